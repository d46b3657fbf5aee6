"""Compare runs: the settings that differ, and the figures with their differences and 95 % intervals.

    python -m xmc.compare RUN RUN … [--baseline RUN] [--csv FILE] [--markdown FILE] [--html FILE]
    python -m xmc.compare EXPERIMENT --tracking-uri sqlite:///runs/mlflow.db        or MLflow run ids

RUN is a run's directory, of any system; one with variants stands for all of them. All must be measured on the same test
documents; an experiment's runs that are not are named and left out. Figures are counted anew from the saved
predictions, for all runs by the baseline's settings for metrics; intervals are over documents, paired (see
xmc/evaluation/bootstrap.py). An MLflow run whose directory is not here is shown with the figures that MLflow has,
without intervals.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before MLflow is imported: it sets its quiet defaults.
from raycluster.tracking import BEST_OF_SWEEP, RUN_FILE
from xmc.errors import InputError, exit_on_input_error

if TYPE_CHECKING:
    import numpy as np

    from xmc.corpus.store import Corpus
    from xmc.evaluation.comparison import Comparison
    from xmc.labels.topk import TopK


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m xmc.compare", description="Compare runs.")
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run's directory, an MLflow run id or an experiment's name"
    )
    parser.add_argument(
        "--baseline", metavar="RUN", help="what the others are compared with (default: the first)"
    )
    parser.add_argument("--tracking-uri", metavar="URI", help="MLflow's store, for run ids and experiments")
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="write settings and figures there, a row each"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with tables and plots there")
    parser.add_argument("--resamples", type=int, default=1000, help="of the bootstrap (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap (default: 0)")
    arguments = parser.parse_args()
    if arguments.resamples < 1:
        raise InputError(f"--resamples is {arguments.resamples}; give at least 1")
    from xmc.evaluation.compare_page import to_html
    from xmc.evaluation.comparison import format_comparison, to_csv, to_markdown
    from xmc.files import atomic_write_text

    sources = [source for word in arguments.runs for source in find(word, arguments.tracking_uri)]
    baseline = _place(arguments.baseline, sources) if arguments.baseline else None
    kept, left_out = of_one_test(sources, baseline)
    for reason in left_out:
        print(f"left out  {reason}")
    first = 0 if baseline is None else kept.index(baseline)
    comparison = compare([sources[place] for place in kept], first, arguments.resamples, arguments.seed)
    print(format_comparison(comparison))
    for file, render in (
        (arguments.csv, to_csv),
        (arguments.markdown, to_markdown),
        (arguments.html, to_html),
    ):
        if file:
            atomic_write_text(file, render(comparison))
            print(f"written: {file}")


# ------------------------------------------------------------------------------------------------ finding runs


@dataclass(frozen=True)
class Source:
    """A run before it is measured: its directory, or what MLflow has of it."""

    name: str
    directory: Path | None
    settings: dict[str, Any] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    curves: dict[str, np.ndarray] = field(default_factory=dict)
    # Whether it was not named itself but is one of an experiment's.
    found: bool = False


def find(word: str, tracking_uri: str | None) -> list[Source]:
    """The run or runs that a word of the command line names."""
    path = Path(word)
    variants = sorted(variant for variant in path.glob("variants/*") if (variant / "stages").is_dir())
    # An experiment may have the name of any other directory, as `xmc` has in this repository.
    if variants or (path / "stages").is_dir():
        return [Source(str(run), run) for run in variants or [path]]
    if tracking_uri is None:
        raise InputError(f"{word}: no run's directory; MLflow's runs and experiments need --tracking-uri")
    return _find_mlflow(word, tracking_uri)


def _find_mlflow(word: str, uri: str) -> list[Source]:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client = MlflowClient(tracking_uri=uri)
    try:
        experiment = client.get_experiment_by_name(word)
        if experiment is None:
            return [_named_run(client, word, uri)]
        found = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
    except MlflowException as error:
        raise InputError(
            f"{word}: neither a run's directory nor a run or experiment of {uri} ({error})"
        ) from error
    measured = [run for run in found if _values(run)]
    if not measured:
        raise InputError(f"{word}: none of the {len(found)} runs of this experiment has been measured")
    return [_of_mlflow(client, run, uri, found=True) for run in measured]


def _named_run(client: Any, run_id: str, uri: str) -> Source:
    run = client.get_run(run_id)
    if not _values(run):
        raise InputError(f"{run_id}: {run.info.run_name} has no figures of its own; of a sweep, name trials")
    return _of_mlflow(client, run, uri, found=False)


def _of_mlflow(client: Any, run: Any, uri: str, found: bool) -> Source:
    import numpy as np

    directory = _directory_of(run, uri)
    if directory is not None:
        return Source(str(directory), directory, found=found)
    history = client.get_metric_history(run.info.run_id, "loss")
    curve = np.array([(metric.step, metric.value) for metric in history]).reshape(-1, 2)
    return Source(
        run.info.run_name or run.info.run_id,
        None,
        dict(run.data.params),
        _values(run),
        {"train": curve} if len(curve) else {},
        found,
    )


def _values(run: Any) -> dict[str, float]:
    """The figures that a run logged, by the names of its table; a sweep's own run has none but its best trial's."""
    return {
        key.replace("_at_", "@"): value
        for key, value in run.data.metrics.items()
        if "_at_" in key and not key.startswith(BEST_OF_SWEEP)
    }


def _directory_of(run: Any, uri: str) -> Path | None:
    """A run's directory where it is here with predictions: as its settings say, or beside the store's file."""
    said = Path(run.data.params.get("run.dir", ""))
    beside = Path(uri.removeprefix("sqlite:///")).parent / said.name
    for candidate in (said, beside):
        file = candidate / RUN_FILE
        own = file.is_file() and json.loads(file.read_text())["run_id"] == run.info.run_id
        if own and any(candidate.glob("stages/evaluate-*")):
            return candidate
    return None


def _place(wanted: str, sources: Sequence[Source]) -> int:
    for number, source in enumerate(sources):
        if wanted in (source.name, Path(source.name).name) or Path(wanted) == source.directory:
            return number
    names = ", ".join(source.name for source in sources)
    raise InputError(f"--baseline {wanted}: is none of the runs that are compared: {names}")


# ------------------------------------------------------------------------------------------------ test parts


@dataclass(frozen=True)
class TestPart:
    """What a run is measured on: what its settings call it, and hashes where its corpus is here."""

    name: str
    path: str
    documents: str = ""
    truth: str = ""

    def difference(self, other: TestPart) -> str:
        """Why figures of the two cannot be compared, as the words between the runs' names; empty where they can."""
        if not self.documents or not other.documents:
            same = self.path == other.path or (self.name and self.name == other.name)
            return "" if same else "is, by its settings, measured on other data than"
        if self.documents != other.documents:
            return "is measured on other test documents than"
        return "" if self.truth == other.truth else "knows other labels, and so other true ones of test, than"


def of_one_test(sources: Sequence[Source], baseline: int | None) -> tuple[list[int], list[str]]:
    """The places of the runs that are measured on what the baseline is, or else the first that was named, or else most;
    and for each other one why it is left out. Those that were named stay in any case: `compare` refuses them."""
    parts, left_out = {}, []
    for place, source in enumerate(sources):
        try:
            parts[place] = _test_part(source)
        except InputError as error:
            if not source.found or place == baseline:
                raise
            left_out.append(str(error))
    if not parts:
        raise InputError("; ".join(left_out))
    named = [place for place in parts if not sources[place].found]
    wanted = baseline if baseline is not None else named[0] if named else _most_common(parts)
    kept = []
    for place, part in parts.items():
        if (why := part.difference(parts[wanted])) and sources[place].found:
            left_out.append(f"{sources[place].name}: {why} {sources[wanted].name}")
        else:
            kept.append(place)
    return kept, left_out


def _most_common(parts: Mapping[int, TestPart]) -> int:
    """The place of the first run whose test part most runs share."""
    shared = {
        place: sum(not part.difference(other) for other in parts.values()) for place, part in parts.items()
    }
    return max(shared, key=lambda place: shared[place])


def _test_part(source: Source) -> TestPart:
    if source.directory is None:
        return _said_part(source.settings)
    measured = Measured.read(source.directory)
    said = _said_part(measured.settings)
    return TestPart(said.name, said.path, *_test_hashes(measured.corpus.path.resolve()))


def _said_part(settings: Mapping[str, Any]) -> TestPart:
    return TestPart(*(str(settings.get(f"corpus.{key}") or "") for key in ("name", "path")))


@cache
def _test_hashes(path: Path) -> tuple[str, str]:
    """Of a corpus' test documents, and of their true labels by name."""
    from xmc.corpus.store import Corpus

    corpus = Corpus.open(path)
    matrix = corpus.label_matrix("test")
    truth = hashlib.sha256("\0".join(corpus.labels.names[: corpus.num_labels].to_pylist()).encode())
    for array in (matrix.indptr, matrix.indices, corpus.num_unseen("test")):
        truth.update(array.astype("int64").tobytes())
    documents = hashlib.sha256("\0".join(corpus.ids("test").to_pylist()).encode())
    return documents.hexdigest(), truth.hexdigest()


# ------------------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True)
class Measured:
    """What a run's directory holds of its evaluation."""

    model: Path
    corpus: Corpus
    evaluated: Path

    @classmethod
    def read(cls, directory: Path) -> Measured:
        from raycluster.stages import RECORD
        from xmc.corpus.store import Corpus
        from xmc.model import model_directory

        model = model_directory(directory)
        for evaluated in sorted(directory.glob("stages/evaluate-*")):
            record = json.loads((evaluated / RECORD).read_text())
            if record["settings"]["model"] == model.name:
                corpus = Corpus.open(directory / "stages" / record["inputs"]["corpus"] / "corpus")
                return cls(model, corpus, evaluated)
        raise InputError(
            f"{directory}: has no saved predictions for a test part; train with one (corpus.test_fraction=0.1, or a "
            "test file), or give the training command again to finish it"
        )

    def predictions(self) -> TopK:
        from xmc.labels.topk import TopK
        from xmc.run import PREDICTIONS

        return TopK.load(self.evaluated / PREDICTIONS)

    @property
    def settings(self) -> dict[str, Any]:
        from xmc.config import read_yaml
        from xmc.model import CONFIG_FILE, ENSEMBLE_FILE
        from xmc.settings import flatten

        settings = flatten(read_yaml(self.model / CONFIG_FILE))
        if (self.model / ENSEMBLE_FILE).exists():
            weights = json.loads((self.model / ENSEMBLE_FILE).read_text())["weights"]
            settings["ensemble.weights"] = ", ".join(f"{weight:.3f}" for weight in weights)
        return settings

    def curves(self, directory: Path) -> dict[str, np.ndarray]:
        """Step and loss (S, 2) of each stage of the model that trained a network."""
        import numpy as np

        from raycluster.job import STEPS_FILE
        from raycluster.stages import RECORD

        inputs = json.loads((self.model / RECORD).read_text())["inputs"]
        found = {}
        for name, stage in inputs.items():
            file = directory / "stages" / stage / STEPS_FILE
            if file.exists():
                rows = [json.loads(line) for line in file.read_text().splitlines()]
                found[name] = np.array([(row["step"], row["loss"]) for row in rows if "loss" in row])
        return {name: curve for name, curve in found.items() if len(curve)}


def compare(
    sources: Sequence[Source], baseline: int = 0, num_resamples: int = 1000, seed: int = 0
) -> Comparison:
    """The runs measured by the same rule on the same documents and the same resamples of them.

    Raises InputError for a run that is measured on others.
    """
    from xmc.evaluation.bootstrap import resample
    from xmc.evaluation.comparison import Comparison, Run

    here = {i: Measured.read(s.directory) for i, s in enumerate(sources) if s.directory is not None}
    # The rule is the baseline's; where its directory is not here, the first one's that is.
    rule = baseline if baseline in here else min(here, default=0)
    tests = [_test_part(source) for source in sources]
    for number, source in enumerate(sources):
        other = rule if number in here and number != rule else baseline
        if why := tests[number].difference(tests[other]):
            raise InputError(f"{source.name}: {why} {sources[other].name}; compare runs of one test part")
    values, parts = _measure(here, rule, sources)
    resampled = (
        dict(zip(here, resample(list(parts.values()), num_resamples, seed), strict=True)) if here else {}
    )
    names = _short_names([source.name for source in sources])
    runs = []
    for number, source in enumerate(sources):
        if number in here:
            assert source.directory is not None
            run = here[number]
            curves = run.curves(source.directory)
            runs.append(Run(names[number], run.settings, values[number], resampled[number], curves))
        else:
            runs.append(Run(names[number], source.settings, source.values, curves=source.curves))
    counted = int((next(iter(parts[min(here)].values()))[1] > 0).sum()) if here else 0
    return Comparison(runs, baseline, counted, num_resamples)


def _measure(
    here: Mapping[int, Measured], rule: int, sources: Sequence[Source]
) -> tuple[dict[int, dict[str, float]], dict[int, Any]]:
    """Each run's figures, and what each document adds to them."""
    from xmc import run
    from xmc.model import read_config

    if not here:
        return {}, {}
    corpus, config = here[rule].corpus, read_config(here[rule].model)
    truth, num_unseen = corpus.label_matrix("test"), corpus.num_unseen("test")
    measured = run.measurer(corpus, "test", config)
    values, parts = {}, {}
    for number, one in here.items():
        predictions = one.predictions()
        try:
            values[number] = measured(predictions).values
            parts[number] = run.metrics_of(corpus, config).parts(predictions, truth, num_unseen)
        except InputError as error:
            raise InputError(f"{sources[number].name}: {error}") from error
    return values, parts


def _short_names(names: Sequence[str]) -> list[str]:
    """The names' last parts where those tell them apart, else the names without the directories that all share."""
    parts = [Path(name).parts or (name,) for name in names]
    if len({own[-1] for own in parts}) == len(parts):
        return [own[-1] for own in parts]
    levels = zip(*(own[:-1] for own in parts), strict=False)
    shared = len(list(takewhile(lambda level: len(set(level)) == 1, levels)))
    return [str(Path(*own[shared:])) for own in parts]


if __name__ == "__main__":
    exit_on_input_error(main)
