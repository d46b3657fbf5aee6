"""Balanced spherical 2-means of label features, one binary level at a time over all nodes of the level.

It groups labels into clusters of (nearly) equal size. The kernels are in `two_means.py`; shaping the result into a
label tree is `tree.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp

from xmc.errors import InputError
from xmc.labels.two_means import Limits, State, rows_of, split_level


@dataclass(frozen=True)
class ClusterConfig:
    """How labels are grouped."""

    # Halve until no cluster holds more labels than this; clusters then hold more than half of it on average.
    max_leaf_size: int = 100
    # Exactly this many clusters instead, whatever their size (any number, not only powers of two).
    num_clusters: int | None = None
    # Passes over a node's labels at most; over a large node's sample at most.
    max_iter: int = 20
    # A node is done when a pass raises its mean similarity to the centroids by less.
    tolerance: float = 1e-4
    # Weigh rare columns up on all but the last levels of sparse features. The common words of a large node part
    # its labels by how general they are; the rarer ones keep neighbours together down to the leaves.
    weigh_rare: bool = True
    # Chooses the two labels that each node starts from.
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_leaf_size < 1:
            raise InputError(f"max_leaf_size={self.max_leaf_size}: a cluster needs at least one label")
        if self.num_clusters is not None and self.num_clusters < 1:
            raise InputError(f"num_clusters={self.num_clusters}: ask for at least one cluster")
        if self.max_iter < 1:
            raise InputError(f"max_iter={self.max_iter}: at least one pass is needed")
        if not self.tolerance >= 0:
            raise InputError(f"tolerance={self.tolerance}: it cannot be negative")


@dataclass(frozen=True)
class LabelClusters:
    """A partition of L labels into K clusters, with the binary splits that led to it."""

    # (L,) int32: the labels, cluster after cluster, ascending within each.
    order: np.ndarray
    # (K+1,) int64: cluster c is order[offsets[c]:offsets[c+1]].
    offsets: np.ndarray
    # Per binary level, from the root: where its nodes begin and end, counted in clusters; first [0, K], last 0…K.
    levels: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, order: np.ndarray, offsets: np.ndarray) -> LabelClusters:
        """From the partition alone: how many clusters there are says how they were split."""
        return cls(order, offsets, _binary_levels(len(offsets) - 1))

    @property
    def num_labels(self) -> int:
        return len(self.order)

    @property
    def num_clusters(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def cluster_of(self) -> np.ndarray:
        """(L,) int32: the cluster of each label."""
        clusters = np.empty(self.num_labels, np.int32)
        clusters[self.order] = np.repeat(np.arange(self.num_clusters, dtype=np.int32), np.diff(self.offsets))
        return clusters

    def matrix(self) -> sp.csr_matrix:
        """C (L×K): a one where the label is in the cluster."""
        indptr = np.arange(self.num_labels + 1, dtype=np.int32)
        ones = np.ones(self.num_labels, np.float32)
        return sp.csr_matrix((ones, self.cluster_of, indptr), shape=(self.num_labels, self.num_clusters))


def cluster_labels(
    features: sp.spmatrix | np.ndarray,
    config: ClusterConfig,
    on_level: Callable[[int, np.ndarray], None] | None = None,
) -> LabelClusters:
    """Partition labels by their features (L×D, sparse or dense, rows of unit length or zero).

    Each node is halved by balanced spherical 2-means: the labels nearer to one centroid than to the other by
    the most go there, so that the sizes of any two clusters differ by at most one. The result depends on the
    features and the config, not on the number of threads. `on_level(level, node_of)` hears of each binary level, the
    root's first, as soon as it is known which of its nodes each label lies under, (L,) int32.
    """
    features = _checked(features)
    num_labels = features.shape[0]
    levels = _binary_levels(count_clusters(num_labels, config))
    num_clusters = len(levels[-1]) - 1
    offsets = np.arange(num_clusters + 1, dtype=np.int64) * num_labels // num_clusters
    state = State.of(num_labels)
    limits = Limits(config.max_iter, float(config.tolerance))
    plain_from = max(0, len(levels) - 1 - _PLAIN_LEVELS) if config.weigh_rare and sp.issparse(features) else 0
    for some, weigh_rare in ((levels[:plain_from], True), (levels[plain_from:-1], False)):
        if some:
            rows = rows_of(features, weigh_rare)
            widths = np.full(len(some[0]) - 1, features.shape[1], np.int64)
            for nodes in some:
                if on_level is not None:
                    _tell(on_level, nodes, offsets, state.order)
                widths = split_level(rows, state, widths, nodes, offsets, config.seed, limits)
            del rows  # before the next copy is made
    if on_level is not None:
        _tell(on_level, levels[-1], offsets, state.order)
    return LabelClusters(state.order.astype(np.int32), offsets, levels)


def _tell(
    on_level: Callable[[int, np.ndarray], None], nodes: np.ndarray, offsets: np.ndarray, order: np.ndarray
) -> None:
    """Hand on the nodes of a binary level, given by where they begin and end in clusters."""
    node_of = np.empty(len(order), np.int32)
    node_of[order] = np.repeat(np.arange(len(nodes) - 1, dtype=np.int32), np.diff(offsets[nodes]))
    on_level((len(nodes) - 2).bit_length(), node_of)


def mean_similarity(features: sp.spmatrix | np.ndarray, clusters: LabelClusters) -> float:
    """Mean over labels of the cosine between a label's features and its cluster's centroid."""
    sums = clusters.matrix().T.tocsr() @ features
    squares = sums.multiply(sums) if sp.issparse(sums) else np.square(sums)
    # The cosines of a cluster's unit rows to their own sum add up to the length of that sum.
    return float(np.sqrt(np.asarray(squares.sum(axis=1), np.float64)).sum() / clusters.num_labels)


# How many of the last levels never weigh columns: clusters are close by the features as they are.
_PLAIN_LEVELS = 3


def count_clusters(num_labels: int, config: ClusterConfig) -> int:
    """How many clusters `cluster_labels` makes of so many labels."""
    if config.num_clusters is None:
        smallest = -(-num_labels // config.max_leaf_size)
        return min(1 << (smallest - 1).bit_length(), num_labels)
    if config.num_clusters > num_labels:
        raise InputError(
            f"num_clusters={config.num_clusters} is more than the {num_labels} labels: ask for fewer clusters"
        )
    return config.num_clusters


def _binary_levels(num_clusters: int) -> tuple[np.ndarray, ...]:
    """Halve the range of clusters until each node is one cluster."""
    levels = [np.array([0, num_clusters], np.int64)]
    while len(levels[-1]) <= num_clusters:
        first, last = levels[-1][:-1], levels[-1][1:]
        levels.append(np.unique(np.concatenate([levels[-1], (first + last + 1) // 2])))
    return tuple(levels)


def _checked(features: Any) -> Any:
    """The features as float32, sparse rows sorted by column; refuses what cannot be clustered."""
    if features.shape[0] == 0:
        raise InputError("there are no labels to cluster")
    if sp.issparse(features):
        features = sp.csr_matrix(features, dtype=np.float32)
        if not features.has_canonical_format:
            features = features.copy()
            features.sum_duplicates()
        values = features.data
    else:
        features = values = np.ascontiguousarray(features, np.float32)
    # A sum is finite only if its terms are, and needs no array of as many flags.
    if not np.isfinite(values.sum(dtype=np.float64)):
        raise InputError("the label features hold infinite values or NaN: mend them before clustering")
    return features
