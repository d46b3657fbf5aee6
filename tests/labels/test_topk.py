from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse as sp

from xmc.errors import InputError
from xmc.labels.topk import TopK, concatenate, merge, top_k_of_csr


def reference(scores: sp.csr_matrix, k: int) -> TopK:
    """Sort every row by (falling score, label id)."""
    ids = np.full((scores.shape[0], k), -1, np.int32)
    values = np.full((scores.shape[0], k), -np.inf, np.float32)
    for i in range(scores.shape[0]):
        row = scores[i]
        order = np.lexsort((row.indices, -row.data))[:k]
        ids[i, : len(order)] = row.indices[order]
        values[i, : len(order)] = row.data[order]
    return TopK(ids, values)


def random_scores(seed: int, rows: int = 200, labels: int = 300, density: float = 0.1) -> sp.csr_matrix:
    matrix = sp.random(rows, labels, density, format="csr", random_state=seed, dtype=np.float32)
    matrix.data = np.round(matrix.data, 1)  # many ties, and stored zeros
    return matrix


def assert_same(a: TopK, b: TopK) -> None:
    np.testing.assert_array_equal(a.label_ids, b.label_ids)
    np.testing.assert_array_equal(a.scores, b.scores)


@pytest.mark.parametrize("k", [1, 5, 30, 60])
def test_top_k_of_csr_equals_a_full_sort(k):
    scores = random_scores(0)
    assert_same(top_k_of_csr(scores, k), reference(scores, k))


def test_top_k_of_csr_does_not_need_sorted_columns():
    scores = random_scores(1)
    flipped = sp.csr_matrix(
        (
            np.concatenate([scores[i].data[::-1] for i in range(200)]),
            np.concatenate([scores[i].indices[::-1] for i in range(200)]),
            scores.indptr,
        ),
        shape=scores.shape,
    )
    assert_same(top_k_of_csr(flipped, 5), reference(scores, 5))


def test_padding_ties_and_masked_entries():
    scores = sp.csr_matrix(
        (
            np.array([1.0, 2.0, 1.0, -np.inf, 0.5], np.float32),
            np.array([7, 3, 2, 4, 0]),
            np.array([0, 3, 3, 5]),
        ),
        shape=(3, 8),
    )
    top = top_k_of_csr(scores, 4)
    assert top.label_ids.tolist() == [[3, 2, 7, -1], [-1] * 4, [0, -1, -1, -1]]
    assert top.scores[0].tolist() == [2, 1, 1, -np.inf]
    assert np.isneginf(top.scores[1]).all()


def test_nan_is_refused():
    with pytest.raises(InputError, match="NaN"):
        top_k_of_csr(sp.csr_matrix(np.array([[1.0, np.nan]], np.float32)), 1)


def test_merge_of_blocks_equals_top_k_of_all():
    scores = random_scores(2, density=0.3)
    parts = []
    for start, stop in ((0, 50), (50, 51), (51, 300)):
        block = top_k_of_csr(scores[:, start:stop], 8)
        shifted = np.where(block.label_ids >= 0, block.label_ids + start, -1).astype(np.int32)
        parts.append(TopK(shifted, block.scores))
    assert_same(merge(parts, 8), top_k_of_csr(scores, 8))
    assert_same(merge(parts[::-1], 8), top_k_of_csr(scores, 8))


def test_concatenate_pads_to_the_widest():
    scores = random_scores(3)
    whole = top_k_of_csr(scores, 6)
    narrow = TopK(whole.label_ids[:50, :4].copy(), whole.scores[:50, :4].copy())
    joined = concatenate([narrow, whole.rows(50, 200)])
    assert joined.label_ids.shape == (200, 6)
    assert (joined.label_ids[:50, 4:] == -1).all()
    assert np.isneginf(joined.scores[:50, 4:]).all()
    assert_same(joined.rows(50, 200), whole.rows(50, 200))


def test_save_and_load(tmp_path):
    top = top_k_of_csr(random_scores(4, density=0.02), 7)
    assert (top.label_ids == -1).any()
    top.save(tmp_path / "top.parquet")
    assert_same(TopK.load(tmp_path / "top.parquet"), top)
    table = pq.read_table(tmp_path / "top.parquet")
    assert table.schema.field("label_ids").type == pa.list_(pa.int32())
    assert table.schema.field("scores").type == pa.list_(pa.float32())


def test_save_and_load_of_nothing(tmp_path):
    empty = top_k_of_csr(sp.csr_matrix((0, 9), dtype=np.float32), 3)
    empty.save(tmp_path / "top.parquet")
    assert TopK.load(tmp_path / "top.parquet").label_ids.shape == (0, 3)


def test_load_sorts_a_strangers_file(tmp_path):
    path = tmp_path / "top.parquet"
    pq.write_table(pa.table({"label_ids": [[4, 1], [], None], "scores": [[0.1, 0.9], [], None]}), path)
    top = TopK.load(path)
    assert top.label_ids.tolist() == [[1, 4], [-1, -1], [-1, -1]]


def test_load_names_what_is_wrong(tmp_path):
    path = tmp_path / "bad.parquet"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(InputError, match=r"bad\.parquet"):
        TopK.load(path)
    pq.write_table(pa.table({"label_ids": [[4, 1]], "scores": [[0.1]]}), path)
    with pytest.raises(InputError, match="differ in length"):
        TopK.load(path)
    pq.write_table(pa.table({"label_ids": [[4, 1]]}), path)
    with pytest.raises(InputError, match="scores"):
        TopK.load(path)


def test_shapes_and_types_are_checked():
    with pytest.raises(ValueError, match="shape"):
        TopK(np.zeros((2, 3), np.int32), np.zeros((2, 2), np.float32))
    with pytest.raises(ValueError, match="int32"):
        TopK(np.zeros((2, 3), np.int64), np.zeros((2, 3), np.float32))
