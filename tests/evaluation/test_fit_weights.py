from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from xmc.evaluation.fit_weights import _hits, fit_calibration, fit_weighted, search_simplex
from xmc.evaluation.metrics import Metrics, MetricsConfig
from xmc.labels.topk import TopK, top_k_of_csr

N, L = 300, 40


def truth_of(random: np.random.Generator) -> sp.csr_matrix:
    truth = sp.random(N, L, 0.1, "csr", np.float32, random_state=random)
    truth.data[:] = 1
    return truth


def member(truth: sp.csr_matrix, random: np.random.Generator, noise: float, kind: str, k: int = 15) -> TopK:
    """Log-odds of the truth under noise, as probabilities or as margins of another scale."""
    odds = 4 * truth.toarray() - 3 + noise * random.standard_normal(truth.shape)
    scores = 1 / (1 + np.exp(-odds)) if kind == "probability" else 0.05 * odds
    return top_k_of_csr(sp.csr_matrix(scores.astype(np.float32)), k)


def measure_of(truth: sp.csr_matrix):
    def measure(top: TopK) -> float:
        metrics = Metrics(np.ones(L), N, MetricsConfig(ks=(5,)))
        metrics.update(top, truth)
        return metrics.result()["nDCG@5"]

    return measure


@pytest.mark.parametrize("seed", range(4))
def test_never_worse_on_validation_than_the_best_member(seed: int):
    random = np.random.default_rng(seed)
    truth = truth_of(random)
    kinds = [(1.5, "probability"), (random.uniform(1, 4), "margin"), (8.0, "probability")]
    parts = [member(truth, random, noise, kind) for noise, kind in kinds]
    measure = measure_of(truth)
    combination, reached = fit_weighted(parts, truth, measure, 10)
    assert reached >= max(map(measure, parts))
    assert reached == measure(combination(parts, 10))
    assert sum(combination.weights) == pytest.approx(1)
    assert min(combination.weights) >= 0
    assert fit_weighted(parts, truth, measure, 10) == (combination, reached)


def test_two_members_that_err_apart_are_better_together():
    random = np.random.default_rng(0)
    truth = truth_of(random)
    parts = [member(truth, random, 2.0, kind) for kind in ("probability", "margin")]
    measure = measure_of(truth)
    combination, reached = fit_weighted(parts, truth, measure, 10)
    assert reached > max(map(measure, parts)) + 3
    assert min(combination.weights) > 0.2  # equally good, whatever their scales


def test_calibration_finds_the_curve():
    random = np.random.default_rng(0)
    margins = random.normal(0, 2, 50_000).astype(np.float32)
    hits = random.random(50_000) < 1 / (1 + np.exp(-(1.5 * margins - 0.7)))
    curve = fit_calibration(margins, hits)
    assert not curve.of_probability
    assert curve.slope == pytest.approx(1.5, rel=0.05)
    assert curve.intercept == pytest.approx(-0.7, abs=0.05)
    probabilities = 1 / (1 + np.exp(-margins))
    of_odds = fit_calibration(probabilities, hits)
    assert of_odds.of_probability
    assert of_odds.slope == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize("hits", [np.zeros(50, bool), np.ones(50, bool), np.arange(50) < 25])
def test_calibration_is_finite_and_rises(hits: np.ndarray):
    # All misses, all hits, and scores that fall where hits are: the curve must still keep a member's order.
    curve = fit_calibration(np.linspace(0.01, 0.99, 50, dtype=np.float32), hits)
    assert np.isfinite([curve.slope, curve.intercept]).all()
    assert curve.slope > 0


def test_calibration_of_a_member_that_names_nothing():
    curve = fit_calibration(np.zeros(0, np.float32), np.zeros(0, bool))
    assert np.isfinite([curve.slope, curve.intercept]).all()


def test_search_finds_the_inside_of_the_simplex():
    peak = np.array([0.5, 0.375, 0.125, 0.0])
    weights, value = search_simplex(lambda w: -float(np.abs(np.array(w) - peak).sum()), 4)
    assert weights == pytest.approx(peak, abs=0.05)
    assert value > -0.15


def test_search_prefers_nobody_where_all_are_equal():
    assert search_simplex(lambda weights: 1.0, 3)[0] == (1 / 3, 1 / 3, 1 / 3)


def test_hits():
    truth = sp.csr_matrix(np.array([[0, 1, 1], [0, 0, 0], [1, 0, 0]], np.float32))
    ids = np.array([[2, 0, -1], [1, -1, -1], [0, 2, 1]], np.int32)
    assert _hits(ids, truth).tolist() == [[True, False, False], [False] * 3, [True, False, False]]
    assert not _hits(ids, sp.csr_matrix((3, 3), dtype=np.float32)).any()
