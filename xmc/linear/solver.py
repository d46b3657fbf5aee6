"""Squared-hinge classifiers by dual coordinate descent, a block of labels of the same documents at once.

For each label it finds w that minimises ½|w|² + cost · Σ max(0, 1 − y (w·x))², as liblinear does, but a document's
entries are read once for all labels of the block and each entry meets the weights of all of them side by side. What
a label ends with does not depend on its neighbours in the block. Which documents train which labels is `problem.py`.

Legend: n documents of a cluster, C columns that two or more of them share, d dense columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from xmc.errors import InputError
from xmc.linear.lanes import step

# Passes over the documents that still move, before all are looked at again.
_INNER_PASSES = 3
# A projected gradient below this part of the tolerance is left as it is.
_IGNORE = 0.1


@dataclass(frozen=True)
class SolverConfig:
    """How one classifier a label is trained and kept."""

    # What an error costs beside the size of the weights: higher fits the documents more closely and takes longer.
    cost: float = 1.0
    # The value of a column that every document has; its weight is regularised as the others. 0: none.
    bias: float = 1.0
    # A label is done when its projected gradients span no more than this.
    tolerance: float = 0.1
    # … or after this many passes.
    max_passes: int = 100
    # Weights of sparse columns that are smaller are dropped: a higher one makes models small and prediction fast.
    threshold: float = 0.1

    def __post_init__(self) -> None:
        if not self.cost > 0:
            raise InputError(f"cost={self.cost}: it must be positive")
        if not self.bias >= 0:
            raise InputError(f"bias={self.bias}: it cannot be negative; 0 means none")
        if not self.tolerance > 0:
            raise InputError(f"tolerance={self.tolerance}: it must be positive")
        if self.max_passes < 1:
            raise InputError(f"max_passes={self.max_passes}: at least one pass is needed")
        if not self.threshold >= 0:
            raise InputError(f"threshold={self.threshold}: it cannot be negative")


class Local(NamedTuple):
    """The documents of a cluster, their columns numbered within it.

    The weight of a column that only one document has follows from that document's α alone, so it takes part in no
    sum: its square is in `diagonal`, and the entry stands behind the shared ones for when weights are read out.
    """

    documents: np.ndarray  # (n,) int32, ascending
    starts: np.ndarray  # (n+1,) int64: where a document's entries begin
    middles: np.ndarray  # (n,) int64: where its lone entries begin
    # read-only int32 by entry: the number within the cluster, the column itself for lone entries
    columns: np.ndarray
    values: np.ndarray  # read-only float32 by entry
    names: np.ndarray  # (C,) int32: the columns by their numbers
    diagonal: np.ndarray  # (n,) float32: 1/2C + squares of the lone entries
    inverse: np.ndarray  # (n,) float32: 1 / (|x|² + bias² + 1/2C)


class Entries(NamedTuple):
    """Weights that are kept, in no particular order."""

    columns: np.ndarray  # int32
    lanes: np.ndarray  # uint16: the label within its block
    values: np.ndarray  # float32


@njit(cache=True, nogil=True)
def all_shared(columns: Any, counts: Any) -> Any:
    """Whether two or more documents have each of the D columns; `counts` (D,) int32 is all zeros, and is left so."""
    for column in columns:
        counts[column] += 1
    shared = counts.size == 0 or counts.min() > 1
    counts[:] = 0
    return shared


@njit(cache=True, nogil=True)
def whole(
    bounds: Any, columns: Any, values: Any, dense: Any, documents: Any, num_columns: Any, cost: Any, bias: Any
) -> Any:
    """The cluster of all documents where they share all columns: their entries as they are, not copied."""
    inverse = np.empty(documents.size, np.float32)
    for row in range(documents.size):
        square = 0.0
        for entry in range(bounds[row], bounds[row + 1]):
            square += values[entry] * values[entry]
        for place in range(dense.shape[1]):
            square += dense[row, place] * dense[row, place]
        inverse[row] = 1 / (square + bias * bias + 0.5 / cost)
    return Local(
        documents,
        bounds.astype(np.int64),
        bounds[1:].astype(np.int64),
        columns,
        values,
        np.arange(num_columns).astype(np.int32),
        np.full(documents.size, 0.5 / cost, np.float32),
        inverse,
    )


@njit(cache=True, nogil=True)
def localise(
    bounds: Any, columns: Any, values: Any, dense: Any, documents: Any, cost: Any, bias: Any, counts: Any
) -> Any:
    """A copy of the cluster of these documents; `counts` (D,) int32 is all zeros, and is left so."""
    size = documents.size
    starts = np.empty(size + 1, np.int64)
    starts[0] = 0
    for row in range(size):
        document = documents[row]
        starts[row + 1] = starts[row] + bounds[document + 1] - bounds[document]
        for entry in range(bounds[document], bounds[document + 1]):
            counts[columns[entry]] += 1
    middles = np.empty(size, np.int64)
    local_columns, local_values = np.empty(starts[size], np.int32), np.empty(starts[size], np.float32)
    names = np.empty(starts[size] // 2, np.int32)
    diagonal, inverse = np.empty(size, np.float32), np.empty(size, np.float32)
    numbered = 0
    for row in range(size):
        document = documents[row]
        shared, lone = starts[row], starts[row + 1]
        square = lone_square = 0.0
        for entry in range(bounds[document], bounds[document + 1]):
            column, value = columns[entry], values[entry]
            square += value * value
            if counts[column] == 1:
                lone -= 1
                local_columns[lone] = column
                local_values[lone] = value
                lone_square += value * value
                continue
            if counts[column] > 0:
                # Negative from now on: the column's number, in the order in which columns appear.
                names[numbered] = column
                counts[column] = -1 - numbered
                numbered += 1
            local_columns[shared] = -1 - counts[column]
            local_values[shared] = value
            shared += 1
        middles[row] = shared
        for place in range(dense.shape[1]):
            square += dense[document, place] * dense[document, place]
        diagonal[row] = 0.5 / cost + lone_square
        inverse[row] = 1 / (square + bias * bias + 0.5 / cost)
    for row in range(size):
        for entry in range(bounds[documents[row]], bounds[documents[row] + 1]):
            counts[columns[entry]] = 0
    return Local(
        documents, starts, middles, local_columns, local_values, names[:numbered].copy(), diagonal, inverse
    )


@njit(cache=True, nogil=True)
def mark_positives(local: Any, positive_starts: Any, positives: Any, positions: Any) -> Any:
    """(n,) uint32: bit i is set where a document has the label at positions[i]."""
    marks = np.zeros(local.documents.size, np.uint32)
    for lane in range(positions.size):
        begin, end = positive_starts[positions[lane]], positive_starts[positions[lane] + 1]
        rows = np.searchsorted(local.documents, positives[begin:end])
        for row in rows:
            marks[row] |= np.uint32(1) << np.uint32(lane)
    return marks


@njit(cache=True, nogil=True)
def _shuffle(order: Any, state: Any) -> Any:
    """Shuffle in place; returns the generator's next state (xorshift, 64 bits, never 0)."""
    for last in range(order.size - 1, 0, -1):
        state ^= state << np.uint64(13)
        state ^= state >> np.uint64(7)
        state ^= state << np.uint64(17)
        other = np.int64(((state >> np.uint64(32)) * np.uint64(last + 1)) >> np.uint64(32))
        order[last], order[other] = order[other], order[last]
    return state


@njit(cache=True, nogil=True)
def solve(
    lanes: Any,  # an entry of LANES
    num_labels: Any,  # how many lanes are in use
    local: Any,
    dense: Any,  # (N×d) float32
    positive: Any,  # (n,) uint32, from mark_positives
    is_negative: Any,  # (n,) bool: the document is a negative of the labels that it does not have; else it is left out
    bias: Any,
    tolerance: Any,
    max_passes: Any,
    seed: Any,  # uint64, not 0
) -> Any:
    """Train a block of labels; returns weights (C × lanes), dense_weights (d × lanes), bias_weights (lanes,), α."""
    size, width, num_dense = local.documents.size, len(lanes), dense.shape[1]
    weights = np.zeros((local.names.size, width), np.float32)
    dense_weights = np.zeros((num_dense, width), np.float32)
    bias_weights = np.zeros(width, np.float32)
    alpha = np.zeros((size, width), np.float32)
    highest, lowest = np.empty(width, np.float32), np.empty(width, np.float32)
    passes = np.zeros(width, np.int64)
    order, moving, moved = np.arange(size), np.empty(size, np.int64), np.zeros(size, np.uint32)
    ignore = np.float32(_IGNORE * tolerance)
    state = seed
    unfinished = np.uint32((np.uint64(1) << np.uint64(num_labels)) - np.uint64(1))
    while unfinished:
        # One pass over all documents decides which labels are done. Those between go over what still moves: few
        # documents, for most labels. All labels of a block make their passes over all documents together.
        state = _shuffle(order, state)
        going = unfinished
        num_moving = size
        for inner in range(1 + _INNER_PASSES):
            highest[:] = 0
            lowest[:] = 0
            kept = 0
            for place in range(num_moving):
                if inner == 0:
                    row = order[place]
                    active = going if is_negative[row] else going & positive[row]
                else:
                    row = moving[place]
                    active = going & moved[row]
                if not active:
                    continue
                moved[row] = step(
                    lanes,
                    weights,
                    local.columns,
                    local.values,
                    local.starts[row],
                    local.middles[row],
                    dense_weights,
                    dense,
                    np.int64(local.documents[row]) * num_dense,
                    num_dense,
                    bias_weights,
                    bias,
                    alpha,
                    row,
                    local.diagonal[row],
                    local.inverse[row],
                    active,
                    positive[row],
                    ignore,
                    highest,
                    lowest,
                )
                if moved[row]:
                    moving[kept] = row
                    kept += 1
            num_moving = kept
            for lane in range(num_labels):
                bit = np.uint32(1) << np.uint32(lane)
                if going & bit:
                    passes[lane] += 1
                    settled = highest[lane] - lowest[lane] <= tolerance
                    if settled or passes[lane] >= max_passes:
                        going &= ~bit
                    if (settled and inner == 0) or passes[lane] >= max_passes:
                        unfinished &= ~bit
            if not going:
                break
    return weights, dense_weights, bias_weights, alpha


@njit(cache=True, nogil=True)
def collect(local: Any, num_labels: Any, weights: Any, alpha: Any, positive: Any, threshold: Any) -> Any:
    """The sparse weights of a block that are not 0 nor below the threshold, those of lone entries among them."""
    threshold = max(threshold, np.float32(np.finfo(np.float32).tiny))
    count = 0
    for number in range(local.names.size):
        for lane in range(num_labels):
            count += abs(weights[number, lane]) >= threshold
    for row in range(local.documents.size):
        for lane in range(num_labels):
            if alpha[row, lane] > 0:
                for entry in range(local.middles[row], local.starts[row + 1]):
                    count += abs(alpha[row, lane] * local.values[entry]) >= threshold
    columns, lanes = np.empty(count, np.int32), np.empty(count, np.uint16)
    values = np.empty(count, np.float32)
    count = 0
    for number in range(local.names.size):
        for lane in range(num_labels):
            if abs(weights[number, lane]) >= threshold:
                columns[count] = local.names[number]
                lanes[count] = lane
                values[count] = weights[number, lane]
                count += 1
    for row in range(local.documents.size):
        for lane in range(num_labels):
            if alpha[row, lane] > 0:
                sign = np.float32(1 if (positive[row] >> np.uint32(lane)) & np.uint32(1) else -1)
                for entry in range(local.middles[row], local.starts[row + 1]):
                    value = alpha[row, lane] * local.values[entry]
                    if abs(value) >= threshold:
                        columns[count] = local.columns[entry]
                        lanes[count] = lane
                        values[count] = sign * value
                        count += 1
    return Entries(columns, lanes, values)
