"""Kernels that halve nodes of labels by balanced spherical 2-means, all nodes of a binary level at once.

A node is a range of positions. Few large nodes are halved one after the other by all threads, many small ones each by
one thread, by the same steps: the result depends on neither. `clustering.py` says what is halved, and how often.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from numba import get_num_threads, njit, prange


class Rows(NamedTuple):
    """The labels' features while they are being clustered.

    Sparse rows are a copy, sorted by column. Every few levels the columns are numbered anew within each node:
    sums then fit a nearer cache. A column that only one label of the node has matters for that label's
    similarity to its own centroid and nothing else: its square is added to `alone` and the entry dropped.
    """

    start: np.ndarray  # (L,) int64: where a label's entries begin
    stop: np.ndarray  # (L,) int64: where they end
    columns: np.ndarray  # int32 by entry; empty when the rows are dense
    values: np.ndarray  # float32 by entry
    alone: np.ndarray  # (L,) float32: squares of the entries dropped from a label's row


class State(NamedTuple):
    """What is known of each position; a node is a range of positions, its labels ascending."""

    order: np.ndarray  # (L,) int64: the label at a position
    right: np.ndarray  # (L,) int8: 1 where the label is in the right half of its node
    left_sign: np.ndarray  # (L,) int8: +1 where it joins the left half, −1 where it leaves, else 0
    right_sign: np.ndarray  # (L,) int8: the same for the right half
    score: np.ndarray  # (L,) float32: how much nearer it is to the right half than to the left
    scratch: np.ndarray  # (L,) float32
    buffer: np.ndarray  # (L,) int64

    @classmethod
    def of(cls, num_labels: int) -> State:
        order = np.arange(num_labels, dtype=np.int64)
        right, left_sign, right_sign = np.zeros((3, num_labels), np.int8)
        score, scratch = np.zeros((2, num_labels), np.float32)
        return cls(order, right, left_sign, right_sign, score, scratch, order.copy())


class Limits(NamedTuple):
    """When a node is done."""

    max_iter: int  # passes over its labels, or over a large node's sample
    tolerance: float  # a pass that raises its mean similarity to the centroids by less was the last


class _Splits(NamedTuple):
    """The nodes of a level, by position."""

    first: np.ndarray  # (nodes,) int64
    middle: np.ndarray  # (nodes,) int64: where the right half begins
    last: np.ndarray  # (nodes,) int64

    @classmethod
    def of(cls, nodes: np.ndarray, offsets: np.ndarray) -> _Splits:
        return cls(offsets[nodes[:-1]], offsets[(nodes[:-1] + nodes[1:] + 1) // 2], offsets[nodes[1:]])


def rows_of(features: Any, weigh_rare: bool) -> Rows:
    """The rows to work on: a copy when they are sparse."""
    num_labels, width = features.shape
    alone = np.zeros(num_labels, np.float32)
    if not sp.issparse(features):
        ends = np.arange(num_labels + 1, dtype=np.int64) * width
        return Rows(ends[:-1], ends[1:], np.empty(0, np.int32), features.ravel(), alone)
    ends = features.indptr.astype(np.int64)
    columns, values = np.empty(features.nnz, np.int32), np.empty(features.nnz, np.float32)
    weights = np.ones(width, np.float32)
    if weigh_rare:
        counts = np.bincount(features.indices, minlength=width)
        weights[:] = np.log1p(num_labels / np.maximum(counts, 1))
    _copy_parallel(ends, features.indices, features.data, weights, weigh_rare, columns, values)
    return Rows(ends[:-1].copy(), ends[1:].copy(), columns, values, alone)


@njit(cache=True, nogil=True, parallel=True)
def _copy_parallel(
    indptr: Any, columns: Any, values: Any, weights: Any, normalise: Any, to_columns: Any, to_values: Any
) -> None:
    """Copy rows with their columns weighed; the copies have unit length if asked."""
    for row in prange(indptr.size - 1):
        square = 0.0
        for entry in range(indptr[row], indptr[row + 1]):
            to_columns[entry] = columns[entry]
            to_values[entry] = values[entry] * weights[columns[entry]]
            square += to_values[entry] * to_values[entry]
        if normalise and square > 0:
            scale = np.float32(1 / np.sqrt(square))
            for entry in range(indptr[row], indptr[row + 1]):
                to_values[entry] *= scale


# A level with fewer nodes than this for each thread is taken node by node with all threads inside the node.
_NODES_PER_THREAD = 2
# Columns are numbered anew when the nodes' widths add up to more than this part of the entries.
_SHRINK_FROM = 0.4


def split_level(
    rows: Rows,
    state: State,
    widths: np.ndarray,
    nodes: np.ndarray,
    offsets: np.ndarray,
    seed: int,
    limits: Limits,
) -> np.ndarray:
    """Halve the nodes of a level; returns the widths of the next level's nodes."""
    splits = _Splits.of(nodes, offsets)
    divisible = np.diff(nodes) > 1
    chosen = np.flatnonzero(divisible)
    keys = _mix(np.uint64(seed), np.uint64(len(nodes))) + chosen.astype(np.uint64)
    entries = np.add.reduceat((rows.stop - rows.start)[state.order], splits.first)
    shrink = bool(rows.columns.size) and widths.sum() > _SHRINK_FROM * entries.sum()
    threads = get_num_threads()
    if threads > 1 and len(chosen) < threads * _NODES_PER_THREAD:
        for node, key in zip(chosen.tolist(), keys, strict=True):
            widths[node] = _split_wide(rows, state, splits, node, int(widths[node]), key, shrink, limits)
    else:
        turns = _share_out(entries[chosen], threads)
        _split_narrow(rows, state, splits, chosen, turns, widths, keys, shrink, limits)
    return np.repeat(widths, np.where(divisible, 2, 1))


def _split_wide(
    rows: Rows,
    state: State,
    splits: _Splits,
    node: int,
    width: int,
    key: np.uint64,
    shrink: bool,
    limits: Limits,
) -> int:
    """Halve one node with all threads, by the same steps as `_split_narrow`. Returns its new width."""
    first, middle, last = (int(bound[node]) for bound in splits)
    if shrink:
        chunks, ranges = _cut(rows, state, first, last, width)
        counts = np.zeros(width, np.int32)
        _count_parallel(rows, state.order, first, last, ranges, counts)
        width = _renumber(counts, width)
        _shrink_parallel(rows, state.order, chunks, counts)
    sums = np.zeros((3, width), np.float32)
    sampled = _take_sample(state, first, last)
    _choose_two(state, first, sampled, key)
    _sum(rows, state, first, sampled, 0, width, sums[0], sums[1])
    np.subtract(sums[1], sums[0], out=sums[2])
    passes, tolerance = limits
    if sampled < last:
        in_sample = _in_sample(first, middle, last, sampled)
        _two_means_wide(rows, state, first, in_sample, sampled, sums, passes, tolerance)
        _put_sample_back(state, first, sampled)
        passes = min(passes, _PASSES_AFTER_SAMPLE)
    _two_means_wide(rows, state, first, middle, last, sums, passes, tolerance)
    _put_in_order(state, first, last)
    return width


def _two_means_wide(
    rows: Rows,
    state: State,
    first: int,
    middle: int,
    last: int,
    sums: np.ndarray,
    max_iter: int,
    tolerance: float,
) -> None:
    """`_two_means` with all threads."""
    left, right, difference = sums
    chunks, ranges = _cut(rows, state, first, last, len(difference))
    _project_parallel(rows, state, chunks, difference)
    _start_halves(state, first, middle, last)
    left[:] = right[:] = 0
    before = -1.0
    for _ in range(max_iter):
        _sum_parallel(rows, state, first, last, ranges, left, right)
        reached, left_scale, right_scale = _compare(rows, state, first, last, left, right, difference)
        _project_parallel(rows, state, chunks, difference)
        moved = _reassign(rows, state, first, middle, last, left_scale, right_scale)
        if moved == 0 or reached - before < tolerance:
            break
        before = reached


@njit(cache=True, nogil=True, parallel=True)
def _split_narrow(
    rows: Any,
    state: Any,
    splits: Any,
    nodes: Any,
    turns: Any,
    widths: Any,
    keys: Any,
    shrink: Any,
    limits: Any,
) -> None:
    """Halve many nodes, each by one thread; `turns` says which thread takes which."""
    widest = widths.max()
    for thread in prange(turns.max() + 1):
        space = np.empty((3, widest), np.float32)
        counts = np.empty(widest if shrink else 0, np.int32)
        for turn in range(nodes.size):
            if turns[turn] != thread:
                continue
            node = nodes[turn]
            first, middle, last = splits.first[node], splits.middle[node], splits.last[node]
            width = widths[node]
            if shrink:
                counts[:width] = 0
                _count(rows, state.order, first, last, 0, width, counts)
                widths[node] = width = _renumber(counts, width)
                _shrink(rows, state.order, first, last, counts)
            sums = space[:, :width]
            sums[:] = 0
            sampled = _take_sample(state, first, last)
            _choose_two(state, first, sampled, keys[turn])
            _sum(rows, state, first, sampled, 0, width, sums[0], sums[1])
            sums[2] = sums[1] - sums[0]
            passes = limits.max_iter
            if sampled < last:
                in_sample = _in_sample(first, middle, last, sampled)
                _two_means(rows, state, first, in_sample, sampled, sums, passes, limits.tolerance)
                _put_sample_back(state, first, sampled)
                passes = min(passes, _PASSES_AFTER_SAMPLE)
            _two_means(rows, state, first, middle, last, sums, passes, limits.tolerance)
            _put_in_order(state, first, last)


@njit(cache=True, nogil=True)
def _two_means(
    rows: Any, state: Any, first: Any, middle: Any, last: Any, sums: Any, max_iter: Any, tolerance: Any
) -> None:
    """Balanced 2-means of a range of labels, from the difference of two centroids in sums[2], and to one."""
    left, right, difference = sums[0], sums[1], sums[2]
    _project(rows, state, first, last, difference)
    _start_halves(state, first, middle, last)
    left[:] = 0
    right[:] = 0
    before = -1.0
    for _ in range(max_iter):
        _sum(rows, state, first, last, 0, difference.size, left, right)
        reached, left_scale, right_scale = _compare(rows, state, first, last, left, right, difference)
        _project(rows, state, first, last, difference)
        moved = _reassign(rows, state, first, middle, last, left_scale, right_scale)
        if moved == 0 or reached - before < tolerance:
            break
        before = reached


# A node of at least twice as many labels is halved on about so many of them first, and then needs few passes
# over all: large nodes would otherwise take the most passes, and time would grow faster than L log L.
_SAMPLE = 4096
_PASSES_AFTER_SAMPLE = 2


@njit(cache=True, nogil=True)
def _take_sample(state: Any, first: Any, last: Any) -> Any:
    """Put every so-manieth label of a large node at its front; returns where the sample ends."""
    step = (last - first) // _SAMPLE
    if step < 2:
        return last
    state.buffer[first:last] = state.order[first:last]
    size = 0
    for position in range(first, last, step):
        state.order[first + size] = state.buffer[position]
        size += 1
    return first + size


@njit(cache=True, nogil=True)
def _put_sample_back(state: Any, first: Any, sampled: Any) -> None:
    state.order[first:sampled] = state.buffer[first:sampled]


@njit(cache=True, nogil=True)
def _in_sample(first: Any, middle: Any, last: Any, sampled: Any) -> Any:
    """Where the right half begins in the sample, in proportion."""
    return first + (middle - first) * (sampled - first) // (last - first)


def _cut(rows: Rows, state: State, first: int, last: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Bounds that give each thread about as many entries of a node: of positions, and of columns."""
    threads = get_num_threads()
    labels = state.order[first:last]
    ends = np.cumsum(rows.stop[labels] - rows.start[labels])
    chunks = first + np.searchsorted(ends, ends[-1] * np.arange(threads + 1) // threads)
    chunks[-1] = last
    if rows.columns.size == 0 or ends[-1] == 0:
        return chunks, np.linspace(0, width, threads + 1).astype(np.int64)
    picks = ends[-1] * np.arange(1024) // 1024
    rank = np.searchsorted(ends, picks, side="right")
    sample = np.sort(rows.columns[rows.stop[labels[rank]] - (ends[rank] - picks)])
    ranges = np.concatenate([[0], sample[1024 * np.arange(1, threads) // threads], [width]])
    return chunks, ranges.astype(np.int64)


@njit(cache=True, nogil=True)
def _share_out(entries: Any, threads: Any) -> Any:
    """Give each node to the thread with the least to do so far, the largest nodes first."""
    load = np.zeros(threads, np.int64)
    turns = np.empty(entries.size, np.int64)
    for node in np.argsort(-entries):
        thread = np.argmin(load)
        turns[node] = thread
        load[thread] += entries[node] + 1
    return turns


@njit(cache=True, nogil=True)
def _mix(first: Any, second: Any) -> Any:
    """A well-spread 64-bit number from two others."""
    mixed = first + (second + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@njit(cache=True, nogil=True)
def _choose_two(state: Any, first: Any, last: Any, key: Any) -> None:
    """Mark two random labels of the node, one for each half."""
    size = np.uint64(last - first)
    one = _mix(key, np.uint64(0)) % size
    other = (one + np.uint64(1) + _mix(key, np.uint64(1)) % (size - np.uint64(1))) % size
    state.left_sign[first:last] = 0
    state.right_sign[first:last] = 0
    state.left_sign[first + np.int64(one)] = 1
    state.right_sign[first + np.int64(other)] = 1


@njit(cache=True, nogil=True)
def _find(columns: Any, start: Any, stop: Any, column: Any) -> Any:
    """The first entry of a sorted row whose column is not below `column`."""
    while start < stop:
        middle = (start + stop) >> 1
        if columns[middle] < column:
            start = middle + 1
        else:
            stop = middle
    return start


@njit(cache=True, nogil=True)
def _add(rows: Any, label: Any, sign: Any, low: Any, high: Any, vector: Any) -> None:
    """vector += sign · row over the columns low…high."""
    start, stop = rows.start[label], rows.stop[label]
    if rows.columns.size == 0:
        for column in range(low, high):
            vector[column] += sign * rows.values[start + column]
        return
    if low > 0:
        start = _find(rows.columns, start, stop, low)
    if high < vector.size:
        stop = _find(rows.columns, start, stop, high)
    for entry in range(start, stop):
        vector[rows.columns[entry]] += sign * rows.values[entry]


@njit(cache=True, nogil=True)
def _sum(rows: Any, state: Any, first: Any, last: Any, low: Any, high: Any, left: Any, right: Any) -> None:
    """Bring the sums of both halves up to date over the columns low…high, label after label."""
    for position in range(first, last):
        label = state.order[position]
        if state.left_sign[position] != 0:
            _add(rows, label, np.float32(state.left_sign[position]), low, high, left)
        if state.right_sign[position] != 0:
            _add(rows, label, np.float32(state.right_sign[position]), low, high, right)


@njit(cache=True, nogil=True, parallel=True)
def _sum_parallel(rows: Any, state: Any, first: Any, last: Any, ranges: Any, left: Any, right: Any) -> None:
    # By ranges of columns, not of labels: no partial sums to add up, and the same result for any number of threads.
    for part in prange(ranges.size - 1):
        _sum(rows, state, first, last, ranges[part], ranges[part + 1], left, right)


@njit(cache=True, nogil=True)
def _compare(rows: Any, state: Any, first: Any, last: Any, left: Any, right: Any, difference: Any) -> Any:
    """difference = right centroid − left centroid, of unit length each.

    Returns the mean similarity of the labels to their half's centroid, and the inverse lengths of the sums.
    """
    left_square = right_square = 0.0
    for column in range(left.size):
        left_square += left[column] * left[column]
        right_square += right[column] * right[column]
    for position in range(first, last):
        alone = rows.alone[state.order[position]]
        if state.right[position]:
            right_square += alone
        else:
            left_square += alone
    left_length, right_length = np.sqrt(left_square), np.sqrt(right_square)
    left_scale = np.float32(1 / left_length if left_length > 0 else 0)
    right_scale = np.float32(1 / right_length if right_length > 0 else 0)
    for column in range(left.size):
        difference[column] = right[column] * right_scale - left[column] * left_scale
    # The cosines of unit rows to the direction of their sum add up to the length of the sum.
    return (left_length + right_length) / (last - first), left_scale, right_scale


@njit(cache=True, nogil=True)
def _project(rows: Any, state: Any, first: Any, last: Any, vector: Any) -> None:
    """score = row · vector. Four sums a row, written out, so that every compilation adds in the same order."""
    columns, values = rows.columns, rows.values
    for position in range(first, last):
        label = state.order[position]
        start, stop = rows.start[label], rows.stop[label]
        a = b = c = d = np.float32(0)
        whole = start + ((stop - start) & ~3)
        if columns.size:
            for entry in range(start, whole, 4):
                a += values[entry] * vector[columns[entry]]
                b += values[entry + 1] * vector[columns[entry + 1]]
                c += values[entry + 2] * vector[columns[entry + 2]]
                d += values[entry + 3] * vector[columns[entry + 3]]
            for entry in range(whole, stop):
                a += values[entry] * vector[columns[entry]]
        else:
            for entry in range(start, whole, 4):
                column = entry - start
                a += values[entry] * vector[column]
                b += values[entry + 1] * vector[column + 1]
                c += values[entry + 2] * vector[column + 2]
                d += values[entry + 3] * vector[column + 3]
            for entry in range(whole, stop):
                a += values[entry] * vector[entry - start]
        state.score[position] = (a + b) + (c + d)


@njit(cache=True, nogil=True, parallel=True)
def _project_parallel(rows: Any, state: Any, chunks: Any, vector: Any) -> None:
    for part in prange(chunks.size - 1):
        _project(rows, state, chunks[part], chunks[part + 1], vector)


@njit(cache=True, nogil=True)
def _count(rows: Any, order: Any, first: Any, last: Any, low: Any, high: Any, counts: Any) -> None:
    """How many of the node's labels have a column, over the columns low…high."""
    for position in range(first, last):
        label = order[position]
        stop = rows.stop[label]
        for entry in range(_find(rows.columns, rows.start[label], stop, low), stop):
            column = rows.columns[entry]
            if column >= high:
                break
            counts[column] += 1


@njit(cache=True, nogil=True, parallel=True)
def _count_parallel(rows: Any, order: Any, first: Any, last: Any, ranges: Any, counts: Any) -> None:
    for part in prange(ranges.size - 1):
        _count(rows, order, first, last, ranges[part], ranges[part + 1], counts)


@njit(cache=True, nogil=True)
def _renumber(counts: Any, width: Any) -> Any:
    """Number the columns that several labels share; `counts` becomes the new numbers (−1: dropped)."""
    kept = 0
    for column in range(width):
        if counts[column] > 1:
            counts[column] = kept
            kept += 1
        else:
            counts[column] = -1
    return kept


@njit(cache=True, nogil=True)
def _shrink(rows: Any, order: Any, first: Any, last: Any, numbers: Any) -> None:
    """Drop and renumber the columns of a node's rows."""
    for position in range(first, last):
        label = order[position]
        write = rows.start[label]
        for entry in range(write, rows.stop[label]):
            value = rows.values[entry]
            number = numbers[rows.columns[entry]]
            if number >= 0:
                rows.columns[write] = number
                rows.values[write] = value
                write += 1
            else:
                rows.alone[label] += value * value
        rows.stop[label] = write


@njit(cache=True, nogil=True, parallel=True)
def _shrink_parallel(rows: Any, order: Any, chunks: Any, numbers: Any) -> None:
    for part in prange(chunks.size - 1):
        _shrink(rows, order, chunks[part], chunks[part + 1], numbers)


@njit(cache=True, nogil=True)
def _start_halves(state: Any, first: Any, middle: Any, last: Any) -> None:
    """The first halves, by the difference of the similarities to the two chosen labels; all labels join one."""
    _halve(state, first, middle, last)
    for position in range(first, last):
        state.right_sign[position] = state.right[position]
        state.left_sign[position] = 1 - state.right[position]


@njit(cache=True, nogil=True)
def _reassign(
    rows: Any, state: Any, first: Any, middle: Any, last: Any, left_scale: Any, right_scale: Any
) -> Any:
    """New halves from the similarities to the present ones; returns how many labels change halves."""
    for position in range(first, last):
        alone = rows.alone[state.order[position]]
        state.score[position] += alone * right_scale if state.right[position] else -alone * left_scale
    return _halve(state, first, middle, last)


@njit(cache=True, nogil=True)
def _halve(state: Any, first: Any, middle: Any, last: Any) -> Any:
    """Put the labels with the largest scores in the right half, ties in order; returns how many moved."""
    state.scratch[first:last] = state.score[first:last]
    bound = _select(state.scratch, first, last - 1, middle)
    ties = last - middle
    for position in range(first, last):
        ties -= state.score[position] > bound
    moved = 0
    for position in range(first, last):
        right = state.score[position] > bound
        if state.score[position] == bound and ties > 0:
            right = True
            ties -= 1
        change = np.int8(right) - state.right[position]
        state.right_sign[position] = change
        state.left_sign[position] = -change
        state.right[position] = right
        moved += change != 0
    return moved


@njit(cache=True, nogil=True)
def _select(values: Any, low: Any, high: Any, target: Any) -> Any:
    """The value that sorting values[low…high] would put at `target`; reorders them."""
    while low < high:
        one, two, three = values[low], values[(low + high) >> 1], values[high]
        pivot = max(min(one, two), min(max(one, two), three))
        left, right = low, high
        while left <= right:
            while values[left] < pivot:
                left += 1
            while values[right] > pivot:
                right -= 1
            if left <= right:
                values[left], values[right] = values[right], values[left]
                left += 1
                right -= 1
        if target <= right:
            high = right
        elif target >= left:
            low = left
        else:
            break
    return values[target]


@njit(cache=True, nogil=True)
def _put_in_order(state: Any, first: Any, last: Any) -> None:
    """Bring the left half before the right one, labels ascending in each."""
    write = first
    for half in range(2):
        for position in range(first, last):
            if state.right[position] == half:
                state.buffer[write] = state.order[position]
                write += 1
    state.order[first:last] = state.buffer[first:last]
