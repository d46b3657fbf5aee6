from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from xmc.errors import InputError
from xmc.nn.losses import LOSSES, loss_by_name


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_derivative_and_value_equal_autograd(name: str) -> None:
    logits = torch.tensor([[-60.0, -1.0, 0.3], [0.999, 2.0, 80.0]], dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]], dtype=torch.float64)
    if name == "bce":
        expected = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
    else:
        expected = (1 - (2 * targets - 1) * logits).clamp_min(0).square().sum()
    expected.backward()
    loss, derivative = LOSSES[name](logits.detach().clone(), targets.view(-1).nonzero()[:, 0])
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(derivative, logits.grad)


def test_unknown_name() -> None:
    with pytest.raises(InputError, match="squared_hinge"):
        loss_by_name("hinge")
