"""What a linear model reads of documents: sparse columns (TF-IDF), dense ones (embeddings), or both side by side.

The dense part is never put into the sparse matrix. Legend: N documents, D sparse columns, d dense ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from numba import njit, prange
from numpy.typing import NDArray

from xmc.errors import InputError


def read_only(array: NDArray) -> NDArray:
    """A view that cannot be written to, as mapped files and shared memory are: kernels then know one kind of array."""
    view = array.view()
    view.flags.writeable = False
    return view


@dataclass(frozen=True)
class Inputs:
    """N documents by their sparse columns (N×D), their dense ones (N×d), or both; at least one of the two."""

    sparse: sp.csr_matrix | None = None
    dense: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        if self.sparse is None and self.dense is None:
            raise InputError("a linear model needs sparse columns, dense ones, or both: neither was given")
        if self.sparse is not None:
            object.__setattr__(self, "sparse", _canonical(self.sparse))
        if self.dense is not None:
            object.__setattr__(self, "dense", np.ascontiguousarray(self.dense, np.float32))
            if self.dense.ndim != 2:
                raise InputError(f"dense inputs must be (documents × width), not {self.dense.shape}")
        # A sum is finite only if its terms are, and needs no array of as many flags.
        if not all(np.isfinite(part.sum(dtype=np.float64)) for part in (self.values, self.dense_rows)):
            raise InputError("the documents' features hold infinite values or NaN: mend them first")
        if self.sparse is not None and self.dense is not None and self.sparse.shape[0] != len(self.dense):
            raise InputError(
                f"{self.sparse.shape[0]} documents have sparse columns but {len(self.dense)} dense ones: "
                "both must be of the same documents"
            )

    def __len__(self) -> int:
        return int(self.sparse.shape[0]) if self.sparse is not None else len(self.dense)  # type: ignore[arg-type]

    @property
    def num_columns(self) -> int:
        """D, 0 without a sparse part."""
        return 0 if self.sparse is None else int(self.sparse.shape[1])

    @property
    def num_dense(self) -> int:
        """d, 0 without a dense part."""
        return 0 if self.dense is None else int(self.dense.shape[1])

    @property
    def row_bounds(self) -> NDArray:
        """(N+1,): where each document's sparse entries begin and end; all zeros without a sparse part."""
        return read_only(np.zeros(len(self) + 1, np.int32) if self.sparse is None else self.sparse.indptr)

    @property
    def columns(self) -> NDArray[np.int32]:
        return read_only(np.zeros(0, np.int32) if self.sparse is None else self.sparse.indices)

    @property
    def values(self) -> NDArray[np.float32]:
        return read_only(np.zeros(0, np.float32) if self.sparse is None else self.sparse.data)

    @property
    def dense_rows(self) -> NDArray[np.float32]:
        """(N×d), with d = 0 where there is no dense part."""
        return read_only(np.zeros((len(self), 0), np.float32) if self.dense is None else self.dense)

    def rows(self, start: int, stop: int) -> Inputs:
        """Documents start … stop−1; their entries are not copied."""
        sparse = self.sparse
        if sparse is not None:
            bounds = sparse.indptr[start : stop + 1]
            begin, end = int(bounds[0]), int(bounds[-1])
            part = (sparse.data[begin:end], sparse.indices[begin:end], bounds - begin)
            sparse = sp.csr_matrix(part, shape=(len(bounds) - 1, sparse.shape[1]), copy=False)
        return Inputs(sparse, None if self.dense is None else self.dense[start:stop])


def combine(tfidf: sp.csr_matrix, embeddings: NDArray) -> Inputs:
    """[TF-IDF (N×D) ; embedding (N×d)], each part of unit length and the whole again.

    A document that has only one of the two is described by that one alone; an empty one stays zero.
    """
    sparse, dense = sp.csr_matrix(tfidf, dtype=np.float32, copy=True), np.array(embeddings, np.float32)
    sparse.sum_duplicates()
    if sparse.shape[0] == len(dense):
        _normalise(sparse.indptr, sparse.data, dense)
    return Inputs(sparse, dense)


def unit_rows(rows: sp.csr_matrix) -> sp.csr_matrix:
    """`rows` (N×D) scaled to unit length, those without entries left zero; themselves where nothing is to scale."""
    rows = _canonical(rows)
    if not _all_unit(read_only(rows.indptr), read_only(rows.data)):
        rows = rows.copy()
        _normalise(rows.indptr, rows.data, np.zeros((rows.shape[0], 0), np.float32))
    return rows


@njit(cache=True, nogil=True)
def _all_unit(bounds: Any, values: Any) -> Any:
    """Whether all rows that are not zero have length 1, but for rounding."""
    for document in range(bounds.size - 1):
        square = 0.0
        for entry in range(bounds[document], bounds[document + 1]):
            square += values[entry] * values[entry]
        if square > 0 and abs(square - 1) > 1e-5:
            return False
    return True


@njit(cache=True, nogil=True, parallel=True)
def _normalise(bounds: Any, values: Any, dense: Any) -> None:
    for document in prange(bounds.size - 1):
        begin, end = bounds[document], bounds[document + 1]
        row = dense[document]
        sparse_square = dense_square = 0.0
        for entry in range(begin, end):
            sparse_square += values[entry] * values[entry]
        for place in range(row.size):
            dense_square += row[place] * row[place]
        parts = (sparse_square > 0) + (dense_square > 0)
        if sparse_square > 0:
            scale = np.float32(1 / np.sqrt(sparse_square * parts))
            for entry in range(begin, end):
                values[entry] *= scale
        if dense_square > 0:
            scale = np.float32(1 / np.sqrt(dense_square * parts))
            for place in range(row.size):
                row[place] *= scale


def _canonical(rows: Any) -> sp.csr_matrix:
    """float32 rows with int32 columns, ascending and each once; a copy only where something must change."""
    if rows.shape[1] > np.iinfo(np.int32).max:
        raise InputError(f"{rows.shape[1]} sparse columns are more than 32 bits can number: use fewer")
    rows = sp.csr_matrix(rows, dtype=np.float32)
    if not rows.has_canonical_format:
        rows = rows.copy()
        rows.sum_duplicates()
    if rows.indices.dtype != np.int32:
        # scipy would turn 64-bit bounds back into 64-bit columns, so that they are set one by one.
        narrow = sp.csr_matrix(rows.shape, dtype=np.float32)
        narrow.indices, narrow.indptr, narrow.data = rows.indices.astype(np.int32), rows.indptr, rows.data
        rows = narrow
    return rows
