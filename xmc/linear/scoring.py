"""Scores the children of each document's clusters and keeps the best: a step of beam search, or the last ranking.

Documents are taken cluster by cluster, so that a cluster's columns are looked up in a table that is filled once.
Legend: N documents, b clusters a document, D sparse columns, k places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import scipy.sparse as sp
from numba import get_num_threads, njit, prange
from numpy.typing import NDArray

from xmc.errors import InputError
from xmc.labels.topk import TopK, concatenate, top_k_of_csr
from xmc.linear.inputs import Inputs, read_only
from xmc.linear.problem import Groups
from xmc.linear.weights import LevelWeights

# How the margin v of a child and the score of its cluster become the child's score:
#   product   exp(−max(0, 1−v)^power), times the cluster's score (less a thousandth: see _KEPT_BACK)
#   sigmoid   1 / (1 + exp(−v)), times the cluster's score
#   margin    v alone
Combine = Literal["product", "sigmoid", "margin"]

# Candidates of one batch of documents: 8 bytes each.
_CANDIDATES = 1 << 21
# The product is 1 for every margin of 1 or more. So much is taken off and given back as the margin grows further, so
# that such children keep their order.
_KEPT_BACK = np.float32(1e-3)


@dataclass(frozen=True)
class CombineConfig:
    """How scores are made of margins."""

    # product, sigmoid or margin, as above.
    combine: Combine = "product"
    # 2 or 3: how fast a score falls below a margin of 1; with `product` only.
    power: int = 3

    def __post_init__(self) -> None:
        if self.combine not in get_args(Combine):
            raise InputError(f"combine={self.combine!r}: choose one of {', '.join(get_args(Combine))}")
        if self.power not in (2, 3):
            raise InputError(f"power={self.power}: choose 2 or 3")

    @property
    def _code(self) -> int:
        return {"product": self.power, "sigmoid": 1, "margin": 0}[self.combine]


def activate(margins: NDArray, config: CombineConfig) -> NDArray[np.float32]:
    """The scores of a matcher's margins, as `score_children` wants its clusters'; padding of −inf stays."""
    scores = np.empty(margins.shape, np.float32)
    _activate_all(margins.astype(np.float32).ravel(), config._code, scores.reshape(-1))
    return scores


def score_children(
    weights: LevelWeights,
    groups: Groups,
    inputs: Inputs,
    parents: TopK | None,
    k: int,
    config: CombineConfig,
) -> TopK:
    """The k best children of each document among those of its clusters.

    `parents` are the clusters with their scores (what `score_children` gave for the level above, or a matcher's
    margins through `activate`); None: all children of the one cluster under the root.
    """
    if (weights.num_columns, weights.dense.shape[1]) != (inputs.num_columns, inputs.num_dense):
        raise InputError(
            f"the weights are of {weights.num_columns} sparse and {weights.dense.shape[1]} dense columns, "
            f"the documents of {inputs.num_columns} and {inputs.num_dense}: both need the same TF-IDF and encoder"
        )
    if (weights.first, weights.last) != (0, groups.num_children):
        raise InputError(
            f"these are the weights of children {weights.first} … {weights.last} of {groups.num_children}: "
            "concatenate all parts first"
        )
    if parents is None:
        shape = len(inputs), 1
        parents = TopK(np.zeros(shape, np.int32), np.ones(shape, np.float32))
    widest = int(np.diff(groups.offsets).max(initial=1)) * parents.k
    batch = max(1, _CANDIDATES // max(widest, 1))
    starts = range(0, max(len(inputs), 1), batch)
    spans = [(start, min(start + batch, len(inputs))) for start in starts]
    tops = [
        _score_batch(weights, groups, inputs.rows(*span), parents.rows(*span), k, config) for span in spans
    ]
    return tops[0] if len(tops) == 1 else concatenate(tops)


def _score_batch(
    weights: LevelWeights, groups: Groups, inputs: Inputs, parents: TopK, k: int, config: CombineConfig
) -> TopK:
    clusters = parents.label_ids.ravel()
    known = np.maximum(clusters, 0)
    counts = np.where(clusters < 0, 0, groups.offsets[known + 1] - groups.offsets[known])
    candidate_starts = np.concatenate([[0], np.cumsum(counts)])
    ids, scores = np.empty(candidate_starts[-1], np.int32), np.empty(candidate_starts[-1], np.float32)
    by_cluster = np.argsort(clusters, kind="stable")
    by_cluster = by_cluster[np.searchsorted(clusters[by_cluster], 0) :]
    # One a thread: numba gives each thread its iterations at once, so that more would only want more tables.
    shares = min(get_num_threads(), max(1, len(by_cluster)))
    _score_pairs(
        read_only(weights.position_bounds),
        read_only(weights.column_bounds),
        read_only(weights.entry_bounds),
        read_only(weights.columns),
        read_only(weights.entry_ends),
        read_only(weights.children),
        read_only(weights.values),
        read_only(weights.intercepts),
        read_only(weights.dense),
        read_only(groups.order),
        np.searchsorted(weights.position_bounds, groups.offsets),
        inputs.row_bounds,
        inputs.columns,
        inputs.values,
        inputs.dense_rows,
        read_only(clusters),
        read_only(parents.scores.ravel()),
        parents.k,
        by_cluster,
        len(by_cluster) * np.arange(shares + 1) // shares,
        candidate_starts,
        config._code,
        np.zeros((shares, weights.num_columns), np.int32),
        ids,
        scores,
    )
    starts = candidate_starts[:: parents.k] if parents.k else np.zeros(len(inputs) + 1, np.int64)
    return top_k_of_csr(sp.csr_matrix((scores, ids, starts), shape=(len(inputs), groups.num_children)), k)


@njit(cache=True, nogil=True, inline="always")
def _activate(margin: Any, code: Any) -> Any:
    if code == 0:
        return margin
    if code == 1:
        return np.float32(1 / (1 + np.exp(-margin)))
    lack = max(np.float32(1) - margin, np.float32(0))
    score = np.exp(-lack * lack) if code == 2 else np.exp(-lack * lack * lack)
    return score * (np.float32(1) - _KEPT_BACK * np.exp(min(np.float32(1) - margin, np.float32(0))))


@njit(cache=True, nogil=True)
def _activate_all(margins: Any, code: Any, scores: Any) -> None:
    for place in range(margins.size):
        scores[place] = margins[place] if margins[place] == -np.inf else _activate(margins[place], code)


@njit(cache=True, nogil=True, fastmath=True)
def _dot(a: Any, b: Any) -> Any:
    total = np.float32(0)
    for place in range(a.size):
        total += a[place] * b[place]
    return total


@njit(cache=True, nogil=True, inline="always")
def _find(columns: Any, begin: Any, end: Any, column: Any) -> Any:
    """The first place in an ascending range that holds this column or a later one."""
    while begin < end:
        middle = (begin + end) >> 1
        if columns[middle] < column:
            begin = middle + 1
        else:
            end = middle
    return begin


@njit(cache=True, nogil=True, parallel=True)
def _score_pairs(
    position_bounds: Any,
    column_bounds: Any,
    entry_bounds: Any,
    columns: Any,
    entry_ends: Any,
    children: Any,
    weights: Any,
    intercepts: Any,
    dense_weights: Any,
    order: Any,
    chunk_bounds: Any,  # (K+1,): the chunks of each cluster
    row_bounds: Any,
    row_columns: Any,
    row_values: Any,
    dense: Any,
    clusters: Any,  # (N·b,): pair p is document p // b and its cluster
    parent_scores: Any,  # (N·b,)
    beam: Any,
    by_cluster: Any,  # pairs, cluster after cluster
    shares: Any,  # bounds in by_cluster
    candidate_starts: Any,  # (N·b+1,)
    code: Any,
    tables: Any,  # (shares × D) int32, zeros
    ids: Any,
    scores: Any,
) -> None:
    """Fill ids and scores with every pair's children."""
    for share in prange(shares.size - 1):
        table = tables[share]
        begin = shares[share]
        while begin < shares[share + 1]:
            cluster = clusters[by_cluster[begin]]
            end = begin
            num_entries = 0
            while end < shares[share + 1] and clusters[by_cluster[end]] == cluster:
                document = by_cluster[end] // beam
                num_entries += row_bounds[document + 1] - row_bounds[document]
                end += 1
            for chunk in range(chunk_bounds[cluster], chunk_bounds[cluster + 1]):
                first, last = position_bounds[chunk], position_bounds[chunk + 1]
                skipped = first - position_bounds[chunk_bounds[cluster]]
                column_begin, column_end = column_bounds[chunk], column_bounds[chunk + 1]
                entry_begin = entry_bounds[chunk]
                # A search takes about as many steps as the table has bits in its size; filling and clearing it, two.
                steps = 1
                while (column_end - column_begin) >> steps:
                    steps += 1
                fill = num_entries * steps > 2 * (column_end - column_begin)
                if fill:
                    for place in range(column_begin, column_end):
                        table[columns[place]] = place - column_begin + 1
                for pair_place in range(begin, end):
                    pair = by_cluster[pair_place]
                    document = pair // beam
                    out = candidate_starts[pair] + skipped
                    for child in range(last - first):
                        inner = _dot(dense_weights[first + child], dense[document])
                        scores[out + child] = intercepts[first + child] + inner
                        ids[out + child] = order[first + child]
                    for item in range(row_bounds[document], row_bounds[document + 1]):
                        column, value = row_columns[item], row_values[item]
                        if fill:
                            place = column_begin + table[column] - 1
                            if place < column_begin:
                                continue
                        else:
                            place = _find(columns, column_begin, column_end, column)
                            if place == column_end or columns[place] != column:
                                continue
                        entry = entry_begin + (entry_ends[place - 1] if place > column_begin else 0)
                        while entry < entry_begin + entry_ends[place]:
                            scores[out + children[entry]] += value * weights[entry]
                            entry += 1
                    if code:
                        for child in range(last - first):
                            scores[out + child] = _activate(scores[out + child], code) * parent_scores[pair]
                if fill:
                    for place in range(column_begin, column_end):
                        table[columns[place]] = 0
            begin = end
