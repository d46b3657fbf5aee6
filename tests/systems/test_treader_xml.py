"""TReaderXML from the command's settings to labelled and explained texts, on the bundled sample with small networks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

import xmc
from raycluster import inference
from xmc import config, run
from xmc.errors import InputError
from xmc.systems import teaching

pytestmark = pytest.mark.slow  # each run starts training groups of its own

SMALL = [
    "encoder.name=random:bert",
    "encoder.max_tokens=32",
    "model.bottleneck_width=32",
    "train.batch_size=64",
    "train.epochs=1",
    "train.label_rate=0.01",
    "teacher.shard_rows=600",
    "teacher.scope.max_nodes=12",
]


def settings(directory: Path, *more: str) -> config.CommonConfig:
    return config.load("treader_xml", [*SMALL, f"run.dir={directory}", *more])


@pytest.fixture(scope="module")
def trained(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            inference, "_PIECE", 512
        )  # several files of vectors, and so several shards of the index
        return run.train(settings(tmp_path_factory.mktemp("runs") / "treader", "corpus.valid_fraction=0.1"))


def stage(directory: Path, name: str) -> Path:
    (found,) = directory.glob(f"stages/{name}-*")
    return found


def values(directory: Path) -> dict[str, float]:
    return json.loads((stage(directory, "evaluate") / "metrics.json").read_text())["values"]


def test_a_run_leaves_a_model_that_beats_the_first_guess(trained: Path):
    # The most frequent label alone reaches 31 %; a network that learnt nothing stays far below.
    assert values(trained)["P@1"] > 25
    model = xmc.load(trained)
    found = model.predict(["a strategy game", "x", "", "C library " * 10_000], k=4)
    assert [len(row) for row in found] == [4, 4, 4, 4]
    assert all(0 <= score <= 1 for row in found for _, score in row)


def test_scopes_are_looked_up_in_train_without_oneself(trained: Path):
    corpus = run.corpus_of(trained, None)
    parts = sorted((stage(trained, "neighbours") / "found" / "train").glob("*.safetensors"))
    found = np.concatenate([load_file(part)["ids"] for part in parts])
    assert found.shape == (corpus.num_documents("train"), 10)
    tokens = pq.read_table(sorted((stage(trained, "tokens") / "train").glob("*.parquet"))[0])["input_ids"]
    texts = tokens.to_pylist()
    for row in range(0, len(texts), 50):
        assert row not in found[row]
        assert all(texts[other] != texts[row] for other in found[row] if other < len(texts))
    assert len(teaching.shard_paths(stage(trained, "neighbours"))) > 1
    about = json.loads((stage(trained, "neighbours") / teaching.RECALL_FILE).read_text())
    assert 0.5 < about["recall"] <= 1


def test_batches_have_scopes_row_for_row(trained: Path):
    for split in ("train", "valid"):
        corpus = run.corpus_of(trained, None)
        tables = [
            pq.read_table(path) for path in sorted((stage(trained, "scopes") / split).glob("*.parquet"))
        ]
        assert sum(map(len, tables)) == corpus.num_documents(split)
        lengths = tables[0][teaching.NODES].combine_chunks().value_lengths()
        assert max(lengths.to_pylist()) == 12


def test_facets_are_in_the_scope(trained: Path):
    nodes = pq.read_table(stage(trained, "nodes") / "names.parquet")["name"].to_pylist()
    read = pq.read_table(sorted((stage(trained, "scopes") / "train").glob("*.parquet"))[0])[teaching.NODES]
    names = {nodes[node] for row in read.to_pylist() for node in row}
    assert "role" in names
    assert "role::program" in names


def test_the_same_command_again_does_nothing(trained: Path, capsys):
    run.train(settings(trained, "corpus.valid_fraction=0.1"))
    said = capsys.readouterr().out
    assert "neighbours: up to date" in said
    assert "train: up to date" in said


def test_new_texts_are_labelled_as_the_batch_is(trained: Path):
    texts = ["a strategy game", "Python bindings for a C library", "x"]
    model = xmc.load(trained)
    together = model.top_k(texts, 5)
    alone = [model.top_k([text], 5) for text in texts]
    assert [row.label_ids[0].tolist() for row in alone] == together.label_ids.tolist()


def test_an_explanation_lists_the_neighbours_and_the_scope(trained: Path):
    corpus = run.corpus_of(trained, None)
    text, own = corpus.texts("train")[5].as_py(), corpus.ids("train")[5].as_py()
    (row,) = xmc.load(trained).explain([text], k=3)
    assert [entry["label"] for entry in row] == [
        label for label, _ in xmc.load(trained).predict([text], k=3)[0]
    ]
    # A new text may find itself in train; its labels then have that neighbour behind them.
    nearest = row[0]["neighbours"][0]
    assert nearest["id"] == own
    assert nearest["similarity"] == pytest.approx(1, abs=1e-4)
    labels = corpus.label_matrix("train")[5].indices
    names = corpus.labels.names
    assert all(
        entry["neighbours"][0]["has_label"] == (entry["label"] in [names[int(i)].as_py() for i in labels])
        for entry in row
    )
    read = {node["label"]: node["weight"] for node in row[0]["scope"]}
    assert 0 < len(read) <= 12
    assert all(0 < weight <= 1 + 1e-6 for weight in read.values())


def test_words_and_clusters_and_no_teacher(ray_session: None, tmp_path: Path):
    """Word vectors below, clusters of labels as parents; a variant without any teacher."""
    changed = [
        "reads=words",
        "words.vectors.width=16",
        "words.max_words=40",
        "teacher.hierarchy=clusters",
        "train.workers=2",
        "train.accumulate=2",
        "variants=[{name: with}, {name: without, model: {teacher: false, reading: none}}]",
    ]
    directory = run.train(settings(tmp_path / "words", *changed))
    for name in ("with", "without"):
        home = directory / "variants" / name
        assert values(home)["P@5"] > 5
        assert len(xmc.load(home).predict(["a strategy game"], k=3)[0]) == 3
    with pytest.raises(InputError, match=r"model\.teacher=false"):
        xmc.load(directory / "variants" / "without").explain(["a strategy game"], k=3)
    assert (directory / "variants" / "with" / "model" / "teacher").is_dir()
    assert not (directory / "variants" / "without" / "model" / "teacher").exists()


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match=r"encoder\.layers_pooled"):
        config.load("treader_xml", ["encoder.layers_pooled=2"])
    with pytest.raises(InputError, match=r"words\.vectors\.width"):
        config.load("treader_xml", ["reads=words", "words.vectors.width=30"])
    with pytest.raises(InputError, match="follows from seed"):
        config.load("treader_xml", ["teacher.neighbours.seed=3"])
