"""The label tree: shallow and wide for AttentionXML, one level of clusters for LightXML and X-Transformer.

It knows nodes, children and ancestors, and how labels become positives of a level; scoring nodes is elsewhere.
Legend: N documents, L labels, n_d nodes of level d. Level 0 is the root, the last level the labels themselves.
"""

from __future__ import annotations

import itertools
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from xmc.errors import InputError
from xmc.files import atomic_file
from xmc.labels.clustering import LabelClusters


@dataclass(frozen=True)
class TreeConfig:
    """The shape of a label tree above its clusters."""

    # K: a node has at most this many children, a power of two; the root may have more when `height` cuts it short.
    branching: int = 8
    # H: levels between the root and the labels, the clusters among them; None: as many as `branching` needs.
    height: int | None = None

    def __post_init__(self) -> None:
        if self.branching < 2 or self.branching & (self.branching - 1):
            raise InputError(f"branching={self.branching}: it must be a power of two, 2 or more")
        if self.height is not None and self.height < 1:
            raise InputError(f"height={self.height}: at least one level lies between the root and the labels")


@dataclass(frozen=True)
class LabelTree:
    """A tree whose last level is a partition of the labels; nodes are numbered within their level."""

    # Per level d above the labels, (n_d + 1,) int64: where each node's children begin and end in children[d].
    offsets: tuple[np.ndarray, ...]
    # Per level d above the labels, (n_{d+1},) int32: nodes of level d+1, parent after parent.
    children: tuple[np.ndarray, ...]

    def __post_init__(self) -> None:
        if not self.offsets or len(self.offsets) != len(self.children) or len(self.offsets[0]) != 2:
            raise InputError("a label tree needs one root, and children for each level above the labels")
        for level, (bounds, nodes) in enumerate(zip(self.offsets, self.children, strict=True)):
            last = level == self.num_levels - 2
            size = len(nodes) if last else len(self.offsets[level + 1]) - 1
            if bounds[0] != 0 or bounds[-1] != len(nodes) or (np.diff(bounds) < 0).any():
                raise InputError(
                    f"level {level} of the label tree: its children's bounds do not fit the children"
                )
            inside = len(nodes) == size and (size == 0 or (nodes.min() >= 0 and nodes.max() < size))
            if not inside or (np.bincount(nodes, minlength=size) != 1).any():
                raise InputError(
                    f"level {level + 1} of the label tree: not every node has exactly one parent"
                )

    @property
    def num_levels(self) -> int:
        """Levels with the root and the labels."""
        return len(self.offsets) + 1

    @property
    def num_labels(self) -> int:
        return len(self.children[-1])

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """(n_0, …, L)."""
        return (1, *(len(nodes) for nodes in self.children))

    @cached_property
    def parents(self) -> tuple[np.ndarray, ...]:
        """Per level d+1, (n_{d+1},) int32: each node's parent on level d. parents[0] belongs to level 1."""
        return tuple(
            _owners(bounds, nodes) for bounds, nodes in zip(self.offsets, self.children, strict=True)
        )

    def ancestors(self, level: int) -> np.ndarray:
        """(L,) int32: the node of `level` that each label lies under."""
        nodes = np.arange(self.num_labels, dtype=np.int32)
        for parents in reversed(self.parents[level:]):
            nodes = parents[nodes]
        return nodes

    def level_matrix(self, level: int) -> sp.csr_matrix:
        """C (L×n_level): a one where the label lies under the node."""
        indptr = np.arange(self.num_labels + 1, dtype=np.int32)
        ones = np.ones(self.num_labels, np.float32)
        return sp.csr_matrix(
            (ones, self.ancestors(level), indptr), shape=(self.num_labels, self.level_sizes[level])
        )

    def positives(self, labels: sp.csr_matrix, level: int) -> sp.csr_matrix:
        """(N×n_level) of ones where one of a document's labels, Y (N×L), lies under the node."""
        positives = sp.csr_matrix(
            (np.ones(labels.nnz, np.float32), self.ancestors(level)[labels.indices], labels.indptr.copy()),
            shape=(labels.shape[0], self.level_sizes[level]),
        )
        positives.sum_duplicates()
        positives.data[:] = 1
        return positives

    def gather_children(self, level: int, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Children on level + 1 of nodes of `level`, of any shape and −1 for none.

        Returns (children (m,) int32, source (m,) int64): `source` is the place of the child's parent in
        nodes.ravel(), so for nodes (B, C) the child belongs to document source // C.
        """
        flat = nodes.ravel().astype(np.int64)
        known = np.maximum(flat, 0)
        begins = self.offsets[level][known]
        counts = np.where(flat < 0, 0, self.offsets[level][known + 1] - begins)
        source = np.repeat(np.arange(len(flat)), counts)
        within = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
        return self.children[level][begins[source] + within], source

    def child_table(self, level: int) -> np.ndarray:
        """(n_level, most children) int32, padded with −1: index it with candidates (B, C) for (B, C, most)."""
        counts = np.diff(self.offsets[level])
        table = np.full((len(counts), counts.max(initial=0)), -1, np.int32)
        table[np.arange(table.shape[1]) < counts[:, None]] = self.children[level]
        return table

    def save(self, path: Path) -> None:
        """Write the tree as one npz file."""
        arrays = {f"offsets_{level}": bounds for level, bounds in enumerate(self.offsets)}
        arrays |= {f"children_{level}": nodes for level, nodes in enumerate(self.children)}
        with atomic_file(path) as temporary, temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)

    @classmethod
    def load(cls, path: Path) -> LabelTree:
        """Read a tree that `save` wrote; what is not one is refused."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                count = sum(name.startswith("offsets_") for name in arrays.files)
                offsets = tuple(arrays[f"offsets_{level}"].astype(np.int64) for level in range(count))
                children = tuple(arrays[f"children_{level}"].astype(np.int32) for level in range(count))
            return cls(offsets, children)
        except (InputError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(f"{path} is not a label tree ({error}): build it again") from error


def kept_levels(num_clusters: int, config: TreeConfig) -> list[int]:
    """The levels of the binary tree over so many clusters that stay, from the top (0 is the root) to the clusters."""
    depth = (num_clusters - 1).bit_length()
    kept = list(range(depth, 0, 1 - config.branching.bit_length())) or [0]
    return kept[: config.height][::-1]


def build_tree(clusters: LabelClusters, config: TreeConfig) -> LabelTree:
    """Compress the binary tree of a clustering: from the clusters up, keep every log2(branching)-th level."""
    kept = kept_levels(clusters.num_clusters, config)
    bounds = [clusters.levels[0], *(clusters.levels[level] for level in kept)]
    # Bounds are counted in clusters and nested, so a node's children are those that begin within it.
    offsets = [np.searchsorted(lower, upper) for upper, lower in itertools.pairwise(bounds)]
    children = [np.arange(len(lower) - 1, dtype=np.int32) for lower in bounds[1:]]
    return LabelTree((*offsets, clusters.offsets), (*children, clusters.order))


def _owners(bounds: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    owners = np.empty(len(nodes), np.int32)
    owners[nodes] = np.repeat(np.arange(len(bounds) - 1, dtype=np.int32), np.diff(bounds))
    return owners
