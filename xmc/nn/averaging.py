"""Stochastic weight averaging: the running mean of named tensors, the encoder's and the label rows' alike.

It works on whatever tensors a rank holds, so each rank averages its own label block (and its own ZeRO partition).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from xmc.errors import InputError

_SWAP_NUMBERS = 2**22  # numbers exchanged at once: bounds the memory of a swap


class WeightAverage:
    """`update` at each point to average; `applied` puts the means in the tensors' place for validation or export."""

    def __init__(self) -> None:
        self.count = 0
        self.means: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the present values in. Means are float32 at least."""
        if self.count == 0:
            self.means = {name: _wide(tensor.detach()).clone() for name, tensor in tensors.items()}
        else:
            self._check(tensors)
            for name, tensor in tensors.items():
                self.means[name].lerp_(_wide(tensor.detach()), 1.0 / (self.count + 1))
        self.count += 1

    @contextmanager
    def applied(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the block the tensors hold the means (nothing changes before the first update)."""
        if self.count == 0:
            yield
            return
        self._check(tensors)
        self._swap(tensors)
        try:
            yield
        finally:
            self._swap(tensors)

    @torch.no_grad()
    def _swap(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            present, mean = tensor.detach().view(-1), self.means[name].view(-1)
            for a, b in zip(present.split(_SWAP_NUMBERS), mean.split(_SWAP_NUMBERS), strict=True):
                kept = a.clone()
                a.copy_(b)
                b.copy_(kept)

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors.keys() != self.means.keys():
            raise InputError("weight average: the tensors are not those that were averaged before")

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors only: the means by name, and `count`."""
        return {
            "count": torch.tensor(self.count),
            **{f"mean.{name}": mean for name, mean in self.means.items()},
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.count = int(state["count"])
        self.means = {
            name.removeprefix("mean."): mean.clone()
            for name, mean in state.items()
            if name.startswith("mean.")
        }


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
