"""One sweep from a preset and a space to the best configuration: trials, MLflow, and what the user reads.

The sweep's directory: `stages/`, which all trials share (the corpus is built, tokenised and clustered once); for each
trial `trials/NNN` with its record, its settings, its log and, as long as it leads, its model; at the end `best.yaml`,
`trials.csv`, `table.txt` and plots. Trials are measured on the validation part; test is never read.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import json
import pkgutil
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import optuna

import tune_spaces
from raycluster import groups
from raycluster.follow import append_line
from raycluster.job import VALIDATION_KS
from raycluster.stages import RECORD as STAGE_RECORD
from raycluster.stages import Runner, is_done
from raycluster.sweep import room, run_trials
from raycluster.tracking import BEST_OF_SWEEP, RUN_FILE, Tracker, TrackingConfig
from xmc import run
from xmc.corpus.store import Corpus
from xmc.errors import InputError
from xmc.evaluation.sweep_report import format_trials, plot_trials, write_csv
from xmc.evaluation.trials import Objective, Trial, best, front, load_trials
from xmc.files import atomic_write_text
from xmc.model import CONFIG_FILE
from xmc.settings import flatten, from_mapping, merge, to_mapping, to_yaml
from xmc.systems.shared_stages import corpus_stage, open_corpus

BEST, RECORD, LOG = "best.yaml", "sweep.json", "log.txt"
STEP_SECONDS, MODEL_BYTES = "step_seconds", "model_bytes"
MINIMISED = (STEP_SECONDS, MODEL_BYTES)
# What all trials must have in common: data and measure; the resources that their number at a time follows from.
_FIXED_SETTINGS = ("system", "corpus", "metrics", "run", "tracking", "members", "variants")
_FIXED_RESOURCES = ("train.workers", "train.device", "train.cpus_per_worker")
_POINTS_CHECKED = 50
_SECONDS_FOR_LAST_WRITES = 20.0


# ------------------------------------------------------------------------------------------------ the space


@dataclass(frozen=True)
class Space:
    """A search space: where it came from, a hash of its source, and its function of (Optuna trial, preset)."""

    name: str
    source: str
    function: Callable[[Any, Any], dict[str, Any]]


def find_space(name: str) -> Space:
    """The space of tune_spaces with that name, or of the Python file that is named itself."""
    module = _load_file(Path(name)) if name.endswith(".py") else _load_named(name)
    function = getattr(module, "space", None)
    if not callable(function) or len(inspect.signature(function).parameters) != 2:
        raise InputError(f"{name}: has no function space(trial, preset); see tune_spaces/light_xml.py")
    source = hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()
    return Space(Path(name).stem, source, function)


def space_names() -> list[str]:
    return sorted(found.name for found in pkgutil.iter_modules(tune_spaces.__path__))


def _load_named(name: str) -> ModuleType:
    names = space_names()
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(
            f"there is no space {name!r}; {hint}known are: {', '.join(names)}; or give a .py file"
        )
    return importlib.import_module(f"tune_spaces.{name}")


def _load_file(path: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or found is None or found.loader is None:
        raise InputError(f"{path}: no such file")
    module = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{path}: cannot be loaded: {type(error).__name__}: {error}") from error
    return module


def trial_config(config: Any, settings: Mapping[str, Any], where: str) -> Any:
    """The preset's settings with a trial's put over them; `where` names the space in errors."""
    for key in settings:
        if key.split(".")[0] in _FIXED_SETTINGS or key in _FIXED_RESOURCES:
            raise InputError(f"{where}: {key} must be the same for all trials; set it on the command line")
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        nested = merge(nested, value)
    return from_mapping(type(config), merge(to_mapping(config), nested), where)


def check_space(space: Space, config: Any) -> None:
    """Draw some points of the space: each must be a configuration that the preset's system takes."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=config.seed))
    for _ in range(_POINTS_CHECKED):
        try:
            settings = space.function(study.ask(), config)
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"space {space.name}: fails with {type(error).__name__}: {error}; is it a space for {config.system}?"
            ) from error
        trial_config(config, settings, f"space {space.name}")


# ------------------------------------------------------------------------------------------------ the sweep


def sweep(config: Any, space: Space, objective: Objective, num_trials: int) -> Path:
    """Do or finish the sweep; return its directory."""
    _check(config, objective, num_trials)
    check_space(space, config)
    with run.opened(config) as (directory, tracker):
        _check_same(directory, config, space, objective)
        tracker.parameters(flatten(to_mapping(config)) | {"space": space.name, "metric": objective.metric})
        runner = Runner(directory / "stages", _say)
        runner.run(corpus_stage(config))
        corpus = open_corpus(runner.done)
        _check_corpus(corpus)
        trials = _run(config, space, objective, num_trials, directory, tracker, corpus)
        _finish(config, directory, tracker, objective, trials)
    return directory


def _run(
    config: Any,
    space: Space,
    objective: Objective,
    num_trials: int,
    directory: Path,
    tracker: Tracker,
    corpus: Corpus,
) -> list[Trial]:
    at_once = room(*run.training_resources(config))
    root = directory / "trials"
    early = is_measured_early(config, objective.metric, corpus.num_labels)
    _say(
        f"{num_trials} trials, {at_once} at a time, for {' and '.join(objective.names)} on the "
        f"{corpus.num_documents('valid'):,} validation documents; "
        + (
            "those that fall behind are stopped early"
            if early and objective.minimise is None
            else "each goes to its end"
        )
    )
    tracking = replace(config.tracking, uri=tracker.uri)

    def propose(asked: optuna.Trial) -> dict[str, Any]:
        return space.function(asked, config)

    def ended(trial: Trial) -> None:
        _close_run(root / trial.name, tracking, trial)
        remove_losers(directory, objective)

    return run_trials(
        root,
        propose,
        partial(_train_trial, config, objective.metric, early, tracking, tracker.run_id),
        objective,
        num_trials,
        at_once,
        config.seed,
        ended,
        _say,
    )


def _check(config: Any, objective: Objective, num_trials: int) -> None:
    if num_trials < 1:
        raise InputError(f"--trials is {num_trials}; try at least one")
    for key in ("members", "variants"):
        if getattr(config, key, ()):
            raise InputError(f"a sweep tries single models, but the preset has {key}; give {key}=[]")
    name, at, k = objective.metric.partition("@")
    if (
        name not in ("P", "R", "nDCG", "PSP", "PSnDCG", "coverage")
        or not at
        or k not in map(str, config.metrics.ks)
    ):
        raise InputError(
            f"--metric is {objective.metric!r}; it is P, R, nDCG, PSP, PSnDCG or coverage at one of "
            f"metrics.ks={list(config.metrics.ks)}, e.g. P@{config.metrics.ks[0]}"
        )
    if objective.minimise == STEP_SECONDS and not hasattr(config, "train"):
        raise InputError(f"{config.system} trains without steps; use --minimise {MODEL_BYTES}")


def _check_same(directory: Path, config: Any, space: Space, objective: Objective) -> None:
    """A directory holds one sweep: trials of another one would be counted among its own."""
    made_of = to_mapping(config) | {"run": None, "tracking": None}
    now = {
        "settings": hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest(),
        "space": [space.name, space.source],
        "objective": list(objective.names),
    }
    file = directory / RECORD
    if file.exists() and (before := json.loads(file.read_text())) != now:
        changed = ", ".join(key for key in now if before.get(key) != now[key])
        raise InputError(
            f"{directory}: holds a sweep with other {changed}; give another run.dir, or remove the directory"
        )
    atomic_write_text(file, json.dumps(now, indent=2))


def _check_corpus(corpus: Corpus) -> None:
    if "valid" not in corpus.splits or corpus.num_documents("valid") == 0:
        raise InputError(
            f"{corpus.path}: has no validation part to compare trials on; give corpus.valid_fraction=0.1 "
            "(a corpus that is built already: build it anew with it)"
        )


# ------------------------------------------------------------------------------------------------ a trial


def is_measured_early(config: Any, metric: str, num_labels: int) -> bool:
    """Whether a training measures `metric` on its way."""
    name, _, k = metric.partition("@")
    return config.validates_labels(num_labels) and name in ("P", "nDCG") and int(k) in VALIDATION_KS


def _train_trial(
    config: Any,
    metric: str,
    early: bool,
    tracking: TrackingConfig,
    parent: str,
    trial: Trial,
    home: Path,
    report: Callable[[dict[str, float]], None],
) -> dict[str, float]:
    """In an actor: the whole run of one trial; if `early`, `report` gets what is measured on validation on its way."""
    directory = home.parent.parent
    chosen = trial_config(config, trial.settings, f"trial {trial.name}")
    chosen = replace(chosen, run=replace(chosen.run, dir=str(home)))
    atomic_write_text(home / CONFIG_FILE, to_yaml(chosen))
    tracker = Tracker(home, tracking, f"{directory.name}-{trial.name}", parent)
    measured = f"valid_{metric.replace('@', '_at_')}"

    def on_steps(rows: list[dict[str, float]]) -> None:
        for row in rows:
            if early and measured in row:
                report({metric: row[measured], "step": row["step"]})

    started = time.monotonic()
    say = partial(append_line, home / LOG)
    values, steps = run.train_trial(chosen, home, directory / "stages", tracker, on_steps, say)
    tracker.finish()
    costs = {
        MODEL_BYTES: float(_num_bytes((home / "model").resolve())),
        "seconds": time.monotonic() - started,
    }
    if steps:
        costs[STEP_SECONDS] = _step_seconds(steps, chosen.train.batch_size)
    return values | costs


def _num_bytes(model: Path) -> int:
    return sum(path.stat().st_size for path in model.rglob("*") if path.is_file())


def _step_seconds(files: Iterable[Path], batch_size: int) -> float:
    """The middle one of all training steps' times."""
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return statistics.median(
        batch_size / row["documents_per_second"] for row in rows if row.get("documents_per_second")
    )


# ------------------------------------------------------------------------------------------------ after a trial


def _close_run(home: Path, tracking: TrackingConfig, trial: Trial) -> None:
    """End the MLflow run of a trial that could not do it itself."""
    if trial.state != "done" and (home / RUN_FILE).exists():
        Tracker(home, tracking, trial.name).finish("KILLED" if trial.state == "stopped" else "FAILED")


def remove_losers(directory: Path, objective: Objective) -> list[Path]:
    """Remove what trials that lost have trained, unless a trial that did not is made of it too; return what was there.
    What comes before training (tokens, clusters …) stays for trials to come.

    A stage whose training group is still held is left: Tune tells of a trial's end before it ends the trial's actor,
    which finds there what it has to give back.
    """
    root, stages = directory / "trials", directory / "stages"
    trials = load_trials(root)
    winners = {trial.number for trial in front(trials, objective)}
    lost = [trial for trial in trials if trial.state != "running" and trial.number not in winners]
    needed = {name for trial in trials if trial not in lost for name in _made_of(root / trial.name)}
    found = []
    for name in sorted({name for trial in lost for name in _made_of(root / trial.name)} - needed):
        if _is_trained(stages, name) and (stages / name).exists():
            found.append(stages / name)
            if not groups.is_held(stages / name):
                shutil.rmtree(stages / name, ignore_errors=True)
    return found


def _made_of(home: Path) -> list[str]:
    return [link.name for link in home.glob("stages/*")]


def _is_trained(stages: Path, name: str) -> bool:
    """Whether a stage was trained, was made of one that was, or is half done."""
    stage = name.rpartition("-")[0]
    trained = stage.endswith("train") or stage.startswith(("level", "model", "evaluate"))
    if trained or not is_done(stages / name):
        return True
    record = json.loads((stages / name / STAGE_RECORD).read_text())
    return any(_is_trained(stages, made_from) for made_from in record["inputs"].values())


def _remove_for_good(directory: Path, objective: Objective) -> None:
    """At the end: the processes of a trial that was just stopped may still be writing, and its actor may have been
    ended before it gave back the training group."""
    deadline = time.monotonic() + _SECONDS_FOR_LAST_WRITES
    while (left := remove_losers(directory, objective)) and time.monotonic() < deadline:
        time.sleep(1)
    for stage in left:
        groups.release(stage)
        shutil.rmtree(stage, ignore_errors=True)


# ------------------------------------------------------------------------------------------------ the end


def _finish(
    config: Any, directory: Path, tracker: Tracker, objective: Objective, trials: list[Trial]
) -> None:
    winner = best(trials, objective)
    if winner is None:
        reasons = "; ".join(f"trial {trial.name}: {trial.error}" for trial in trials if trial.error)
        raise InputError(f"{directory}: no trial came to its end. {reasons}")
    _remove_for_good(directory, objective)
    table = format_trials(trials, objective)
    atomic_write_text(directory / "table.txt", table + "\n")
    write_csv(trials, objective, directory / "trials.csv")
    plots = plot_trials(trials, objective, directory)
    shown = Path(config.run.dir)
    chosen = trial_config(config, winner.settings, BEST)
    chosen = replace(chosen, run=replace(chosen.run, dir=str(shown.with_name(f"{shown.name}-best"))))
    command = f"python -m xmc.train {shown / BEST}"
    about = f"# The best of {len(trials)} trials by {objective.metric} on validation: trial {winner.name}."
    atomic_write_text(directory / BEST, f"# {command}\n#\n{about}\n{to_yaml(chosen)}")
    values = {name: winner.value(name) for name in winner.reports[-1]}
    files = [directory / name for name in ("table.txt", "trials.csv", BEST)]
    tracker.results(
        {f"{BEST_OF_SWEEP}{key}": value for key, value in values.items() if value is not None},
        [*files, *plots],
    )
    print(f"\n{table}\n")
    print(f"table        {shown / 'trials.csv'}")
    print(f"plots        {' '.join(str(shown / path.name) for path in plots)}")
    print(f"MLflow       mlflow ui --backend-store-uri {tracker.uri}")
    leader = shown / "trials" / winner.name
    print(f"best model   {leader / 'model'} (on test: python -m xmc.evaluate {leader})")
    print(f"train it     {command}")


def _say(line: str) -> None:
    print(line, flush=True)
