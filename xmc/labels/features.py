"""Label features to cluster by: PIFA from the documents of a label, and features of the labels' own texts.

Legend: N documents, L labels, D features. Document and text features themselves come from elsewhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from numba import get_num_threads, njit, prange

from xmc.errors import InputError


def pifa(labels: sp.spmatrix, documents: sp.spmatrix | np.ndarray) -> sp.csr_matrix | np.ndarray:
    """Z (L×D) float32 = YᵀX with rows of unit length, from Y (N×L) and X (N×D), sparse or dense as X is.

    A label without documents gets a zero row. Sparse rows are sorted by column. Beyond the result, memory is
    one row of D sums a thread, and room for the entries that the documents of a label share.
    """
    if labels.shape[0] != documents.shape[0]:
        raise InputError(
            f"{labels.shape[0]} documents have labels but {documents.shape[0]} have features: both must be the same"
        )
    by_label = sp.csc_matrix(labels)
    starts, members = by_label.indptr.astype(np.int64), by_label.indices
    weights = by_label.data.astype(np.float32, copy=False)
    if not sp.issparse(documents):
        dense = np.ascontiguousarray(documents, np.float32)
        return _pifa_dense(starts, members, weights, dense)
    rows = sp.csr_matrix(documents, dtype=np.float32)
    rows.sum_duplicates()
    return _pifa_sparse(starts, members, weights, rows)


def _pifa_sparse(
    starts: np.ndarray, members: np.ndarray, weights: np.ndarray, rows: sp.csr_matrix
) -> sp.csr_matrix:
    num_labels, num_columns = len(starts) - 1, rows.shape[1]
    row_ends = rows.indptr.astype(np.int64)
    # Room for each label: as if its documents shared no word. Pages that stay unused are never touched.
    work = np.concatenate([[0], np.cumsum(np.diff(row_ends)[members])])[starts]
    room = np.concatenate([[0], np.cumsum(np.minimum(np.diff(work), num_columns))])
    columns, values = np.empty(room[-1], np.int32), np.empty(room[-1], np.float32)
    counts = np.zeros(num_labels, np.int64)
    # Several shares a thread, alike in work: a few labels have most of the documents.
    shares = 16 * get_num_threads()
    bounds = np.searchsorted(work, work[-1] * np.arange(shares + 1) // shares)
    bounds[0], bounds[-1] = 0, num_labels
    _sum_rows(
        starts,
        members,
        weights,
        row_ends,
        rows.indices,
        rows.data,
        num_columns,
        bounds,
        room,
        columns,
        values,
        counts,
    )
    ends = np.concatenate([[0], np.cumsum(counts)])
    _close_gaps(room, ends, columns, values)
    # In place: a second array of this size is what must not be.
    columns.resize(ends[-1], refcheck=False)
    values.resize(ends[-1], refcheck=False)
    index_type = np.int32 if ends[-1] <= np.iinfo(np.int32).max else np.int64
    indptr, indices = ends.astype(index_type), columns.astype(index_type, copy=False)
    features = sp.csr_matrix((values, indices, indptr), shape=(num_labels, num_columns), copy=False)
    features.has_canonical_format = True
    return features


@njit(cache=True, nogil=True, parallel=True)
def _sum_rows(
    starts: Any,
    members: Any,
    weights: Any,
    row_ends: Any,
    row_columns: Any,
    row_values: Any,
    num_columns: Any,
    bounds: Any,
    room: Any,
    columns: Any,
    values: Any,
    counts: Any,
) -> None:
    """Sum the documents' rows of each label, scale to unit length, write from room[label] on."""
    for share in prange(bounds.size - 1):
        sums = np.zeros(num_columns, np.float32)
        # One bit a column says that it is in use: reading the bits in order sorts the row without sorting.
        used = np.zeros((num_columns + 63) // 64, np.uint64)
        for label in range(bounds[share], bounds[share + 1]):
            for member in range(starts[label], starts[label + 1]):
                document, weight = members[member], weights[member]
                for entry in range(row_ends[document], row_ends[document + 1]):
                    column = row_columns[entry]
                    sums[column] += weight * row_values[entry]
                    used[column >> 6] |= np.uint64(1) << np.uint64(column & 63)
            if starts[label] == starts[label + 1]:
                continue
            write = room[label]
            square = 0.0
            for word in range(used.size):
                bits = used[word]
                while bits:
                    column = (word << 6) + _lowest_bit(bits)
                    bits &= bits - np.uint64(1)
                    value = sums[column]
                    sums[column] = 0
                    columns[write] = column
                    values[write] = value
                    square += value * value
                    write += 1
                used[word] = 0
            counts[label] = write - room[label]
            if square > 0:
                scale = np.float32(1 / np.sqrt(square))
                for entry in range(room[label], write):
                    values[entry] *= scale


# Multiplied by a power of two, a de Bruijn number shows each power's exponent in its six top bits.
_DE_BRUIJN = 0x03F79D71B4CB0A89
_BIT_PLACES = np.zeros(64, np.int64)
_BIT_PLACES[[(_DE_BRUIJN << place) % 2**64 >> 58 for place in range(64)]] = np.arange(64)


@njit(cache=True, nogil=True)
def _lowest_bit(bits: Any) -> Any:
    """The place of the lowest set bit."""
    lowest = bits & (~bits + np.uint64(1))
    return _BIT_PLACES[(lowest * np.uint64(_DE_BRUIJN)) >> np.uint64(58)]


@njit(cache=True, nogil=True)
def _close_gaps(room: Any, ends: Any, columns: Any, values: Any) -> None:
    """Move each row from where there was room for it to where the row before it ends."""
    for row in range(ends.size - 1):
        gap = room[row] - ends[row]
        if gap:
            for entry in range(ends[row], ends[row + 1]):
                columns[entry] = columns[entry + gap]
                values[entry] = values[entry + gap]


@njit(cache=True, nogil=True, parallel=True)
def _pifa_dense(starts: Any, members: Any, weights: Any, documents: Any) -> Any:
    """(L×D): the weighted sum of each label's documents, of unit length."""
    num_columns = documents.shape[1]
    sums = np.zeros((starts.size - 1, num_columns), np.float32)
    for label in prange(starts.size - 1):
        for member in range(starts[label], starts[label + 1]):
            document, weight = members[member], weights[member]
            for column in range(num_columns):
                sums[label, column] += weight * documents[document, column]
        square = 0.0
        for column in range(num_columns):
            square += sums[label, column] * sums[label, column]
        if square > 0:
            scale = np.float32(1 / np.sqrt(square))
            for column in range(num_columns):
                sums[label, column] *= scale
    return sums


def fill_empty_rows(features: sp.csr_matrix, texts: sp.csr_matrix) -> sp.csr_matrix:
    """Label features (L×D) whose zero rows are replaced by the labels' text features (L×D, same columns).

    For labels without a training document; a label without text either keeps its zero row.
    """
    if features.shape != texts.shape:
        raise InputError(
            f"label features are {features.shape} and text features {texts.shape}: both must come from the same TF-IDF"
        )
    empty = _lengths(features) == 0
    keep = sp.diags(empty.astype(np.float32))
    return (features + keep @ _unit_rows(texts)).tocsr()


def concatenate(features: sp.csr_matrix, texts: sp.csr_matrix, text_weight: float = 1.0) -> sp.csr_matrix:
    """[features ; text_weight · texts] (L×(D+D')), each part and then the whole with rows of unit length.

    A label that has only one of the two is described by that one alone.
    """
    if features.shape[0] != texts.shape[0]:
        raise InputError(f"{features.shape[0]} labels have features but {texts.shape[0]} have texts")
    if not text_weight > 0:
        raise InputError(f"text_weight={text_weight}: it must be positive; without texts, do not concatenate")
    return _unit_rows(sp.hstack([_unit_rows(features), text_weight * _unit_rows(texts)], format="csr"))


def _lengths(rows: sp.csr_matrix) -> np.ndarray:
    return np.sqrt(np.asarray(rows.multiply(rows).sum(axis=1), np.float64).ravel())


def _unit_rows(rows: sp.csr_matrix) -> sp.csr_matrix:
    lengths = _lengths(rows)
    scales = np.divide(1, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    return sp.csr_matrix(sp.diags(scales.astype(np.float32)) @ rows, dtype=np.float32)
