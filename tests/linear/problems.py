"""Small random problems, and weights as plain arrays, for the tests of this room."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from xmc.linear.inputs import Inputs
from xmc.linear.problem import Groups
from xmc.linear.weights import LevelWeights


def random_inputs(rng: np.random.Generator, documents: int, columns: int, dense: int = 0) -> Inputs:
    """Sparse rows of about ten entries, the first document empty, and dense ones beside them."""
    sparse = sp.random(documents, columns, min(1.0, 10 / columns), format="lil", dtype=np.float32, rng=rng)
    sparse[0] = 0
    embeddings = rng.standard_normal((documents, dense)).astype(np.float32) * 0.3
    return Inputs(sp.csr_matrix(sparse), embeddings if dense else None)


def random_labels(rng: np.random.Generator, documents: int, labels: int, part: float = 0.15) -> sp.csr_matrix:
    return sp.csr_matrix((rng.random((documents, labels)) < part).astype(np.float32))


def even_groups(rng: np.random.Generator, children: int, clusters: int) -> Groups:
    offsets = np.arange(clusters + 1, dtype=np.int64) * children // clusters
    return Groups(rng.permutation(children).astype(np.int32), offsets)


def one_group(children: int) -> Groups:
    return Groups(np.arange(children, dtype=np.int32), np.array([0, children], np.int64))


def unpacked(weights: LevelWeights) -> np.ndarray:
    """(D + d + 1, n): sparse weights, dense ones, intercepts, by position."""
    size = weights.last - weights.first
    sparse = np.zeros((weights.num_columns, size), np.float32)
    for chunk in range(len(weights.position_bounds) - 1):
        columns = weights.columns[slice(*weights.column_bounds[chunk : chunk + 2])]
        ends = weights.entry_ends[slice(*weights.column_bounds[chunk : chunk + 2])]
        entries = slice(*weights.entry_bounds[chunk : chunk + 2])
        assert (np.diff(columns) > 0).all()
        rows = np.repeat(columns, np.diff(ends, prepend=0))
        children = weights.position_bounds[chunk] - weights.first + weights.children[entries]
        assert (sparse[rows, children] == 0).all()
        sparse[rows, children] = weights.values[entries]
    return np.vstack([sparse, weights.dense.T, weights.intercepts])


def taken(inputs: Inputs, rows: np.ndarray) -> Inputs:
    """A copy of these documents."""
    sparse = None if inputs.sparse is None else inputs.sparse[rows]
    return Inputs(sparse, None if inputs.dense is None else inputs.dense[rows])


def dense_inputs(inputs: Inputs) -> np.ndarray:
    """(N, D + d + 1): all columns and a one for the intercept."""
    sparse = np.zeros((len(inputs), 0)) if inputs.sparse is None else inputs.sparse.toarray()
    return np.hstack([sparse, inputs.dense_rows, np.ones((len(inputs), 1))])
