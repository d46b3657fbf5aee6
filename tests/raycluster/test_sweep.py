"""What the search and the early stopping know after a killed driver, without Ray; and trials that run on it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import psutil
import pytest
import ray
import ray.train
from ray.train.torch import TorchTrainer
from ray.tune.schedulers import TrialScheduler
from ray.tune.search import Searcher

from raycluster import groups, sweep
from raycluster.follow import append_line
from raycluster.sweep import Book, Search, room, run_trials
from xmc import config, run
from xmc.errors import InputError
from xmc.evaluation.trials import Objective, Trial, load_trials
from xmc.sweep import remove_losers

PRECISION = Objective("P@1")


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"x": trial.suggest_float("x", 0, 1), "kind": trial.suggest_categorical("kind", ["a", "b"])}


def ended(number: int, x: float, *values: float, state: str = "done") -> Trial:
    reports = [{"P@1": value} for value in values]
    return Trial(number, {"x": x, "kind": "a"}, {"x": x, "kind": "a"}, state, reports)  # type: ignore[arg-type]


def test_trials_that_were_left_are_taken_up_first_and_new_ones_follow(tmp_path: Path):
    past = [ended(0, 0.1, 10.0), ended(1, 0.2, 20.0, state="running"), ended(2, 0.3, 30.0, state="failed")]
    trials = {trial.number: trial for trial in past}
    search = Search(space, PRECISION, 1, tmp_path, trials)
    assert search.suggest("one") == {"trial": "001"}
    assert Trial.load(tmp_path / "001") == past[1]
    assert search.suggest("two") == {"trial": "003"}
    assert trials[3].settings.keys() == {"x", "kind"}
    trials[3].reports.append({"P@1": 50.0})
    search.on_trial_complete("two", {})
    assert trials[3].state == "stopped"  # it never said that it was done
    search.on_trial_complete("one", error=True)
    assert trials[1].state == "failed"


def test_the_search_learns_from_records_what_it_would_have_learnt_itself(tmp_path: Path):
    past = {i: ended(i, i / 20, float(i)) for i in range(20)}  # more of x is better
    search = Search(space, PRECISION, 1, tmp_path, past)
    for i in range(5):
        search.suggest(str(i))
    assert min(past[number].settings["x"] for number in range(20, 25)) > 0.5


def test_no_configuration_is_tried_twice_and_a_small_space_ends(tmp_path: Path):
    trials: dict[int, Trial] = {}
    search = Search(lambda t: {"n": t.suggest_int("n", 1, 5)}, PRECISION, 1, tmp_path, trials)
    proposed = []
    while (found := search.suggest(str(len(proposed)))) != Searcher.FINISHED:
        proposed.append(found)
        trials[len(proposed) - 1].reports.append({"P@1": 1.0})
        trials[len(proposed) - 1].state = "done"
        search.on_trial_complete(str(len(proposed) - 1), {})
    assert sorted(trial.settings["n"] for trial in trials.values()) == [1, 2, 3, 4, 5]
    assert search.exhausted


def test_early_stopping_remembers_earlier_trials():
    earlier = [ended(0, 0.5, 50.0, 60.0, 70.0), ended(1, 0.5, 40.0, state="stopped")]
    new = SimpleNamespace(trial_id="new")

    def decide(scheduler: Any, value: float) -> str:
        scheduler.on_trial_add(None, new)
        return scheduler.on_trial_result(None, new, {"metrics/P@1": value, "training_iteration": 1})

    assert decide(sweep._scheduler(PRECISION, []), 10.0) == TrialScheduler.CONTINUE
    assert decide(sweep._scheduler(PRECISION, earlier), 10.0) == TrialScheduler.STOP
    assert decide(sweep._scheduler(PRECISION, earlier), 55.0) == TrialScheduler.CONTINUE


def test_old_reports_that_are_told_again_leave_the_record_whole(tmp_path: Path):
    left = ended(0, 0.5, state="running")
    left.reports = [{"P@1": value, "step": step} for step, value in ((10, 1.0), (20, 2.0))]
    left.save(tmp_path)
    said: list[str] = []
    book = Book(tmp_path, {0: left}, PRECISION, 1, lambda trial: None, said.append)

    def tell(metrics: dict[str, float], place: int, state: str) -> list[dict[str, float]]:
        result = {"metrics": metrics, "place": place, "state": state}
        book.on_trial_result(0, [], SimpleNamespace(config={"trial": "000"}), result)
        return Trial.load(tmp_path / "000").reports

    assert tell({"P@1": 1.0, "step": 10}, 0, "running") == left.reports
    assert len(left.reports) == 2
    assert said == []
    assert len(tell({"P@1": 3.0, "step": 30}, 2, "running")) == 3
    assert said == ["trial 000  P@1 3 at step 30"]
    assert tell({"P@1": 3.0}, 3, "done")[-1] == {"P@1": 3.0}


@pytest.mark.parametrize(
    ("cpus", "gpus", "fit"), [(1.0, 0, 1), (0.2, 0, 3), (4.0, 0, 1), (0.2, 1, 1), (0.2, 0.5, 2)]
)
def test_as_many_trials_at_once_as_leave_a_cpu_free(cpus: float, gpus: float, fit: int, monkeypatch):
    monkeypatch.setattr(sweep.pool.ray, "cluster_resources", lambda: {"CPU": 2.0, "GPU": 1.0})
    assert room(cpus, gpus) == fit


def test_a_run_counts_with_the_actors_that_label_its_documents(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 16.0})
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}] * 3 + [{"Alive": False}])
    small = config.load("light_xml", ["train.cpus_per_worker=0.2"])
    assert run.training_resources(small) == (pytest.approx(1.5), 0)
    large = config.load("light_xml", ["train.cpus_per_worker=2", "train.workers=2"])
    assert run.training_resources(large) == (pytest.approx(4), 0)


# ------------------------------------------------------------------------------------------------ on Ray


def train(trial: Trial, home: Path, report: Any) -> dict[str, float]:
    """Trial 1 cannot work; trial 2 fails once, trial 3 is killed once; all others learn what x lets them.

    Nothing is measured twice to the same number: each step again gives a little more.
    """
    (home / "attempts").open("a").write("once\n")
    if trial.number == 1:
        raise InputError("no such setting")
    if trial.number == 2 and (home / "attempts").read_text().count("once") == 1:
        report({"P@1": 1.0, "step": 1})
        raise RuntimeError("the machine is gone")
    if trial.number == 3 and (home / "attempts").read_text().count("once") == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for step in range(1, 4):
        again = (home / "attempts").read_text().count("once") - 1
        report({"P@1": step + 0.1 * again, "step": step})
    return {"P@1": 10.0 + trial.settings["x"]}


@pytest.mark.slow
def test_a_trial_that_fails_ends_nothing_and_one_that_dies_goes_on(ray_session: None, tmp_path: Path):
    heard: list[str] = []
    over: list[Trial] = []
    trials = run_trials(tmp_path, space, train, PRECISION, 4, 2, 1, over.append, heard.append)
    assert trials == load_trials(tmp_path)
    assert [trial.state for trial in trials] == ["done", "failed", "done", "done"]
    assert sorted(trial.number for trial in over) == [0, 1, 2, 3]
    assert (
        tmp_path / "001" / "attempts"
    ).read_text() == "once\n"  # settings that do not work are not tried again
    assert trials[1].error == "InputError: no such setting"
    assert "Traceback" in (tmp_path / "001" / "error.txt").read_text()
    assert (tmp_path / "003" / "attempts").read_text() == "once\n" * 2
    assert any("003  failed and is tried again  its process died" in line for line in heard)
    # What trial 2 reported before it died is not reported twice.
    assert [report["P@1"] for report in trials[2].reports[:-1]] == [1.0, 2.1, 3.1]
    assert any("002  failed and is tried again  RuntimeError: the machine is gone" in line for line in heard)
    assert run_trials(tmp_path, space, train, PRECISION, 4, 2, 1, over.append, heard.append) == trials
    assert json.loads((tmp_path / "000" / "trial.json").read_text())["state"] == "done"


def rank(config: dict[str, str]) -> None:
    """Of a training that never ends."""
    groups.note(Path(config["stage"]))
    append_line(Path(config["pids"]), str(os.getpid()))
    time.sleep(3600)


def lag(trial: Trial, home: Path, report: Any) -> dict[str, float]:
    """Trial 3 says how bad it is while its training group works; the next one needs the CPUs that this held."""
    if trial.number > 3:
        if not within(120, lambda: ray.available_resources().get("CPU", 0) > 1.5):
            raise InputError("the stopped trial holds its CPUs")
        return {"P@1": 95.0}
    pids, stage = home / "pids", home.parent.parent / "stages" / "train-a"
    stage.mkdir(parents=True)
    (home / "stages").mkdir()
    (home / "stages" / stage.name).symlink_to(stage)
    append_line(pids, str(os.getpid()))

    def tell() -> None:
        assert within(600, lambda: len(pids.read_text().splitlines()) == 2)
        report({"P@1": 1.0, "step": 7})

    threading.Thread(target=tell, daemon=True).start()
    TorchTrainer(
        rank,
        train_loop_config={"pids": str(pids), "stage": str(stage)},
        scaling_config=ray.train.ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(name="group", storage_path=str(home / "ray")),
    ).fit()
    return {}


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.5)
    return condition()


@pytest.mark.slow
def test_a_stopped_trial_leaves_no_process_and_gives_back_what_it_reserved(ray_session: None, tmp_path: Path):
    root, stage = tmp_path / "trials", tmp_path / "stages" / "train-a"
    for number in range(3):
        ended(number, 0.1 * number, 90.0).save(root)
    over: list[int] = []

    def on_end(trial: Trial) -> None:  # as a real sweep's: before Tune ends the trial's actor
        over.append(trial.number)
        remove_losers(tmp_path, PRECISION)

    trials = run_trials(root, space, lag, PRECISION, 5, 1, 1, on_end, print)
    assert over == [3, 4]
    assert [(trial.state, trial.error) for trial in trials[3:]] == [("stopped", ""), ("done", "")]
    assert trials[3].reports == [{"P@1": 1.0, "step": 7}]
    assert not (root / "003" / "error.txt").exists()
    pids = [int(line) for line in (root / "003" / "pids").read_text().splitlines()]
    assert within(60, lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert not stage.exists()  # removed when the next trial ended
