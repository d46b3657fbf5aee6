"""The linear tree: learns what can be learned, searches as asked, and comes back from disk the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

from xmc.errors import InputError
from xmc.labels.clustering import ClusterConfig, cluster_labels
from xmc.labels.features import pifa
from xmc.labels.tree import LabelTree, TreeConfig, build_tree
from xmc.linear.inputs import Inputs
from xmc.linear.scoring import CombineConfig
from xmc.linear.tree import LinearConfig, LinearTree, flat_tree

LABELS, WORDS = 64, 400


def documents(rng: np.random.Generator, count: int) -> tuple[Inputs, sp.csr_matrix]:
    """Two labels a document; each label has four words of its own, and half of the words are noise."""
    labels = np.array([rng.permutation(LABELS)[:2] for _ in range(count)])
    own = labels[:, :, None] * 4 + rng.integers(0, 4, (count, 2, 3))
    noise = rng.integers(LABELS * 4, WORDS, (count, 6))
    words = np.concatenate([own.reshape(count, -1), noise], axis=1)
    starts = np.arange(count + 1) * words.shape[1]
    sparse = sp.csr_matrix((np.ones(words.size, np.float32), words.ravel(), starts), shape=(count, WORDS))
    sparse.sum_duplicates()
    sparse.data /= np.repeat(
        np.sqrt(np.add.reduceat(sparse.data**2, sparse.indptr[:-1])), np.diff(sparse.indptr)
    )
    starts = np.arange(count + 1) * 2
    y = sp.csr_matrix((np.ones(2 * count, np.float32), labels.ravel(), starts), shape=(count, LABELS))
    return Inputs(sparse), y


@pytest.fixture(scope="module")
def data() -> tuple[Inputs, sp.csr_matrix, Inputs, sp.csr_matrix]:
    rng = np.random.default_rng(0)
    return *documents(rng, 1200), *documents(rng, 200)


def label_tree(data: tuple, branching: int, height: int | None) -> LabelTree:
    clusters = cluster_labels(pifa(data[1], data[0].sparse), ClusterConfig(max_leaf_size=8))
    return build_tree(clusters, TreeConfig(branching, height))


def precision(model: LinearTree, data: tuple, **options: int) -> float:
    top = model.predict(data[2], 2, **options)
    rows = np.repeat(np.arange(len(top)), 2)
    return float(np.asarray(data[3][rows, top.label_ids.ravel()]).mean())


@pytest.mark.parametrize("negatives", ["tfn", "man", "tfn+man"])
def test_two_levels_learn(data: tuple, negatives: str):
    config = LinearConfig(negatives=negatives, beam=4)  # type: ignore[arg-type]
    model = LinearTree.train(data[0], data[1], label_tree(data, 2, 1), config)
    assert [weights.last for weights in model.levels] == [8, 64]
    assert precision(model, data) > 0.95


def test_a_deep_tree_learns_and_a_wider_beam_finds_more(data: tuple):
    model = LinearTree.train(data[0], data[1], label_tree(data, 2, None), LinearConfig(beam=4))
    assert len(model.levels) == 4
    assert precision(model, data) > 0.9
    assert precision(model, data, beam=1) < precision(model, data, beam=4)


def test_a_flat_tree_is_one_versus_all(data: tuple):
    config = LinearConfig(scores=CombineConfig("margin"))
    model = LinearTree.train(data[0], data[1], flat_tree(LABELS), config)
    assert len(model.levels) == 1
    assert precision(model, data) > 0.95


def test_a_saved_tree_predicts_the_same(data: tuple, tmp_path: Path):
    config = LinearConfig(beam=3, scores=CombineConfig("product", 2))
    model = LinearTree.train(data[0], data[1], label_tree(data, 2, 1), config, seed=3, num_threads=2)
    model.save(tmp_path / "model")
    loaded = LinearTree.load(tmp_path / "model")
    assert loaded.config == config
    wanted, found = model.predict(data[2], 5), loaded.predict(data[2], 5)
    np.testing.assert_array_equal(found.label_ids, wanted.label_ids)
    np.testing.assert_array_equal(found.scores, wanted.scores)
    assert ((wanted.scores >= 0) & (wanted.scores <= 1)).all()


def test_what_is_no_model_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"linear\.json"):
        LinearTree.load(tmp_path)
    with pytest.raises(InputError, match="beam"):
        LinearConfig(beam=0)
    with pytest.raises(InputError, match="root"):
        LinearConfig(negatives="all")
