from __future__ import annotations

import numba
import numpy as np
import pytest
import scipy.sparse as sp

from xmc.errors import InputError
from xmc.labels.features import concatenate, fill_empty_rows, pifa


@pytest.fixture
def corpus():
    rng = np.random.default_rng(0)
    labels = sp.random(300, 80, 0.05, "csr", np.float32, rng, data_rvs=np.ones)
    labels = labels @ sp.diags((np.arange(80) != 7).astype(np.float32))  # label 7 has no document
    labels.eliminate_zeros()
    documents = sp.random(300, 500, 0.04, "csr", np.float32, rng)
    return labels, documents


def reference(labels, documents):
    sums = labels.T.astype(np.float64) @ documents.astype(np.float64)
    sums = sums.toarray() if sp.issparse(sums) else sums
    lengths = np.linalg.norm(sums, axis=1, keepdims=True)
    return sums / np.where(lengths > 0, lengths, 1)


def test_pifa_is_the_normalised_sum_of_a_labels_documents(corpus):
    features = pifa(*corpus)
    np.testing.assert_allclose(features.toarray(), reference(*corpus), atol=1e-6)
    assert features.dtype == np.float32
    assert features[7].nnz == 0


def test_pifa_rows_are_canonical(corpus):
    features = pifa(*corpus)
    again = sp.csr_matrix((features.data, features.indices, features.indptr), shape=features.shape)
    assert again.has_canonical_format
    assert features.nnz == np.count_nonzero(reference(*corpus))


def test_dense_documents_give_the_same(corpus):
    labels, documents = corpus
    np.testing.assert_allclose(pifa(labels, documents.toarray()), reference(*corpus), atol=1e-6)


def test_pifa_does_not_depend_on_threads(corpus):
    two = pifa(*corpus)
    numba.set_num_threads(1)
    try:
        one = pifa(*corpus)
    finally:
        numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
    np.testing.assert_array_equal(one.data, two.data)
    np.testing.assert_array_equal(one.indices, two.indices)


def test_columns_at_word_borders_are_found():
    labels = sp.csr_matrix(np.ones((2, 1), np.float32))
    documents = np.zeros((2, 130), np.float32)
    documents[0, [0, 63, 64]] = 1
    documents[1, [64, 127, 128, 129]] = 1
    features = pifa(labels, sp.csr_matrix(documents))
    np.testing.assert_array_equal(features.indices, [0, 63, 64, 127, 128, 129])
    np.testing.assert_allclose(features.data, np.array([1, 1, 2, 1, 1, 1]) / 3)


def test_documents_must_match(corpus):
    with pytest.raises(InputError, match="300 documents"):
        pifa(corpus[0], corpus[1][:299])


def test_text_fills_labels_without_documents():
    features = sp.csr_matrix(np.array([[1, 0], [0, 0], [0, 0]], np.float32))
    texts = sp.csr_matrix(np.array([[0, 1], [3, 4], [0, 0]], np.float32))
    filled = fill_empty_rows(features, texts)
    np.testing.assert_allclose(filled.toarray(), [[1, 0], [0.6, 0.8], [0, 0]], rtol=1e-6)
    assert filled.dtype == np.float32
    with pytest.raises(InputError, match="same TF-IDF"):
        fill_empty_rows(features, texts[:, :1])


def test_concatenation_weighs_both_parts():
    features = sp.csr_matrix(np.array([[2, 0], [0, 0], [0, 0]], np.float32))
    texts = sp.csr_matrix(np.array([[5], [7], [0]], np.float32))
    joined = concatenate(features, texts, text_weight=0.75)
    np.testing.assert_allclose(joined.toarray(), [[0.8, 0, 0.6], [0, 0, 1], [0, 0, 0]], rtol=1e-6)
    with pytest.raises(InputError, match="text_weight"):
        concatenate(features, texts, text_weight=0)
