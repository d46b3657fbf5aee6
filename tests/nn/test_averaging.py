from __future__ import annotations

import pytest
import torch

from xmc.errors import InputError
from xmc.nn.averaging import WeightAverage


def test_mean_swap_and_state() -> None:
    weights = {"a": torch.zeros(3, 2), "b": torch.zeros(4, dtype=torch.float16)}
    average = WeightAverage()
    with average.applied(weights):
        assert not weights["a"].any()
    for value in (1.0, 2.0, 6.0):
        weights["a"].fill_(value)
        weights["b"].fill_(value)
        average.update(weights)
    assert average.means["b"].dtype == torch.float32
    with pytest.raises(RuntimeError), average.applied(weights):
        torch.testing.assert_close(weights["a"], torch.full((3, 2), 3.0))
        torch.testing.assert_close(weights["b"], torch.full((4,), 3.0, dtype=torch.float16))
        raise RuntimeError("validation failed")
    assert torch.equal(weights["a"], torch.full((3, 2), 6.0)), "the trained weights come back"
    restored = WeightAverage()
    restored.load_state_dict({name: tensor.clone() for name, tensor in average.state_dict().items()})
    for each in (average, restored):
        weights["a"].fill_(7.0)
        weights["b"].fill_(7.0)
        each.update(weights)
    torch.testing.assert_close(restored.means, average.means)
    torch.testing.assert_close(restored.means["a"], torch.full((3, 2), 4.0))


def test_parameters_that_need_gradients_are_averaged() -> None:
    layer = torch.nn.Linear(2, 2)
    average = WeightAverage()
    average.update(dict(layer.named_parameters()))
    before = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.add_(2.0)
    average.update(dict(layer.named_parameters()))
    with average.applied(dict(layer.named_parameters())):
        torch.testing.assert_close(layer.weight.detach(), before + 1.0)


def test_other_tensors_are_refused() -> None:
    average = WeightAverage()
    average.update({"a": torch.zeros(1)})
    with pytest.raises(InputError):
        average.update({"b": torch.zeros(1)})
