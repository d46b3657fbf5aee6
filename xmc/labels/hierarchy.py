"""The labels' hierarchy, from parents' names or from a clustering. Learns nothing and holds no texts.

Nodes are numbered so that node i < L is label i: a label's id is its node. Behind the labels stand the rows of the
label table that train never saw, then the parents that are no labels themselves, by name.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import scipy.sparse as sp
from numpy.typing import NDArray

from xmc.errors import InputError

NO_PARENT = -1


@dataclass(frozen=True)
class Hierarchy:
    """A forest over V nodes, the first `num_labels` of which are the labels."""

    num_labels: int
    names: pa.Array
    """(V,) string."""
    parent: NDArray[np.int32]
    """(V,) node of each node's parent, −1 for a root."""
    depth: NDArray[np.int32]
    """(V,) steps to the node's root; 0 for a root."""

    @classmethod
    def from_parents(cls, names: pa.Array, parents: pa.Array, num_labels: int) -> Hierarchy:
        """From the columns of a label table: names (R,), each row's parent's name or null, R ≥ num_labels rows.

        Parents that are no rows become nodes without parents. A cycle, a name given twice: InputError.
        """
        names, parents = _strings(names), _strings(parents)
        _refuse_duplicates(names)
        parents = pc.if_else(pc.equal(parents, ""), pa.scalar(None, pa.string()), parents)
        unknown = pc.unique(parents.filter(pc.invert(pc.is_in(parents, value_set=names))).drop_null())
        unknown = unknown.take(pc.array_sort_indices(unknown))
        nodes = pa.concat_arrays([names, unknown])
        known = pc.fill_null(pc.index_in(parents, value_set=nodes, skip_nulls=True), NO_PARENT)
        parent = np.full(len(nodes), NO_PARENT, np.int32)
        parent[: len(names)] = known.to_numpy(zero_copy_only=False)
        return cls(num_labels, nodes, parent, _depths(parent, nodes))

    @classmethod
    def from_clusters(cls, names: pa.Array, cluster_of: NDArray) -> Hierarchy:
        """One level over the labels, from each label's cluster (L,); the stand-in where no parents are known."""
        num_labels = len(cluster_of)
        num_clusters = int(cluster_of.max()) + 1 if num_labels else 0
        clusters = pa.array([f"cluster {c}" for c in range(num_clusters)], pa.string())
        parent = np.full(num_labels + num_clusters, NO_PARENT, np.int32)
        parent[:num_labels] = num_labels + np.asarray(cluster_of)
        nodes = pa.concat_arrays([_strings(names), clusters])
        return cls(num_labels, nodes, parent, _depths(parent, nodes))

    @property
    def num_nodes(self) -> int:
        return len(self.parent)

    def parents_of_labels(self, label_ids: NDArray) -> NDArray[np.int32]:
        """Parent nodes of labels in any shape; −1 for a root, and for −1 (padding)."""
        ids = np.asarray(label_ids)
        if not self.num_nodes:
            return np.full(ids.shape, NO_PARENT, np.int32)
        return np.where(ids >= 0, self.parent[ids], np.int32(NO_PARENT))

    def ancestors(self) -> sp.csr_matrix:
        """(V × V) ones where the column is an ancestor of the row; a row lists its ancestors nearest first."""
        indptr = np.concatenate([[0], np.cumsum(self.depth, dtype=np.int64)])
        indices = np.empty(indptr[-1], np.int32)
        nodes, above = np.arange(self.num_nodes), self.parent
        # One round a level of the hierarchy, over all nodes at once.
        for step in range(int(self.depth.max(initial=0))):
            nodes, above = nodes[above != NO_PARENT], above[above != NO_PARENT]
            indices[indptr[nodes] + step] = above
            above = self.parent[above]
        ones = np.ones(len(indices), np.float32)
        return sp.csr_matrix((ones, indices, indptr), shape=(self.num_nodes, self.num_nodes))


def _strings(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return pa.array(column, pa.string()) if not isinstance(column, pa.Array) else column.cast(pa.string())


def _refuse_duplicates(names: pa.Array) -> None:
    counts = pc.value_counts(names)
    twice = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    if len(twice):
        raise InputError(
            f"label {twice[0].as_py()!r} stands twice in the label table; give every label one row"
        )


def _depths(parent: NDArray[np.int32], names: pa.Array) -> NDArray[np.int32]:
    """Steps to the root by pointer jumping: every round doubles the step, so that log2(depth) rounds do."""
    depth = (parent != NO_PARENT).astype(np.int32)
    jump = parent.copy()
    for _ in range(len(parent).bit_length() + 1):
        moving = np.flatnonzero(jump != NO_PARENT)
        if not moving.size:
            return depth
        depth[moving] += depth[jump[moving]]
        jump[moving] = jump[jump[moving]]
    # More steps than there are nodes: whoever is still moving has arrived on a cycle.
    moving = np.flatnonzero(jump != NO_PARENT)
    if moving.size:
        raise InputError(_name_cycle(int(jump[moving[0]]), parent, names))
    return depth


def _name_cycle(start: int, parent: NDArray[np.int32], names: pa.Array, at_most: int = 10) -> str:
    path = [start]
    while (above := int(parent[path[-1]])) != start:
        path.append(above)
    shown = [repr(names[node].as_py()) for node in path[:at_most]]
    if len(path) > at_most:
        shown.append(f"… ({len(path)} labels)")
    shown.append(repr(names[start].as_py()))
    return f"the label table's parents go in a circle: {' → '.join(shown)}; remove the parent of one of them"
