from __future__ import annotations

import csv
from pathlib import Path

from xmc.evaluation.sweep_report import format_trials, plot_trials, searched, write_csv
from xmc.evaluation.trials import Objective, Trial


def trials() -> list[Trial]:
    parts = ([0.5, 0.5], [0.7, 0.2, 0.1], [0.1, 0.2, 0.7], [0.7, 0.3])
    found = [
        Trial(
            i,
            {"clusters": len(fractions), "rate": 10.0**-i},
            {"model.partition.fractions": fractions, "train.rate": 10.0**-i, "same": 1},
            "done",
            [{"P@1": 50.0 + i, "model_bytes": 1000.0 * (i + 1)}],
        )
        for i, fractions in enumerate(parts)
    ]
    stopped = Trial(4, {"clusters": 2, "rate": 0.5}, {"train.rate": 0.5}, "stopped", [{"P@1": 99.0}])
    failed = Trial(5, {"clusters": 2, "rate": 9.0}, {"train.rate": 9.0}, "failed", [], "it broke")
    return [*found, stopped, failed]


def test_the_table_ranks_finished_trials_first_and_marks_the_winner():
    lines = format_trials(trials(), Objective("P@1")).splitlines()
    assert lines[0].split() == ["trial", "state", "P@1", "fractions", "rate", "same"]
    assert [line.lstrip("* ").split()[0] for line in lines[1:7]] == ["003", "002", "001", "000", "004", "005"]
    assert [line.startswith("*") for line in lines[1:7]] == [True] + [False] * 5
    assert "0.7/0.3" in lines[1]
    assert "trial 005 failed: it broke" in lines


def test_the_csv_has_everything_that_was_measured(tmp_path: Path):
    write_csv(trials(), Objective("P@1", "model_bytes"), tmp_path / "trials.csv")
    with open(tmp_path / "trials.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["winner"] for row in rows] == ["1", "1", "1", "1", "0", "0"]  # dearer and better, each
    assert rows[1]["model.partition.fractions"] == "[0.7, 0.2, 0.1]"
    assert rows[3]["P@1"] == "53.0"
    assert rows[4]["model_bytes"] == ""
    assert rows[5]["error"] == "it broke"
    assert searched(trials()[:4]) == ["model.partition.fractions", "train.rate"]


def test_plots_are_drawn_where_there_is_something_to_show(tmp_path: Path):
    names = lambda files: [file.name for file in files]  # noqa: E731
    assert names(plot_trials(trials(), Objective("P@1"), tmp_path)) == [
        *("parallel.png", "clusters.png", "partitions.png")
    ]
    assert names(plot_trials(trials()[:4], Objective("P@1", "model_bytes"), tmp_path))[-1] == "front.png"
    assert all(path.stat().st_size > 5000 for path in tmp_path.glob("*.png"))
    alone = [Trial(0, {"name": "a"}, {"name": "a"}, "done", [{"P@1": 1.0}])]
    assert names(plot_trials(alone, Objective("P@1"), tmp_path)) == ["parallel.png"]
    assert plot_trials([trials()[5]], Objective("P@1"), tmp_path) == []
    # Most trials of a sweep are stopped: they are drawn too.
    most_stopped = trials()[:3]
    for trial in most_stopped[1:]:
        trial.state = "stopped"
    assert names(plot_trials(most_stopped, Objective("P@1"), tmp_path))[1:] == [
        "clusters.png",
        "partitions.png",
    ]
