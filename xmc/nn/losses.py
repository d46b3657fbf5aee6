"""Losses of a (document, label) logit by name, each with its own derivative: label layers never build a graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from xmc.errors import InputError

# logits (any shape), flat indices of the positives in it → (float64 sum of the losses, derivative shaped as the logits)
PairLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

_EXACT_SOFTPLUS = 50.0  # beyond it softplus(x) is x, to float64


def bce(logits: Tensor, positives: Tensor) -> tuple[Tensor, Tensor]:
    """Binary cross-entropy with logits: softplus(x) − y·x."""
    loss = F.softplus(logits, threshold=_EXACT_SOFTPLUS).sum(dtype=torch.float64)
    loss = loss - logits.view(-1)[positives].sum(dtype=torch.float64)
    derivative = torch.sigmoid(logits)
    derivative.view(-1)[positives] -= 1.0
    return loss, derivative


def squared_hinge(logits: Tensor, positives: Tensor) -> tuple[Tensor, Tensor]:
    """max(0, 1 − t·x)² with t = ±1."""
    violation = (logits + 1.0).clamp_min_(0.0)
    missing = (1.0 - logits.view(-1)[positives]).clamp_min_(0.0)
    violation.view(-1)[positives] = -missing
    return violation.square().sum(dtype=torch.float64), violation.mul_(2.0)


LOSSES: dict[str, PairLoss] = {"bce": bce, "squared_hinge": squared_hinge}


def loss_by_name(name: str) -> PairLoss:
    if name not in LOSSES:
        raise InputError(f"loss {name!r} is unknown; choose one of {', '.join(sorted(LOSSES))}")
    return LOSSES[name]
