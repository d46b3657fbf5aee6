from __future__ import annotations

import json
import math

import napkinxc.metrics as napkinxc
import numpy as np
import pytest
import scipy.sparse as sp

from xmc.errors import InputError
from xmc.evaluation.metrics import Metrics, MetricsConfig, band_thresholds
from xmc.evaluation.propensity import PropensityConfig
from xmc.labels.topk import TopK

KS = (1, 3, 5, 10)
NUM_TRAIN = 5000


def top_k(rows: list[list[int]], k: int) -> TopK:
    ids = np.full((len(rows), k), -1, np.int32)
    scores = np.full((len(rows), k), -np.inf, np.float32)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
        scores[i, : len(row)] = -np.arange(len(row))
    return TopK(ids, scores)


def truth_of(rows: list[list[int]], num_labels: int) -> sp.csr_matrix:
    indptr = np.cumsum([0] + [len(row) for row in rows])
    flat = np.array([label for row in rows for label in sorted(row)], np.int32)
    return sp.csr_matrix((np.ones(len(flat), np.float32), flat, indptr), shape=(len(rows), num_labels))


class Case:
    """Random documents with Zipf labels, short predictions among them, every one with a label."""

    def __init__(self, seed: int, num_documents: int = 600, num_labels: int = 80) -> None:
        random = np.random.default_rng(seed)
        weights = 1 / np.arange(1, num_labels + 1)
        weights /= weights.sum()

        def draw(count: int) -> list[int]:
            return random.choice(num_labels, size=count, replace=False, p=weights).tolist()

        self.num_labels = num_labels
        self.frequency = random.permutation((1000 * weights / weights[0]).astype(int))
        self.true_rows = [draw(random.integers(1, 13)) for _ in range(num_documents)]
        self.predicted_rows = [draw(random.integers(0, 11)) for _ in range(num_documents)]
        self.truth = truth_of(self.true_rows, num_labels)
        self.top_k = top_k(self.predicted_rows, 10)
        self.inverse = 1 + (np.log(NUM_TRAIN) - 1) * 2.5**0.55 * (self.frequency + 1.5) ** -0.55

    def metrics(self, **settings) -> Metrics:
        return Metrics(self.frequency, NUM_TRAIN, MetricsConfig(ks=KS, **settings))


@pytest.fixture(scope="module")
def case() -> Case:
    return Case(0)


def test_equals_napkinxc_on_random_data(case):
    """Its definitions coincide with ours where every document has a label and train has seen all labels.

    It counts documents without labels as zeros (ours leaves them out), and labels beyond its propensity array drop
    from its ideal sums (ours counts them): those cases are computed by hand below.
    """
    metrics = case.metrics()
    metrics.update(case.top_k, case.truth)
    result = metrics.result()
    pairs = case.true_rows, case.predicted_rows
    expected = {
        "P": napkinxc.precision_at_k(*pairs, k=10),
        "R": napkinxc.recall_at_k(*pairs, k=10),
        "nDCG": napkinxc.ndcg_at_k(*pairs, k=10),
        "PSP": napkinxc.psprecision_at_k(*pairs, case.inverse, k=10),
        "PSnDCG": napkinxc.psndcg_at_k(*pairs, case.inverse, k=10),
        "coverage": napkinxc.coverage_at_k(*pairs, k=10),
    }
    for name, values in expected.items():
        for k in KS:
            assert result[f"{name}@{k}"] == pytest.approx(100 * values[k - 1], rel=1e-10), f"{name}@{k}"


def test_hand_computed():
    """Two documents, five labels of frequencies 8, 4, 2, 1, 1; predictions [0, 2, 3] and [1, 4]."""
    frequency = np.array([8, 4, 2, 1, 1])
    q = 1 + (math.log(20) - 1) * 2.5**0.55 * (frequency + 1.5) ** -0.55
    metrics = Metrics(frequency, 20)
    metrics.update(top_k([[0, 2, 3], [1, 4]], 5), truth_of([[0, 3], [1, 2, 4, 0]], 5))
    result = metrics.result()
    second, third, fourth = 1 / math.log2(3), 1 / 2, 1 / math.log2(5)
    expected = {
        "P@1": 1.0,
        "P@3": (2 / 3 + 2 / 3) / 2,
        "P@5": (2 / 5 + 2 / 5) / 2,
        "R@1": (1 / 2 + 1 / 4) / 2,
        "R@3": (1 + 1 / 2) / 2,
        "nDCG@3": ((1 + third) / (1 + second) + (1 + second) / (1 + second + third)) / 2,
        "nDCG@5": ((1 + third) / (1 + second) + (1 + second) / (1 + second + third + fourth)) / 2,
        "PSP@1": (q[0] + q[1]) / (q[3] + q[4]),
        "PSP@3": (q[0] + q[3] + q[1] + q[4]) / (q[3] + q[0] + q[4] + q[2] + q[1]),
        "PSnDCG@3": ((q[0] + q[3] * third) / (1 + second) + (q[1] + q[4] * second) / (1 + second + third))
        / (
            (q[3] + q[0] * second) / (1 + second)
            + (q[4] + q[2] * second + q[1] * third) / (1 + second + third)
        ),
        "coverage@1": 2 / 5,
        "coverage@3": 4 / 5,
    }
    for name, value in expected.items():
        assert result[name] == pytest.approx(100 * value, rel=1e-12), name
    assert (result.num_documents, result.num_unlabelled, result.num_assignments) == (2, 0, 6)


def test_documents_without_labels_are_counted_and_left_out(case):
    alone = case.metrics()
    alone.update(case.top_k, case.truth)
    with_empty = case.metrics()
    with_empty.update(
        top_k([*case.predicted_rows, [1, 2, 3], []], 10), truth_of([*case.true_rows, [], []], case.num_labels)
    )
    assert with_empty.result().values == alone.result().values
    assert with_empty.result().num_unlabelled == 2
    assert with_empty.result().num_documents == len(case.true_rows) + 2


def test_only_documents_without_labels_give_no_figure():
    metrics = Metrics(np.array([1, 2]), 10)
    metrics.update(top_k([[0, 1]], 5), truth_of([[]], 2))
    result = metrics.result()
    assert all(math.isnan(value) for value in result.values.values())
    assert json.loads(json.dumps(result.to_dict()))["values"]["P@1"] is None


def test_unseen_labels_count_in_denominators():
    """Document 1: true {0} and two labels that train never saw; document 2: one unseen label and nothing else."""
    frequency = np.array([3, 6])
    c = (math.log(50) - 1) * 2.5**0.55
    q0, unseen = 1 + c * 4.5**-0.55, 1 + c * 1.5**-0.55
    metrics = Metrics(frequency, 50, MetricsConfig(ks=(1, 3)))
    metrics.update(top_k([[0, 1], [1]], 3), truth_of([[0], []], 2), np.array([2, 1]))
    result = metrics.result(num_unseen_labels=2)
    second, third = 1 / math.log2(3), 1 / 2
    ideal = 1 + second + third
    expected = {
        "P@1": 1 / 2,
        "R@1": (1 / 3) / 2,
        "nDCG@1": 1 / 2,
        "nDCG@3": (1 / ideal) / 2,
        "PSP@1": q0 / (2 * unseen),
        "PSP@3": q0 / (2 * unseen + q0 + unseen),
        "PSnDCG@3": (q0 / ideal) / ((unseen * (1 + second) + q0 * third) / ideal + unseen),
        "coverage@1": 1 / 3,
        "tail.R@3": 1 / 4,
    }
    for name, value in expected.items():
        assert result[name] == pytest.approx(100 * value, rel=1e-12), name
    assert result.num_unlabelled == 0
    assert (result.num_assignments, result.num_unseen_assignments) == (4, 3)
    # Without their number coverage can only be over the labels that train saw, and the result says so.
    assert metrics.result().num_unseen_labels is None
    assert metrics.result()["coverage@1"] == 100


def test_unseen_labels_equal_labels_of_frequency_zero(case):
    """Columns that train never saw and counts of them are two ways to say the same."""
    hidden = np.arange(case.num_labels) % 7 == 3
    frequency = np.where(hidden, 0, case.frequency)
    predicted = [[label for label in row if not hidden[label]] for row in case.predicted_rows]
    as_columns = Metrics(frequency, NUM_TRAIN, MetricsConfig(ks=KS, band_frequencies=(5, 50)))
    as_columns.update(top_k(predicted, 10), case.truth)

    new_id = np.cumsum(~hidden) - 1
    seen = [[new_id[label] for label in row if not hidden[label]] for row in case.true_rows]
    unseen = [sum(hidden[label] for label in row) for row in case.true_rows]
    as_counts = Metrics(frequency[~hidden], NUM_TRAIN, MetricsConfig(ks=KS, band_frequencies=(5, 50)))
    renamed = [[new_id[label] for label in row] for row in predicted]
    as_counts.update(top_k(renamed, 10), truth_of(seen, (~hidden).sum()), np.array(unseen))
    num_unseen_labels = len({label for row in case.true_rows for label in row if hidden[label]})
    assert as_counts.result(num_unseen_labels).values == pytest.approx(
        as_columns.result().values, nan_ok=True
    )


def test_fewer_predictions_than_places():
    """P@k divides by k all the same; padding is never a prediction of the last label."""
    metrics = Metrics(np.array([1, 1, 1, 1, 1, 1]), 10)
    metrics.update(top_k([[2], []], 5), truth_of([[2, 5], [5]], 6))
    result = metrics.result()
    assert result["P@5"] == pytest.approx(100 * (1 / 5) / 2)
    assert result["R@5"] == pytest.approx(100 * (1 / 2) / 2)
    assert result["coverage@5"] == pytest.approx(50)


def test_fewer_labels_than_places():
    metrics = Metrics(np.array([1, 1]), 10)
    metrics.update(top_k([[1, 0]], 2), truth_of([[0, 1]], 2))
    assert metrics.result()["P@5"] == pytest.approx(40)
    assert metrics.result()["nDCG@5"] == pytest.approx(100)


def test_a_label_named_twice_counts_once():
    metrics = Metrics(np.array([1, 1, 1, 1, 1, 1]), 10)
    metrics.update(top_k([[2, 2, 2, 2, 2]], 5), truth_of([[2]], 6))
    assert metrics.result()["P@5"] == pytest.approx(20)
    assert metrics.result()["R@5"] == pytest.approx(100)


def test_merging_shards_equals_evaluating_at_once(case):
    unseen = np.arange(len(case.true_rows)) % 3
    whole = case.metrics()
    whole.update(case.top_k, case.truth, unseen)
    merged = case.metrics()
    for start, stop in ((0, 1), (1, 200), (200, 200), (200, 600)):
        shard = case.metrics()
        shard.update(case.top_k.rows(start, stop), case.truth[start:stop], unseen[start:stop])
        merged.merge(shard)
    expected, got = whole.result().to_dict(), merged.result().to_dict()
    assert got.pop("values") == pytest.approx(expected.pop("values"), rel=1e-12)
    assert got == expected


def test_merge_refuses_other_settings(case):
    other = case.metrics(propensity=PropensityConfig(a=0.6))
    with pytest.raises(ValueError, match="same"):
        case.metrics().merge(other)


def test_the_documents_parts_make_the_figures(case):
    truth = truth_of([*case.true_rows, []], case.num_labels)
    predictions = top_k([*case.predicted_rows, [1]], 10)
    num_unseen = np.r_[np.arange(len(case.true_rows)) % 3 == 0, False].astype(np.int32)
    metrics = case.metrics(band_frequencies=(20, 100))
    parts = metrics.parts(predictions, truth, num_unseen)
    metrics.update(predictions, truth, num_unseen)
    figures = {name: value for name, value in metrics.result().values.items() if "coverage" not in name}
    assert parts.keys() == figures.keys()
    for name, (numerators, denominators) in parts.items():
        assert numerators.shape == denominators.shape == (len(case.true_rows) + 1,)
        assert numerators[-1] == denominators[-1] == 0  # it has no true label
        assert 100 * numerators.sum() / denominators.sum() == pytest.approx(figures[name]), name


def test_bands(case):
    metrics = case.metrics(band_frequencies=(20, 100))
    metrics.update(case.top_k, case.truth)
    result = metrics.result()
    for k in KS:
        together = sum(result[f"{band}.contribution@{k}"] for band in ("head", "torso", "tail"))
        assert together == pytest.approx(result[f"P@{k}"])
    is_torso = (case.frequency >= 20) & (case.frequency < 100)
    predicted = hits = true = 0
    for row, truth in zip(case.predicted_rows, case.true_rows, strict=True):
        predicted += sum(is_torso[label] for label in row[:3])
        hits += sum(is_torso[label] and label in truth for label in row[:3])
        true += sum(is_torso[label] for label in truth)
    assert result["torso.P@3"] == pytest.approx(100 * hits / predicted)
    assert result["torso.R@3"] == pytest.approx(100 * hits / true)
    torso = result.bands[1]
    assert (torso.name, torso.min_frequency, torso.max_frequency) == ("torso", 20, 99)
    assert (torso.num_labels, torso.num_assignments) == (is_torso.sum(), true)


@pytest.mark.parametrize(
    ("frequency", "expected"),
    [
        ([6, 3, 3, 2, 2, 1, 1], (3, 6)),  # 18 assignments: 6 | 3 + 3 | the rest
        ([1, 1, 1, 1], (1, 1)),  # one frequency: all of them head
        ([100, 1, 1], (100, 100)),
        ([0, 0], (1, 1)),
    ],
)
def test_band_thresholds_cut_assignments_in_thirds(frequency, expected):
    assert band_thresholds(np.array(frequency)) == expected


def test_truth_may_be_unsorted_with_duplicates_and_zeros():
    messy = sp.csr_matrix(
        (np.array([1, 1, 1, 0], np.float32), np.array([4, 1, 4, 2]), np.array([0, 4])), shape=(1, 6)
    )
    metrics = Metrics(np.ones(6), 10)
    metrics.update(top_k([[2, 4, 1, 0, 3]], 5), messy)
    assert metrics.result()["P@1"] == 0
    assert metrics.result()["R@3"] == pytest.approx(100)
    assert messy.nnz == 4, "the caller's matrix is not changed"


def test_what_does_not_fit_is_refused():
    metrics = Metrics(np.ones(6), 10)
    truth = truth_of([[1], [2]], 6)
    with pytest.raises(InputError, match="same documents"):
        metrics.update(top_k([[1]], 5), truth)
    with pytest.raises(InputError, match="7 labels"):
        metrics.update(top_k([[1], [2]], 5), truth_of([[1], [2]], 7))
    with pytest.raises(InputError, match="only 3 are predicted"):
        metrics.update(top_k([[1], [2]], 3), truth)
    with pytest.raises(InputError, match="another corpus"):
        metrics.update(top_k([[1], [6]], 5), truth)
    with pytest.raises(InputError, match=r"metrics\.ks"):
        MetricsConfig(ks=(0, 1))
    with pytest.raises(InputError, match="band_frequencies"):
        MetricsConfig(band_frequencies=(10, 5))
