from __future__ import annotations

import pytest
import torch
from torch import nn

from xmc.nn.engine import EngineConfig, choose_precision
from xmc.systems.neural import for_prediction

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("precision", ["auto", "fp32", "bf16", "fp16"])
def test_a_network_predicts_in_the_precision_that_it_would_be_trained_in(precision: str):
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    config = EngineConfig(precision=precision)
    for_prediction(module, config)
    assert module[0].weight.dtype == DTYPES[choose_precision(config, torch.device("cpu"))]
    assert not module[1].training
