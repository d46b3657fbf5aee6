"""Combine trained runs, of one system or of several, into one model.

    python -m xmc.ensemble RUN RUN … -o DIR [--how mean|mean_rank|round_robin|weighted]

The runs must be trained on the same corpus. DIR becomes a run like any other: a model that xmc.load, xmc.predict and
xmc.evaluate take, metrics on the test part, an MLflow run that names its members. `weighted`, the default where the
corpus has a validation part, fits the members' weights there; test is only measured. What a member predicts is kept in
DIR: another --how asks no member again. Members' settings for metrics and tracking are the first one's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmc.errors import InputError, exit_on_input_error

if TYPE_CHECKING:
    from xmc.corpus.store import Corpus
    from xmc.evaluation.combine import Combination, Form
    from xmc.evaluation.metrics import MetricResult
    from xmc.labels.topk import TopK

# The runs that DIR was last made of: another choice is another MLflow run.
MEMBERS_FILE = "members.json"


def main() -> None:
    from xmc.evaluation.combine import FORMS

    parser = argparse.ArgumentParser(
        prog="python -m xmc.ensemble", description="Combine trained runs into one model."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="runs' directories, two or more")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="the ensemble's run")
    parser.add_argument(
        "--how", choices=FORMS, help="default: weighted where the corpus has a validation part, else mean"
    )
    arguments = parser.parse_args()
    ensemble(arguments.runs, arguments.output, arguments.how)


def ensemble(runs: Sequence[Path], directory: Path, how: Form | None = None) -> Path:
    """Make, or bring up to date, the ensemble of `runs` in `directory`; return that."""
    from xmc import run
    from xmc.model import model_directory

    models = [model_directory(given) for given in runs]
    keys = [run.model_key(model) for model in models]
    if len(runs) < 2:
        raise InputError(f"{runs[0]}: one run is no ensemble; name two or more")
    for number, key in enumerate(keys):
        if key in keys[:number]:
            raise InputError(
                f"{runs[number]}: is the same model as {runs[keys.index(key)]}; name each run once"
            )
    corpus = _common_corpus(runs, models)
    config = _config(runs, models, corpus, directory, how)
    about = {"how": config.ensemble.how, "members": dict(zip(map(str, runs), keys, strict=True))}
    run.check_writable(directory)
    _forget_another(directory, about)
    with run.opened(config) as (home, tracker):
        tracker.parameters(_parameters(config, runs))
        _ensemble(config, home, tracker, runs, models)
    print(f"compare      python -m xmc.compare {' '.join(map(str, runs))} {directory}")
    return directory


def _common_corpus(runs: Sequence[Path], models: Sequence[Path]) -> Corpus:
    """The corpus that all runs were trained on.

    A model without a run around it brings no corpus: its labels are checked, its documents cannot be.
    """
    from xmc import run

    own = {given: run.corpus_of(given, None) for given in runs if (given / "stages").is_dir()}
    if not own:
        raise InputError(f"{runs[0]}: is a model without its corpus; name at least one run's directory")
    (first, corpus), *others = own.items()
    for given, model in zip(runs, models, strict=True):
        try:
            run.check_same_labels(model, corpus)
        except InputError:
            raise InputError(
                f"{given}: its labels are not those of {first}; an ensemble needs runs of the same corpus"
            ) from None
    for given, other in others:
        for split in ("valid", "test"):
            if (split in other.splits) != (split in corpus.splits) or (
                split in corpus.splits and not other.ids(split).equals(corpus.ids(split))
            ):
                raise InputError(
                    f"{given}: holds out other documents ({split}) than {first}, so that one of them was trained on "
                    "what the other is measured by; train both with the same corpus settings"
                )
    return corpus


def _config(
    runs: Sequence[Path], models: Sequence[Path], corpus: Corpus, directory: Path, how: Form | None
) -> Any:
    """The ensemble's settings: those that all systems have in common, as the first member has them."""
    from raycluster.tracking import RUN_FILE
    from xmc.config import CommonConfig, RunConfig
    from xmc.evaluation.combine import EnsembleConfig
    from xmc.model import SEVERAL_SYSTEMS, read_config

    first = read_config(models[0])
    if how is None:
        how = "weighted" if "valid" in corpus.splits else "mean"
        if how == "mean":
            print(
                "no validation part to fit weights on (corpus.valid_fraction=0): the mean of scores is taken"
            )
    known = runs[0] / RUN_FILE
    uri = json.loads(known.read_text())["uri"] if known.exists() else first.tracking.uri
    return CommonConfig(
        system=SEVERAL_SYSTEMS,
        seed=first.seed,
        run=RunConfig(dir=str(directory), top_k=first.run.top_k),
        corpus=replace(first.corpus, path=str(corpus.path.resolve())),
        metrics=first.metrics,
        tracking=replace(first.tracking, uri=uri),
        ensemble=EnsembleConfig(how),
    )


def _forget_another(directory: Path, about: dict[str, Any]) -> None:
    """MLflow keeps a run's first parameters: where others are made in the same place, they get a run of their own."""
    from raycluster.tracking import RUN_FILE
    from xmc.files import atomic_write_text

    file, text = directory / MEMBERS_FILE, json.dumps(about, indent=2) + "\n"
    if (directory / RUN_FILE).exists() and not file.exists():
        raise InputError(f"{directory}: is the run of another command; give -o a directory of its own")
    if file.exists() and file.read_text() != text:
        (directory / RUN_FILE).unlink(missing_ok=True)
    atomic_write_text(file, text)


def _parameters(config: Any, runs: Sequence[Path]) -> dict[str, Any]:
    from raycluster.tracking import RUN_FILE
    from xmc.settings import flatten, to_mapping

    named: dict[str, Any] = {}
    for number, given in enumerate(runs):
        named[f"member.{number}"] = str(given)
        if (given / RUN_FILE).exists():
            named[f"member.{number}.run_id"] = json.loads((given / RUN_FILE).read_text())["run_id"]
    return flatten(to_mapping(config)) | named


def _ensemble(
    config: Any, directory: Path, tracker: Any, runs: Sequence[Path], models: Sequence[Path]
) -> None:
    from raycluster.stages import Runner, prune
    from xmc import run
    from xmc.systems.shared_stages import corpus_stage, open_corpus

    runner = Runner(directory / "stages")
    runner.run(corpus_stage(config))
    corpus = open_corpus(runner.done)
    on_valid = run.validation_predictions(config, models, corpus, runner)
    combination = run.fit_combination(config, corpus, on_valid)
    model = runner.run(run.ensemble_stage(config, models, combination, corpus))
    if on_valid:
        print("\nvalidation\n" + _table(config, runs, on_valid, combination, corpus, "valid"))
    evaluated = None
    if "test" in corpus.splits:
        on_test = run.member_predictions(config, models, corpus, "test", runner)
        known = partial(combination, on_test, config.run.top_k)
        evaluated = runner.run(run.evaluate_stage(config, model, known))
        print("\ntest\n" + _table(config, runs, on_test, combination, corpus, "test"))
    run.point(directory / "model", model)
    prune(directory / "stages", runner.done)
    tracker.results({f"weight.{i}": weight for i, weight in enumerate(combination.weights)}, [])
    run.finish(config, directory, runner, tracker, evaluated)


def _table(
    config: Any,
    runs: Sequence[Path],
    parts: Sequence[TopK],
    combination: Combination,
    corpus: Corpus,
    split: str,
) -> str:
    """The members' figures above the ensemble's; on validation, where one may choose, among those of every form."""
    from xmc import run
    from xmc.evaluation.combine import FORMS, Combination
    from xmc.evaluation.table import align

    measured = run.measurer(corpus, split, config)
    rows = [(str(given), measured(part)) for given, part in zip(runs, parts, strict=True)]
    for form in FORMS:
        if form == combination.how:
            rows.append((f"ensemble: {form}", measured(combination(parts, config.run.top_k))))
        elif split == "valid":
            rows.append((f"  not taken: {form}", measured(Combination(form)(parts, config.run.top_k))))
    return "\n".join(align(_cells(rows), "<"))


def _cells(rows: Sequence[tuple[str, MetricResult]]) -> list[list[str]]:
    keys = [key for key in rows[0][1].values if key.split("@")[0] in ("P", "nDCG", "PSP")]
    return [["%", *keys], *([name, *(f"{result[key]:.2f}" for key in keys)] for name, result in rows)]


if __name__ == "__main__":
    exit_on_input_error(main)
