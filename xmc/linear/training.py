"""Trains a range of a level's children: threads over clusters, and over the labels of a wide cluster.

The result does not depend on the number of threads, nor on how a level is divided in ranges.
Legend: N documents, D sparse columns, d dense ones, m labels of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numba import get_num_threads, njit
from numpy.typing import NDArray

from xmc.errors import InputError
from xmc.linear.inputs import Inputs, read_only
from xmc.linear.lanes import LANES
from xmc.linear.problem import Problem, work
from xmc.linear.solver import (
    Entries,
    Local,
    SolverConfig,
    all_shared,
    collect,
    localise,
    mark_positives,
    solve,
    whole,
)
from xmc.linear.weights import MAX_CHUNK, LevelWeights, concatenate

# Small clusters are given to threads in this many shares a thread: some take longer than thought.
_SHARES = 8
# Labels of one block: as many weights of a column as fill a line of cache; wider blocks gain nothing beyond.
_WIDTH = 16


class _Piece(NamedTuple):
    """Positions of one cluster: the cluster or a part of it."""

    cluster: int
    first: int
    last: int


class _Block(NamedTuple):
    """What training one block of m labels gave."""

    positions: NDArray[np.int64]  # (m,)
    entries: Entries
    intercepts: NDArray[np.float32]  # (m,)
    dense: NDArray[np.float32]  # (m×d)


def train_block(
    inputs: Inputs,
    problem: Problem,
    positions: tuple[int, int],
    config: SolverConfig,
    seed: int = 0,
    num_threads: int | None = None,
) -> LevelWeights:
    """The weights of the children at these positions; ranges as `plan_blocks` gives them."""
    if problem.rows.size and problem.rows.max() >= len(inputs):
        raise InputError(f"the labels are of more than the {len(inputs)} documents given")
    pieces = list(_pieces(problem, *positions))
    if not pieces:
        raise InputError(f"positions {positions} hold no children")
    threads = num_threads or get_num_threads()
    per_child = work(problem, inputs)
    amounts = np.array([per_child[piece.cluster] * (piece.last - piece.first) for piece in pieces])
    is_wide = amounts > amounts.sum() / (2 * threads)
    parts: dict[int, LevelWeights] = {}
    with ThreadPoolExecutor(threads) as pool:
        # One wide cluster after the other, so that only one copy of so many documents exists at most.
        for place in np.flatnonzero(is_wide).tolist():
            parts[place] = _train_wide(inputs, problem, pieces[place], config, seed, pool)
        shares = list(_shares(amounts, is_wide, _SHARES * threads))

        def train_share(share: NDArray) -> LevelWeights:
            counts = np.zeros(inputs.num_columns, np.int32)
            return concatenate(
                [_train_piece(inputs, problem, pieces[i], config, seed, counts) for i in share]
            )

        for share, part in zip(shares, pool.map(train_share, shares), strict=True):
            parts[int(share[0])] = part
    return concatenate([parts[place] for place in sorted(parts)])


def _pieces(problem: Problem, first: int, last: int) -> Iterator[_Piece]:
    """The clusters within positions first … last−1, cut to those and to what a chunk can hold."""
    offsets = problem.groups.offsets
    for cluster in range(np.searchsorted(offsets, first, "right") - 1, np.searchsorted(offsets, last)):
        begin, end = max(first, int(offsets[cluster])), min(last, int(offsets[cluster + 1]))
        for start in range(begin, end, MAX_CHUNK):
            yield _Piece(int(cluster), start, min(start + MAX_CHUNK, end))


def _shares(amounts: NDArray, is_wide: NDArray, count: int) -> Iterator[NDArray]:
    """Runs of neighbouring pieces that are not wide, of about equal work; `count` of them or a few more."""
    reached = np.cumsum(np.where(is_wide, 0, amounts))
    target = max(reached[-1] / count, 1.0)
    key = np.minimum((reached - amounts / 2) // target, count)
    # A wide piece between two others parts them.
    key = key * (len(amounts) + 1) + np.cumsum(is_wide)
    narrow = np.flatnonzero(~is_wide)
    if len(narrow):
        yield from np.split(narrow, np.flatnonzero(np.diff(key[narrow])) + 1)


def _train_wide(
    inputs: Inputs, problem: Problem, piece: _Piece, config: SolverConfig, seed: int, pool: ThreadPoolExecutor
) -> LevelWeights:
    """One cluster, its blocks of labels shared among the threads."""
    counts = np.zeros(inputs.num_columns, np.int32)
    local = _localise(inputs, problem, piece, config, counts)
    blocks = pool.map(
        lambda labels: _train_labels(inputs, problem, piece, local, labels, config, seed),
        _label_blocks(problem, piece),
    )
    return _assemble(piece, list(blocks), inputs, counts)


def _train_piece(
    inputs: Inputs,
    problem: Problem,
    piece: _Piece,
    config: SolverConfig,
    seed: int,
    counts: NDArray[np.int32],
) -> LevelWeights:
    """One cluster, in this thread; `counts` (D,) is all zeros, and is left so."""
    local = _localise(inputs, problem, piece, config, counts)
    blocks = [
        _train_labels(inputs, problem, piece, local, labels, config, seed)
        for labels in _label_blocks(problem, piece)
    ]
    return _assemble(piece, blocks, inputs, counts)


def _localise(
    inputs: Inputs, problem: Problem, piece: _Piece, config: SolverConfig, counts: NDArray[np.int32]
) -> Local:
    """The piece's documents as the solver reads them; `counts` (D,) is all zeros, and is left so."""
    rows = read_only(problem.rows_of(piece.cluster))
    documents = (inputs.row_bounds, inputs.columns, inputs.values, inputs.dense_rows, rows)
    if len(rows) == len(inputs) and all_shared(inputs.columns, counts):
        return whole(*documents, inputs.num_columns, config.cost, config.bias)
    local = localise(*documents, config.cost, config.bias, counts)
    # As the inputs' own arrays are: the solver is compiled for one kind.
    return local._replace(columns=read_only(local.columns), values=read_only(local.values))


def _label_blocks(problem: Problem, piece: _Piece) -> list[NDArray[np.int64]]:
    """Positions of the piece in blocks of like frequency: they need about as many passes."""
    frequencies = np.diff(problem.positive_starts[piece.first : piece.last + 1])
    positions = piece.first + np.argsort(-frequencies, kind="stable")
    return [positions[start : start + _WIDTH] for start in range(0, len(positions), _WIDTH)]


def _train_labels(
    inputs: Inputs,
    problem: Problem,
    piece: _Piece,
    local: Local,
    positions: NDArray[np.int64],
    config: SolverConfig,
    seed: int,
) -> _Block:
    width = min(width for width in LANES if width >= len(positions))
    starts, positives = read_only(problem.positive_starts), read_only(problem.positives)
    positive = mark_positives(local, starts, positives, positions)
    weights, dense, bias_weights, alpha = solve(
        LANES[width],
        len(positions),
        local,
        inputs.dense_rows,
        positive,
        read_only(problem.is_negative[slice(*problem.row_bounds[piece.cluster])]),
        np.float32(config.bias),
        np.float32(config.tolerance),
        config.max_passes,
        _mix(seed, piece.cluster),
    )
    entries = collect(local, len(positions), weights, alpha, positive, np.float32(config.threshold))
    size = len(positions)
    return _Block(
        positions, entries, config.bias * bias_weights[:size], np.ascontiguousarray(dense[:, :size].T)
    )


def _mix(seed: int, cluster: int) -> np.uint64:
    """A number for the order of a cluster's documents: the same for all parts of it, and never 0."""
    return np.uint64(
        (seed * 0x9E3779B97F4A7C15 + cluster * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) % 2**64 | 1
    )


def _assemble(piece: _Piece, blocks: list[_Block], inputs: Inputs, counts: NDArray[np.int32]) -> LevelWeights:
    """One chunk from the blocks of its labels, which are given up; `counts` (D,) is all zeros, and is left so."""
    order = np.concatenate([block.positions for block in blocks])
    intercepts = np.empty(len(order), np.float32)
    intercepts[order - piece.first] = np.concatenate([block.intercepts for block in blocks])
    dense = np.empty((len(order), inputs.num_dense), np.float32)
    dense[order - piece.first] = np.concatenate([block.dense for block in blocks])
    columns = np.empty(sum(_count(block.entries.columns, counts) for block in blocks), np.int32)
    named = 0
    for block in blocks:
        named = _name(block.entries.columns, counts, columns, named)
    columns.sort()
    entry_ends = _ends(columns, counts)
    size = int(entry_ends[-1]) if len(entry_ends) else 0
    children, values = np.empty(size, np.uint16), np.empty(size, np.float32)
    # Entries take as much memory as the chunk itself: those of a block go as soon as they have their place.
    while blocks:
        block = blocks.pop(0)
        _place(*block.entries, (block.positions - piece.first).astype(np.uint16), counts, children, values)
    counts[columns] = 0
    return LevelWeights(
        inputs.num_columns,
        np.array([piece.first, piece.last], np.int64),
        np.array([0, len(columns)], np.int64),
        np.array([0, len(values)], np.int64),
        columns,
        entry_ends,
        children,
        values,
        intercepts,
        dense,
    )


@njit(cache=True, nogil=True)
def _count(columns: Any, counts: Any) -> Any:
    """Add the entries of each column to `counts` (D,); returns how many columns had none before."""
    distinct = 0
    for column in columns:
        distinct += counts[column] == 0
        counts[column] += 1
    return distinct


@njit(cache=True, nogil=True)
def _name(columns: Any, counts: Any, names: Any, named: Any) -> Any:
    """Write each column that is met for the first time to `names`, from place `named` on; returns the next place."""
    for column in columns:
        if counts[column] > 0:
            names[named] = column
            named += 1
            counts[column] = -counts[column]  # negative: it has been met
    return named


@njit(cache=True, nogil=True)
def _ends(names: Any, counts: Any) -> Any:
    """Where the entries of each named column end; `counts` goes from their negative number to where they begin."""
    ends = np.empty(names.size, np.int32)
    reached = 0
    for place in range(names.size):
        begin = reached
        reached -= counts[names[place]]
        ends[place] = reached
        counts[names[place]] = begin
    return ends


@njit(cache=True, nogil=True)
def _place(
    columns: Any, lanes: Any, values: Any, child_of: Any, begins: Any, out_children: Any, out_values: Any
) -> None:
    """Bring a block's entries to their columns' places: begins (D,), moved on by what is written."""
    for entry in range(columns.size):
        at = begins[columns[entry]]
        begins[columns[entry]] += 1
        out_children[at] = child_of[lanes[entry]]
        out_values[at] = values[entry]
