"""Top-k predictions as two arrays, and the ways to make, join and keep them. Does not know what a score means.

Shapes: N documents, L labels, k places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse as sp
from numba import njit, prange
from numpy.typing import NDArray

from xmc.errors import InputError
from xmc.files import atomic_file

# pyarrow is imported where files are read and written: a model that only predicts does without its 28 MB.
if TYPE_CHECKING:
    import pyarrow as pa

NO_LABEL = -1
_PLACES_KEY = b"places"


@dataclass(frozen=True)
class TopK:
    """The best labels of N documents, best first; ties stand in the order of their label ids.

    label_ids: int32 (N, k), −1 where a document has fewer than k labels; scores: float32 (N, k), −inf there.
    """

    label_ids: NDArray[np.int32]
    scores: NDArray[np.float32]

    def __post_init__(self) -> None:
        if self.label_ids.ndim != 2 or self.label_ids.shape != self.scores.shape:
            raise ValueError(
                f"label_ids {self.label_ids.shape} and scores {self.scores.shape} must be one (N, k) shape"
            )
        if self.label_ids.dtype != np.int32 or self.scores.dtype != np.float32:
            raise ValueError(
                f"label_ids must be int32 and scores float32, not {self.label_ids.dtype} and {self.scores.dtype}"
            )

    def __len__(self) -> int:
        return self.label_ids.shape[0]

    @property
    def k(self) -> int:
        return self.label_ids.shape[1]

    def rows(self, start: int, stop: int) -> TopK:
        """Documents start … stop−1, without a copy."""
        return TopK(self.label_ids[start:stop], self.scores[start:stop])

    def save(self, path: Path) -> None:
        """Write Parquet with the columns label_ids list<int32> and scores list<float32>, padding left out."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        kept = self.label_ids != NO_LABEL
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(kept.sum(axis=1), out=offsets[1:])
        columns = {
            "label_ids": pa.LargeListArray.from_arrays(offsets, self.label_ids[kept]),
            "scores": pa.LargeListArray.from_arrays(offsets, self.scores[kept]),
        }
        schema = pa.schema(
            [("label_ids", pa.list_(pa.int32())), ("scores", pa.list_(pa.float32()))],
            metadata={_PLACES_KEY: str(self.k).encode()},
        )
        with atomic_file(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
            # Row groups small enough that 32-bit list offsets hold them whatever the file's size.
            for batch in pa.table(columns).to_batches(max_chunksize=65_536):
                writer.write_table(pa.Table.from_batches([batch]).cast(schema))

    @classmethod
    def load(cls, path: Path) -> TopK:
        """Read what `save` wrote, or any Parquet file with these two list columns, its rows in any order of score."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pq.read_table(path, columns=["label_ids", "scores"])
        except (OSError, pa.ArrowInvalid) as error:
            raise InputError(
                f"{path}: not readable as top-k predictions ({error}); write it with TopK.save"
            ) from None
        missing = {"label_ids", "scores"} - set(table.column_names)
        if missing:
            raise InputError(f"{path}: no column {' and '.join(sorted(missing))}; write it with TopK.save")
        indptr, ids = _flatten(table["label_ids"], np.int32)
        score_indptr, scores = _flatten(table["scores"], np.float32)
        if not np.array_equal(indptr, score_indptr):
            raise InputError(f"{path}: label_ids and scores differ in length; each label needs one score")
        longest = int(np.diff(indptr).max(initial=0))
        k = int((table.schema.metadata or {}).get(_PLACES_KEY, longest))
        return _select(indptr, ids, scores, max(k, longest))


def _flatten(column: pa.ChunkedArray, dtype: type[np.generic]) -> tuple[NDArray[np.int64], NDArray]:
    """A list column's row bounds (N + 1,) and its values one after the other; a null is an empty list."""
    lengths = [chunk.value_lengths().fill_null(0).to_numpy(zero_copy_only=False) for chunk in column.chunks]
    values = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
    indptr = np.concatenate([[0], np.cumsum(np.concatenate([np.zeros(0, np.int64), *lengths]))]).astype(
        np.int64
    )
    return indptr, np.concatenate([np.zeros(0, dtype), *values]).astype(dtype, copy=False)


@njit(cache=True, nogil=True, inline="always")
def _worse(score_a: float, id_a: int, score_b: float, id_b: int) -> bool:
    return score_a < score_b or (score_a == score_b and id_a > id_b)


@njit(cache=True, nogil=True)
def _sift_down(scores: NDArray, ids: NDArray, root: int, size: int) -> None:
    """Restore the heap whose root is its worst entry."""
    while True:
        child = 2 * root + 1
        if child >= size:
            return
        if child + 1 < size and _worse(scores[child + 1], ids[child + 1], scores[child], ids[child]):
            child += 1
        if not _worse(scores[child], ids[child], scores[root], ids[root]):
            return
        scores[root], scores[child] = scores[child], scores[root]
        ids[root], ids[child] = ids[child], ids[root]
        root = child


@njit(parallel=True, cache=True, nogil=True)
def _select_rows(
    indptr: NDArray, ids: NDArray, scores: NDArray, out_ids: NDArray, out_scores: NDArray
) -> None:
    """Keep each row's k best in a heap inside the output row, then sort that row in place."""
    k = out_ids.shape[1]
    for i in prange(out_ids.shape[0]):
        row_ids = out_ids[i]
        row_scores = out_scores[i]
        size = 0
        for at in range(indptr[i], indptr[i + 1]):
            label = ids[at]
            score = scores[at]
            if label < 0 or score == -np.inf:
                continue
            if size < k:
                row_ids[size] = label
                row_scores[size] = score
                size += 1
                if size == k:
                    for root in range(k // 2 - 1, -1, -1):
                        _sift_down(row_scores, row_ids, root, k)
            elif _worse(row_scores[0], row_ids[0], score, label):
                row_ids[0] = label
                row_scores[0] = score
                _sift_down(row_scores, row_ids, 0, k)
        if size < k:
            for root in range(size // 2 - 1, -1, -1):
                _sift_down(row_scores, row_ids, root, size)
        for last in range(size - 1, 0, -1):
            row_scores[0], row_scores[last] = row_scores[last], row_scores[0]
            row_ids[0], row_ids[last] = row_ids[last], row_ids[0]
            _sift_down(row_scores, row_ids, 0, last)


def _select(indptr: NDArray, ids: NDArray, scores: NDArray, k: int) -> TopK:
    """The k best of every row of a ragged (row, label, score) list."""
    if np.isnan(scores).any():
        raise InputError("a score is not a number (NaN); the model that made it diverged: look at its loss")
    num_rows = len(indptr) - 1
    top = TopK(np.full((num_rows, k), NO_LABEL, np.int32), np.full((num_rows, k), -np.inf, np.float32))
    if k:
        _select_rows(
            np.ascontiguousarray(indptr, np.int64),
            np.ascontiguousarray(ids, np.int32),
            np.ascontiguousarray(scores, np.float32),
            top.label_ids,
            top.scores,
        )
    return top


def top_k_of_csr(scores: sp.csr_matrix, k: int) -> TopK:
    """The k best stored entries of each row of scores (N × L, no duplicate entries).

    Entries that are not stored, and stored ones of −inf, are no predictions; a stored zero is one.
    """
    return _select(scores.indptr, scores.indices, scores.data, k)


def merge(parts: Sequence[TopK], k: int) -> TopK:
    """The k best of the same N documents' predictions from disjoint blocks of labels.

    Label ids are global. The result equals the top k over all labels if every part holds k or all of its block.
    """
    ids_Nm = np.concatenate([part.label_ids for part in parts], axis=1)
    scores_Nm = np.concatenate([part.scores for part in parts], axis=1)
    num_rows, width = ids_Nm.shape
    return _select(np.arange(num_rows + 1) * width, ids_Nm.ravel(), scores_Nm.ravel(), k)


def concatenate(parts: Sequence[TopK]) -> TopK:
    """The parts' documents one after the other, padded to the widest part."""
    k = max(part.k for part in parts)

    def widen(array: NDArray, fill: float) -> NDArray:
        return np.pad(array, ((0, 0), (0, k - array.shape[1])), constant_values=fill)

    return TopK(
        np.concatenate([widen(part.label_ids, NO_LABEL) for part in parts]),
        np.concatenate([widen(part.scores, -np.inf) for part in parts]),
    )
