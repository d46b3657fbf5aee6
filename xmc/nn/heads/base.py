"""What every head offers to the trainer: loss, step, best labels, and rows that any number of ranks can save and load.

A head owns label layers, which live outside the engine. What belongs to the engine (encoder, projections) is a module
of its own whose outputs are handed to the head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from xmc.nn.block_files import RowBlock
from xmc.nn.candidates import CandidateLabelLayer
from xmc.nn.dense_layer import DenseLabelLayer
from xmc.nn.sharding import Ragged, rank_index, world_size

# (layer, tensor, first row, last row + 1) → rows
HeadReader = Callable[[str, str, int, int], Tensor]


class LabelHead(ABC):
    """Every call is collective: all ranks make it, each with its own documents (any number, none included).

    `averaging_engine`: the engine divides parameter gradients by the number of ranks, as DDP and DeepSpeed do.
    """

    def __init__(self, *, averaging_engine: bool = True) -> None:
        self.layers: dict[str, DenseLabelLayer | CandidateLabelLayer] = {}
        self.gradient_scale = float(world_size()) if averaging_engine else 1.0

    def begin(self, targets: Ragged) -> None:  # noqa: B027 (heads without biases have nothing to do)
        """Called once, before a training from nothing, with the labels of all of this rank's documents. Layers with
        biases start from the labels' rates: else the first hundred steps teach all rows and the encoder no more than
        that labels are rare, and of many labels the documents' embeddings come out alike."""

    @abstractmethod
    def loss(self, outputs: tuple[Tensor, ...], targets: Ragged, *, lr: float | None = None) -> Tensor:
        """The mean loss over all ranks' documents, with the graph to this rank's `outputs` of the engine module.

        With `lr` the label rows move at once, with the least memory. Without, their gradients are stored: call `step`
        after one or more micro-batches. Under torch.no_grad() nothing is learnt.
        """

    @abstractmethod
    def top_k(self, outputs: tuple[Tensor, ...], k: int) -> tuple[Tensor, Tensor]:
        """This rank's documents' best labels: probabilities (b × k) float32, falling, and label ids (b × k) int64,
        ties by id, padded with −inf and −1."""

    def classes_of(self, labels: Tensor) -> Tensor:
        """What the head scores for these label ids (n,): the labels themselves, unless it scores groups of them."""
        return labels

    def step(self, lr: float, max_norm: float | None = None) -> None:
        """Move the rows by the mean of the stored gradients; with `max_norm` all rows' gradient is clipped to it."""
        factor = 1.0
        if max_norm is not None:
            norm = float(self.gradient_norm())
            factor = min(1.0, max_norm / (norm + 1e-6))
        for layer in self.layers.values():
            layer.step(lr, factor)

    def gradient_norm(self) -> Tensor:
        """Norm (float64 scalar) of the stored gradients of all ranks' label rows."""
        squares = torch.stack([layer.gradient_square_sum() for layer in self.layers.values()]).sum()
        if world_size() > 1:
            dist.all_reduce(squares)
        return squares.sqrt()

    def trained_tensors(self) -> dict[str, Tensor]:
        """This rank's trained rows by name, to be changed in place (weight averaging)."""
        return {
            f"{name}.{table}": tensor
            for name, layer in self.layers.items()
            for table, tensor in layer.tables().items()
        }

    def export_blocks(self, *, with_optimiser: bool = False) -> dict[str, RowBlock]:
        """This rank's rows by layer, with their range; with optimiser state for checkpoints. No copies are made."""
        return {
            name: RowBlock(
                layer.block.start,
                layer.block.stop,
                layer.block.num_labels,
                layer.tensors() if with_optimiser else layer.tables(),
            )
            for name, layer in self.layers.items()
        }

    def load_rows(self, reader: HeadReader, *, with_optimiser: bool = False) -> None:
        """Fill this rank's rows; the reader (`BlockReader`) gives any range, however the rows were divided before."""
        for name, layer in self.layers.items():
            layer.load(_of_layer(reader, name), with_optimiser=with_optimiser)

    def shared_state(self) -> dict[str, Tensor]:
        """What is the same on every rank: step counts, and what a head adds."""
        return {f"{name}.step": torch.tensor(layer.step_count) for name, layer in self.layers.items()}

    def load_shared_state(self, state: Mapping[str, Tensor]) -> None:
        for name, layer in self.layers.items():
            layer.step_count = int(state[f"{name}.step"])


def document_rates(targets: Ragged, num_classes: int) -> Tensor:
    """(num_classes,) float64: the share of all ranks' documents that have each class; never quite 0 or 1."""
    pairs = torch.unique(targets.documents() * num_classes + targets.ids)
    counts = torch.bincount(pairs % num_classes, minlength=num_classes + 1)
    counts[num_classes] = len(targets)
    if world_size() > 1:
        dist.all_reduce(counts)
    return (counts[:-1].double() + 0.5) / (counts[-1] + 1.0)


def own_rows(x: Tensor, sizes: list[int]) -> Tensor:
    """This rank's documents' rows of a result for all ranks' documents."""
    start = sum(sizes[: rank_index()])
    return x[start : start + sizes[rank_index()]]


def _of_layer(reader: HeadReader, layer: str) -> Callable[[str, int, int], Tensor]:
    return lambda tensor, start, stop: reader(layer, tensor, start, stop)
