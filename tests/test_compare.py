from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from raycluster.tracking import Tracker, TrackingConfig
from tests.runs import guess, make_corpus, make_run
from xmc import compare
from xmc.compare import Source, find
from xmc.corpus.store import Corpus
from xmc.errors import InputError
from xmc.settings import flatten


@pytest.fixture(scope="module")
def corpus(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def runs(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("runs")
    good = make_run(home / "good", corpus, guess(corpus, "test", 1.0, 0, 5), "train.epochs=7")
    return [good, make_run(home / "poor", corpus, guess(corpus, "test", 4.0, 1, 5))]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}"  # making one takes seconds


def track(directory: Path, config: TrackingConfig, corpus_path: str, **metrics: float) -> str:
    """The run of a directory in MLflow, with these figures; its id."""
    directory.mkdir(exist_ok=True)
    tracker = Tracker(directory, config, directory.name)
    settings = {"run": {"dir": str(directory)}, "system": "light_xml", "corpus": {"path": corpus_path}}
    tracker.parameters(flatten(settings))
    tracker.steps([{"step": 1, "time": 1.0, "loss": 0.5}])
    tracker.results(metrics, [])
    tracker.finish()
    return tracker.run_id


def sources(*directories: Path) -> list[Source]:
    return [source for directory in directories for source in find(str(directory), None)]


def test_figures_are_those_of_the_runs_own_tables(runs: list[Path]):
    compared = compare.compare(sources(*runs), num_resamples=200)
    for run, directory in zip(compared.runs, runs, strict=True):
        (file,) = directory.glob("stages/evaluate-*/metrics.json")
        own = {k: math.nan if v is None else v for k, v in json.loads(file.read_text())["values"].items()}
        assert run.values == pytest.approx(own, nan_ok=True)
    assert [run.name for run in compared.runs] == ["good", "poor"]
    assert compared.num_documents == 60
    for metric in ("P@1", "P@5", "nDCG@3", "PSP@5", "tail.R@5"):
        figure = compared.figure(metric, 1)
        assert figure.low <= figure.value <= figure.high
        assert figure.difference_low <= figure.difference <= figure.difference_high
    assert compared.figure("P@1", 1).differs
    assert set(compared.settings()) == {"train.epochs"}
    np.testing.assert_array_equal(compared.runs[0].curves["train"][:3], [[1, 1], [2, 1 / 2], [3, 1 / 3]])


def test_a_run_beside_itself_differs_by_nothing(runs: list[Path]):
    compared = compare.compare(sources(runs[0], runs[0]), num_resamples=50)
    for metric in compared.metrics:
        figure = compared.figure(metric, 1)
        if not math.isnan(figure.value):
            assert figure.difference == 0
        if metric in compared.runs[0].resampled and not math.isnan(figure.low):
            assert figure.difference_low == figure.difference_high == 0


def test_the_command_writes_what_it_is_asked_for(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    files = {f"--{kind}": str(tmp_path / f"out.{kind}") for kind in ("csv", "markdown", "html")}
    words = [*map(str, runs), "--baseline", "poor", "--resamples", "100"]
    monkeypatch.setattr(sys, "argv", ["compare", *words, *(word for pair in files.items() for word in pair)])
    compare.main()
    said = capsys.readouterr().out
    assert "train.epochs" in said
    assert "differences to run 2" in said
    rows = list(csv.DictReader(open(files["--csv"])))  # noqa: SIM115
    (p1,) = (row for row in rows if row["name"] == "P@1" and row["run"] == "good")
    assert float(p1["difference"]) > 0
    assert "| P@1 |" in Path(files["--markdown"]).read_text()
    assert "Training loss" in Path(files["--html"]).read_text()
    monkeypatch.setattr(sys, "argv", ["compare", *map(str, runs), "--baseline", "none"])
    with pytest.raises(InputError, match=r"good, .*poor"):
        compare.main()


def test_other_test_documents_and_other_labels_are_refused(
    runs: list[Path], corpus: Corpus, tmp_path: Path, ray_session: None
):
    other = make_corpus(tmp_path / "other", seed=1)
    elsewhere = make_run(tmp_path / "elsewhere", other, guess(other, "test", 1.0, 0, 5))
    with pytest.raises(InputError, match="elsewhere: is measured on other test documents"):
        compare.compare(sources(runs[0], elsewhere))
    given = tmp_path / "fewer" / "input"
    given.mkdir(parents=True)
    source = corpus.path.parent / "input"
    (given / "test.jsonl").write_text((source / "test.jsonl").read_text())
    train = [line for line in (source / "train.jsonl").read_text().splitlines() if "heavy" not in line]
    (given / "train.jsonl").write_text("\n".join(train) + "\n")
    from xmc.corpus import CorpusConfig, build

    fewer = build(given, tmp_path / "fewer" / "corpus", CorpusConfig())
    narrower = make_run(tmp_path / "narrower", fewer, guess(fewer, "test", 1.0, 0, 5))
    with pytest.raises(InputError, match="knows other labels"):
        compare.compare(sources(runs[0], narrower))


def test_unmeasured_and_unknown_runs_are_refused(runs: list[Path], corpus: Corpus, tmp_path: Path):
    unmeasured = make_run(tmp_path / "unmeasured", corpus)
    with pytest.raises(InputError, match="no saved predictions"):
        compare.compare(sources(unmeasured))
    with pytest.raises(InputError, match="tracking-uri"):
        find("no-such-run", None)


def test_variants_stand_for_themselves(corpus: Corpus, tmp_path: Path):
    for name in ("b", "a"):
        make_run(tmp_path / "ablation" / "variants" / name, corpus, guess(corpus, "test", 1.0, 0, 5))
    assert [Path(s.name).name for s in find(str(tmp_path / "ablation"), None)] == ["a", "b"]


def test_runs_of_mlflow(corpus: Corpus, tmp_path: Path, store: str):
    here = make_run(tmp_path / "here", corpus, guess(corpus, "test", 1.0, 0, 5))
    config = TrackingConfig(uri=store, experiment="mine")
    figures = {"P@1": 12.5, "tail.P@1": 1.0}
    ids = [track(path, config, str(corpus.path), **figures) for path in (here, tmp_path / "gone")]
    Tracker(tmp_path, config, "never measured").finish()
    (tmp_path / "gone" / "mlflow.json").unlink()

    found = find("mine", config.uri)
    assert [source.directory for source in found] == [here, None]
    compared = compare.compare(found, num_resamples=20)
    assert compared.runs[1].name == "gone"
    assert compared.runs[1].values == {"P@1": 12.5, "tail.P@1": 1.0}
    assert compared.runs[1].curves["train"].tolist() == [[1, 0.5]]
    assert compared.figure("P@1", 1).difference == pytest.approx(12.5 - compared.runs[0].values["P@1"])
    assert find(ids[1], config.uri)[0].values == {"P@1": 12.5, "tail.P@1": 1.0}
    alone = compare.compare(find(ids[1], config.uri))
    assert alone.num_documents == 0
    with pytest.raises(InputError, match="neither a run's directory nor"):
        find("nothing", config.uri)


def test_an_experiment_is_compared_on_one_test_part(
    corpus: Corpus, tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """All runs of a folder are in one experiment by default, whatever their data."""
    config = TrackingConfig(
        uri=store, experiment="xmc"
    )  # also a directory of the repository, which is no run
    other = make_corpus(tmp_path / "other", seed=1)
    elsewhere = make_run(tmp_path / "elsewhere", other, guess(other, "test", 1.0, 0, 5))
    track(elsewhere, config, str(other.path), **{"P@1": 1.0})
    for name in ("one", "two"):
        run = make_run(tmp_path / name, corpus, guess(corpus, "test", 1.0, 0, 5))
        track(run, config, str(corpus.path), **{"P@1": 1.0})
    track(tmp_path / "gone", config, str(corpus.path), **{"P@1": 1.0})
    away = track(tmp_path / "away", config, "data/other", **{"P@1": 1.0})
    swept = track(tmp_path / "sweep", config, str(corpus.path), **{"best_P@1": 99.0})
    monkeypatch.setattr(sys, "argv", ["compare", "xmc", "--tracking-uri", store, "--resamples", "10"])
    compare.main()
    said = capsys.readouterr().out
    left_out = [Path(line.split()[2].rstrip(":")).name for line in said.splitlines() if "left out" in line]
    assert left_out == ["elsewhere", "away"]
    shown = [line.split()[1] for line in said.splitlines() if "light_xml" in line]
    assert shown == ["one", "two", "gone"]
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--baseline", "elsewhere"])
    compare.main()
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if "light_xml" in line] == [
        "elsewhere"
    ]
    # A run that is named is refused, not left out.
    named = [*sources(tmp_path / "one"), *find(away, store)]
    assert compare.of_one_test(named, None) == ([0, 1], [])
    with pytest.raises(InputError, match=r"away: is, by its settings, measured on other data than .*one"):
        compare.compare(named)
    with pytest.raises(InputError, match="sweep has no figures of its own"):
        find(swept, store)


def test_names_are_as_short_as_tells_them_apart():
    short = compare._short_names
    assert short(["runs/a", "runs/b"]) == ["a", "b"]
    assert short(["/x/runs/a/variants/one", "/x/runs/b/variants/one"]) == ["a/variants/one", "b/variants/one"]
    assert short(["runs/a", "runs/a"]) == ["a", "a"]
    assert short(["a", "runs/a", "."]) == ["a", "runs/a", "."]
