from __future__ import annotations

import numba
import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse as sp

from xmc.errors import InputError
from xmc.labels.hierarchy import Hierarchy
from xmc.labels.neighbours import NeighbourConfig, NeighbourIndex, search_shards
from xmc.labels.teacher import (
    ScopeConfig,
    Teacher,
    build_scopes,
    common_groups,
    sequence_keys,
    shard_path,
)

# Labels 0…4, inner nodes 5 and 6; label 4 has no parent, 5 has parent 6: two roots, two levels.
PARENT = np.array([5, 5, 6, 6, -1, 6, -1], np.int32)
LABELS = sp.csr_matrix(
    np.array([[1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [1, 0, 0, 0, 1], [0, 0, 0, 0, 0]], np.float32)
)


def lists(scopes):
    return [
        dict(zip(scopes.nodes[a:b].tolist(), scopes.weights[a:b].tolist(), strict=True))
        for a, b in zip(scopes.offsets, scopes.offsets[1:], strict=False)
    ]


def test_scopes_by_hand():
    neighbours = np.array([[0, 2], [1, -1], [3, 3]])
    similarities = np.array([[0.9, 0.6], [0.5, -np.inf], [0.1, 0.1]], np.float32)
    scopes = build_scopes(neighbours, similarities, LABELS, PARENT, ScopeConfig())
    # Document 0 votes once for node 5, though two of its labels lie below it.
    assert lists(scopes)[0] == pytest.approx({0: 1.0, 5: 1.0, 1: 0.6, 4: 0.4})
    assert lists(scopes)[1:] == [{2: 1.0, 6: 1.0}, {}]
    assert scopes.nodes[:4].tolist() == [0, 5, 1, 4]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ScopeConfig(levels_up=0), [0, 1, 4]),
        (ScopeConfig(levels_up=2), [0, 5, 6, 1, 4]),
        (ScopeConfig(max_nodes=2), [0, 5]),
        (ScopeConfig(order="id"), [0, 1, 4, 5]),
        (ScopeConfig(order="id", max_nodes=3), [0, 1, 5]),
    ],
)
def test_levels_order_and_bound(config, expected):
    neighbours, similarities = np.array([[0, 2]]), np.array([[0.9, 0.6]], np.float32)
    assert build_scopes(neighbours, similarities, LABELS, PARENT, config).nodes.tolist() == expected


def test_a_neighbour_without_likeness_still_counts_a_little():
    scopes = build_scopes(
        np.array([[0, 1]]), np.array([[0.5, -0.2]], np.float32), LABELS, PARENT, ScopeConfig()
    )
    assert 0 < lists(scopes)[0][2] < 0.01


def test_scopes_do_not_depend_on_the_threads():
    random = np.random.default_rng(0)
    labels = sp.random(300, 80, 0.1, "csr", np.float32, random_state=0)
    parent = np.concatenate([random.integers(80, 90, 80), np.full(10, -1)]).astype(np.int32)
    neighbours, similarities = random.integers(0, 300, (500, 8)), random.random((500, 8), np.float32)
    before = numba.get_num_threads()
    results = []
    for threads in (1, before):
        numba.set_num_threads(threads)
        results.append(build_scopes(neighbours, similarities, labels, parent, ScopeConfig(max_nodes=12)))
    numba.set_num_threads(before)
    for name in ("nodes", "weights", "offsets"):
        np.testing.assert_array_equal(getattr(results[0], name), getattr(results[1], name))


def test_equal_sequences_have_equal_keys():
    values = np.array([1, 2, 3, 1, 2, 3, 3, 2, 1, 1, 2], np.int32)
    keys = sequence_keys(values, np.array([0, 3, 6, 9, 11, 11]))
    assert keys[0] == keys[1]
    assert len(set(keys.tolist())) == 4
    assert (keys >= 0).all()
    random = np.random.default_rng(0).integers(0, 3, (20_000, 12)).astype(np.int32)
    many = sequence_keys(random.ravel(), np.arange(0, random.size + 1, 12))
    assert len(np.unique(many)) == len(np.unique(random, axis=0))


def test_groups_join_documents_that_share_any_key():
    text, source = np.array([7, 7, 8, 9, 10]), np.array([1, 2, 2, 3, 4])
    groups = common_groups(text, source)
    assert groups[0] == groups[1] == groups[2]
    assert len(set(groups.tolist())) == 3
    assert len(set(common_groups(source).tolist())) == 4


def make_teacher(vectors, labels, groups, num_shards=2, k=3, index="exact"):
    config = NeighbourConfig(num_neighbours=k, index=index)
    shards = tuple(
        NeighbourIndex.build(vectors[rows], config, groups[rows])
        for rows in np.array_split(np.arange(len(vectors)), num_shards)
    )
    names = pa.array([str(i) for i in range(labels.shape[1])])
    parent = np.full(labels.shape[1], -1, np.int32)
    ids = pa.array([f"d{i}" for i in range(len(vectors))])
    return Teacher(shards, labels, parent, ScopeConfig(), ids, names)


def test_a_training_document_never_sees_its_own_labels():
    """Every document has one label that only it, or its copy, has: a scope with it has leaked. Copies stand in
    different shards, and differ in the last bits as the same text does in different batches."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 1000, (60, 20)).astype(np.int32)
    vectors = random.normal(size=(60, 16)).astype(np.float32)
    tokens[30:40], vectors[30:40] = tokens[:10], vectors[:10] * np.float32(1 + 1e-6)
    own = np.arange(60)
    own[30:40] = own[:10]
    labels = sp.csr_matrix((np.ones(60, np.float32), (np.arange(60), own)), shape=(60, 60))
    groups = sequence_keys(tokens.ravel(), np.arange(0, tokens.size + 1, 20))
    teacher = make_teacher(vectors, labels, groups)

    def leaked(asked, exclude):
        return np.array(
            [own[i] in scope for i, scope in enumerate(lists(asked.look_up(vectors, exclude).scopes))]
        )

    assert not leaked(teacher, groups).any()
    # Without the guard, or with one that knows the document itself but not its copy, labels leak: the test can fail.
    assert leaked(teacher, None).all()
    assert leaked(make_teacher(vectors, labels, np.arange(60)), np.arange(60))[:10].all()


def test_a_new_text_may_ask_its_copy_in_train():
    vectors = np.eye(4, dtype=np.float32)
    labels = sp.identity(4, np.float32, "csr")
    known = make_teacher(vectors, labels, np.arange(4), k=1).look_up(vectors)
    assert known.neighbours[:, 0].tolist() == [0, 1, 2, 3]
    assert known.scopes.nodes.tolist() == [0, 1, 2, 3]


def test_shards_find_what_one_index_finds():
    vectors = np.random.default_rng(1).normal(size=(500, 12)).astype(np.float32)
    groups = np.arange(500) // 2
    config = NeighbourConfig(num_neighbours=7)
    whole = NeighbourIndex.build(vectors, config, groups).search(vectors, groups)
    cuts = [slice(0, 200), slice(200, 203), slice(203, 500)]  # one shard has fewer rows than neighbours
    shards = (NeighbourIndex.build(vectors[cut], config, groups[cut]) for cut in cuts)
    ids, similarities = search_shards(shards, vectors, groups)
    np.testing.assert_array_equal(ids, whole[0])
    np.testing.assert_allclose(similarities, whole[1], atol=1e-6)


@pytest.mark.parametrize("index", ["exact", "ivf"])
def test_save_and_load(tmp_path, index):
    random = np.random.default_rng(2)
    vectors = random.normal(size=(200, 8)).astype(np.float32)
    labels = sp.random(200, 30, 0.1, "csr", np.float32, random_state=2)
    labels.data[:] = 1
    teacher = make_teacher(vectors, labels, np.arange(200), num_shards=3, index=index)
    for number, shard in enumerate(teacher.shards):
        shard.save(shard_path(tmp_path, number))
    teacher.save(tmp_path)
    loaded = Teacher.load(tmp_path, teacher.config, 30)
    asked = random.normal(size=(20, 8)).astype(np.float32)
    before, after = teacher.look_up(asked), loaded.look_up(asked)
    np.testing.assert_array_equal(before.neighbours, after.neighbours)
    np.testing.assert_array_equal(before.scopes.nodes, after.scopes.nodes)
    assert loaded.document_ids[7].as_py() == "d7"
    with pytest.raises(InputError, match="train the model again"):
        Teacher.load(tmp_path / "nowhere", teacher.config, 30)


def test_a_hierarchy_of_names_serves():
    names = pa.array(["role::program", "role::data", "use::games"])
    hierarchy = Hierarchy.from_parents(names, pa.array(["role", "role", None]), 3)
    labels = sp.csr_matrix(np.eye(3, dtype=np.float32))
    scopes = build_scopes(
        np.array([[0, 1, 2]]), np.ones((1, 3), np.float32), labels, hierarchy.parent, ScopeConfig()
    )
    assert hierarchy.names.take(pa.array(scopes.nodes)).to_pylist() == ["role", *names.to_pylist()]


def test_what_is_wrong_is_named():
    with pytest.raises(InputError, match=r"scope\.max_nodes"):
        ScopeConfig(max_nodes=0)
    with pytest.raises(InputError, match=r"scope\.levels_up"):
        ScopeConfig(levels_up=-1)
