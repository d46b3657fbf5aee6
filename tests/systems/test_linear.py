"""The linear system from the command's settings to labelled documents, on the bundled sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import ray
import scipy.sparse as sp

import xmc
from tests.linear.problems import unpacked
from xmc import config, run
from xmc.errors import InputError
from xmc.labels.clustering import LabelClusters
from xmc.labels.tree import TreeConfig, build_tree
from xmc.linear.inputs import Inputs
from xmc.linear.problem import Groups, Problem
from xmc.linear.solver import SolverConfig
from xmc.linear.training import train_block
from xmc.linear.tree import LinearConfig, LinearTree
from xmc.linear.weights import LevelWeights
from xmc.systems import ranking
from xmc.systems.vectors import ranker_inputs

SMALL = ["flat_below=10", "clusters.max_leaf_size=16", "tfidf.min_df=1"]
RANDOM = ["encoder.name=random:bert", "encoder.max_tokens=32"]


def values(directory: Path) -> dict[str, float]:
    (file,) = directory.glob("stages/evaluate-*/metrics.json")
    return json.loads(file.read_text())["values"]


@pytest.fixture(scope="module")
def trained(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "linear"
    return run.train(config.load("linear", [*SMALL, f"run.dir={directory}"]))


def test_a_run_leaves_a_model_that_labels_texts(trained: Path) -> None:
    # The most frequent label alone reaches 31 %.
    assert values(trained)["P@1"] > 60
    found = xmc.load(trained).predict(["a strategy game", "x", "", "C library " * 100_000], k=4)
    assert [len(row) for row in found] == [4, 4, 4, 4]
    assert all(row == sorted(row, key=lambda pair: -pair[1]) for row in found)


def test_saved_predictions_are_the_models(trained: Path) -> None:
    from xmc.labels.topk import TopK

    corpus = run.corpus_of(trained, None)
    (saved,) = trained.glob("stages/evaluate-*/predictions.parquet")
    texts = corpus.texts("test").to_pylist()[:50]
    again = xmc.load(trained).top_k(texts, 10)
    assert np.array_equal(again.label_ids, TopK.load(saved).label_ids[:50])


def test_the_same_command_again_does_nothing(trained: Path, capsys: pytest.CaptureFixture) -> None:
    run.train(config.load("linear", [*SMALL, f"run.dir={trained}"]))
    assert "train: up to date" in capsys.readouterr().out


@pytest.mark.slow
def test_embeddings_join_tfidf(ray_session: None, tmp_path: Path) -> None:
    options = [*SMALL, *RANDOM, f"run.dir={tmp_path / 'both'}", "inputs=both"]
    directory = run.train(config.load("linear", options))
    assert values(directory)["P@1"] > 60
    assert len(xmc.load(directory).predict(["a strategy game"], k=3)[0]) == 3


def test_documents_that_are_features_only(ray_session: None, tmp_path: Path) -> None:
    """The repository's format: sparse features, no text."""
    generator = np.random.default_rng(0)
    for name, count in (("train", 400), ("test", 100)):
        lines = [f"{count} 30 6"]
        for _ in range(count):
            label = int(generator.integers(6))
            noise = sorted({label, 6 + int(generator.integers(24))})
            lines.append(f"{label} " + " ".join(f"{feature}:1.0" for feature in noise))
        (tmp_path / f"{name}.txt").write_text("\n".join(lines) + "\n")
    options = [f"corpus.path={tmp_path}", f"run.dir={tmp_path / 'run'}", "metrics.ks=[1]"]
    directory = run.train(config.load("linear", options))
    assert values(directory)["P@1"] > 95
    model = xmc.load(directory)
    features = sp.csr_matrix(np.eye(30, dtype=np.float32)[:6])
    for length in (1, 7):
        assert model.top_k_of_features(features * length, 1).label_ids[:, 0].tolist() == list(range(6))
    with pytest.raises(InputError, match="features without texts"):
        model.predict(["a text"])


@pytest.mark.parametrize("negatives", ["tfn", "tfn+man"])
def test_tasks_train_the_tree_that_one_process_trains(
    ray_session: None, tmp_path: Path, negatives: Literal["tfn", "tfn+man"]
) -> None:
    generator = np.random.default_rng(0)
    features = sp.random(300, 60, 0.1, "csr", np.float32, random_state=generator)
    labels = sp.random(300, 32, 0.06, "csr", np.float32, random_state=generator)
    labels.data[:] = 1
    tree = build_tree(
        LabelClusters.of(np.arange(32, dtype=np.int32), np.arange(0, 33, 4, dtype=np.int64)),
        TreeConfig(branching=2),
    )
    assert tree.num_levels > 3
    linear, inputs = LinearConfig(negatives=negatives, negative_beam=2), Inputs(features)
    ranking.train_tree(ray.put(inputs), labels, tree, linear, 3, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]
    found, wanted = (
        LinearTree.load(tmp_path / "tree"),
        LinearTree.train(inputs, labels, tree, linear, seed=3),
    )
    assert len(found.levels) == len(wanted.levels) == tree.num_levels - 1
    for ours, theirs in zip(found.levels, wanted.levels, strict=True):
        np.testing.assert_array_equal(unpacked(ours), unpacked(theirs))


def test_features_of_any_length_are_read_as_unit_rows() -> None:
    rows = sp.csr_matrix(np.array([[3.0, 4.0], [0.0, 0.0]], np.float32))
    read = ranker_inputs("tfidf", rows, None)
    np.testing.assert_allclose(read.sparse.toarray(), [[0.6, 0.8], [0, 0]], rtol=1e-6)


def test_blocks_that_are_done_are_not_trained_again(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(0)
    features = sp.random(200, 50, 0.2, "csr", np.float32, random_state=generator)
    labels = sp.random(200, 24, 0.1, "csr", np.float32, random_state=generator)
    labels.data[:] = 1
    groups = Groups(np.arange(24, dtype=np.int32), np.array([0, 8, 16, 24], np.int64))
    problem = Problem.build(labels, groups, "tfn")
    inputs, file = Inputs(features, None), tmp_path / "weights.safetensors"
    shared = ray.put(inputs)

    def die(parts: list, path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ranking, "join_files", die)
        with pytest.raises(KeyboardInterrupt):
            ranking.teach(shared, [ranking.Level(problem, 0, file)], SolverConfig())
    parts = sorted((tmp_path / "weights.parts").iterdir())
    assert len(parts) > 1
    parts[0].unlink()
    before = {path: path.stat().st_mtime_ns for path in parts[1:]}
    with monkeypatch.context() as patch:
        patch.setattr(ranking, "join_files", die)
        with pytest.raises(KeyboardInterrupt):
            ranking.teach(shared, [ranking.Level(problem, 0, file)], SolverConfig())
    assert {path: path.stat().st_mtime_ns for path in parts[1:]} == before
    ranking.teach(shared, [ranking.Level(problem, 0, file)], SolverConfig())
    whole = train_block(inputs, problem, (0, 24), SolverConfig(), 0)
    whole.save(tmp_path / "whole.safetensors")
    assert LevelWeights.load(file).num_entries == whole.num_entries
    assert not (tmp_path / "weights.parts").exists()
