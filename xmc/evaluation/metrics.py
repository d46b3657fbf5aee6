"""Ranking metrics of top-k predictions against a sparse truth, accumulated over shards.

Every figure comes from one pass over (prediction, truth) pairs; nothing here is documents × labels.
Does not make predictions, and does not draw confidence intervals: `Metrics.parts` gives what they need.

Shapes: N documents, L labels, k places, S asked-for places (`ks`).

Definitions, for a document with true labels T, u of which train never saw, and ranked predictions r_1, r_2, …;
q_l is a label's inverse propensity, d_i = 1/log2(i+1), hit_i = [r_i ∈ T]:

    P@k         Σ_{i≤k} hit_i / k                                            mean over documents
    R@k         Σ_{i≤k} hit_i / |T|                                          mean over documents
    nDCG@k      Σ_{i≤k} hit_i d_i / Σ_{i≤min(k,|T|)} d_i                     mean over documents
    PSP@k       Σ_{i≤k} hit_i q_{r_i} / k                                    sum over documents / best reachable sum
    PSnDCG@k    Σ_{i≤k} hit_i q_{r_i} d_i / Σ_{i≤min(k,|T|)} d_i             sum over documents / best reachable sum
    coverage@k  distinct labels hit in some document's first k / distinct labels in the truth

The best reachable ranking names all of T by falling q. Labels that train never saw can't be predicted but belong to T:
they count in |T|, in both ideal sums (with the propensity of frequency 0) and in coverage's denominator.
A document without any true label is left out of every figure and counted. A label named twice counts once.

By frequency band, over all documents together:

    P@k             hits on the band's labels / predictions of the band's labels, among the first k
    R@k             hits on the band's labels / true labels of the band
    contribution@k  hits on the band's labels / (k · documents): the bands' contributions add up to P@k
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import scipy.sparse as sp
from numba import njit, prange
from numpy.typing import NDArray

from xmc.errors import InputError
from xmc.evaluation.propensity import PropensityConfig, inverse_propensity
from xmc.labels.topk import TopK

BANDS = ("head", "torso", "tail")

# Order of the per-document values that the kernel writes.
_MEANS = ("P", "R", "nDCG")
_RATIOS = ("PSP", "PSnDCG")
_NUM_VALUES = len(_MEANS) + 2 * len(_RATIOS)


@dataclass(frozen=True)
class MetricsConfig:
    """What is measured."""

    # Places at which every metric is taken.
    ks: tuple[int, ...] = (1, 3, 5)
    # Propensity curve; unset values follow the data set's name.
    propensity: PropensityConfig = field(default_factory=PropensityConfig)
    # Least train frequency of a torso and of a head label, e.g. (10, 100). None: chosen so that the head holds the
    # first third of the train assignments, the torso the second and the tail the rest (labels of one frequency stay
    # together, so that thirds are approximate).
    band_frequencies: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not self.ks or min(self.ks) < 1:
            raise InputError(f"metrics.ks is {self.ks}; give one or more places, each at least 1")
        if self.band_frequencies is not None:
            torso, head = self.band_frequencies
            if not 0 <= torso <= head:
                raise InputError(
                    f"metrics.band_frequencies is {(torso, head)}; give (torso, head), torso ≤ head"
                )


@dataclass(frozen=True)
class Band:
    """One frequency band: the labels with `min_frequency` ≤ train frequency ≤ `max_frequency`."""

    name: str
    min_frequency: int
    max_frequency: int | None
    num_labels: int
    num_assignments: int
    """True assignments of these labels in the evaluated documents; the tail's include labels that train never saw."""


@dataclass(frozen=True)
class MetricResult:
    """Figures in percent, with what they were counted over. A figure without anything to count is NaN."""

    ks: tuple[int, ...]
    # "P@5", "coverage@1", "tail.R@3" … in the order in which they are worth reading
    values: dict[str, float]
    num_documents: int
    """All documents given; `num_unlabelled` of them have no true label and are in no average."""
    num_unlabelled: int
    num_assignments: int
    """True (document, label) pairs, the `num_unseen_assignments` of labels that train never saw among them."""
    num_unseen_assignments: int
    num_unseen_labels: int | None
    """Distinct such labels where known; without it coverage is over the labels that train saw."""
    bands: tuple[Band, ...]
    propensity_a: float
    propensity_b: float

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and dicts for JSON; NaN becomes None."""
        plain = asdict(self)
        plain["values"] = {name: None if math.isnan(v) else v for name, v in self.values.items()}
        plain["ks"] = list(self.ks)
        plain["bands"] = list(plain["bands"])
        return plain


def band_thresholds(train_frequency: NDArray) -> tuple[int, int]:
    """(least torso frequency, least head frequency) that cut the train assignments in about thirds.

    The head is the smallest set of most frequent labels that holds a third or more of the assignments; head and torso
    together are the smallest that holds two thirds.
    """
    falling = np.sort(np.asarray(train_frequency, np.int64))[::-1]
    if falling.size == 0 or falling[0] == 0:
        return (1, 1)
    mass = np.cumsum(falling)
    torso_at, head_at = np.searchsorted(3 * mass, [2 * mass[-1], mass[-1]])
    return int(falling[torso_at]), int(falling[head_at])


@njit(cache=True, nogil=True)
def _find(row: NDArray, label: int) -> int:
    """The place of a label in a sorted row, or −1."""
    low = 0
    high = row.shape[0]
    while low < high:
        middle = (low + high) // 2
        if row[middle] < label:
            low = middle + 1
        else:
            high = middle
    return low if low < row.shape[0] and row[low] == label else -1


@njit(parallel=True, cache=True, nogil=True)
def _score_documents(
    predicted_Nw: NDArray,
    indptr: NDArray,
    indices: NDArray,
    num_unseen_N: NDArray,
    inverse_L: NDArray,
    unseen_inverse: float,
    ks: NDArray,
    values_NVS: NDArray,
    hits_Nw: NDArray,
) -> None:
    """Fill P, R, nDCG, PSP, best PSP, PSnDCG, best PSnDCG at each of the rising `ks`, and which places are hits.

    Rows of documents without true labels stay as they are.
    """
    num_documents, width = predicted_Nw.shape
    for i in prange(num_documents):
        row = indices[indptr[i] : indptr[i + 1]]
        unseen = num_unseen_N[i]
        num_true = row.shape[0] + unseen
        if num_true == 0:
            continue
        best = np.empty(row.shape[0])
        for j in range(row.shape[0]):
            best[j] = inverse_L[row[j]]
        best.sort()
        taken = np.zeros(row.shape[0], np.bool_)
        hits = 0
        dcg = ideal = psp = best_psp = psdcg = best_psdcg = 0.0
        s = 0
        for j in range(ks[-1]):
            discount = 1.0 / np.log2(j + 2.0)
            if j < width and predicted_Nw[i, j] >= 0:
                at = _find(row, predicted_Nw[i, j])
                if at >= 0 and not taken[at]:
                    taken[at] = True
                    hits_Nw[i, j] = 1
                    hits += 1
                    dcg += discount
                    psp += inverse_L[row[at]]
                    psdcg += inverse_L[row[at]] * discount
            if j < num_true:
                # A frequency of 0 has the largest inverse propensity: the ideal ranking opens with unseen labels.
                gain = unseen_inverse if j < unseen else best[num_true - 1 - j]
                ideal += discount
                best_psp += gain
                best_psdcg += gain * discount
            if j + 1 == ks[s]:
                values_NVS[i, 0, s] = hits / ks[s]
                values_NVS[i, 1, s] = hits / num_true
                values_NVS[i, 2, s] = dcg / ideal
                values_NVS[i, 3, s] = psp / ks[s]
                values_NVS[i, 4, s] = best_psp / ks[s]
                values_NVS[i, 5, s] = psdcg / ideal
                values_NVS[i, 6, s] = best_psdcg / ideal
                s += 1


@njit(cache=True, nogil=True)
def _count_labels(
    predicted_Nw: NDArray,
    hits_Nw: NDArray,
    labelled_N: NDArray,
    band_of_L: NDArray,
    best_place_L: NDArray,
    predicted_bands_3w: NDArray,
    hit_bands_3w: NDArray,
) -> None:
    """Add each place's predictions and hits a band, and lower each hit label's best place.

    Serial: threads would race for the labels, and it is a small part of the whole.
    """
    for i in range(predicted_Nw.shape[0]):
        if not labelled_N[i]:
            continue
        for j in range(hits_Nw.shape[1]):
            label = predicted_Nw[i, j]
            if label < 0:
                continue
            band = band_of_L[label]
            predicted_bands_3w[band, j] += 1
            if hits_Nw[i, j]:
                hit_bands_3w[band, j] += 1
                if j < best_place_L[label]:
                    best_place_L[label] = j


class Metrics:
    """Accumulates the metrics of one data set, shard by shard; partial accumulators merge to the same result.

    Its state is L + a few numbers, whatever the number of documents, so that it travels cheaply between processes.

    Example:
        metrics = Metrics(corpus.labels.train_frequency, num_train_documents)
        metrics.update(top_k, corpus.label_matrix("test"), corpus.num_unseen("test"))
        print(format_table(metrics.result()))
    """

    def __init__(
        self,
        train_frequency: NDArray,
        num_train_documents: int,
        config: MetricsConfig | None = None,
        data_set: str = "",
    ) -> None:
        """train_frequency: (L,) documents of train a label. data_set: its name chooses the propensity's (a, b)."""
        config = config or MetricsConfig()
        frequency_L = np.asarray(train_frequency)
        self.ks = tuple(sorted(set(config.ks)))
        self.num_labels = len(frequency_L)
        self.propensity = config.propensity.resolve(data_set)
        self._inverse_L = inverse_propensity(frequency_L, num_train_documents, *self.propensity)
        self._unseen_inverse = float(inverse_propensity(0, num_train_documents, *self.propensity))
        self._thresholds = config.band_frequencies or band_thresholds(frequency_L)
        torso, head = self._thresholds
        # 0 head, 1 torso, 2 tail
        self._band_of_L = (2 - (frequency_L >= torso) - (frequency_L >= head)).astype(np.int8)
        self._sums_VS = np.zeros((_NUM_VALUES, len(self.ks)))
        self._num_documents = 0
        self._num_unlabelled = 0
        self._num_unseen = 0
        self._best_place_L = np.full(self.num_labels, np.iinfo(np.int32).max, np.int32)
        self._in_truth_L = np.zeros(self.num_labels, bool)
        self._predicted_bands_3w = np.zeros((3, self.ks[-1]), np.int64)
        self._hit_bands_3w = np.zeros((3, self.ks[-1]), np.int64)
        self._true_bands_3 = np.zeros(3, np.int64)

    def update(self, top_k: TopK, truth: sp.csr_matrix, num_unseen: NDArray | None = None) -> None:
        """Add N documents: their predictions, their true labels (N × L) and how many more train never saw (N,)."""
        truth, unseen_N = self._checked(top_k, truth, num_unseen)
        values_NVS, hits_Nw, labelled_N = self._score(top_k, truth, unseen_N)
        self._sums_VS += values_NVS.sum(axis=0)
        self._num_documents += len(top_k)
        self._num_unlabelled += int(len(top_k) - labelled_N.sum())
        self._num_unseen += int(unseen_N.sum())
        self._true_bands_3[-1] += unseen_N.sum()  # frequency 0 is tail
        self._in_truth_L[truth.indices] = True
        self._true_bands_3 += np.bincount(self._band_of_L[truth.indices], minlength=3)
        _count_labels(
            top_k.label_ids,
            hits_Nw,
            labelled_N,
            self._band_of_L,
            self._best_place_L,
            self._predicted_bands_3w,
            self._hit_bands_3w,
        )

    def parts(
        self, top_k: TopK, truth: sp.csr_matrix, num_unseen: NDArray | None = None
    ) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """What each of N documents adds to each figure but coverage: (numerators (N,), denominators (N,)).

        A figure is 100 · Σ numerators / Σ denominators; documents without true labels have 0 in both. What this gives
        is not added to the accumulator.
        """
        truth, unseen_N = self._checked(top_k, truth, num_unseen)
        values_NVS, hits_Nw, labelled_N = self._score(top_k, truth, unseen_N)
        one_N = labelled_N.astype(np.float64)
        found = {}
        for v, name in enumerate(_MEANS):
            for s, k in enumerate(self.ks):
                found[f"{name}@{k}"] = (values_NVS[:, v, s], one_N)
        for r, name in enumerate(_RATIOS):
            for s, k in enumerate(self.ks):
                v = len(_MEANS) + 2 * r
                found[f"{name}@{k}"] = (values_NVS[:, v, s], values_NVS[:, v + 1, s])
        return found | self._band_parts(top_k, truth, unseen_N, hits_Nw, one_N)

    def _band_parts(
        self, top_k: TopK, truth: sp.csr_matrix, unseen_N: NDArray, hits_Nw: NDArray, one_N: NDArray
    ) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
        ids_Nw = top_k.label_ids[:, : hits_Nw.shape[1]]
        band_Nw = np.where((ids_Nw >= 0) & (one_N > 0)[:, None], self._band_of_L[ids_Nw], -1)
        rows = np.repeat(np.arange(len(top_k)), np.diff(truth.indptr))
        true_N3 = np.bincount(3 * rows + self._band_of_L[truth.indices], minlength=3 * len(top_k)).reshape(
            -1, 3
        )
        true_N3[:, -1] += unseen_N
        found = {}
        for b, band in enumerate(BANDS):
            true_N = true_N3[:, b].astype(np.float64)
            for k in self.ks:
                hits_N = (hits_Nw * (band_Nw == b))[:, :k].sum(axis=1).astype(np.float64)
                found[f"{band}.P@{k}"] = (hits_N, (band_Nw == b)[:, :k].sum(axis=1).astype(np.float64))
                found[f"{band}.R@{k}"] = (hits_N, true_N)
                found[f"{band}.contribution@{k}"] = (hits_N, k * one_N)
        return found

    def merge(self, other: Metrics) -> None:
        """Add what another accumulator of the same data set and settings has seen."""
        same = (
            self.ks == other.ks
            and self._thresholds == other._thresholds
            and np.array_equal(self._inverse_L, other._inverse_L)
        )
        if not same:
            raise ValueError("only accumulators of the same labels, propensities, bands and ks can be merged")
        self._sums_VS += other._sums_VS
        self._num_documents += other._num_documents
        self._num_unlabelled += other._num_unlabelled
        self._num_unseen += other._num_unseen
        np.minimum(self._best_place_L, other._best_place_L, out=self._best_place_L)
        self._in_truth_L |= other._in_truth_L
        self._predicted_bands_3w += other._predicted_bands_3w
        self._hit_bands_3w += other._hit_bands_3w
        self._true_bands_3 += other._true_bands_3

    def result(self, num_unseen_labels: int | None = None) -> MetricResult:
        """The figures so far. num_unseen_labels: distinct labels of the truth that train never saw, for coverage.

        Shards know only how many such assignments they have; where the number of distinct ones is not given,
        coverage is over the labels that train saw, and the result says so by None.
        """
        if num_unseen_labels is None and self._num_unseen == 0:
            num_unseen_labels = 0
        return MetricResult(
            ks=self.ks,
            values=self._ranking_values() | self._coverage(num_unseen_labels or 0) | self._band_values(),
            num_documents=self._num_documents,
            num_unlabelled=self._num_unlabelled,
            num_assignments=int(self._true_bands_3.sum()),
            num_unseen_assignments=self._num_unseen,
            num_unseen_labels=num_unseen_labels,
            bands=self._bands(),
            propensity_a=self.propensity[0],
            propensity_b=self.propensity[1],
        )

    def _checked(
        self, top_k: TopK, truth: sp.csr_matrix, num_unseen: NDArray | None
    ) -> tuple[sp.csr_matrix, NDArray[np.int64]]:
        """The truth with sorted, distinct, non-zero entries, and num_unseen as an array; raises where they disagree."""
        unseen_N = np.zeros(len(top_k), np.int64) if num_unseen is None else np.asarray(num_unseen, np.int64)
        if truth.shape[0] != len(top_k) or unseen_N.shape != (len(top_k),):
            raise InputError(
                f"{len(top_k)} documents are predicted, {truth.shape[0]} have a truth and {len(unseen_N)} a count of "
                "unseen labels; predict and evaluate the same documents in the same order"
            )
        if truth.shape[1] != self.num_labels:
            raise InputError(
                f"the truth has {truth.shape[1]} labels, train {self.num_labels}; use one corpus for both"
            )
        if top_k.k < min(self.ks[-1], self.num_labels):
            raise InputError(
                f"metrics are asked for {self.ks[-1]} places but only {top_k.k} are predicted; "
                f"predict with k={self.ks[-1]} or more, or lower metrics.ks"
            )
        used = top_k.label_ids[:, : self.ks[-1]]
        if used.size and not -1 <= used.min() <= used.max() < self.num_labels:
            raise InputError(
                f"predicted label ids reach from {used.min()} to {used.max()}, but there are {self.num_labels} labels; "
                "the predictions belong to another corpus"
            )
        if not truth.has_canonical_format or (truth.data == 0).any():
            truth = truth.copy()
            truth.sum_duplicates()
            truth.eliminate_zeros()
        return truth, unseen_N

    def _score(
        self, top_k: TopK, truth: sp.csr_matrix, unseen_N: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.uint8], NDArray[np.bool_]]:
        """(N, V, S) values, (N, w) hits and (N,) whether the document has true labels."""
        num_documents = len(top_k)
        values_NVS = np.zeros((num_documents, _NUM_VALUES, len(self.ks)))
        hits_Nw = np.zeros((num_documents, min(self.ks[-1], top_k.k)), np.uint8)
        _score_documents(
            top_k.label_ids,
            truth.indptr.astype(np.int64, copy=False),
            truth.indices.astype(np.int32, copy=False),
            unseen_N,
            self._inverse_L,
            self._unseen_inverse,
            np.asarray(self.ks, np.int64),
            values_NVS,
            hits_Nw,
        )
        return values_NVS, hits_Nw, np.diff(truth.indptr) + unseen_N > 0

    def _ranking_values(self) -> dict[str, float]:
        values = {}
        num_labelled = self._num_documents - self._num_unlabelled
        for v, name in enumerate(_MEANS):
            for s, k in enumerate(self.ks):
                values[f"{name}@{k}"] = _percent(self._sums_VS[v, s], num_labelled)
        for r, name in enumerate(_RATIOS):
            for s, k in enumerate(self.ks):
                reached, best = self._sums_VS[len(_MEANS) + 2 * r : len(_MEANS) + 2 * r + 2, s]
                values[f"{name}@{k}"] = _percent(reached, best)
        return values

    def _coverage(self, num_unseen_labels: int) -> dict[str, float]:
        num_true_labels = int(self._in_truth_L.sum()) + num_unseen_labels
        return {
            f"coverage@{k}": _percent(int((self._best_place_L < k).sum()), num_true_labels) for k in self.ks
        }

    def _band_values(self) -> dict[str, float]:
        values = {}
        num_labelled = self._num_documents - self._num_unlabelled
        for b, band in enumerate(BANDS):
            for k in self.ks:
                hits = int(self._hit_bands_3w[b, :k].sum())
                values[f"{band}.P@{k}"] = _percent(hits, int(self._predicted_bands_3w[b, :k].sum()))
                values[f"{band}.R@{k}"] = _percent(hits, int(self._true_bands_3[b]))
                values[f"{band}.contribution@{k}"] = _percent(hits, k * num_labelled)
        return values

    def _bands(self) -> tuple[Band, ...]:
        torso, head = self._thresholds
        num_labels_3 = np.bincount(self._band_of_L, minlength=3)
        ranges = ((head, None), (torso, head - 1), (0, torso - 1))
        return tuple(
            Band(name, low, high, int(num_labels_3[b]), int(self._true_bands_3[b]))
            for b, (name, (low, high)) in enumerate(zip(BANDS, ranges, strict=True))
        )


def _percent(part: float, whole: float) -> float:
    return float(100 * part / whole) if whole else math.nan
