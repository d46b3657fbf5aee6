"""Training rows of clusters by hand: the example of the X-Transformer paper's Figure 4, and its matcher's negatives."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from xmc.errors import InputError
from xmc.labels.topk import TopK
from xmc.linear.problem import Groups, Problem

# Figure 4: 6 documents, 20 labels, 4 clusters of 5; documents 0, 1 and 5 have labels of the first cluster.
GROUPS = Groups(np.arange(20, dtype=np.int32), np.array([0, 5, 10, 15, 20], np.int64))
LABELS = [[0, 3, 7], [2, 16], [6, 11], [12, 13], [8, 19], [4, 15]]
# What a matcher might say: two clusters a document, the second unknown for the fourth document.
NAMED = [[0, 1], [3, 0], [1, 2], [2, -1], [0, 3], [3, 1]]


def label_matrix() -> sp.csr_matrix:
    matrix = np.zeros((6, 20), np.float32)
    for document, labels in enumerate(LABELS):
        matrix[document, labels] = 1
    return sp.csr_matrix(matrix)


def matched() -> TopK:
    return TopK(np.array(NAMED, np.int32), np.zeros((6, 2), np.float32))


def rows(problem: Problem) -> list[list[int]]:
    return [problem.rows_of(cluster).tolist() for cluster in range(problem.groups.num_clusters)]


def test_teacher_forcing_negatives():
    problem = Problem.build(label_matrix(), GROUPS, "tfn")
    assert rows(problem) == [[0, 1, 5], [0, 2, 4], [2, 3], [1, 4, 5]]
    assert problem.is_negative.all()


def test_both_kinds_of_negatives():
    problem = Problem.build(label_matrix(), GROUPS, "tfn+man", matched())
    assert rows(problem) == [[0, 1, 4, 5], [0, 2, 4, 5], [2, 3], [1, 4, 5]]
    assert problem.is_negative.all()


def test_matcher_aware_negatives_keep_positives():
    problem = Problem.build(label_matrix(), GROUPS, "man", matched())
    # Document 5 has a label of the first cluster but the matcher did not name it: a positive, never a negative.
    assert rows(problem) == [[0, 1, 4, 5], [0, 2, 4, 5], [2, 3], [1, 4, 5]]
    first = problem.is_negative[slice(*problem.row_bounds[0])]
    assert first.tolist() == [True, True, True, False]
    assert problem.is_negative.tolist() == [
        *[True, True, True, False],
        *[True, True, False, True],
        *[True, True],
        *[True, True, True],
    ]


def test_every_document_under_the_root():
    root = Groups(np.arange(20, dtype=np.int32), np.array([0, 20], np.int64))
    assert rows(Problem.build(label_matrix(), root, "all")) == [[0, 1, 2, 3, 4, 5]]


def test_positives_follow_the_order_of_children():
    groups = Groups(np.arange(20, dtype=np.int32)[::-1].copy(), GROUPS.offsets)
    problem = Problem.build(label_matrix(), groups, "tfn")
    for position, child in enumerate(groups.order):
        start, stop = problem.positive_starts[position : position + 2]
        wanted = [document for document, labels in enumerate(LABELS) if child in labels]
        assert problem.positives[start:stop].tolist() == wanted
    assert rows(problem) == [[1, 4, 5], [2, 3], [0, 2, 4], [0, 1, 5]]


def test_what_does_not_fit_is_refused():
    with pytest.raises(InputError, match="matched"):
        Problem.build(label_matrix(), GROUPS, "tfn+man")
    with pytest.raises(InputError, match="negatives"):
        Problem.build(label_matrix(), GROUPS, "some")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="columns"):
        Problem.build(label_matrix()[:, :19], GROUPS, "tfn")
    beyond = TopK(np.full((6, 1), 4, np.int32), np.zeros((6, 1), np.float32))
    with pytest.raises(InputError, match="matcher"):
        Problem.build(label_matrix(), GROUPS, "man", beyond)
