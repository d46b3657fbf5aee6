from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

import xmc
from raycluster.tracking import RUN_FILE
from tests.runs import guess, make_corpus, make_run
from xmc import config, run
from xmc.corpus.store import Corpus
from xmc.ensemble import ensemble
from xmc.errors import InputError
from xmc.evaluation.combine import Combination
from xmc.labels.topk import TopK
from xmc.model import ENSEMBLE_FILE, Ensemble, Model, read_config

NOISE = {"good": 1.5, "poor": 5.0, "margin": 1.5}


@pytest.fixture(scope="module")
def corpus(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Members predict by their directory's name, without a network; the list tells who was asked for what."""
    calls: list[tuple[str, str]] = []

    def predict(model: Path, corpus: Corpus, split: str, k: int) -> TopK:
        name = model.parent.parent.name
        calls.append((name, split))
        top = guess(corpus, split, NOISE[name], len(calls), k)
        return TopK(top.label_ids, 10 * np.log(top.scores)) if name == "margin" else top

    monkeypatch.setattr(run, "predict_split", predict)
    return calls


def members(home: Path, corpus: Corpus, *names: str) -> list[Path]:
    return [make_run(home / name, corpus) for name in names]


def measured(directory: Path) -> dict[str, float]:
    (file,) = directory.glob("stages/evaluate-*/metrics.json")
    return json.loads(file.read_text())["values"]


def test_weights_are_fitted_on_validation_and_members_are_asked_once(
    corpus: Corpus, tmp_path: Path, asked: list[tuple[str, str]], capsys: pytest.CaptureFixture
):
    runs = members(tmp_path, corpus, "good", "poor", "margin")
    out = ensemble(runs, tmp_path / "all")
    names = ("good", "poor", "margin")
    assert asked == [(name, split) for split in ("valid", "test") for name in names]
    saved = Combination.load(out / "model" / ENSEMBLE_FILE, 3)
    assert saved.how == "weighted"
    assert saved.weights[1] < min(saved.weights[0], saved.weights[2])
    said = capsys.readouterr().out
    assert "ensemble: weighted" in said
    assert "not taken: round_robin" in said
    assert "python -m xmc.predict" in said
    assert said.rstrip().endswith(str(tmp_path / "all"))

    # Another form is made of the same predictions, measured anew, and is another MLflow run.
    first = json.loads((out / RUN_FILE).read_text())["run_id"]
    weighted = measured(out)["P@1"]
    ensemble(runs, out, "mean")
    assert len(asked) == 6
    assert Combination.load(out / "model" / ENSEMBLE_FILE, 3) == Combination("mean")
    assert measured(out)["P@1"] != weighted
    assert json.loads((out / RUN_FILE).read_text())["run_id"] != first
    assert read_config(out / "model").ensemble.how == "mean"


def test_mlflow_names_the_members(corpus: Corpus, tmp_path: Path, asked: list[tuple[str, str]]):
    import mlflow

    runs = members(tmp_path, corpus, "good", "poor")
    out = ensemble(runs, tmp_path / "both")
    about = json.loads((out / RUN_FILE).read_text())
    logged = mlflow.MlflowClient(about["uri"]).get_run(about["run_id"])
    assert logged.info.status == "FINISHED"
    assert [logged.data.params[f"member.{i}"] for i in range(2)] == list(map(str, runs))
    assert logged.data.params["ensemble.how"] == "weighted"
    assert sum(logged.data.metrics[f"weight.{i}"] for i in range(2)) == pytest.approx(1)
    assert logged.data.metrics["P_at_1"] == pytest.approx(measured(out)["P@1"])


def test_without_a_validation_part(
    ray_session: None, tmp_path: Path, asked: list[tuple[str, str]], capsys: pytest.CaptureFixture
):
    runs = members(tmp_path, make_corpus(tmp_path / "c", valid_fraction=0.0), "good", "poor")
    with pytest.raises(InputError, match="has no validation part"):
        ensemble(runs, tmp_path / "weighted", "weighted")
    out = ensemble(runs, tmp_path / "mean")
    assert "the mean of scores is taken" in capsys.readouterr().out
    assert Combination.load(out / "model" / ENSEMBLE_FILE, 2).how == "mean"
    assert {split for _, split in asked} == {"test"}


def test_what_is_no_ensemble_is_refused(
    corpus: Corpus, ray_session: None, tmp_path: Path, asked: list[tuple[str, str]]
):
    good, poor = members(tmp_path, corpus, "good", "poor")
    other = make_run(tmp_path / "margin", make_corpus(tmp_path / "other", seed=1))
    with pytest.raises(InputError, match="two or more"):
        ensemble([good], tmp_path / "out")
    with pytest.raises(InputError, match="same model"):
        ensemble([good, poor, good], tmp_path / "out")
    with pytest.raises(InputError, match="holds out other documents"):
        ensemble([good, other], tmp_path / "out")
    with pytest.raises(InputError, match="run of another command"):
        (poor / RUN_FILE).write_text("{}")
        ensemble([good, other := make_run(tmp_path / "third", corpus)], poor)
    labels = other / "model" / "labels.parquet"
    import pyarrow.parquet as pq

    table = pq.ParquetFile(labels).read()
    os.remove(labels)
    pq.write_table(table.slice(1), labels)
    with pytest.raises(InputError, match="its labels are not those of"):
        ensemble([good, other], tmp_path / "out")
    assert not asked


def test_members_of_an_ensemble_are_ordered_by_number():
    names = np.array([f"label {i}" for i in range(20)])

    class One:
        def __init__(self, label: int) -> None:
            self.label = label

        def top_k(self, texts: list[str], k: int) -> TopK:
            ids = np.array([[self.label, 15]] * len(texts), np.int32)
            return TopK(ids, np.array([[0.9, 0.1]] * len(texts), np.float32))

    both = Model(names, Ensemble([Model(names, One(label)) for label in (3, 1)], Combination("round_robin")))
    assert [label for label, _ in both.predict(["a"], k=3)[0]] == ["label 3", "label 1", "label 15"]
    with pytest.raises(InputError, match="reads texts"):
        both.top_k_of_features(None, 3)  # type: ignore[arg-type]


@pytest.mark.slow
def test_an_ensemble_of_two_systems_predicts_as_its_members_together(ray_session: None, tmp_path: Path):
    from tests.systems.test_light_xml import SMALL

    network = run.train(
        config.load("light_xml", [*SMALL, f"run.dir={tmp_path / 'network'}", "model.mode=flat"])
    )
    linear = run.train(config.load("linear", ["corpus.path=sample", f"run.dir={tmp_path / 'linear'}"]))
    out = ensemble([network, linear], tmp_path / "both")
    (saved,) = out.glob("stages/evaluate-*/predictions.parquet")
    texts = run.corpus_of(out, None).texts("test").to_pylist()[:40]
    together = xmc.load(out).top_k(texts, 10)
    np.testing.assert_allclose(together.scores, TopK.load(saved).rows(0, 40).scores, rtol=1e-4)
    assert measured(out)["nDCG@5"] > measured(network)["nDCG@5"]
    # A run's own ensemble takes the form from its settings; an ensemble may be a member of another.
    inner = [*SMALL, "model.mode=flat", "members=[{seed: 1}, {seed: 2}]", "ensemble.how=round_robin"]
    seeds = run.train(config.load("light_xml", [*inner, f"run.dir={tmp_path / 'seeds'}"]))
    assert Combination.load(seeds / "model" / ENSEMBLE_FILE, 2).how == "round_robin"
    nested = xmc.load(ensemble([seeds, linear], tmp_path / "nested", "mean_rank"))
    assert len(nested.predict(["a strategy game"], k=3)[0]) == 3
