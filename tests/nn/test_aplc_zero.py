"""APLC under a DeepSpeed engine at ZeRO 0 to 3, three rates, tails that come and go: equal to plain torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from raycluster.job import Learner, TrainConfig, rate_groups
from tests.nn.ranks import run_checks
from tests.nn.test_aplc_ranks import LR, WIDTH, Plain, clusters, documents, ragged
from xmc.nn.engine import Engine, EngineConfig
from xmc.nn.heads.aplc import AplcHead, AplcHeadConfig, TailInputs
from xmc.nn.heads.base import own_rows

# Wide tails: a LayerNorm over two numbers has no gradient to speak of, and AdamW makes much of its rounding.
CONFIG = AplcHeadConfig(projection="norm_relu", decay=1.0)
TRAIN = TrainConfig(encoder_rate=2e-3, hidden_rate=5e-3, label_rate=LR)


class _Tower(nn.Module):
    """Stands for encoder, hidden layer and the tails' inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(5, 12)
        self.hidden = nn.Linear(12, WIDTH)
        self.tails = TailInputs(CONFIG, 3, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = torch.tanh(self.hidden(torch.tanh(self.encoder(x))))
        return h, *self.tails(h)


def _batch(step: int) -> tuple[list[int], Tensor, Tensor]:
    sizes, _, targets = documents(step)
    return sizes, torch.randn(sum(sizes), 5, generator=torch.Generator().manual_seed(step)), targets.float()


def _groups(tower: _Tower, head: AplcHead) -> list[dict]:
    learner = Learner(tower, head)
    learner.label_parts = ("tails",)
    return rate_groups(learner, TRAIN, 0.01)


def _sharded(stage: int) -> tuple[dict[str, Tensor], AplcHead]:
    tower, head = _Tower(), AplcHead(CONFIG, clusters(), WIDTH, seed=5)
    settings = EngineConfig(zero_stage=stage, precision="fp32")  # type: ignore[arg-type]
    engine = Engine(tower, _groups(tower, head), settings, torch.device("cpu"), batch_per_rank=4)
    for step in range(6):
        sizes, x, targets = _batch(step)
        mine = ragged(own_rows(targets, sizes))
        tower.tails.expect(head.members(mine))
        engine.backward(head.loss(engine(own_rows(x, sizes)), mine, lr=LR))
        engine.step()
    return engine.weights(), head


def _plain() -> tuple[dict[str, Tensor], Plain]:
    tower, plain = _Tower(), Plain(CONFIG)
    for table in (*plain.rows, *plain.bias):
        table.data = table.data.float()
    optimiser = torch.optim.AdamW(_groups(tower, AplcHead(CONFIG, clusters(), WIDTH, seed=5)))
    for step in range(6):
        _, x, targets = _batch(step)
        plain.loss(tower(x), targets).backward()
        for p in tower.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        plain.rest_untouched()
        for each in (optimiser, plain.optimiser):
            each.step()
            each.zero_grad()
    return {name: p.detach() for name, p in tower.named_parameters()}, plain


def check_zero() -> None:
    expected, plain = _plain()
    for stage in range(4):
        weights, head = _sharded(stage)
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(
                weight, expected[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name, s=stage: f"{s} {n}: {m}"
            )
        for layer, rows in zip(head.layers.values(), plain.rows, strict=True):
            mine = rows.detach()[layer.block.start : layer.block.stop]
            torch.testing.assert_close(layer.weight, mine, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_engines_equal_plain_torch(world: int) -> None:
    cache = Path(__file__).parents[2] / ".cache" / "torch_extensions"
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(cache))
    assert run_checks(world, [check_zero]) == {"check_zero": [""] * world}
