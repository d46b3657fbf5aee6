from __future__ import annotations

from pathlib import Path

from xmc.evaluation.trials import Objective, Trial, best, front, load_trials


def trial(number: int, state: str, precision: float, seconds: float | None = None) -> Trial:
    report = {"P@1": precision} | ({} if seconds is None else {"step_seconds": seconds})
    return Trial(number, {}, {}, state, [report])  # type: ignore[arg-type]


def test_a_record_comes_back_as_it_was(tmp_path: Path):
    written = [
        Trial(
            12, {"rate": 1e-3}, {"train.fractions": [0.5, 0.5], "a": None}, "failed", [{"P@1": 3.0}], "why"
        ),
        trial(3, "done", 50.0),
    ]
    for record in written:
        record.save(tmp_path)
    assert load_trials(tmp_path) == written[::-1]
    assert load_trials(tmp_path / "none") == []


def test_only_finished_trials_win_and_the_first_of_equals():
    trials = [
        trial(0, "done", 40.0),
        trial(1, "stopped", 90.0),
        trial(2, "done", 50.0),
        trial(3, "done", 50.0),
        trial(4, "done", float("nan")),
        Trial(5, {}, {}, "failed"),
    ]
    assert best(trials, Objective("P@1")) is trials[2]
    assert front(trials, Objective("P@1")) == [trials[2]]
    assert best(trials[4:], Objective("P@1")) is None
    assert front(trials[4:], Objective("P@1")) == []


def test_the_front_is_what_no_other_trial_beats():
    trials = [
        trial(0, "done", 50.0, 1.0),  # beaten by 1: as precise, faster
        trial(1, "done", 50.0, 0.5),
        trial(2, "done", 60.0, 2.0),
        trial(3, "done", 40.0, 0.4),
        trial(4, "done", 39.0, 0.4),  # beaten by 3
        trial(5, "stopped", 70.0, 0.1),
        trial(6, "done", 99.0),  # its cost was not measured
        trial(7, "done", 60.0, 2.0),  # the same as 2: neither beats the other
    ]
    assert [t.number for t in front(trials, Objective("P@1", "step_seconds"))] == [1, 2, 3, 7]
