"""The sparse label matrix Y: built from lists of label ids without a Python loop, and its label counts.

Legend: N documents, L labels. Reading a corpus is `xmc.corpus`; nothing here is ever dense N×L.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import scipy.sparse as sp

from xmc.errors import InputError


def label_matrix(label_ids: pa.ListArray | pa.ChunkedArray, num_labels: int) -> sp.csr_matrix:
    """Y (N×L) float32 of ones from each document's label ids; a null list is a document without labels.

    A label that a document names twice counts once.
    """
    lengths = pc.fill_null(pc.list_value_length(label_ids), 0)
    indptr = np.zeros(len(label_ids) + 1, np.int64)
    np.cumsum(lengths.to_numpy(), out=indptr[1:])
    indices = pc.list_flatten(label_ids).to_numpy()
    if indices.size and (indices.min() < 0 or indices.max() >= num_labels):
        raise InputError(
            f"label ids must lie in 0…{num_labels - 1}, found {indices.min()}…{indices.max()}:"
            " the documents and the label table do not belong together; build the corpus again"
        )
    ones = np.ones(indices.size, np.float32)
    matrix = sp.csr_matrix((ones, indices.astype(np.int32), indptr), shape=(len(label_ids), num_labels))
    matrix.sum_duplicates()
    matrix.data[:] = 1
    return matrix


def label_frequencies(labels: sp.csr_matrix) -> np.ndarray:
    """(L,) int64: the number of documents of each label of Y (N×L)."""
    return np.bincount(labels.indices, minlength=labels.shape[1])
