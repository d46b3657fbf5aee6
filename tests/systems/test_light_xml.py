"""LightXML from the command's settings to labelled texts, on the bundled sample with a small random encoder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import xmc
from raycluster.tracking import RUN_FILE
from xmc import config, run
from xmc.corpus.store import Corpus
from xmc.errors import InputError
from xmc.labels.topk import TopK

pytestmark = pytest.mark.slow  # each run starts training groups and commands of its own

SMALL = [
    "encoder.name=random:bert",
    "encoder.layers_pooled=2",
    "encoder.max_tokens=32",
    "train.batch_size=64",
    "train.epochs=1",
    "train.label_rate=0.01",
    "clusters.max_leaf_size=16",
    "model.head.recalled_clusters=6",
    "model.head.rank_width=16",
]


def settings(directory: Path, *more: str) -> config.CommonConfig:
    return config.load("light_xml", [*SMALL, f"run.dir={directory}", *more])


@pytest.fixture(scope="module")
def clustered(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run.train(settings(tmp_path_factory.mktemp("runs") / "clustered", "model.mode=clustered"))


def values(directory: Path) -> dict[str, float]:
    (file,) = directory.glob("stages/evaluate-*/metrics.json")
    return json.loads(file.read_text())["values"]


def test_a_run_leaves_a_model_that_beats_the_first_guess(clustered: Path):
    # The most frequent label alone reaches 31 %; a network that learnt nothing stays far below.
    assert values(clustered)["P@1"] > 25
    model = xmc.load(clustered)
    found = model.predict(["a strategy game", "x", "", "C library " * 100_000], k=4)
    assert [len(row) for row in found] == [4, 4, 4, 4]
    assert all(0 <= score <= 1 for row in found for _, score in row)
    assert all(row == sorted(row, key=lambda pair: -pair[1]) for row in found)
    with pytest.raises(InputError, match="list of texts"):
        model.predict("one text")


def test_the_same_command_again_does_nothing_and_a_changed_metric_only_measures(clustered: Path, capsys):
    (training,) = clustered.glob("stages/train-*/stage.json")
    before = training.stat().st_mtime_ns
    again = settings(clustered, "model.mode=clustered", "metrics.ks=[1, 2]")
    run.train(again)
    said = capsys.readouterr().out
    assert "train: up to date" in said
    assert "evaluate: done" in said
    assert training.stat().st_mtime_ns == before
    assert "P@2" in values(clustered)
    run.train(settings(clustered, "model.mode=clustered"))


def test_saved_predictions_measure_the_same_as_the_model(clustered: Path, tmp_path: Path):
    corpus = run.corpus_of(clustered, None)
    (saved,) = clustered.glob("stages/evaluate-*/predictions.parquet")
    top = TopK.load(saved)
    names = corpus.labels.names
    rows = zip(corpus.ids("test").to_pylist(), top.label_ids, top.scores, strict=True)
    lines = [
        {"id": i, "labels": [names[int(j)].as_py() for j in ids], "scores": [float(s) for s in scores]}
        for i, ids, scores in rows
    ]
    file = tmp_path / "predictions.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)))
    command = [sys.executable, "-m", "xmc.evaluate", str(clustered), "--predictions", str(file), "--json"]
    subprocess.run([*command, str(tmp_path / "out.json")], check=True, stdout=subprocess.DEVNULL)
    measured = json.loads((tmp_path / "out.json").read_text())["values"]
    assert measured == pytest.approx(values(clustered))
    file.write_text(json.dumps(lines[0]) + "\n")
    done = subprocess.run([*command, str(tmp_path / "out.json")], capture_output=True, text=True)
    assert done.returncode == 2
    assert "299 documents of test have no prediction" in done.stderr


def test_predict_keeps_order_and_names_a_bad_row(clustered: Path, tmp_path: Path):
    documents = [{"id": f"d{i}", "text": f"library number {i}"} for i in range(40)]
    file, out = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    file.write_text("".join(json.dumps(d) + "\n" for d in documents))
    command = [sys.executable, "-m", "xmc.predict", str(clustered), str(file), "-o", str(out), "-k", "3"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    import pyarrow.parquet as pq

    table = pq.read_table(out)
    assert table["id"].to_pylist() == [d["id"] for d in documents]
    expected = xmc.load(clustered).predict([d["text"] for d in documents], k=3)
    assert table["labels"].to_pylist() == [[label for label, _ in row] for row in expected]
    file.write_text(json.dumps(documents[0]) + "\nnot json\n")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"{file}:2" in done.stderr


def test_mlflow_has_the_run_and_serves_its_model(clustered: Path):
    import mlflow
    import pandas as pd

    about = json.loads((clustered / RUN_FILE).read_text())
    mlflow.set_tracking_uri(about["uri"])
    logged = mlflow.get_run(about["run_id"])
    assert logged.info.status == "FINISHED"
    assert logged.data.params["train.batch_size"] == "64"
    assert logged.data.metrics["P_at_1"] == pytest.approx(values(clustered)["P@1"])
    history = mlflow.MlflowClient().get_metric_history(about["run_id"], "loss")
    assert [metric.step for metric in history] == list(range(1, len(history) + 1))
    artifacts = {item.path for item in mlflow.MlflowClient().list_artifacts(about["run_id"])}
    assert {"bands.png", "loss.png", "metrics.json", "table.txt"} <= artifacts
    served = mlflow.pyfunc.load_model(f"runs:/{about['run_id']}/model")
    texts = ["a strategy game", "python bindings"]
    expected = [[label for label, _ in row] for row in xmc.load(clustered).predict(texts, k=3)]
    for given in (texts, pd.DataFrame({"text": texts})):
        assert served.predict(given, params={"k": 3})["labels"].tolist() == expected


def test_another_label_set_is_refused(clustered: Path, tmp_path: Path, ray_session: None):
    from xmc.corpus import CorpusConfig, build

    (tmp_path / "in").mkdir()
    rows = [{"id": str(i), "text": f"text {i}", "labels": ["a", "b"]} for i in range(20)]
    for name in ("train", "test"):
        lines = "".join(json.dumps({**row, "id": name + row["id"]}) + "\n" for row in rows)
        (tmp_path / "in" / f"{name}.jsonl").write_text(lines)
    other: Corpus = build(tmp_path / "in", tmp_path / "corpus", CorpusConfig())
    model = (clustered / "model").resolve()
    with pytest.raises(InputError, match="labels that are not the model's"):
        run.check_same_labels(model, other)


def test_static_negatives_and_the_last_layer_alone(ray_session: None, tmp_path: Path):
    static = [
        "model.mode=clustered",
        "model.head.negatives=static",
        "model.recall_epochs=1",
        "train.epochs=2",
    ]
    directory = run.train(settings(tmp_path / "static", *static, "encoder.layers_pooled=1"))
    assert values(directory)["P@5"] > 5


def test_an_ensemble_averages_members_that_are_child_runs(ray_session: None, tmp_path: Path):
    members = "members=[{seed: 1}, {seed: 2, model: {mode: flat}}]"
    directory = run.train(settings(tmp_path / "both", "model.mode=clustered", members))
    texts = ["a strategy game", "python bindings"]
    num_labels = 385
    alone = [
        xmc.load(path).top_k(texts, num_labels)
        for path in sorted((directory / "model" / "members").iterdir())
    ]
    means = np.zeros((len(texts), num_labels))
    for top in alone:
        kept = top.label_ids >= 0
        np.add.at(means, (np.nonzero(kept)[0], top.label_ids[kept]), top.scores[kept] / len(alone))
    together = xmc.load(directory).top_k(texts, 5)
    assert np.sort(means, axis=1)[:, ::-1][:, 0] == pytest.approx(together.scores[:, 0], rel=1e-4)
    import mlflow

    about = json.loads((directory / RUN_FILE).read_text())
    client = mlflow.MlflowClient(about["uri"])
    experiment = client.get_run(about["run_id"]).info.experiment_id
    children = client.search_runs([experiment], f"tags.mlflow.parentRunId = '{about['run_id']}'")
    assert sorted(child.data.params["seed"] for child in children) == ["1", "2"]


def test_an_empty_corpus_is_refused(ray_session: None, tmp_path: Path):
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(InputError, match="train"):
        run.train(settings(tmp_path / "run", f"corpus.path={tmp_path / 'train.jsonl'}"))
