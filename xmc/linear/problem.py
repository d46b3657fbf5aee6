"""What a level of a linear model trains on: its children grouped by cluster, and each cluster's documents.

Chooses negatives and divides the work; solving is `training.py`.
Legend: N documents, K clusters, n children. A position is a place in the list of children, cluster after cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from xmc.errors import InputError
from xmc.labels.clustering import LabelClusters
from xmc.labels.topk import TopK
from xmc.labels.tree import LabelTree
from xmc.linear.inputs import Inputs
from xmc.linear.lanes import LANES

# The documents that train the children of a cluster:
#   all       every document; for the one cluster under the root
#   tfn       teacher-forcing negatives: those with a label in the cluster
#   man       matcher-aware negatives: those for which the matcher named the cluster; and each child's own positives
#   tfn+man   both
Negatives = Literal["all", "tfn", "man", "tfn+man"]

# Cuts within a cluster keep whole blocks of labels together.
_CUT = max(LANES)


@dataclass(frozen=True)
class Groups:
    """Children by cluster: those of cluster c are order[offsets[c]:offsets[c+1]]."""

    order: NDArray[np.int32]  # (n,)
    offsets: NDArray[np.int64]  # (K+1,)

    @property
    def num_children(self) -> int:
        return len(self.order)

    @property
    def num_clusters(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def of_level(cls, tree: LabelTree, level: int) -> Groups:
        """The children of the tree's nodes of `level`; 0 is the root."""
        return cls(tree.children[level], tree.offsets[level])

    @classmethod
    def of_clusters(cls, clusters: LabelClusters) -> Groups:
        return cls(clusters.order, clusters.offsets)

    def cluster_of(self) -> NDArray[np.int32]:
        """(n,): the cluster of each child."""
        clusters = np.empty(self.num_children, np.int32)
        clusters[self.order] = np.repeat(np.arange(self.num_clusters, dtype=np.int32), np.diff(self.offsets))
        return clusters


@dataclass(frozen=True)
class Problem:
    """The training documents and the positives of every cluster of a level."""

    groups: Groups
    # (K, 2): the documents of cluster c are rows[row_bounds[c, 0]:row_bounds[c, 1]], ascending.
    row_bounds: NDArray[np.int64]
    rows: NDArray[np.int32]
    # By row: the document trains all children of the cluster, not only those it has.
    is_negative: NDArray[np.bool_]
    # (n+1,): the documents with the child at position p are positives[positive_starts[p]:…[p+1]], ascending.
    positive_starts: NDArray[np.int64]
    positives: NDArray[np.int32]

    def rows_of(self, cluster: int) -> NDArray[np.int32]:
        """The documents that train a cluster's children."""
        return self.rows[slice(*self.row_bounds[cluster])]

    @classmethod
    def build(
        cls,
        labels: sp.csr_matrix,
        groups: Groups,
        negatives: Negatives,
        matched: TopK | None = None,
    ) -> Problem:
        """From Y (N×n), a document's children, and the clusters that a matcher named: top b of K."""
        if negatives not in get_args(Negatives):
            raise InputError(f"negatives={negatives!r}: choose one of {', '.join(get_args(Negatives))}")
        if labels.shape[1] != groups.num_children:
            raise InputError(f"the labels have {labels.shape[1]} columns for {groups.num_children} children")
        by_position = sp.csc_matrix(labels)[:, groups.order]
        by_position.sum_duplicates()
        positives = by_position.indptr.astype(np.int64), by_position.indices.astype(np.int32)
        if negatives == "all":
            rows = np.arange(labels.shape[0], dtype=np.int32)
            bounds = np.tile(np.array([0, len(rows)], np.int64), (groups.num_clusters, 1))
            return cls(groups, bounds, rows, np.ones(len(rows), np.bool_), *positives)
        chosen = _clusters_of(labels, groups)
        is_negative = np.ones(chosen.nnz, np.bool_)
        if "man" in negatives:
            if matched is None:
                raise InputError(
                    f"negatives={negatives!r} needs the clusters that a matcher named: give `matched`"
                )
            named = _named_clusters(matched, (labels.shape[0], groups.num_clusters))
            chosen = sp.csc_matrix(chosen + named)
            is_negative = np.ones(chosen.nnz, np.bool_)
            if negatives == "man":
                # Twice where the matcher named it, on the same entries as `chosen`.
                is_negative = sp.csc_matrix(chosen.astype(np.int8) + named.astype(np.int8)).data == 2
        bounds = np.column_stack([chosen.indptr[:-1], chosen.indptr[1:]]).astype(np.int64)
        return cls(groups, bounds, chosen.indices.astype(np.int32), is_negative, *positives)


def _clusters_of(labels: sp.csr_matrix, groups: Groups) -> sp.csc_matrix:
    """(N×K) true where a document has a child in the cluster, sorted."""
    labels = sp.csr_matrix(labels)
    clusters = sp.csr_matrix(
        (np.ones(labels.nnz, np.bool_), groups.cluster_of()[labels.indices], labels.indptr),
        shape=(labels.shape[0], groups.num_clusters),
    ).tocsc()
    clusters.sum_duplicates()
    return clusters


def _named_clusters(matched: TopK, shape: tuple[int, int]) -> sp.csc_matrix:
    """(N×K) true where the matcher named the cluster, sorted."""
    kept = matched.label_ids >= 0
    ids = matched.label_ids[kept]
    size = max(shape[1], int(ids.max(initial=-1)) + 1)
    if (len(matched), size) != shape:
        raise InputError(
            f"the matcher's clusters are {len(matched), size}, documents × clusters are {shape}: both must be the same"
        )
    starts = np.concatenate([[0], np.cumsum(kept.sum(axis=1))])
    named = sp.csr_matrix((np.ones(len(ids), np.bool_), ids, starts), shape=shape).tocsc()
    named.sum_duplicates()
    return named


def work(problem: Problem, inputs: Inputs) -> NDArray[np.float64]:
    """(K,): the entries that one pass over a cluster's documents reads, for each of its children."""
    # A constant a document stands for what it costs without any entry.
    entries = np.diff(inputs.row_bounds).astype(np.float64) + inputs.num_dense + 10
    sums = np.concatenate([[0], np.cumsum(entries[problem.rows])])
    return sums[problem.row_bounds[:, 1]] - sums[problem.row_bounds[:, 0]]


def plan_blocks(problem: Problem, inputs: Inputs, num_blocks: int) -> list[tuple[int, int]]:
    """Ranges of positions, in order, that cover all children with about equal work; at most `num_blocks` of them.

    Small clusters are joined. A cluster is cut only where it is more than half a block by itself: each part must
    read all of its documents.
    """
    if num_blocks < 1:
        raise InputError(f"num_blocks={num_blocks}: at least one is needed")
    offsets, per_child = problem.groups.offsets, work(problem, inputs)
    ends = np.concatenate([[0], np.cumsum(per_child * np.diff(offsets))])
    target = ends[-1] / num_blocks
    cuts, reached = [offsets], [ends]
    for cluster in np.flatnonzero(np.diff(ends) > target / 2):
        within = np.arange(_CUT, offsets[cluster + 1] - offsets[cluster], _CUT)
        cuts.append(offsets[cluster] + within)
        reached.append(ends[cluster] + per_child[cluster] * within)
    positions, first = np.unique(np.concatenate(cuts), return_index=True)
    amounts = np.concatenate(reached)[first]
    wanted = target * np.arange(1, num_blocks)
    after = np.clip(np.searchsorted(amounts, wanted), 1, len(amounts) - 1)
    nearest = np.where(wanted - amounts[after - 1] < amounts[after] - wanted, after - 1, after)
    chosen = np.unique(np.concatenate([[0], positions[nearest], [problem.groups.num_children]]))
    return list(zip(chosen[:-1].tolist(), chosen[1:].tolist(), strict=True))
