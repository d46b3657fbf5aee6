"""Weights against scikit-learn and a plain minimiser, and what must not change them: threads, cuts, neighbours."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.sparse as sp
from scipy.optimize import minimize
from sklearn.svm import LinearSVC

from tests.linear.problems import (
    dense_inputs,
    even_groups,
    one_group,
    random_inputs,
    random_labels,
    taken,
    unpacked,
)
from xmc.errors import InputError
from xmc.labels.topk import TopK
from xmc.linear import training
from xmc.linear.inputs import Inputs
from xmc.linear.problem import Groups, Problem, plan_blocks
from xmc.linear.solver import SolverConfig, all_shared
from xmc.linear.training import train_block
from xmc.linear.weights import concatenate

TIGHT = {"tolerance": 1e-5, "max_passes": 100_000, "threshold": 0.0}


def train_all(inputs: Inputs, problem: Problem, config: SolverConfig, **options: int) -> np.ndarray:
    return unpacked(train_block(inputs, problem, (0, problem.groups.num_children), config, **options))


def minimised(inputs: Inputs, labels: np.ndarray, cost: float, bias: float) -> np.ndarray:
    """The primal problem by a general minimiser, in float64; the last weight is the intercept."""
    rows = dense_inputs(inputs).astype(np.float64)
    rows[:, -1] = bias
    signs = np.where(labels, 1.0, -1.0)

    def objective(weights: np.ndarray) -> tuple[float, np.ndarray]:
        lack = np.maximum(0, 1 - signs * (rows @ weights))
        value = 0.5 * weights @ weights + cost * lack @ lack
        return value, weights - 2 * cost * rows.T @ (signs * lack)

    start = np.zeros(rows.shape[1])
    options = {"maxiter": 10_000, "ftol": 1e-15, "gtol": 1e-9}
    found = minimize(objective, start, jac=True, method="L-BFGS-B", options=options).x
    found[-1] *= bias
    return found


@pytest.mark.parametrize("num_dense", [0, 5])
@pytest.mark.parametrize(("cost", "bias"), [(1.0, 1.0), (4.0, 0.5), (0.3, 0.0)])
def test_weights_equal_liblinear(num_dense: int, cost: float, bias: float):
    rng = np.random.default_rng(0)
    inputs = random_inputs(rng, 120, 200, num_dense)
    labels = random_labels(rng, 120, 20)
    labels = sp.csr_matrix(sp.hstack([labels, sp.csr_matrix(([1.0], ([7], [0])), shape=(120, 1))]))
    problem = Problem.build(labels, one_group(21), "all")
    found = train_all(inputs, problem, SolverConfig(cost, bias, **TIGHT))
    rows = dense_inputs(inputs)[:, :-1]
    for label in (0, 13, 20):  # the last has one positive
        peer = LinearSVC(
            C=cost,
            loss="squared_hinge",
            dual=True,
            fit_intercept=bias > 0,
            intercept_scaling=bias or 1.0,
            tol=1e-6,
            max_iter=100_000,
        ).fit(rows, labels[:, [label]].toarray().ravel())
        np.testing.assert_allclose(found[:-1, label], peer.coef_[0], atol=1e-3)
        np.testing.assert_allclose(found[-1, label], np.ravel(peer.intercept_)[0], atol=1e-3)


def test_labels_of_all_documents_and_of_none():
    rng = np.random.default_rng(1)
    inputs = random_inputs(rng, 60, 80, 3)
    labels = sp.csr_matrix(np.column_stack([np.ones(60), np.zeros(60)]).astype(np.float32))
    found = train_all(inputs, Problem.build(labels, one_group(2), "all"), SolverConfig(**TIGHT))
    np.testing.assert_allclose(found[:, 0], minimised(inputs, np.ones(60, bool), 1.0, 1.0), atol=1e-3)
    np.testing.assert_allclose(found[:, 1], minimised(inputs, np.zeros(60, bool), 1.0, 1.0), atol=1e-3)


def test_dense_columns_alone():
    rng = np.random.default_rng(2)
    inputs = Inputs(dense=rng.standard_normal((50, 7)).astype(np.float32))
    labels = random_labels(rng, 50, 3, 0.3)
    found = train_all(inputs, Problem.build(labels, one_group(3), "all"), SolverConfig(**TIGHT))
    for label in range(3):
        wanted = minimised(inputs, labels[:, [label]].toarray().ravel() > 0, 1.0, 1.0)
        np.testing.assert_allclose(found[:, label], wanted, atol=1e-3)


@pytest.mark.parametrize("children", [1, 8, 12, 40])
def test_a_label_does_not_feel_its_block(children: int):
    rng = np.random.default_rng(3)
    inputs = random_inputs(rng, 100, 150, 2)
    labels = random_labels(rng, 100, 40)
    alone = train_all(inputs, Problem.build(labels[:, :1], one_group(1), "all"), SolverConfig(threshold=0.0))
    many = Problem.build(labels[:, :children], one_group(children), "all")
    np.testing.assert_array_equal(train_all(inputs, many, SolverConfig(threshold=0.0))[:, :1], alone)


def clustered(rng: np.random.Generator) -> tuple[Inputs, Problem]:
    """Seven clusters of 20 children, so that a cluster is more than one block of labels."""
    inputs = random_inputs(rng, 150, 120, 3)
    labels = random_labels(rng, 150, 140, 0.02)
    return inputs, Problem.build(labels, even_groups(rng, 140, 7), "tfn")


def test_same_weights_with_any_number_of_threads():
    inputs, problem = clustered(np.random.default_rng(4))
    one = train_all(inputs, problem, SolverConfig(), seed=5, num_threads=1)
    three = train_all(inputs, problem, SolverConfig(), seed=5, num_threads=3)
    np.testing.assert_array_equal(one, three)
    assert (one != train_all(inputs, problem, SolverConfig(), seed=6, num_threads=1)).any()


@pytest.mark.parametrize("cuts", [[0, 140], [0, 33, 35, 36, 140], list(range(0, 141, 20))])
def test_a_cut_cluster_equals_an_uncut_one(cuts: list[int]):
    inputs, problem = clustered(np.random.default_rng(4))
    whole = train_all(inputs, problem, SolverConfig())
    parts = [
        train_block(inputs, problem, span, SolverConfig(), num_threads=2) for span in itertools.pairwise(cuts)
    ]
    np.testing.assert_array_equal(unpacked(concatenate(parts)), whole)


def test_documents_that_are_read_in_place_give_what_a_copy_gives(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(15)
    inputs = random_inputs(rng, 300, 60, 2)
    assert all_shared(inputs.columns, np.zeros(60, np.int32))
    problem = Problem.build(random_labels(rng, 300, 20), one_group(20), "all")
    in_place = train_all(inputs, problem, SolverConfig())
    monkeypatch.setattr(training, "all_shared", lambda columns, counts: False)
    np.testing.assert_array_equal(train_all(inputs, problem, SolverConfig()), in_place)


def test_columns_of_one_document_or_none_are_found():
    counts = np.zeros(3, np.int32)
    assert all_shared(np.array([0, 1, 2, 2, 1, 0], np.int32), counts)
    assert not all_shared(np.array([0, 1, 2, 2, 1], np.int32), counts)
    assert not all_shared(np.array([0, 1, 1, 0], np.int32), counts)
    assert not counts.any()


def test_clusters_train_on_their_documents_only():
    inputs, problem = clustered(np.random.default_rng(7))
    found = train_all(inputs, problem, SolverConfig(**TIGHT))
    for position in (0, 45, 139):
        rows = problem.rows_of(position // 20)
        start, stop = problem.positive_starts[position : position + 2]
        wanted = minimised(taken(inputs, rows), np.isin(rows, problem.positives[start:stop]), 1.0, 1.0)
        np.testing.assert_allclose(found[:, position], wanted, atol=1e-3)


def test_a_document_outside_the_matched_is_no_negative():
    rng = np.random.default_rng(8)
    inputs = random_inputs(rng, 80, 60)
    labels = random_labels(rng, 80, 4, 0.2)
    groups = Groups(np.arange(4, dtype=np.int32), np.array([0, 4], np.int64))
    named = rng.random(80) < 0.5
    matched = TopK(np.where(named, 0, -1).astype(np.int32)[:, None], np.zeros((80, 1), np.float32))
    problem = Problem.build(labels, groups, "man", matched)
    found = train_all(inputs, problem, SolverConfig(**TIGHT))
    for label in range(4):
        positive = labels[:, [label]].toarray().ravel() > 0
        rows = np.flatnonzero(positive | named)
        wanted = minimised(taken(inputs, rows), positive[rows], 1.0, 1.0)
        np.testing.assert_allclose(found[:, label], wanted, atol=1e-3)


def test_small_weights_are_dropped_and_others_kept():
    inputs, problem = clustered(np.random.default_rng(9))
    whole = train_all(inputs, problem, SolverConfig(threshold=0.0))
    pruned = train_all(inputs, problem, SolverConfig(threshold=0.1))
    sparse = slice(0, inputs.num_columns)
    wanted = np.where(np.abs(whole[sparse]) >= np.float32(0.1), whole[sparse], 0)
    np.testing.assert_array_equal(pruned[sparse], wanted)
    np.testing.assert_array_equal(pruned[inputs.num_columns :], whole[inputs.num_columns :])
    assert 0 < np.count_nonzero(wanted) < np.count_nonzero(whole[sparse])


def test_a_cluster_without_documents_gets_zeros():
    inputs = random_inputs(np.random.default_rng(10), 20, 30)
    labels = sp.csr_matrix(([1.0, 1.0], ([3, 4], [0, 1])), shape=(20, 4), dtype=np.float32)
    groups = Groups(np.arange(4, dtype=np.int32), np.array([0, 2, 4], np.int64))
    found = train_all(inputs, Problem.build(labels, groups, "tfn"), SolverConfig())
    assert (found[:, 2:] == 0).all()
    assert (found[:, 0] != 0).any()


def test_planned_blocks_cover_all_children():
    inputs, problem = clustered(np.random.default_rng(11))
    for count in (1, 3, 7, 20):
        blocks = plan_blocks(problem, inputs, count)
        assert len(blocks) <= count
        assert [blocks[0][0], blocks[-1][1]] == [0, 140]
        assert all(before[1] == after[0] for before, after in itertools.pairwise(blocks))
        assert all(first < last for first, last in blocks)
    # Seven clusters of like size: three blocks need no cut within one.
    assert all(last % 20 == 0 for _, last in plan_blocks(problem, inputs, 3))


def test_a_wide_cluster_is_divided_evenly():
    rng = np.random.default_rng(12)
    inputs = random_inputs(rng, 50, 40)
    problem = Problem.build(random_labels(rng, 50, 320), one_group(320), "all")
    sizes = [last - first for first, last in plan_blocks(problem, inputs, 4)]
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) <= 32


def test_positions_without_children_are_refused():
    inputs, problem = clustered(np.random.default_rng(13))
    with pytest.raises(InputError, match="no children"):
        train_block(inputs, problem, (4, 4), SolverConfig())


@pytest.mark.parametrize(
    ("field", "value"),
    [("cost", 0.0), ("bias", -1.0), ("tolerance", 0.0), ("max_passes", 0), ("threshold", -0.1)],
)
def test_settings_are_checked(field: str, value: float):
    with pytest.raises(InputError, match=field):
        SolverConfig(**{field: value})


def test_arrays_may_be_read_only():
    inputs, problem = clustered(np.random.default_rng(14))
    wanted = train_all(inputs, problem, SolverConfig())
    arrays = [inputs.sparse.data, inputs.sparse.indices, inputs.sparse.indptr, inputs.dense]
    for array in (*arrays, problem.rows, problem.positives, problem.positive_starts, problem.is_negative):
        array.flags.writeable = False
    np.testing.assert_array_equal(train_all(inputs, problem, SolverConfig()), wanted)
