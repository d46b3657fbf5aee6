"""Inputs: parts, views, unit lengths, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from tests.linear.problems import random_inputs
from xmc.errors import InputError
from xmc.linear.inputs import Inputs, combine, unit_rows


def test_rows_share_memory():
    inputs = random_inputs(np.random.default_rng(0), 30, 50, 4)
    part = inputs.rows(10, 25)
    assert len(part) == 15
    np.testing.assert_array_equal(part.sparse.toarray(), inputs.sparse.toarray()[10:25])
    assert np.shares_memory(part.values, inputs.values)
    assert np.shares_memory(part.dense, inputs.dense)


def test_combined_parts_have_equal_length_and_the_whole_is_one():
    rng = np.random.default_rng(1)
    tfidf = random_inputs(rng, 20, 30).sparse
    embeddings = rng.standard_normal((20, 6)) * 9
    embeddings[3] = 0
    before = tfidf.copy()
    inputs = combine(tfidf, embeddings)
    sparse = np.linalg.norm(inputs.sparse.toarray(), axis=1)
    dense = np.linalg.norm(inputs.dense, axis=1)
    half = np.sqrt(0.5)
    # The first document has no words, the fourth no embedding.
    np.testing.assert_allclose(sparse, [0, half, half, 1, *[half] * 16], atol=1e-6)
    np.testing.assert_allclose(dense, [1, half, half, 0, *[half] * 16], atol=1e-6)
    assert (tfidf != before).nnz == 0


def test_rows_become_unit_rows_and_those_that_are_stay_as_they_are():
    rows = random_inputs(np.random.default_rng(2), 20, 30).sparse
    before = rows.copy()
    units = unit_rows(rows)
    # The first document has no words.
    np.testing.assert_allclose(np.linalg.norm(units.toarray(), axis=1), [0, *[1] * 19], atol=1e-6)
    assert (rows != before).nnz == 0
    assert np.shares_memory(unit_rows(units).data, units.data)


def test_duplicate_and_wide_columns_become_canonical():
    wide = sp.csr_matrix((2, 5), dtype=np.float64)
    wide.data, wide.indices = np.array([1.0, 2.0, 3.0]), np.array([4, 1, 4], np.int64)
    wide.indptr = np.array([0, 3, 3], np.int64)
    inputs = Inputs(wide)
    assert inputs.columns.dtype == np.int32
    assert inputs.columns.tolist() == [1, 4]
    assert inputs.values.tolist() == [2.0, 4.0]
    assert inputs.values.dtype == np.float32


def test_what_cannot_be_read_is_refused():
    with pytest.raises(InputError, match="neither"):
        Inputs()
    with pytest.raises(InputError, match="same documents"):
        Inputs(sp.csr_matrix((3, 4)), np.zeros((2, 4), np.float32))
    with pytest.raises(InputError, match="NaN"):
        Inputs(sp.csr_matrix(np.array([[np.nan]])))
    with pytest.raises(InputError, match="NaN"):
        Inputs(dense=np.array([[np.inf]], np.float32))
