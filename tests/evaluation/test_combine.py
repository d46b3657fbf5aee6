from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from xmc.errors import InputError
from xmc.evaluation import combine
from xmc.evaluation.combine import Calibration, Combination, align, wider
from xmc.labels.topk import TopK

PLAIN = Calibration(of_probability=True, slope=1.0, intercept=0.0)


def top(*rows: dict[int, float], k: int = 3) -> TopK:
    """Lists from {label: score}, best first."""
    ids = np.full((len(rows), k), -1, np.int32)
    scores = np.full((len(rows), k), -np.inf, np.float32)
    for i, row in enumerate(rows):
        best = sorted(row.items(), key=lambda pair: (-pair[1], pair[0]))
        ids[i, : len(row)] = [label for label, _ in best]
        scores[i, : len(row)] = [score for _, score in best]
    return TopK(ids, scores)


# Two members, two documents; the second names nothing for the second document.
A = top({7: 0.9, 2: 0.6, 5: 0.3}, {1: 0.5, 4: 0.2})
B = top({2: 0.8, 9: 0.4}, {}, k=2)


def found(how: str, k: int = 4, parts: tuple[TopK, ...] = (A, B), **more) -> list[list[tuple[int, float]]]:
    combined = Combination(how, **more)(parts, k)  # type: ignore[arg-type]
    return [
        [(int(i), round(float(s), 5)) for i, s in zip(ids, scores, strict=True) if i >= 0]
        for ids, scores in zip(combined.label_ids, combined.scores, strict=True)
    ]


def test_mean():
    assert found("mean") == [[(2, 0.7), (7, 0.45), (9, 0.2), (5, 0.15)], [(1, 0.25), (4, 0.1)]]


def test_mean_of_margins_does_not_prefer_what_a_member_leaves_out():
    # Unnamed counts as 0 for probabilities; for margins that would beat every named label below 0.
    margins = top({1: -0.5, 2: -2.0}, k=2)
    other = top({1: 0.2, 3: 0.1}, k=2)
    assert found("mean", parts=(margins, other)) == [[(1, -0.15), (3, -0.95), (2, -1.0)]]


def test_mean_rank():
    # A has three places, B two: what they leave out has places 4 and 3. Labels 7 and 2: (1, 3) and (2, 1).
    first, second = found("mean_rank")
    assert first == [(2, round(1 / 1.5, 5)), (7, 0.5), (5, round(1 / 3, 5)), (9, round(1 / 3, 5))]
    assert second == [(1, 0.5), (4, 0.4)]


def test_round_robin():
    # Turns: A's 7, B's 2, A's 2 (named already), B's 9, A's 5.
    assert found("round_robin") == [
        [(7, 1.0), (2, 0.5), (9, 0.25), (5, 0.2)],
        [(1, 1.0), (4, round(1 / 3, 5))],
    ]


def test_round_robin_gives_no_turn_to_a_shorter_list_that_has_ended():
    long, short = top({1: 3, 2: 2, 3: 1}), top({9: 1}, k=1)
    assert [label for label, _ in found("round_robin", parts=(short, long))[0]] == [9, 1, 2, 3]


def test_weighted_by_hand():
    def pooled(a: float, b: float) -> float:
        odds = 0.75 * np.log(a / (1 - a)) + 0.25 * np.log(b / (1 - b))
        return round(float(1 / (1 + np.exp(-odds))), 5)

    expected = [(7, pooled(0.9, 0.4)), (2, pooled(0.6, 0.8)), (5, pooled(0.3, 0.4)), (9, pooled(0.3, 0.4))]
    first, second = found("weighted", weights=(0.75, 0.25), calibrations=(PLAIN, PLAIN))
    assert first == expected
    assert [label for label, _ in second] == [1, 4]


def test_all_weight_on_one_member_is_its_list():
    curves = (Calibration(True, 3.0, -2.0), PLAIN)
    combined = Combination("weighted", (1.0, 0.0), curves)((A, B), 3)
    np.testing.assert_array_equal(combined.label_ids, A.label_ids)


def test_scores_of_certain_labels_keep_their_order():
    sure = top({3: 1 - 2**-24, 1: 1 - 2**-22, 2: 1 - 2**-20})
    steep = Calibration(True, 4.0, 0.0)
    combined = Combination("weighted", (1.0,), (steep,))((sure,), 3)
    assert combined.label_ids.tolist() == [[3, 1, 2]]
    assert np.all(combined.scores == 1)


def test_a_label_named_twice_counts_at_its_better_place():
    twice = TopK(np.array([[4, 6, 4]], np.int32), np.array([[0.9, 0.5, 0.1]], np.float32))
    assert found("mean", parts=(twice,)) == [[(4, 0.9), (6, 0.5)]]


def test_blocks_of_documents_make_no_difference(monkeypatch: pytest.MonkeyPatch):
    random = np.random.default_rng(0)
    rows = [{int(i): float(random.random()) for i in random.choice(40, 6, replace=False)} for _ in range(100)]
    parts = (top(*rows[:50], k=6), top(*rows[50:], k=6))
    whole = Combination("mean")(parts, 5)
    monkeypatch.setattr(combine, "_AT_ONCE", 7)
    blocks = Combination("mean")(parts, 5)
    np.testing.assert_array_equal(whole.label_ids, blocks.label_ids)
    np.testing.assert_array_equal(whole.scores, blocks.scores)


def test_other_documents_are_refused():
    with pytest.raises(InputError, match="2, 1 documents"):
        align((A, B.rows(0, 1)))


def test_no_documents():
    assert found("mean", parts=(A.rows(0, 0), B.rows(0, 0))) == []


def test_members_are_asked_for_more_than_is_wanted():
    assert wider(10, 1000) == 50
    assert wider(10, 23) == 23


def test_save_and_load(tmp_path: Path):
    saved = Combination("weighted", (0.25, 0.75), (PLAIN, Calibration(False, 2.5, -1.0)))
    saved.save(tmp_path / "ensemble.json")
    assert Combination.load(tmp_path / "ensemble.json", 2) == saved
    with pytest.raises(InputError, match="2 weights for 3 members"):
        Combination.load(tmp_path / "ensemble.json", 3)
    (tmp_path / "ensemble.json").write_text('{"how": "guess", "weights": [], "calibrations": []}')
    with pytest.raises(InputError, match="guess"):
        Combination.load(tmp_path / "ensemble.json", 2)
    with pytest.raises(InputError, match="missing"):
        Combination.load(tmp_path / "other.json", 2)
