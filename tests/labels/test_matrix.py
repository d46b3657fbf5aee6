from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from xmc.errors import InputError
from xmc.labels.matrix import label_frequencies, label_matrix


def test_lists_become_rows():
    lists = pa.chunked_array(
        [pa.array([[2, 0], [], None], pa.list_(pa.int32())), pa.array([[1, 1]], pa.list_(pa.int32()))]
    )
    matrix = label_matrix(lists, 4)
    expected = [[1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]]
    np.testing.assert_array_equal(matrix.toarray(), expected)
    assert matrix.dtype == np.float32
    assert matrix.has_sorted_indices


def test_a_slice_of_an_array_keeps_its_rows():
    lists = pa.array([[0], [1, 2], [3], [0, 3]], pa.list_(pa.int32()))
    np.testing.assert_array_equal(label_matrix(lists.slice(1, 2), 4).toarray(), [[0, 1, 1, 0], [0, 0, 0, 1]])


@pytest.mark.parametrize("bad", [4, -1])
def test_ids_outside_the_table_are_refused(bad):
    with pytest.raises(InputError, match=f"{bad}"):
        label_matrix(pa.array([[0], [bad]], pa.list_(pa.int32())), 4)


def test_frequencies_count_documents():
    matrix = label_matrix(pa.array([[2, 0], [2], []], pa.list_(pa.int32())), 4)
    np.testing.assert_array_equal(label_frequencies(matrix), [1, 0, 2, 0])
