"""The pruned weights of a level: what they are made of, joining parts, and keeping them in one safetensors file.

Children lie in chunks, a cluster or a part of one each; a chunk lists its columns in order and, for each, the few
children that have a weight there. Legend: n children, d dense columns.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from xmc.errors import InputError
from xmc.files import atomic_file

# A child within its chunk takes 16 bits.
MAX_CHUNK = 1 << 16


@dataclass(frozen=True)
class LevelWeights:
    """Weights of the children at positions [position_bounds[0], position_bounds[-1]) of a level."""

    num_columns: int  # D of the inputs they belong to
    position_bounds: NDArray[np.int64]  # (chunks+1,): the children of each chunk
    column_bounds: NDArray[np.int64]  # (chunks+1,): its part of `columns`
    entry_bounds: NDArray[np.int64]  # (chunks+1,): its part of `children` and `values`
    columns: NDArray[np.int32]  # ascending within a chunk
    entry_ends: NDArray[np.int32]  # by column: where its entries end, from the chunk's first entry
    children: NDArray[np.uint16]  # by entry: the child within its chunk
    values: NDArray[np.float32]  # by entry
    intercepts: NDArray[np.float32]  # (n,)
    dense: NDArray[np.float32]  # (n×d)

    @property
    def first(self) -> int:
        return int(self.position_bounds[0])

    @property
    def last(self) -> int:
        return int(self.position_bounds[-1])

    @property
    def num_entries(self) -> int:
        return len(self.values)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays().values())

    def _arrays(self) -> dict[str, NDArray]:
        return {
            field.name: getattr(self, field.name) for field in fields(self) if field.name != "num_columns"
        }

    def save(self, path: Path) -> None:
        """Write one safetensors file."""
        _write(path, self.num_columns, {name: [array] for name, array in self._arrays().items()})

    @classmethod
    def load(cls, path: Path) -> LevelWeights:
        """Map a file that `save` wrote into memory: weights are read when they are used."""
        try:
            arrays, metadata = _map_file(path)
            weights = cls(int(metadata["num_columns"]), **arrays)
        except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
            raise InputError(
                f"{path} holds no weights of a linear level ({error}): train it again"
            ) from error
        weights._check(path)
        return weights

    def _check(self, path: Path) -> None:
        """Refuse bounds that lead outside the arrays: compiled code follows them unchecked."""
        bounds = {
            "columns": (self.column_bounds, len(self.columns)),
            "entries": (self.entry_bounds, len(self.values)),
            "children": (self.position_bounds - self.first, len(self.intercepts)),
        }
        chunks = len(self.column_bounds)
        fit = all(
            len(value) == chunks and value[0] == 0 and value[-1] == size and (np.diff(value) >= 0).all()
            for value, size in bounds.values()
        )
        fit = fit and len(self.entry_ends) == len(self.columns) and len(self.children) == len(self.values)
        fit = fit and self.dense.ndim == 2 and len(self.dense) == len(self.intercepts)
        fit = fit and self.columns.min(initial=0) >= 0 and self.columns.max(initial=-1) < self.num_columns
        if not fit or not _entries_fit(
            self.position_bounds, self.column_bounds, self.entry_bounds, self.entry_ends, self.children
        ):
            raise InputError(
                f"{path}: the parts of these weights do not fit each other: train the level again"
            )


@njit(cache=True, nogil=True)
def _entries_fit(
    position_bounds: Any, column_bounds: Any, entry_bounds: Any, entry_ends: Any, children: Any
) -> Any:
    for chunk in range(position_bounds.size - 1):
        size = entry_bounds[chunk + 1] - entry_bounds[chunk]
        before = 0
        for place in range(column_bounds[chunk], column_bounds[chunk + 1]):
            if entry_ends[place] < before:
                return False
            before = entry_ends[place]
        if before != size:
            return False
        for entry in range(entry_bounds[chunk], entry_bounds[chunk + 1]):
            if children[entry] >= position_bounds[chunk + 1] - position_bounds[chunk]:
                return False
    return True


_TYPES = {"I64": np.int64, "I32": np.int32, "U16": np.uint16, "F32": np.float32}
_NAMES = {np.dtype(kind): name for name, kind in _TYPES.items()}


def _map_file(path: Path) -> tuple[dict[str, NDArray], dict[str, str]]:
    """The arrays of a safetensors file, unread, and its metadata."""
    content = np.memmap(path, np.uint8, "r").view(np.ndarray)
    length = int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8 : 8 + length].tobytes())
    metadata, content = header.pop("__metadata__", {}), content[8 + length :]
    arrays = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        arrays[name] = content[begin:end].view(_TYPES[entry["dtype"]]).reshape(entry["shape"])
    return arrays, metadata


def _write(path: Path, num_columns: int, arrays: Mapping[str, Sequence[NDArray]]) -> None:
    """A safetensors file of arrays that come in pieces, none of which is copied: they may be mapped files."""
    header: dict[str, Any] = {"__metadata__": {"num_columns": str(num_columns)}}
    # Wide items first: each array then begins at a multiple of its items' size.
    names = sorted(arrays, key=lambda name: -arrays[name][0].itemsize)
    begin = 0
    for name in names:
        pieces = arrays[name]
        end = begin + sum(piece.nbytes for piece in pieces)
        shape = [sum(map(len, pieces)), *pieces[0].shape[1:]]
        header[name] = {"dtype": _NAMES[pieces[0].dtype], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with atomic_file(path) as temporary, open(temporary, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            for piece in arrays[name]:
                file.write(np.ascontiguousarray(piece).data)


def concatenate(parts: Sequence[LevelWeights]) -> LevelWeights:
    """Join parts whose positions follow one another."""
    if len(parts) == 1:
        return parts[0]
    arrays = {name: np.concatenate(pieces) for name, pieces in _joined(parts).items()}
    return LevelWeights(parts[0].num_columns, **arrays)


def join_files(parts: Sequence[Path], path: Path) -> None:
    """The same of parts that lie on disk, from file to file: memory holds none of them."""
    loaded = [LevelWeights.load(part) for part in parts]
    _write(path, loaded[0].num_columns, _joined(loaded))


def _joined(parts: Sequence[LevelWeights]) -> dict[str, list[NDArray]]:
    """The pieces of each array of all parts together."""
    for before, after in itertools.pairwise(parts):
        if before.last != after.first:
            raise ValueError(
                f"positions end at {before.last} and go on at {after.first}: give all parts in order"
            )

    def join_bounds(name: str) -> NDArray:
        sizes = np.concatenate([np.diff(getattr(part, name)) for part in parts])
        return getattr(parts[0], name)[0] + np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    return {
        name: [join_bounds(name)] if name.endswith("_bounds") else [getattr(part, name) for part in parts]
        for name in parts[0]._arrays()
    }
