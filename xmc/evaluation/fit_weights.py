"""Weights and calibrations of a weighted ensemble, fitted on validation predictions. Combines nothing by itself.

Members of different kinds score on different scales: a network's probabilities, a tree's products of them, a linear
ranker's margins. So each member first gets a calibration: a logistic curve over its score (over the log-odds of it
where scores lie between 0 and 1), fitted on whether the labels that it named were true. Then the weights of the
members' calibrated log-odds are searched on the simplex for the best figure on validation.

Why log-odds: they come out as probabilities again. Against weighting raw scores or calibrated probabilities no clear
gain is shown yet.

The search is small and has no chance in it: from equal weights and from the best single member, weight is moved
between pairs of members in steps that halve, as long as the figure rises. Single members are among its starts, so the
result is not worse on validation than the best of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.special import expit

from xmc.evaluation.combine import Calibration, Combination, align, best, log_odds, pool
from xmc.labels.topk import NO_LABEL, TopK

_STEPS = (1 / 4, 1 / 8, 1 / 16, 1 / 32)
# The least slope of a calibration: it must rise even where a member's scores tell nothing.
_LEAST_SLOPE = 1e-3

Weights = tuple[float, ...]


def fit_weighted(
    parts: Sequence[TopK], truth: sp.csr_matrix, measure: Callable[[TopK], float], k: int
) -> tuple[Combination, float]:
    """The weighted combination of M members' lists of N validation documents that is best by `measure`, and how good.

    truth: (N × L). measure: the figure of a list (N, k), larger is better.
    """
    candidates = align(parts)
    named_NWM, hits_NW = candidates.named, _hits(candidates.label_ids, truth)
    calibrations = tuple(
        fit_calibration(candidates.scores[:, :, m][named_NWM[:, :, m]], hits_NW[named_NWM[:, :, m]])
        for m in range(len(parts))
    )
    log_odds_NWM = log_odds(candidates, calibrations)
    weights, reached = search_simplex(
        lambda weights: measure(best(candidates, pool(log_odds_NWM, candidates, weights), k)), len(parts)
    )
    return Combination("weighted", weights, calibrations), reached


def _hits(label_ids: NDArray[np.int32], truth: sp.csr_matrix) -> NDArray[np.bool_]:
    """(N, W) whether each candidate is a true label of its document."""
    truth = truth.sorted_indices()
    width = truth.shape[1] + 1
    # Documents and labels as one number: rows of sorted truth make a sorted list to search in.
    rows = np.repeat(np.arange(truth.shape[0], dtype=np.int64), np.diff(truth.indptr))
    true = rows * width + truth.indices
    wanted = np.arange(len(label_ids), dtype=np.int64)[:, None] * width + label_ids
    at = np.minimum(np.searchsorted(true, wanted), max(len(true) - 1, 0))
    return (true[at] == wanted) & (label_ids != NO_LABEL) if len(true) else np.zeros(label_ids.shape, bool)


def fit_calibration(scores: NDArray, hits: NDArray[np.bool_], num_steps: int = 50) -> Calibration:
    """The logistic curve from scores (n,) to the share of hits (n,), by Newton's method.

    Two made-up entries, a hit and a miss at the mean, keep it finite where all are hits, or none.
    """
    plain = Calibration(bool(scores.size) and bool((scores >= 0).all() and (scores <= 1).all()), 1.0, 0.0)
    x = plain.inputs(scores)
    middle, spread = (float(x.mean()), float(x.std())) if x.size else (0.0, 0.0)
    z = np.concatenate([(x - middle) / (spread or 1.0), [0.0, 0.0]])
    y = np.concatenate([hits, [0.0, 1.0]])
    slope = intercept = 0.0
    for _ in range(num_steps):
        p = expit(slope * z + intercept)
        w = p * (1 - p)
        # The ridge of 1 on the slope bounds it where hits and misses are parted cleanly.
        gradient = np.array([((y - p) * z).sum() - slope, (y - p).sum()])
        hessian = np.array([[(w * z * z).sum() + 1, (w * z).sum()], [(w * z).sum(), w.sum()]])
        step = np.linalg.solve(hessian, gradient)
        slope, intercept = slope + step[0], intercept + step[1]
        if np.abs(step).max() < 1e-9:
            break
    slope = max(slope, _LEAST_SLOPE)
    scale = slope / (spread or 1.0)
    return Calibration(plain.of_probability, float(scale), float(intercept - scale * middle))


def search_simplex(value: Callable[[Weights], float], num_members: int) -> tuple[Weights, float]:
    """Weights (sum 1) of the largest `value`, and that value; see the module's words on how."""
    equal = (1 / num_members,) * num_members
    single = [tuple(float(i == m) for i in range(num_members)) for m in range(num_members)]
    known: dict[Weights, float] = {}

    def ask(weights: Weights) -> float:
        if weights not in known:
            known[weights] = value(weights)
        return known[weights]

    ask(equal)  # the first known: where nothing is better, nobody is preferred
    for start in (equal, max(single, key=ask)):
        _climb(ask, start)
    found = max(known, key=lambda weights: known[weights])
    return found, known[found]


def _climb(ask: Callable[[Weights], float], weights: Weights) -> None:
    """Move weight between pairs, the best move at a time, until no move of the smallest step helps."""
    for step in _STEPS:
        while True:
            moves = [
                _moved(weights, giver, taker, step) for giver, taker in permutations(range(len(weights)), 2)
            ]
            most = max(moves, key=ask)
            if ask(most) <= ask(weights):
                break
            weights = most


def _moved(weights: Weights, giver: int, taker: int, step: float) -> Weights:
    moved = list(weights)
    amount = min(step, moved[giver])
    moved[giver] -= amount
    moved[taker] += amount
    return tuple(round(weight, 12) for weight in moved)
