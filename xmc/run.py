"""One training run from settings to a measured model: stages, ensemble members, MLflow, and what the user reads.

The run's directory: `stages/` (see raycluster.stages), `model` (a link to the finished model), `mlflow.json`. A run
with variants has such a directory for each in `variants/`; they share the stages that they have in common.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raycluster import inference, pool, session, trainer
from raycluster.follow import append_line
from raycluster.job import STEPS_FILE
from raycluster.stages import RECORD, Runner, Stage, locked, prune
from raycluster.tracking import Tracker
from xmc.corpus.store import Corpus
from xmc.errors import InputError
from xmc.evaluation.combine import Combination, wider
from xmc.evaluation.fit_weights import fit_weighted
from xmc.evaluation.metrics import MetricResult, Metrics
from xmc.evaluation.report import plot_bands, plot_loss
from xmc.evaluation.table import align, format_table
from xmc.files import atomic_write_text
from xmc.labels.topk import TopK, concatenate
from xmc.model import CONFIG_FILE, ENSEMBLE_FILE, LABELS_FILE, MEMBERS
from xmc.progress import Progress
from xmc.settings import flatten, from_mapping, merge, to_mapping, to_yaml
from xmc.systems import find_system
from xmc.systems.neural import StepCallback, link_tree
from xmc.systems.shared_stages import corpus_stage, open_corpus

PREDICTIONS, METRICS = "predictions.parquet", "metrics.json"
MEMBER_MESSAGES = "members/messages.txt"
_SECONDS_BETWEEN_SIGNS = 60.0


def train(config: Any) -> Path:
    """Do or finish the run that `config` describes; return its directory."""
    with opened(config) as (directory, tracker):
        if config.variants:
            _train_variants(config, directory, tracker)
        else:
            _train(config, directory, directory / "stages", tracker)
    return directory


@contextmanager
def opened(config: Any) -> Iterator[tuple[Path, Tracker]]:
    """The run's directory, held by this process, and its MLflow run, which ends with the block; Ray is connected."""
    check_writable(Path(config.run.dir))
    # Workers have working directories of their own.
    directory = Path(config.run.dir).expanduser().resolve()
    with locked(directory):
        session.connect()
        tracker = Tracker(directory, config.tracking, directory.name)
        try:
            yield directory, tracker
        except BaseException:
            tracker.finish("FAILED")
            raise
        tracker.finish()


def check_writable(directory: Path) -> None:
    """Make the run's directory, or say why it cannot be one."""
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


def _train(config: Any, directory: Path, stages: Path, tracker: Tracker) -> None:
    """The run of `directory`, its stages in the directory `stages`, which other runs may share."""
    tracker.parameters(flatten(to_mapping(config)))
    runner = Runner(stages, _say)
    runner.run(corpus_stage(config))
    corpus = open_corpus(runner.done)
    if corpus.num_documents("train") == 0:
        raise InputError(f"{corpus.path}: no training documents")
    if config.members:
        model = _ensemble(config, directory, runner, corpus, tracker)
    else:
        model = runner.run(_network_stages(config, corpus, runner, tracker.steps))
    evaluated = runner.run(evaluate_stage(config, model)) if "test" in corpus.splits else None
    point(directory / "model", model)
    if stages != directory / "stages":
        _show_stages(directory / "stages", runner.done)
    elif not config.members:
        prune(stages, runner.done)
    finish(config, directory, runner, tracker, evaluated)


def _network_stages(config: Any, corpus: Corpus, runner: Runner, on_steps: StepCallback) -> Stage:
    """Run a system's own stages; return the one that makes the model of them."""
    system = find_system(config.system)
    own = system.stages(config, corpus, on_steps)
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


def _show_stages(shown: Path, done: Mapping[str, Path]) -> None:
    """Links to the shared stages that a run is made of: it then looks like any other run."""
    shown.mkdir(exist_ok=True)
    for link in shown.iterdir():
        link.unlink()
    for path in done.values():
        os.symlink(os.path.relpath(path, shown), shown / path.name)


# ------------------------------------------------------------------------------------------------ variants


def variant_config(config: Any, number: int, directory: Path) -> tuple[str, Any]:
    """A variant's name, and its settings: the run's with the variant's own put over them."""
    own = dict(config.variants[number])
    name = str(own.pop("name", number))
    values = merge(to_mapping(config), own) | {"variants": ()}
    values = merge(values, {"run": {"dir": str(directory / "variants" / name)}})
    return name, from_mapping(type(config), values, f"variants[{number}]")


def _train_variants(config: Any, directory: Path, tracker: Tracker) -> None:
    """Train and measure the variants one after the other: each may need the whole cluster."""
    variants = [variant_config(config, number, directory) for number in range(len(config.variants))]
    tracker.parameters(flatten(to_mapping(config)))
    for name, variant in variants:
        _say(f"\nvariant {name}")
        home = Path(variant.run.dir)
        home.mkdir(parents=True, exist_ok=True)
        tracking = replace(config.tracking, uri=tracker.uri)
        child = Tracker(home, tracking, f"{directory.name}-{name}", tracker.run_id)
        try:
            _train(variant, home, directory / "stages", child)
        except BaseException:
            child.finish("FAILED")
            raise
        child.finish()
    homes = " ".join(variant.run.dir for _, variant in variants)
    print(f"\n{_variants_table(variants)}\n\ncompare them  python -m xmc.compare {homes}")


def _variants_table(variants: Sequence[tuple[str, Any]]) -> str:
    """The ranking metrics of each variant, one row each."""
    found = [
        json.loads(next(Path(variant.run.dir).glob(f"stages/evaluate-*/{METRICS}")).read_text())["values"]
        for _, variant in variants
    ]
    keys = [key for key in found[0] if key.split("@")[0] in ("P", "PSP", "nDCG")]
    rows = [["%", *keys]]
    for (name, _), values in zip(variants, found, strict=True):
        rows.append([name, *("–" if values[key] is None else f"{values[key]:.2f}" for key in keys)])
    return "\n".join(align(rows, "<"))


# ------------------------------------------------------------------------------------------------ trials


def train_trial(
    config: Any,
    directory: Path,
    stages: Path,
    tracker: Tracker,
    on_steps: StepCallback,
    say: Callable[[str], None],
) -> tuple[dict[str, float], list[Path]]:
    """Train one configuration of a sweep and measure it on the validation part: the metrics, and the files of its
    training steps. Test is left alone.

    `stages` is shared with other trials; which of them this one is made of is shown in `directory` as each begins,
    since a trial may be ended at any time.
    """
    tracker.parameters(flatten(to_mapping(config)))

    def told(line: str) -> None:
        _show_stages(directory / "stages", runner.done)
        say(line)

    def heard(rows: list[dict[str, float]]) -> None:
        on_steps(rows)
        tracker.steps(rows)

    runner = Runner(stages, told)
    runner.run(corpus_stage(config))
    model = runner.run(_network_stages(config, open_corpus(runner.done), runner, heard))
    measured = runner.run(evaluate_stage(config, model, split="valid"))
    point(directory / "model", model)
    values = json.loads((measured / METRICS).read_text())["values"]
    found = {key: value for key, value in values.items() if value is not None}
    tracker.results({f"valid_{key}": value for key, value in found.items()}, [measured / "table.txt"])
    steps = [path / STEPS_FILE for path in runner.done.values()]
    return found, [path for path in steps if path.exists()]


# ------------------------------------------------------------------------------------------------ ensembles


def member_config(config: Any, number: int) -> Any:
    """The settings of one member: the ensemble's with the member's own put over them."""
    values = merge(to_mapping(config), config.members[number]) | {"members": (), "ensemble": {}}
    return from_mapping(type(config), values, f"members[{number}]")


def _ensemble(config: Any, directory: Path, runner: Runner, corpus: Corpus, tracker: Tracker) -> Path:
    """Train the members at once as far as there is room, then put their models together."""
    members = [member_config(config, number) for number in range(len(config.members))]
    at_once = members_at_once(members)
    _say(f"{len(members)} members, {at_once} at a time")
    jobs = {
        f"member {number}": partial(_train_member, member, directory, runner.root, number, tracker.run_id)
        for number, member in enumerate(members)
    }
    models = pool.run_all(jobs, at_once, pool.printing(directory / MEMBER_MESSAGES))
    on_valid = validation_predictions(config, models, corpus, runner)
    combination = fit_combination(config, corpus, on_valid)
    return runner.run(ensemble_stage(config, models, combination, corpus))


def members_at_once(members: Sequence[Any]) -> int:
    """How many members train at the same time.

    Actors with a network, which some systems start between trainings, are not counted: as members use them they wait
    for no task, so they come to their end however many there are.
    """
    return min(len(members), *(pool.room(*_least_resources(member)) for member in members))


def validation_predictions(config: Any, models: Sequence[Path], corpus: Corpus, runner: Runner) -> list[TopK]:
    """What the members predict for the validation part where the form of the ensemble is fitted on it, else nothing."""
    if config.ensemble.how != "weighted":
        return []
    if "valid" not in corpus.splits:
        raise InputError(
            f"{corpus.path}: has no validation part to fit weights on; train with corpus.valid_fraction=0.05, or "
            "combine without weights: mean, mean_rank or round_robin"
        )
    return member_predictions(config, models, corpus, "valid", runner)


def fit_combination(config: Any, corpus: Corpus, on_valid: Sequence[TopK]) -> Combination:
    """How the members' lists become one, from `validation_predictions`."""
    if config.ensemble.how != "weighted":
        return Combination(config.ensemble.how)
    measured, figure = measurer(corpus, "valid", config), f"nDCG@{max(config.metrics.ks)}"
    combination, reached = fit_weighted(
        on_valid, corpus.label_matrix("valid"), lambda top: measured(top)[figure], config.run.top_k
    )
    weights = ", ".join(f"{weight:.3f}" for weight in combination.weights)
    _say(f"weights {weights}: {figure} {reached:.2f} on validation")
    return combination


def member_predictions(
    config: Any, models: Sequence[Path], corpus: Corpus, split: str, runner: Runner
) -> list[TopK]:
    """Each member's predictions for a split, as wide as an ensemble asks for them; a stage each."""
    wide = wider(config.run.top_k, corpus.num_labels)
    return [TopK.load(runner.run(_predict_stage(model, split, wide)) / PREDICTIONS) for model in models]


def _predict_stage(model: Path, split: str, k: int) -> Stage:
    key = model_key(model)

    def run(out: Path, given: Mapping[str, Path]) -> None:
        predict_split(model, open_corpus(given), split, k).save(out / PREDICTIONS)

    return Stage(f"predict-{split}-{key[:10]}", {"model": key, "k": k}, run, ("corpus",))


def model_key(model: Path) -> str:
    """The hash of what a model was made from."""
    try:
        return json.loads((model / RECORD).read_text())["key"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{model / RECORD}: damaged or missing ({error!r}); name a run's directory"
        ) from error


def ensemble_stage(config: Any, models: Sequence[Path], combination: Combination, corpus: Corpus) -> Stage:
    """The model directory of an ensemble, which needs its members' runs no more."""

    def run(out: Path, given: Mapping[str, Path]) -> None:
        (out / MEMBERS).mkdir()
        for number, model in enumerate(models):
            link_tree(model, out / MEMBERS / str(number))
        combination.save(out / ENSEMBLE_FILE)
        write_common_files(config, corpus, out)

    settings = to_mapping(config) | {"run": None, "tracking": None}
    made_of = {"models": [model_key(model) for model in models], "combination": asdict(combination)}
    return Stage("ensemble", settings | made_of, run, ("corpus",))


def training_resources(config: Any) -> tuple[float, float]:
    """CPUs and GPUs that a trial needs at least: for its training group, later for the actors that label documents,
    which tasks read for them."""
    cpus, gpus = _least_resources(config)
    return max(cpus, inference.reserved_cpus()), gpus


def _least_resources(config: Any) -> tuple[float, float]:
    """The same for training alone. What has no network trains by tasks, which use the whole cluster and queue."""
    return trainer.least_resources(config.train) if hasattr(config, "train") else (trainer.default_cpus(1), 0)


def _train_member(config: Any, directory: Path, stages: Path, number: int, parent: str) -> Path:
    """In an actor: bring one member's model up to date in the run's own stages; its MLflow run is a child."""
    session.connect()
    home = directory / "members" / str(number)
    home.mkdir(parents=True, exist_ok=True)
    tracker = Tracker(
        home, replace(config.tracking, uri=_uri(directory)), f"{directory.name}-member-{number}", parent
    )
    tracker.parameters(flatten(to_mapping(config)))
    messages = directory / MEMBER_MESSAGES

    def say(line: str) -> None:
        append_line(messages, f"member {number}: {line}")

    show = _signs(say)

    def heard(rows: list[dict[str, float]]) -> None:
        tracker.steps(rows)
        show(rows)

    runner = Runner(stages, say)
    runner.run(corpus_stage(config))
    model = runner.run(_network_stages(config, open_corpus(runner.done), runner, heard))
    tracker.finish()
    return model


def _signs(say: Callable[[str], None]) -> StepCallback:
    """Says now and then how far a training is."""
    said = time.monotonic()

    def show(rows: list[dict[str, float]]) -> None:
        nonlocal said
        if time.monotonic() - said >= _SECONDS_BETWEEN_SIGNS:
            said = time.monotonic()
            say(f"step {rows[-1]['step']:,}, loss {rows[-1]['loss']:.4f}")

    return show


def _uri(directory: Path) -> str:
    return json.loads((directory / "mlflow.json").read_text())["uri"]


# ------------------------------------------------------------------------------------------------ evaluation


def evaluate_stage(
    config: Any, model: Path, known: Callable[[], TopK] | None = None, split: str = "test"
) -> Stage:
    """Predictions for a part with their metrics and plots; `known` gives them where the model need not."""

    def run(out: Path, given: Mapping[str, Path]) -> None:
        corpus = open_corpus(given)
        top_k = known() if known else predict_split(model, corpus, split, config.run.top_k)
        top_k.save(out / PREDICTIONS)
        result = measure(top_k, corpus, split, config)
        atomic_write_text(out / METRICS, json.dumps(result.to_dict(), indent=2))
        atomic_write_text(out / "table.txt", format_table(result) + "\n")
        plot_bands(result, out / "bands.png")

    settings = {"model": model.name, "top_k": config.run.top_k, "metrics": asdict(config.metrics)}
    return Stage("evaluate" if split == "test" else f"evaluate_{split}", settings, run, ("corpus",))


def predict_split(model: Path, corpus: Corpus, split: str, k: int) -> TopK:
    """(N, k) predictions for a split of a corpus, through Ray Data."""
    columns = ["text"] if corpus.has_text else ["feature_ids", "feature_values"]
    num_features = None if corpus.has_text else corpus.num_features
    labelled = inference.label_documents(model, corpus.dataset(split, columns), k, num_features=num_features)
    parts = []
    with Progress(f"labelling {split}", corpus.num_documents(split), "documents") as progress:
        for batch in labelled.iter_batches(batch_size=None, batch_format="pyarrow"):
            parts.append(inference.to_top_k(pa.table(batch), k))
            progress.update(len(parts[-1]))
    return concatenate(parts)


def measure(top_k: TopK, corpus: Corpus, split: str, config: Any) -> MetricResult:
    """The metrics of predictions for a split."""
    return measurer(corpus, split, config)(top_k)


def measurer(corpus: Corpus, split: str, config: Any) -> Callable[[TopK], MetricResult]:
    """`measure` for several predictions of one split, whose truth is read once."""
    truth, num_unseen = corpus.label_matrix(split), corpus.num_unseen(split)
    unseen_labels = corpus.manifest["unseen_test_labels"] if split == "test" else None

    def measured(top_k: TopK) -> MetricResult:
        metrics = metrics_of(corpus, config)
        metrics.update(top_k, truth, num_unseen)
        return metrics.result(unseen_labels)

    return measured


def metrics_of(corpus: Corpus, config: Any) -> Metrics:
    """An empty accumulator for predictions of any split."""
    train_documents = sum(corpus.num_documents(s) for s in ("train", "valid") if s in corpus.splits)
    frequency = corpus.labels.train_frequency[: corpus.num_labels]
    return Metrics(frequency, train_documents, config.metrics, config.corpus.name)


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


def point(link: Path, target: Path) -> None:
    """Make the link anew in one step."""
    temporary = link.with_name(f".{link.name}.tmp")
    temporary.unlink(missing_ok=True)
    os.symlink(os.path.relpath(target, link.parent), temporary)
    os.replace(temporary, link)


def finish(config: Any, directory: Path, runner: Runner, tracker: Tracker, evaluated: Path | None) -> None:
    """Log what the run made, and tell the user where it is."""
    files = []
    trained = [path / STEPS_FILE for path in runner.done.values()]
    for steps in (path for path in trained if path.exists()):
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
