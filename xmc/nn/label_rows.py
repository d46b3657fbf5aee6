"""The rows of a label block with their optimiser: what dense and candidate layers share. Scores nothing by itself.

Legend: L_r rows of this rank's block, d width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from xmc.nn.optimisers import RowOptimiser, RowOptimiserConfig, row_optimiser
from xmc.nn.sharding import LabelBlock

# (tensor name, first row, last row + 1) → those rows of the saved tensor, whatever blocks it was saved in
RowReader = Callable[[str, int, int], Tensor]

_TILE = 4096  # rows drawn by one generator


def uniform_rows(block: LabelBlock, width: int, bound: float, seed: int) -> Tensor:
    """Rows of a block (L_r × d) drawn from U(−bound, bound): the same rows however the labels are divided."""
    rows = torch.empty(block.size, width)
    for tile in range(block.start // _TILE, -(-block.stop // _TILE)):
        generator = torch.Generator().manual_seed((seed * 1_000_003 + tile) % 2**63)
        first, last = max(block.start, tile * _TILE), min(block.stop, (tile + 1) * _TILE)
        drawn = torch.rand(last - tile * _TILE, width, generator=generator)
        rows[first - block.start : last - block.start] = drawn[first - tile * _TILE :]
    return rows.mul_(2 * bound).sub_(bound)


class LabelRows:
    """Weights (L_r × d), optionally biases (L_r,), of a block, with one optimiser each.

    Gradients reach them without autograd. Either a slice is moved as soon as its gradient is known, or gradients are
    stored and `step` applies the mean of those stored since the last one (gradient accumulation, clipping).
    """

    def __init__(
        self,
        block: LabelBlock,
        width: int,
        optimiser: RowOptimiserConfig,
        *,
        bound: float,
        seed: int,
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        chunk_bytes: int = 8 * 2**20,
    ) -> None:
        self.block = block
        self.width = width
        self.chunk_bytes = chunk_bytes
        self.weight = uniform_rows(block, width, bound, seed).to(device=device, dtype=dtype)
        self.bias = torch.zeros(block.size, device=device, dtype=dtype) if bias else None
        self.optimisers: dict[str, RowOptimiser] = {
            name: row_optimiser(table, optimiser) for name, table in self.tables().items()
        }

    def start_at(self, rates: Tensor) -> None:
        """Set the biases, where there are any, so that each label starts with its rate (L,) as probability."""
        if self.bias is not None:
            self.bias.copy_(torch.logit(rates[self.block.start : self.block.stop]))

    def tables(self) -> dict[str, Tensor]:
        """The trained tensors by name."""
        return {"weight": self.weight} if self.bias is None else {"weight": self.weight, "bias": self.bias}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor with one row a label: trained ones, and optimiser state as `weight.exp_avg` and the like."""
        state = {
            f"{table}.{name}": value
            for table, optimiser in self.optimisers.items()
            for name, value in optimiser.state.items()
        }
        return {**self.tables(), **state}

    def load(self, reader: RowReader, *, with_optimiser: bool = True) -> None:
        """Fill this block's rows from any division of the saved rows."""
        for name, tensor in (self.tensors() if with_optimiser else self.tables()).items():
            for start, stop in self.spans(1):  # read at once, the rows would be in memory twice
                tensor[start:stop].copy_(reader(name, self.block.start + start, self.block.start + stop))

    @property
    def step_count(self) -> int:
        return self.optimisers["weight"].step

    @step_count.setter
    def step_count(self, value: int) -> None:
        for optimiser in self.optimisers.values():
            optimiser.step = value

    def begin_step(self) -> None:
        for optimiser in self.optimisers.values():
            optimiser.begin_step()

    def spans(self, columns: int) -> Iterator[tuple[int, int]]:
        """Slices of rows such that (rows × max(columns, d)) numbers stay within `chunk_bytes`."""
        step = max(1, self.chunk_bytes // (self.weight.element_size() * max(columns, self.width)))
        for start in range(0, self.block.size, step):
            yield start, min(start + step, self.block.size)
