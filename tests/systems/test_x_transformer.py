"""X-Transformer from the command's settings to labelled texts, on the bundled sample with a small random encoder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import xmc
from raycluster.inference import read_vectors
from xmc import config, run
from xmc.corpus.tokens import SubwordEncoder, TokensConfig
from xmc.labels.topk import TopK
from xmc.nn.encoders import EncoderConfig, load_tokenizer
from xmc.systems.vectors import pretrained

pytestmark = pytest.mark.slow  # each run starts training groups

SMALL = [
    "encoder.name=random:bert",
    "encoder.max_tokens=32",
    "clusters.max_leaf_size=8",
    "train.updates=12",
    "train.batch_size=64",
    "train.label_rate=0.01",
    "ranker.beam=30",
    "tfidf.min_df=1",
]


def settings(directory: Path, *more: str) -> config.CommonConfig:
    return config.load("x_transformer", [*SMALL, f"run.dir={directory}", *more])


def values(directory: Path) -> dict[str, float]:
    (file,) = directory.glob("stages/evaluate-*/metrics.json")
    return json.loads(file.read_text())["values"]


@pytest.fixture(scope="module")
def trained(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run.train(settings(tmp_path_factory.mktemp("runs") / "x_transformer"))


def test_a_run_leaves_a_model_that_labels_texts(trained: Path) -> None:
    # The most frequent label alone reaches 31 %; the matcher learnt little in 12 updates, the rankers do the rest.
    assert values(trained)["P@1"] > 45
    model = xmc.load(trained)
    found = model.predict(["a strategy game", "x", "", "C library " * 100_000], k=4)
    assert [len(row) for row in found] == [4, 4, 4, 4]
    assert all(0 <= score <= 1 for row in found for _, score in row)
    corpus = run.corpus_of(trained, None)
    (saved,) = trained.glob("stages/evaluate-*/predictions.parquet")
    again = model.top_k(corpus.texts("test").to_pylist()[:50], 10)
    assert (again.label_ids == TopK.load(saved).label_ids[:50]).mean() > 0.99


def test_vectors_are_those_of_the_trained_network_in_the_order_of_the_corpus(trained: Path) -> None:
    (directory,) = trained.glob("stages/vectors-*")
    found = read_vectors(directory)
    corpus = run.corpus_of(trained, None)
    assert len(found["vectors"]) == corpus.num_documents("train")
    reader = xmc.load(trained).predictor._reader
    _, clusters = reader.read(corpus.texts("train").to_pylist()[:20])
    assert np.allclose(clusters.scores, found["scores"][:20], atol=1e-4)


def test_another_run_begins_with_the_trained_encoder(trained: Path, tmp_path: Path) -> None:
    encoder = trained / "model" / "network" / "encoder"
    own, again = (
        load_tokenizer(EncoderConfig(str(path))) for path in (trained / "model" / "tokenizer", encoder)
    )
    assert own("a strategy game")["input_ids"] == again("a strategy game")["input_ids"]
    options = [f"encoder.name={encoder}", "encoder.max_tokens=32", "inputs=embedding", "tfidf.min_df=1"]
    directory = run.train(config.load("linear", [*options, f"run.dir={tmp_path / 'linear'}"]))
    assert len(xmc.load(directory).predict(["a strategy game"], k=3)[0]) == 3


def test_a_changed_ranker_keeps_the_matcher(trained: Path, capsys: pytest.CaptureFixture) -> None:
    run.train(settings(trained, "ranker.negatives=tfn", "ranker.inputs=tfidf"))
    said = capsys.readouterr().out
    assert "vectors: up to date" in said
    assert "ranker: done" in said
    run.train(settings(trained))


def test_label_texts_and_neural_pifa_index_labels_too(ray_session: None, tmp_path: Path) -> None:
    more = ["train.updates=4", "members=[{index: text_emb}, {index: pifa_neural}]"]
    directory = run.train(settings(tmp_path / "members", *more))
    assert values(directory)["P@1"] > 40
    names = {path.name.rsplit("-", 1)[0] for path in (directory / "stages").glob("[a-z]*")}
    assert {"label_vectors", "neural_clusters", "neural_train", "neural_vectors"} <= names
    (label_vectors,) = (directory / "stages").glob("label_vectors-*")
    corpus = run.corpus_of(directory, None)
    vectors = read_vectors(label_vectors)["vectors"]
    # A label's vector is that of its own text, whatever other texts are read beside it.
    used = settings(directory)
    encoder = replace(used.encoder, layers_pooled=1, summary="mean")
    subwords = SubwordEncoder(load_tokenizer(encoder), TokensConfig("saved", encoder.max_tokens))
    alone = pretrained(encoder, used.seed, (subwords.pad_id, "right"))(
        subwords.encode_texts(corpus.labels.texts[7:8])
    )
    assert vectors.shape[0] == corpus.num_labels
    assert np.allclose(vectors[7], alone["vectors"][0], atol=1e-5)


def test_variants_are_measured_side_by_side(
    ray_session: None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    all_ranked = "{name: all, ranker: {negatives: all}}"
    variants = (
        f"variants=[{{name: tfidf, ranker: {{inputs: tfidf, negatives: tfn}}}}, {{name: man}}, {all_ranked}]"
    )
    directory = run.train(settings(tmp_path / "ablation", "train.updates=4", variants))
    said = capsys.readouterr().out
    assert len(list((directory / "stages").glob("train-*"))) == 1  # one matcher serves all
    for name in ("tfidf", "man", "all"):
        figure = f"{values(directory / 'variants' / name)['P@1']:.2f}"
        assert any(line.startswith(name) and figure in line for line in said.splitlines())
        (found,) = xmc.load(directory / "variants" / name).predict(["a game"], k=10_000)
        assert (len(found) == len(xmc.load(directory / "variants" / name).label_names)) == (name == "all")
