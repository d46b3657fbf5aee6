"""Several members' top-k lists of the same documents made into one list. Trains nothing; weights come from fit_weights.

Shapes: N documents, M members, k places, W the sum of the members' places.

A label's score, r_m being its place in member m's list (1 is best) and s_m its score there:

    mean          mean of s_m; a label that m does not name counts 0 there, or m's lowest score where that is negative
    mean_rank     1 / mean of r_m; a label that m does not name has the place after m's last
    round_robin   the members' first places in the members' order, then their second places …, no label twice;
                  1 / the turn at which the label was first named
    weighted      σ(Σ w_m x_m), weights that sum to 1; x_m = a_m s_m + b_m are the calibrated log-odds of s_m, and
                  those of m's lowest score where m does not name the label

`mean` suits members of one kind, whose scores mean the same. `mean_rank` and `round_robin` look at no score, so they
take members of any kind, and suffer from each that is weak. `weighted` suits members of different kinds and strengths,
and needs a validation part to fit (a, b) and w on (see fit_weights). Labels that only members of weight 0 name are no
candidates there: weight 1 for one member gives that member's list.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray
from scipy.special import expit, logit

from xmc.errors import InputError
from xmc.files import atomic_write_text
from xmc.labels.topk import NO_LABEL, TopK, concatenate, merge

Form = Literal["mean", "mean_rank", "round_robin", "weighted"]
FORMS: tuple[Form, ...] = ("mean", "mean_rank", "round_robin", "weighted")
# Documents that are combined at once: bounds the (N, W, M) arrays.
_AT_ONCE = 16_384
# An ensemble asks each member for this many times as many labels as it is asked for: what one ranks low, another
# may rank high.
_WIDER = 5
# Probabilities nearer to 0 or 1 than this have the same log-odds.
_SMALLEST, _LARGEST = 1e-12, 1 - 1e-7


@dataclass(frozen=True)
class EnsembleConfig:
    """How the members of an ensemble become one model."""

    # mean of scores, mean_rank, round_robin, or weighted by what the members are worth on the validation part.
    how: Form = "mean"


@dataclass(frozen=True)
class Calibration:
    """A rising line from a member's score to log-odds: slope · x + intercept.

    x is the score itself, or its own log-odds where the member's scores lie between 0 and 1.
    """

    of_probability: bool
    slope: float
    intercept: float

    def inputs(self, scores: NDArray) -> NDArray[np.float64]:
        """x, in the shape of `scores`."""
        exact = scores.astype(np.float64)
        return logit(np.clip(exact, _SMALLEST, _LARGEST)) if self.of_probability else exact

    def __call__(self, scores: NDArray) -> NDArray[np.float64]:
        """Log-odds, in the shape of `scores`."""
        return self.slope * self.inputs(scores) + self.intercept


@dataclass(frozen=True)
class Combination:
    """A form with what it needs. `weights` and `calibrations` belong to `weighted`: one of each a member."""

    how: Form
    weights: tuple[float, ...] = ()
    calibrations: tuple[Calibration, ...] = ()

    def __call__(self, parts: Sequence[TopK], k: int) -> TopK:
        """The k best labels (N, k) of the members' lists of the same N documents."""
        rows = range(0, max(len(parts[0]), 1), _AT_ONCE)
        return concatenate(
            [self._of_candidates(align([p.rows(i, i + _AT_ONCE) for p in parts]), k) for i in rows]
        )

    def _of_candidates(self, candidates: Candidates, k: int) -> TopK:
        if self.how != "weighted":
            return best(candidates, _SCORES[self.how](candidates), k)
        top = best(candidates, pool(log_odds(candidates, self.calibrations), candidates, self.weights), k)
        # Ranked by log-odds: probabilities near 1 would be equal in 32 bits.
        return TopK(top.label_ids, np.where(top.label_ids == NO_LABEL, -np.inf, expit(top.scores)))

    def save(self, path: Path) -> None:
        atomic_write_text(path, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path, num_members: int) -> Combination:
        """Read what `save` wrote for an ensemble of `num_members`."""
        try:
            values = json.loads(path.read_text())
            loaded = cls(
                values["how"],
                tuple(map(float, values["weights"])),
                tuple(Calibration(**one) for one in values["calibrations"]),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: damaged or missing ({error!r}); make the ensemble again") from error
        if loaded.how not in FORMS:
            raise InputError(f"{path}: how is {loaded.how!r}; this version knows {', '.join(FORMS)}")
        if loaded.how == "weighted" and len(loaded.weights) != num_members:
            raise InputError(
                f"{path}: {len(loaded.weights)} weights for {num_members} members; make it again"
            )
        return loaded


def wider(k: int, num_labels: int) -> int:
    """How many labels a member is asked for where the ensemble is asked for k."""
    return min(_WIDER * k, num_labels)


# ------------------------------------------------------------------------------------------------ alignment


@dataclass(frozen=True)
class Candidates:
    """Every label that some member names for a document, beside what each member says of it.

    label_ids: int32 (N, W), −1 padded. places: int32 (N, W, M), 1 for a member's best; one more than `num_places` (M,)
    where it does not name the label. scores: float32 (N, W, M), there the member's lowest for the document, which is 0
    where it names none.
    """

    label_ids: NDArray[np.int32]
    places: NDArray[np.int32]
    scores: NDArray[np.float32]
    num_places: NDArray[np.int32]

    @property
    def named(self) -> NDArray[np.bool_]:
        """(N, W, M) whether the member names the label."""
        return self.places <= self.num_places


def align(parts: Sequence[TopK]) -> Candidates:
    """The members' lists of the same N documents side by side."""
    num_rows, num_members = len(parts[0]), len(parts)
    if any(len(part) != num_rows for part in parts):
        counts = ", ".join(f"{len(part):,}" for part in parts)
        raise InputError(f"members predicted {counts} documents; combine predictions of the same ones")
    num_places = np.array([part.k for part in parts], np.int32)
    starts = np.concatenate([[0], np.cumsum(num_places)])
    width = int(starts[-1])
    candidates = Candidates(
        np.full((num_rows, width), NO_LABEL, np.int32),
        np.empty((num_rows, width, num_members), np.int32),
        np.empty((num_rows, width, num_members), np.float32),
        num_places,
    )
    _align(
        np.concatenate([part.label_ids for part in parts], axis=1),
        np.concatenate([part.scores for part in parts], axis=1),
        starts,
        candidates.label_ids,
        candidates.places,
        candidates.scores,
    )
    return candidates


@njit(parallel=True, cache=True, nogil=True)
def _align(
    ids_NW: NDArray,
    scores_NW: NDArray,
    starts: NDArray,
    out_ids_NW: NDArray,
    out_places_NWM: NDArray,
    out_scores_NWM: NDArray,
) -> None:
    """Sort each document's entries by label, so that one label's stand together, and write them out side by side.

    `starts` (M + 1,): member m's places are the columns starts[m] … starts[m+1] − 1.
    """
    num_rows, width = ids_NW.shape
    num_members = starts.shape[0] - 1
    for i in prange(num_rows):
        lowest = np.zeros(num_members, np.float32)
        for m in range(num_members):
            first = True
            for j in range(starts[m], starts[m + 1]):
                if ids_NW[i, j] >= 0 and (first or scores_NW[i, j] < lowest[m]):
                    lowest[m] = scores_NW[i, j]
                    first = False
        for j in range(width):
            for m in range(num_members):
                out_places_NWM[i, j, m] = starts[m + 1] - starts[m] + 1
                out_scores_NWM[i, j, m] = lowest[m]
        u = -1
        for at in np.argsort(ids_NW[i]):
            label = ids_NW[i, at]
            if label < 0:
                continue
            if u < 0 or out_ids_NW[i, u] != label:
                u += 1
                out_ids_NW[i, u] = label
            m = 0
            while starts[m + 1] <= at:
                m += 1
            place = at - starts[m] + 1
            # A label that a member names twice counts at its better place.
            if place < out_places_NWM[i, u, m]:
                out_places_NWM[i, u, m] = place
                out_scores_NWM[i, u, m] = scores_NW[i, at]


# ------------------------------------------------------------------------------------------------ forms


def _mean(candidates: Candidates) -> NDArray:
    return np.where(candidates.named, candidates.scores, np.minimum(candidates.scores, 0)).mean(axis=2)


def _mean_rank(candidates: Candidates) -> NDArray:
    return 1 / candidates.places.mean(axis=2)


def _round_robin(candidates: Candidates) -> NDArray:
    num_members = candidates.places.shape[2]
    # A member that does not name a label must not win a turn over one with more places that does.
    places = np.where(candidates.named, candidates.places, candidates.num_places.max() + 1)
    turns = (places - 1) * num_members + np.arange(num_members)
    return 1 / (turns.min(axis=2) + 1.0)


_SCORES: dict[str, Callable[[Candidates], NDArray]] = {
    "mean": _mean,
    "mean_rank": _mean_rank,
    "round_robin": _round_robin,
}


def log_odds(candidates: Candidates, calibrations: Sequence[Calibration]) -> NDArray[np.float64]:
    """(N, W, M): what the members say of each candidate, on one scale."""
    return np.stack([curve(candidates.scores[:, :, m]) for m, curve in enumerate(calibrations)], axis=2)


def pool(log_odds_NWM: NDArray, candidates: Candidates, weights: Sequence[float]) -> NDArray:
    """(N, W) weighted means; −inf for labels that only members of weight 0 name."""
    weights_M = np.asarray(weights, np.float64)
    named_NW = candidates.named[:, :, weights_M > 0].any(axis=2)
    return np.where(named_NW, log_odds_NWM @ weights_M, -np.inf)


def best(candidates: Candidates, scores_NW: NDArray, k: int) -> TopK:
    """The k best candidates (N, k) by their scores."""
    masked = np.where(candidates.label_ids == NO_LABEL, -np.inf, scores_NW).astype(np.float32)
    return merge([TopK(candidates.label_ids, masked)], k)
