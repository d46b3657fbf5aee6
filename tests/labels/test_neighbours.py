from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from xmc.errors import InputError
from xmc.labels.neighbours import NeighbourConfig, NeighbourIndex, duplicate_groups, measure_recall, recall


def clustered_vectors(count: int = 2000, width: int = 16, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    centres = random.normal(size=(40, width))
    return (centres[random.integers(40, size=count)] + 0.6 * random.normal(size=(count, width))).astype(
        np.float32
    )


def brute_force(vectors, exclude, groups, k):
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = np.round(unit @ unit.T, 5)  # rounding makes ties, which the stable sort resolves by id
    cosines[exclude[:, None] == groups[None, :]] = -np.inf
    return np.argsort(-cosines, axis=1, kind="stable")[:, :k]


def test_exact_search_without_oneself_equals_brute_force():
    vectors = clustered_vectors(500)
    index = NeighbourIndex.build(vectors, NeighbourConfig(num_neighbours=7))
    own = np.arange(500)
    ids, cosines = index.search(vectors, exclude=own)
    assert not (ids == own[:, None]).any()
    assert (np.diff(cosines, axis=1) <= 0).all()
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(cosines, np.einsum("qd,qkd->qk", unit, unit[ids]), atol=1e-5)
    assert recall(ids, brute_force(vectors, own, own, 7)) == 1


def test_queries_without_exclusion_find_themselves():
    vectors = clustered_vectors(300)
    index = NeighbourIndex.build(vectors, NeighbourConfig(num_neighbours=3))
    assert (index.search(vectors)[0][:, 0] == np.arange(300)).all()
    mixed = np.where(np.arange(300) % 2, np.arange(300), -1)
    ids, _ = index.search(vectors, exclude=mixed)
    np.testing.assert_array_equal(ids[:, 0] == np.arange(300), mixed == -1)


@pytest.mark.parametrize("kind", ["exact", "hnsw", "ivf"])
def test_large_groups_of_duplicates_are_left_out(kind):
    """70 copies of one vector: k more than the group must be asked for, which the first request does not."""
    vectors = clustered_vectors(400)
    vectors[100:170] = vectors[7]
    groups = duplicate_groups(vectors)
    assert len(np.unique(groups)) == 400 - 70
    config = NeighbourConfig(num_neighbours=5, index=kind, ivf_probes=40)
    ids, cosines = NeighbourIndex.build(vectors, config, groups).search(vectors, exclude=groups)
    assert (ids >= 0).all()
    assert (groups[ids] != groups[:, None]).all()
    assert np.isfinite(cosines).all()
    assert recall(ids, brute_force(vectors, groups, groups, 5)) > (0.999 if kind == "exact" else 0.9)


def test_copies_of_the_nearest_vector_are_all_neighbours():
    """Copies lie in the index once but stand for every one of their rows."""
    vectors = clustered_vectors(50)
    vectors[[10, 20, 30]] = vectors[40]
    ids, cosines = NeighbourIndex.build(vectors, NeighbourConfig(num_neighbours=3)).search(
        vectors, np.arange(50)
    )
    assert ids[[10, 40]].tolist() == [[20, 30, 40], [10, 20, 30]]
    np.testing.assert_allclose(cosines[10], 1, atol=1e-6)


def test_fewer_vectors_than_neighbours_are_padded():
    vectors = clustered_vectors(3)
    ids, cosines = NeighbourIndex.build(vectors, NeighbourConfig(num_neighbours=5)).search(
        vectors, np.arange(3)
    )
    assert (ids[:, :2] >= 0).all()
    assert (ids[:, 2:] == -1).all()
    assert np.isneginf(cosines[:, 2:]).all()
    alone = NeighbourIndex.build(vectors, NeighbourConfig(num_neighbours=2), np.zeros(3)).search(
        vectors, np.zeros(3)
    )
    assert (alone[0] == -1).all()


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_approximate_search_is_repeatable_and_nearly_right(kind):
    vectors = clustered_vectors()
    own = np.arange(len(vectors))
    config = NeighbourConfig(num_neighbours=10, index=kind, seed=3)
    first = NeighbourIndex.build(vectors, config)
    second = NeighbourIndex.build(vectors, config)
    for a, b in zip(first.search(vectors, own), second.search(vectors, own), strict=True):
        np.testing.assert_array_equal(a, b)
    assert 0.9 < measure_recall(first, vectors, vectors, own) <= 1
    careless = NeighbourConfig(
        num_neighbours=10, index=kind, ivf_probes=1, hnsw_search_candidates=1, hnsw_links=2
    )
    assert measure_recall(NeighbourIndex.build(vectors, careless), vectors, vectors, own) < 0.9


def test_recall_by_hand():
    exact = np.array([[1, 2, 3], [4, 5, -1]])
    assert recall(exact, exact) == 1
    assert recall(np.array([[3, 9, 1], [1, 2, 3]]), exact) == pytest.approx(2 / 5)
    assert recall(np.array([[-1, -1, -1], [-1, 5, 4]]), exact) == pytest.approx(2 / 5)


@pytest.mark.parametrize("kind", ["exact", "hnsw", "ivf"])
def test_save_and_load(tmp_path, kind):
    vectors = clustered_vectors(300)
    groups = np.arange(300) // 2
    index = NeighbourIndex.build(vectors, NeighbourConfig(num_neighbours=4, index=kind), groups)
    index.save(tmp_path / "index")
    loaded = NeighbourIndex.load(tmp_path / "index")
    assert loaded.config == index.config
    for a, b in zip(index.search(vectors, groups), loaded.search(vectors, groups), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_is_wrong_is_named(tmp_path):
    with pytest.raises(InputError, match="exact, hnsw, ivf"):
        NeighbourConfig(index="hsnw")
    with pytest.raises(InputError, match=r"neighbours\.ivf_probes"):
        NeighbourConfig(ivf_probes=0)
    with pytest.raises(InputError, match="not finite"):
        NeighbourIndex.build(np.array([[1, np.nan]], np.float32), NeighbourConfig())
    with pytest.raises(InputError, match="no vectors"):
        NeighbourIndex.build(np.zeros((0, 4), np.float32), NeighbourConfig())
    with pytest.raises(InputError, match="nowhere"):
        NeighbourIndex.load(tmp_path / "nowhere")


BOTH = """
import os
{imports}
import numpy as np
from xmc.labels.neighbours import NeighbourConfig, NeighbourIndex
torch.set_num_threads(2)
faiss.omp_set_num_threads(2)
vectors = np.random.default_rng(0).normal(size=(3000, 32)).astype(np.float32)
for kind in ("exact", "ivf", "hnsw"):
    weights = torch.randn(512, 512, requires_grad=True)
    (weights @ weights).relu().sum().backward()
    index = NeighbourIndex.build(vectors, NeighbourConfig(num_neighbours=3, index=kind))
    ids, _ = index.search(vectors)
    tensor = torch.from_numpy(vectors)
    unit = torch.nn.functional.normalize(tensor)
    best = (unit @ unit.T).argmax(dim=1)
assert (NeighbourIndex.build(vectors, NeighbourConfig(num_neighbours=1)).search(vectors)[0][:, 0] == best.numpy()).all()
print("both work")
"""


@pytest.mark.parametrize("imports", ["import torch, faiss", "import faiss, torch"])
def test_faiss_and_torch_share_a_process(imports):
    """Each brings an OpenMP runtime of its own; a clash would crash or hang, so that it is tried in a process apart."""
    done = subprocess.run(
        [sys.executable, "-c", BOTH.format(imports=imports)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "both work" in done.stdout
