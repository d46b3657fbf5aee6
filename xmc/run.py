"""One training run from settings to a measured model: stages, ensemble members, MLflow, and what the user reads.

The run's directory: `stages/` (see raycluster.stages), `model` (a link to the finished model), `mlflow.json`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raycluster import inference, pool, session, trainer
from raycluster.follow import append_line
from raycluster.stages import Runner, Stage, locked, prune
from raycluster.tracking import Tracker
from xmc.corpus.store import Corpus
from xmc.errors import InputError
from xmc.evaluation.metrics import MetricResult, Metrics
from xmc.evaluation.report import plot_bands, plot_loss
from xmc.evaluation.table import format_table
from xmc.files import atomic_write_text
from xmc.labels.topk import TopK, concatenate
from xmc.model import CONFIG_FILE, LABELS_FILE
from xmc.progress import Progress
from xmc.settings import flatten, from_mapping, merge, to_mapping, to_yaml
from xmc.systems import find_system
from xmc.systems.shared_stages import corpus_stage, open_corpus

PREDICTIONS, METRICS = "predictions.parquet", "metrics.json"
MEMBER_MESSAGES = "members/messages.txt"


def train(config: Any) -> Path:
    """Do or finish the run that `config` describes; return its directory."""
    _check_writable(Path(config.run.dir))
    # Workers have working directories of their own.
    directory = Path(config.run.dir).expanduser().resolve()
    with locked(directory):
        session.connect()
        tracker = Tracker(directory, config.tracking, directory.name)
        try:
            _train(config, directory, tracker)
        except BaseException:
            tracker.finish("FAILED")
            raise
        tracker.finish()
    return directory


def _check_writable(directory: Path) -> None:
    if "working_dir_files" in Path.cwd().parts and not directory.is_absolute():
        raise InputError(
            f"run.dir {directory}: inside a Ray job this is a copy of the working directory that goes away with it; "
            "give an absolute path that every node sees"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        atomic_write_text(directory / ".writable", "")
        (directory / ".writable").unlink()
    except OSError as error:
        raise InputError(f"run.dir {directory}: cannot be written ({error}); give another one") from error


def _train(config: Any, directory: Path, tracker: Tracker) -> None:
    tracker.parameters(flatten(to_mapping(config)))
    runner = Runner(directory / "stages", _say)
    runner.run(corpus_stage(config))
    corpus = open_corpus(runner.done)
    if corpus.num_documents("train") == 0:
        raise InputError(f"{corpus.path}: no training documents")
    if config.members:
        model = _ensemble(config, directory, runner, corpus, tracker)
    else:
        model = runner.run(_network_stages(config, corpus, runner, tracker))
    evaluated = runner.run(evaluate_stage(config, model)) if "test" in corpus.splits else None
    _point(directory / "model", model)
    if not config.members:
        prune(directory / "stages", runner.done)
    _finish(config, directory, runner, tracker, evaluated)


def _network_stages(config: Any, corpus: Corpus, runner: Runner, tracker: Tracker) -> Stage:
    """Run a system's own stages; return the one that makes the model of them."""
    system = find_system(config.system)
    own = system.stages(config, corpus, tracker.steps)
    for stage in own:
        runner.run(stage)

    def run(out: Path, given: Mapping[str, Path]) -> None:
        system.assemble(out, given)
        write_common_files(config, corpus, out)

    return Stage(
        "model", to_mapping(config) | {"run": None, "tracking": None}, run, ("corpus", *(s.name for s in own))
    )


def write_common_files(config: Any, corpus: Corpus, out: Path) -> None:
    """The settings and label names that every model directory has."""
    atomic_write_text(out / CONFIG_FILE, to_yaml(config))
    pq.write_table(corpus.labels.table.slice(0, corpus.num_labels), out / LABELS_FILE)


# ------------------------------------------------------------------------------------------------ ensembles


def member_config(config: Any, number: int) -> Any:
    """The settings of one member: the ensemble's with the member's own put over them."""
    values = merge(to_mapping(config), config.members[number]) | {"members": ()}
    return from_mapping(type(config), values, f"members[{number}]")


def _ensemble(config: Any, directory: Path, runner: Runner, corpus: Corpus, tracker: Tracker) -> Path:
    """Train the members at once as far as there is room, then put their models together."""
    members = [member_config(config, number) for number in range(len(config.members))]
    workers = max(member.train.workers for member in members)
    at_once = min(pool.room(workers * trainer.default_cpus(workers)), len(members))
    _say(f"{len(members)} members, {at_once} at a time")
    jobs = [partial(_train_member, m, directory, number, tracker.run_id) for number, m in enumerate(members)]
    models = pool.run_all(jobs, at_once, directory / MEMBER_MESSAGES)

    def run(out: Path, given: Mapping[str, Path]) -> None:
        (out / "members").mkdir()
        for number, model in enumerate(models):
            os.symlink(os.path.relpath(model, out / "members"), out / "members" / f"{number}")
        write_common_files(config, corpus, out)

    return runner.run(Stage("ensemble", {"models": [model.name for model in models]}, run, ("corpus",)))


def _train_member(config: Any, directory: Path, number: int, parent: str) -> Path:
    """In an actor: bring one member's model up to date in the run's own stages; its MLflow run is a child."""
    session.connect()
    home = directory / "members" / str(number)
    home.mkdir(parents=True, exist_ok=True)
    tracker = Tracker(
        home, replace(config.tracking, uri=_uri(directory)), f"{directory.name}-member-{number}", parent
    )
    tracker.parameters(flatten(to_mapping(config)))
    messages = directory / MEMBER_MESSAGES
    runner = Runner(directory / "stages", lambda line: append_line(messages, f"member {number}: {line}"))
    runner.run(corpus_stage(config))
    model = runner.run(_network_stages(config, open_corpus(runner.done), runner, tracker))
    tracker.finish()
    return model


def _uri(directory: Path) -> str:
    return json.loads((directory / "mlflow.json").read_text())["uri"]


# ------------------------------------------------------------------------------------------------ evaluation


def evaluate_stage(config: Any, model: Path) -> Stage:
    """Predictions for the test part with their metrics and plots."""

    def run(out: Path, given: Mapping[str, Path]) -> None:
        corpus = open_corpus(given)
        top_k = predict_split(model, corpus, "test", config.run.top_k)
        top_k.save(out / PREDICTIONS)
        result = measure(top_k, corpus, "test", config)
        atomic_write_text(out / METRICS, json.dumps(result.to_dict(), indent=2))
        atomic_write_text(out / "table.txt", format_table(result) + "\n")
        plot_bands(result, out / "bands.png")

    settings = {"model": model.name, "top_k": config.run.top_k, "metrics": asdict(config.metrics)}
    return Stage("evaluate", settings, run, ("corpus",))


def predict_split(model: Path, corpus: Corpus, split: str, k: int) -> TopK:
    """(N, k) predictions for a split of a corpus, through Ray Data."""
    labelled = inference.label_documents(model, corpus.dataset(split, ["text"]), k)
    parts = []
    with Progress(f"labelling {split}", corpus.num_documents(split), "documents") as progress:
        for batch in labelled.iter_batches(batch_size=None, batch_format="pyarrow"):
            parts.append(inference.to_top_k(pa.table(batch), k))
            progress.update(len(parts[-1]))
    return concatenate(parts)


def measure(top_k: TopK, corpus: Corpus, split: str, config: Any) -> MetricResult:
    """The metrics of predictions for a split."""
    train_documents = sum(corpus.num_documents(s) for s in ("train", "valid") if s in corpus.splits)
    frequency = corpus.labels.train_frequency[: corpus.num_labels]
    metrics = Metrics(frequency, train_documents, config.metrics, config.corpus.name)
    metrics.update(top_k, corpus.label_matrix(split), corpus.num_unseen(split))
    return metrics.result(corpus.manifest["unseen_test_labels"] if split == "test" else None)


def corpus_of(run: Path, given: Path | None) -> Corpus:
    """The built corpus `given`, or the one that a run was trained on."""
    if given is not None:
        return Corpus.open(given)
    found = sorted(run.glob("stages/corpus-*/corpus"))
    if not found:
        raise InputError(f"{run}: is a model without its corpus; name a built corpus to measure on")
    return Corpus.open(found[-1])


def check_same_labels(model: Path, corpus: Corpus) -> None:
    """A model names labels by position: on a corpus with other labels its figures would mean nothing."""
    names = pq.ParquetFile(model / LABELS_FILE).read(["name"]).column("name").combine_chunks()
    if not names.equals(corpus.labels.names[: corpus.num_labels]):
        raise InputError(
            f"{corpus.path}: has {corpus.num_labels:,} labels that are not the model's {len(names):,}; "
            "build its train part with the model's training data, or train on it"
        )


# ------------------------------------------------------------------------------------------------ the end of a run


def _point(link: Path, target: Path) -> None:
    """Make the link anew in one step."""
    temporary = link.with_name(f".{link.name}.tmp")
    temporary.unlink(missing_ok=True)
    os.symlink(os.path.relpath(target, link.parent), temporary)
    os.replace(temporary, link)


def _finish(config: Any, directory: Path, runner: Runner, tracker: Tracker, evaluated: Path | None) -> None:
    files = []
    steps = runner.done["train"] / trainer.STEPS_FILE if "train" in runner.done else None
    if steps is not None and steps.exists():
        plot_loss([json.loads(line) for line in steps.read_text().splitlines()], steps.parent / "loss.png")
        files.append(steps.parent / "loss.png")
    if evaluated is not None:
        files += [evaluated / name for name in (METRICS, "table.txt", "bands.png")]
        values = json.loads((evaluated / METRICS).read_text())["values"]
        tracker.results({key: value for key, value in values.items() if value is not None}, files)
        print("\n" + (evaluated / "table.txt").read_text())
    else:
        tracker.results({}, files)
    tracker.model((directory / "model").resolve())
    shown = Path(config.run.dir)
    print(f"model        {shown / 'model'}")
    print(f"MLflow       mlflow ui --backend-store-uri {tracker.uri}")
    print(f"label texts  python -m xmc.predict {shown} INPUT.jsonl -o OUTPUT.jsonl -k {config.run.top_k}")


def _say(line: str) -> None:
    print(line, flush=True)
