"""Label rows on disk: one safetensors file a layer and block, named by its range, read back in any other division."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from xmc.errors import InputError
from xmc.files import atomic_file

_NAME = re.compile(r"(?P<layer>[a-z_]+)\.(?P<start>\d+)-(?P<stop>\d+)\.safetensors")


@dataclass(frozen=True)
class RowBlock:
    """Tensors with one row for each of the labels [start, stop) of `num_rows`."""

    start: int
    stop: int
    num_rows: int
    tensors: dict[str, Tensor]


def write_blocks(blocks: dict[str, RowBlock], directory: Path) -> list[Path]:
    """Write this rank's blocks, by layer; an empty block has no file. Returns the files."""
    files = []
    for layer, block in blocks.items():
        if block.start == block.stop:
            continue
        path = directory / f"{layer}.{block.start:010d}-{block.stop:010d}.safetensors"
        with atomic_file(path) as temporary:
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in block.tensors.items()}
            save_file(tensors, temporary, metadata={"num_rows": str(block.num_rows)})
        files.append(path)
    return files


class BlockReader:
    """Rows of any range from the block files of a directory: `reader(layer, tensor, start, stop)`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._blocks: dict[str, list[tuple[int, int, Path]]] = {}
        for path in sorted(directory.glob("*.safetensors")):
            match = _NAME.fullmatch(path.name)
            if match:
                block = int(match["start"]), int(match["stop"]), path
                self._blocks.setdefault(match["layer"], []).append(block)

    def __call__(self, layer: str, tensor: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a layer's tensor, pieced together from the files that hold them."""
        parts, reached = [], start
        for first, last, path in self._blocks.get(layer, []):
            if first <= reached < min(last, stop):
                parts.append(_read_rows(path, tensor, reached - first, min(last, stop) - first))
                reached = min(last, stop)
        if reached < stop:
            raise InputError(
                f"{self.directory}: rows {reached} to {stop} of label layer {layer!r} are in no file"
            )
        return torch.cat(parts) if len(parts) != 1 else parts[0]

    def num_rows(self, layer: str) -> int:
        """How many rows the layer has in all."""
        if layer not in self._blocks:
            raise InputError(f"{self.directory}: there is no file of label layer {layer!r}")
        with safe_open(self._blocks[layer][0][2], framework="pt") as file:
            return int(file.metadata()["num_rows"])


def _read_rows(path: Path, tensor: str, start: int, stop: int) -> Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_slice(tensor)[start:stop]
    except Exception as error:  # safetensors raises its own kind for each way a file can be broken
        raise InputError(f"{path}: tensor {tensor!r} cannot be read: {error}") from error
