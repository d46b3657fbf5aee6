"""Ray Tune over trials that are whole training runs: Optuna proposes them, ASHA ends those that fall behind.

What a trial is and what it measured stands in its own directory, written by the driver alone. A sweep whose driver was
killed is rebuilt from these records through the interfaces of the search and of the scheduler, so that both know what
they knew; Tune's own snapshot would forget the scheduler's part, and it is pickled. Knows nothing of any setting.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import ray
from ray import cloudpickle, tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import Searcher

from raycluster import groups, pool
from raycluster.follow import Tail, append_line
from xmc.errors import InputError
from xmc.evaluation.trials import Objective, Trial, best, load_trials
from xmc.files import atomic_write_text

ERROR_FILE, REPORTS_FILE = "error.txt", "reports.jsonl"
# What Tune's actor of a trial reserves; the one that does its work is the pool's.
_TUNE_CPUS = 0.05
# At every rung, after 1, 3, 9 … reports, about a third of the trials goes on.
_REDUCTION, _MOST_REPORTS = 3, 3**12
# Proposals that were tried before are passed over so often, by the search and then by chance, before it ends.
_PROPOSALS, _RANDOM_PROPOSALS = 20, 200
_SECONDS_BETWEEN_SIGNS = 60.0
# A report as Tune gets it: the metrics, their place among the trial's reports, and the state that follows from it.
_METRICS, _PLACE, _STATE = "metrics", "place", "state"
_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the records are the log
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",  # their first lines are said, their files named
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a failed trial reports no metrics
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # it would end a sweep that the user stops as if that were complete
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths stay what they are
}

# `space(trial)` asks an Optuna trial for values and gives the settings that follow from them.
Space = Callable[[optuna.Trial], dict[str, Any]]
# `train(trial, home, report)`, in an actor: calls `report(metrics)`, with their `step`, on its way and returns the
# final metrics.
Train = Callable[[Trial, Path, Callable[[dict[str, float]], None]], dict[str, float]]


def room(cpus: float, gpus: float) -> int:
    """How many trials fit at once if each takes so much at least; at least one."""
    return pool.room(cpus + _TUNE_CPUS, gpus)


def run_trials(
    root: Path,
    space: Space,
    train: Train,
    objective: Objective,
    num_trials: int,
    at_once: int,
    seed: int,
    on_end: Callable[[Trial], None],
    say: Callable[[str], None],
) -> list[Trial]:
    """Bring the sweep whose trials live below `root` to `num_trials` ended ones; return all of them by number.

    `on_end` hears of every trial that is done, stopped or failed. Trials that a killed driver left are taken up again.
    """
    past = load_trials(root)
    ended = [trial for trial in past if trial.state != "running"]
    if len(ended) >= num_trials:
        return past
    trials = {trial.number: trial for trial in past}
    search = Search(space, objective, seed, root, trials)
    os.environ.update(_ENVIRONMENT)
    # It would name failed trials once more, by other names.
    logging.getLogger("ray.tune.tune").setLevel(logging.CRITICAL)
    at_once = min(at_once, num_trials - len(ended))
    storage = root.parent / ".tune"
    shutil.rmtree(storage, ignore_errors=True)
    tuner = tune.Tuner(
        tune.with_resources(
            tune.with_parameters(_TuneTrial, train=cloudpickle.dumps(train), root=root, at_once=at_once),
            {"cpu": _TUNE_CPUS},
        ),
        tune_config=tune.TuneConfig(
            search_alg=search,
            scheduler=None if objective.minimise else _scheduler(objective, ended),
            num_samples=num_trials - len(ended),
            max_concurrent_trials=at_once,
        ),
        run_config=tune.RunConfig(
            name="trials",
            storage_path=str(storage),
            failure_config=tune.FailureConfig(max_failures=1),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # stages keep their own
            callbacks=[Book(root, trials, objective, num_trials, on_end, say)],
            verbose=0,
        ),
    )
    tuner.fit()
    shutil.rmtree(storage, ignore_errors=True)
    if search.exhausted:
        say(f"every configuration of the space was tried: {len(trials)} trials in place of {num_trials}")
    return [trials[number] for number in sorted(trials)]


def _scheduler(objective: Objective, ended: Sequence[Trial]) -> ASHAScheduler:
    """ASHA that has seen the reports of earlier trials."""
    scheduler = ASHAScheduler(
        time_attr="training_iteration",
        metric=f"{_METRICS}/{objective.metric}",
        mode="max",
        max_t=_MOST_REPORTS,
        reduction_factor=_REDUCTION,
    )
    for trial in ended:
        known = SimpleNamespace(trial_id=f"earlier-{trial.number}")
        scheduler.on_trial_add(None, known)
        for place, report in enumerate(trial.reports):
            result = {f"{_METRICS}/{key}": value for key, value in report.items()}
            scheduler.on_trial_result(None, known, result | {"training_iteration": place + 1})
    return scheduler


# ------------------------------------------------------------------------------------------------ in actors


class _TuneTrial(tune.Trainable):
    """One trial as Tune sees it: each step is a report. First come those that it made before it or its driver died.

    All that this actor starts would have to fit into its own placement group, so another one outside of it does the
    work; they end together. Reports come as lines of a file. `train` stays pickled here, so that only the other one
    loads all that training needs.
    """

    def setup(self, config: dict[str, Any], train: bytes, root: Path, at_once: int) -> None:
        self._home = root / config["trial"]
        self._waiting = Trial.load(self._home).reports
        self._last_step = self._waiting[-1]["step"] if self._waiting else -1
        self._place = 0
        (self._home / ERROR_FILE).unlink(missing_ok=True)
        # What was reported there and is not in the record yet is heard now.
        self._heard = Tail(self._home / REPORTS_FILE)
        self._job, self._at_once, self._worker = partial(_work, train, self._home), at_once, None

    def step(self) -> dict[str, Any]:
        if not self._waiting and self._worker is None:
            # Not before the old reports are judged: a trial that they end would hold what it has just reserved.
            self._worker, self._result = pool.start(self._job, self._at_once)
        ended = False
        while not self._waiting and not ended:
            ended = self._has_ended(0.5)
            for metrics in map(json.loads, self._heard.lines()):
                # A training that goes on from its checkpoint repeats the measurements since then.
                if metrics["step"] > self._last_step:
                    self._waiting.append(metrics)
                    self._last_step = metrics["step"]
        self._place += 1
        if self._waiting:
            return _result(self._waiting.pop(0), self._place - 1, "running")
        metrics, state = ray.get(self._result)
        return _result(metrics, self._place - 1, state) | {"done": True}

    def cleanup(self) -> None:
        """End the work, if it goes on, and give back what its training group has reserved."""
        if self._worker is not None:
            ray.kill(self._worker)
        for stage in self._home.glob("stages/*"):
            groups.release(stage)

    def _has_ended(self, seconds: float) -> bool:
        return bool(ray.wait([self._result], timeout=seconds)[0])


def _work(train: bytes, home: Path) -> tuple[dict[str, float], str]:
    """The final metrics of a trial, and its state. An InputError is a result: its settings do not work. Any other
    error is Tune's, which tries once more."""

    def report(metrics: dict[str, float]) -> None:
        append_line(home / REPORTS_FILE, json.dumps(metrics))

    try:
        work: Train = cloudpickle.loads(train)
        return work(Trial.load(home), home, report), "done"
    except Exception as error:
        text = f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"
        atomic_write_text(home / ERROR_FILE, text)
        if not isinstance(error, InputError):
            raise
        return {}, "failed"


def _result(metrics: dict[str, float], place: int, state: str) -> dict[str, Any]:
    return {_METRICS: metrics, _PLACE: place, _STATE: state}


# ------------------------------------------------------------------------------------------------ in the driver


class Search(Searcher):
    """Optuna's proposals (TPE) for Tune. No configuration is tried twice; when nothing new is proposed it ends.

    A trial that was stopped early counts as pruned: the search then knows that it was bad, and not how bad.
    """

    def __init__(
        self, space: Space, objective: Objective, seed: int, root: Path, trials: dict[int, Trial]
    ) -> None:
        super().__init__()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space, self._objective, self._root, self._trials = space, objective, root, trials
        # Earlier proposals are not drawn again here, so the same seed would begin with them once more.
        self._seed = seed + len(trials)
        self._study = optuna.create_study(
            directions=["maximize", "minimize"][: len(objective.names)],
            sampler=optuna.samplers.TPESampler(seed=self._seed),
        )
        self._asked: dict[str, tuple[optuna.Trial, Trial]] = {}
        self.exhausted = False
        for trial in trials.values():
            if trial.state != "running":
                self._study.enqueue_trial(trial.params)
                asked = self._study.ask()
                self._space(asked)
                self._tell(asked, trial)
        for trial in trials.values():
            if trial.state == "running":
                self._study.enqueue_trial(trial.params, user_attrs={"number": trial.number})

    def suggest(self, trial_id: str) -> dict[str, Any] | str:
        asked, trial = self._propose()
        if trial is None:
            self.exhausted = True
            return Searcher.FINISHED
        trial.save(self._root)
        self._trials[trial.number] = trial
        self._asked[trial_id] = asked, trial
        return {"trial": trial.name}

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        asked, trial = self._asked.pop(trial_id)
        if error:
            trial.state = "failed"
        elif trial.state == "running":
            trial.state = "stopped"
        self._tell(asked, trial)

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the trials' records hold it all."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing, see `save`."""

    def _propose(self) -> tuple[optuna.Trial, Trial | None]:
        tried = {json.dumps(trial.settings, sort_keys=True) for trial in self._trials.values()}
        sampler = self._study.sampler
        try:
            for attempt in range(_PROPOSALS + _RANDOM_PROPOSALS):
                if attempt == _PROPOSALS:
                    self._study.sampler = optuna.samplers.RandomSampler(seed=self._seed + len(tried))
                asked = self._study.ask()
                settings = self._space(asked)
                if "number" in asked.user_attrs:
                    return asked, self._trials[asked.user_attrs["number"]]
                if json.dumps(settings, sort_keys=True) not in tried:
                    number = max(self._trials, default=-1) + 1
                    return asked, Trial(number, asked.params, settings)
                self._study.tell(asked, state=optuna.trial.TrialState.FAIL)
        finally:
            self._study.sampler = sampler
        return asked, None

    def _tell(self, asked: optuna.Trial, trial: Trial) -> None:
        values = [trial.value(name) for name in self._objective.names]
        if trial.state == "done" and None not in values:
            self._study.tell(asked, values)
        elif trial.state == "stopped" and values[0] is not None:
            asked.report(values[0], len(trial.reports))
            self._study.tell(asked, state=optuna.trial.TrialState.PRUNED)
        else:
            self._study.tell(asked, state=optuna.trial.TrialState.FAIL)


class Book(tune.Callback):
    """Keeps the records up to date and tells the user what happens."""

    def __init__(
        self,
        root: Path,
        trials: dict[int, Trial],
        objective: Objective,
        num_trials: int,
        on_end: Callable[[Trial], None],
        say: Callable[[str], None],
    ) -> None:
        self._root, self._trials, self._objective = root, trials, objective
        self._num_trials, self._on_end, self._print = num_trials, on_end, say
        self._last_sign = time.monotonic()

    def _trial(self, trial: Any) -> Trial:
        return self._trials[int(trial.config["trial"])]

    def _say(self, line: str) -> None:
        self._last_sign = time.monotonic()
        self._print(line)

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        known = self._trial(trial)
        shown = "  ".join(f"{key}={_short(value)}" for key, value in known.settings.items())
        self._say(f"trial {known.name}  starts  {shown}")

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        known = self._trial(trial)
        if result[_PLACE] < len(known.reports):
            return  # told again after its driver or machine died
        known.state = result[_STATE]
        if result[_METRICS]:
            known.reports.append(result[_METRICS])
        known.save(self._root)
        if known.state == "running":
            self._say(f"trial {known.name}  {self._values(known)} at step {result[_METRICS]['step']:,}")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._end(self._trial(trial))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._end(self._trial(trial))

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        known = self._trial(trial)
        self._say(f"trial {known.name}  failed and is tried again  {self._reason(known)}")

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if time.monotonic() - self._last_sign > _SECONDS_BETWEEN_SIGNS:
            ended = sum(trial.state != "running" for trial in self._trials.values())
            running = ", ".join(trial.name for trial in self._trials.values() if trial.state == "running")
            leader = best(self._trials.values(), self._objective)
            shown = f"; best  {self._values(leader)} of trial {leader.name}" if leader else ""
            self._say(f"{ended} of {self._num_trials} trials ended, running {running or 'none'}{shown}")

    def _end(self, trial: Trial) -> None:
        line = f"{trial.state}  {self._values(trial)}"
        if trial.state == "failed":
            trial.error = self._reason(trial)
            line = f"failed  {trial.error}  (see {self._root / trial.name / ERROR_FILE})"
        elif best(self._trials.values(), self._objective) is trial:
            line += ", the best so far"
        trial.save(self._root)
        self._say(f"trial {trial.name}  {line}")
        self._on_end(trial)

    def _values(self, trial: Trial) -> str:
        found = {name: trial.value(name) for name in self._objective.names}
        return "  ".join(f"{name} {_short(value)}" for name, value in found.items() if value is not None)

    def _reason(self, trial: Trial) -> str:
        file = self._root / trial.name / ERROR_FILE
        return file.read_text().splitlines()[0] if file.exists() else "its process died"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(_short, value)) + ")"
    return str(value)
