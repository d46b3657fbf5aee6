from __future__ import annotations

import numba
import numpy as np
import pytest
import scipy.sparse as sp

from xmc.errors import InputError
from xmc.labels import two_means
from xmc.labels.clustering import ClusterConfig, cluster_labels, mean_similarity


def unit(rows):
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows / np.where(lengths > 0, lengths, 1)).astype(np.float32)


def clustered_rows(num_labels=700, num_topics=24, num_columns=400, seed=0):
    """Sparse rows that scatter around overlapping topics."""
    rng = np.random.default_rng(seed)
    topics = rng.random((num_topics, num_columns)) * (rng.random((num_topics, num_columns)) < 0.1)
    rows = topics[rng.integers(num_topics, size=num_labels)] * rng.random((num_labels, num_columns))
    rows += rng.random((num_labels, num_columns)) * (rng.random((num_labels, num_columns)) < 0.02)
    return sp.csr_matrix(unit(rows))


def node_by_node(rows, max_leaf_size, seed, max_iter=20, tolerance=1e-4):
    """Plain balanced spherical 2-means, one node at a time."""
    rng = np.random.default_rng(seed)
    leaves, open_nodes = [], [np.arange(len(rows))]
    while open_nodes:
        node = open_nodes.pop()
        if len(node) <= max_leaf_size:
            leaves.append(node)
            continue
        centres = rows[rng.choice(node, 2, replace=False)]
        before = -1.0
        for _ in range(max_iter):
            by_score = np.argsort(rows[node] @ (centres[1] - centres[0]), kind="stable")
            halves = node[by_score[: len(node) // 2]], node[by_score[len(node) // 2 :]]
            sums = [rows[half].sum(0) for half in halves]
            reached = sum(np.linalg.norm(total) for total in sums) / len(node)
            centres = unit(np.array(sums))
            if reached - before < tolerance:
                break
            before = reached
        open_nodes += halves
    return leaves


def assert_partition(clusters, num_labels):
    np.testing.assert_array_equal(np.sort(clusters.order), np.arange(num_labels))
    assert clusters.offsets[0] == 0
    assert clusters.offsets[-1] == num_labels
    sizes = np.diff(clusters.offsets)
    assert sizes.max() - sizes.min() <= 1
    for cluster in range(clusters.num_clusters):
        members = clusters.order[clusters.offsets[cluster] : clusters.offsets[cluster + 1]]
        assert (np.diff(members) > 0).all()
        assert (clusters.cluster_of[members] == cluster).all()


@pytest.mark.parametrize("size", [1, 3, 8, 10, 60])
@pytest.mark.parametrize("num_labels", [61, 128, 700])
def test_clusters_are_bounded_by_a_size(num_labels, size):
    clusters = cluster_labels(clustered_rows(num_labels), ClusterConfig(max_leaf_size=size))
    assert_partition(clusters, num_labels)
    sizes = np.diff(clusters.offsets)
    assert sizes.max() <= size
    # More than half of the bound on average; whole labels may leave one cluster one label short of it.
    assert sizes.mean() > size / 2 or sizes.max() == 1
    assert sizes.min() > size / 2 - 1


@pytest.mark.parametrize("num_clusters", [1, 2, 5, 64, 100, 699, 700])
def test_any_number_of_clusters(num_clusters):
    clusters = cluster_labels(clustered_rows(700), ClusterConfig(num_clusters=num_clusters))
    assert clusters.num_clusters == num_clusters
    assert_partition(clusters, 700)
    matrix = clusters.matrix()
    assert matrix.shape == (700, num_clusters)
    np.testing.assert_array_equal(matrix.indices, clusters.cluster_of)


def test_separable_groups_are_recovered():
    rng = np.random.default_rng(3)
    groups = rng.permutation(np.repeat(np.arange(16), 25))
    rows = np.zeros((400, 160))
    for label, group in enumerate(groups):
        rows[label, 10 * group : 10 * group + 10] = rng.random(10) + 0.5
    for features in (sp.csr_matrix(unit(rows)), unit(rows)):
        clusters = cluster_labels(features, ClusterConfig(max_leaf_size=25, tolerance=0))
        pairs = set(zip(groups, clusters.cluster_of, strict=True))
        # Balanced 2-means from random starts may cut through groups on the way; most groups stay whole.
        assert len(pairs) <= 20


def test_two_separable_halves_are_recovered_exactly():
    rng = np.random.default_rng(4)
    side = rng.permutation(np.repeat([0, 1], 50))
    rows = np.where(side[:, None] == (np.arange(20) >= 10), rng.random((100, 20)) + 0.5, 0)
    for seed in range(5):
        found = cluster_labels(sp.csr_matrix(unit(rows)), ClusterConfig(num_clusters=2, seed=seed)).cluster_of
        assert len(set(zip(side, found, strict=True))) == 2


@pytest.mark.parametrize("weigh_rare", [True, False])
def test_quality_is_that_of_plain_two_means(weigh_rare):
    rows = clustered_rows()
    dense = rows.toarray()
    plain = np.mean(
        [
            sum(np.linalg.norm(dense[leaf].sum(0)) for leaf in node_by_node(dense, 11, seed)) / len(dense)
            for seed in range(4)
        ]
    )
    config = [ClusterConfig(max_leaf_size=11, weigh_rare=weigh_rare, seed=seed) for seed in range(4)]
    ours = np.mean([mean_similarity(rows, cluster_labels(rows, each)) for each in config])
    assert ours > plain - 0.005


def test_mean_similarity_is_the_mean_cosine_to_the_own_centroid():
    rows = clustered_rows(100)
    clusters = cluster_labels(rows, ClusterConfig(max_leaf_size=9))
    dense = rows.toarray()
    centroids = unit(clusters.matrix().T @ dense)
    expected = (dense * centroids[clusters.cluster_of]).sum(1).mean()
    assert mean_similarity(rows, clusters) == pytest.approx(expected, abs=1e-5)
    assert mean_similarity(dense, clusters) == pytest.approx(expected, abs=1e-5)


def with_threads(threads, features, config):
    numba.set_num_threads(threads)
    try:
        return cluster_labels(features, config).order
    finally:
        numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="needs two cores")
@pytest.mark.parametrize("dense", [False, True])
def test_threads_do_not_change_the_result(dense):
    features = clustered_rows(1500, num_columns=90)
    features = features.toarray() if dense else features
    config = ClusterConfig(max_leaf_size=6, seed=5)
    np.testing.assert_array_equal(with_threads(1, features, config), with_threads(2, features, config))


def test_the_seed_decides():
    rows = clustered_rows()
    first, again, other = (
        cluster_labels(rows, ClusterConfig(max_leaf_size=8, seed=seed)).order for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_dense_and_sparse_features_agree():
    rows = clustered_rows()
    config = ClusterConfig(max_leaf_size=12, weigh_rare=False)
    sparse, dense = cluster_labels(rows, config), cluster_labels(rows.toarray(), config)
    # Sums are added in another order, so a label on the very border may fall to the other side.
    assert (sparse.cluster_of == dense.cluster_of).mean() > 0.98


@pytest.mark.parametrize("always", [0.0, 1e9])
def test_dropping_lonely_columns_changes_nothing(monkeypatch, always):
    rows = clustered_rows()
    config = ClusterConfig(max_leaf_size=8)
    usual = cluster_labels(rows, config)
    monkeypatch.setattr(two_means, "_SHRINK_FROM", always)
    other = cluster_labels(rows, config)
    assert (usual.cluster_of == other.cluster_of).mean() > 0.98


def test_the_input_is_left_alone_and_need_not_be_sorted():
    rows = clustered_rows(200)
    shuffled = sp.csr_matrix((rows.data.copy(), rows.indices.copy(), rows.indptr), shape=rows.shape)
    for row in range(200):
        part = slice(rows.indptr[row], rows.indptr[row + 1])
        shuffled.indices[part], shuffled.data[part] = rows.indices[part][::-1], rows.data[part][::-1]
    before = shuffled.data.copy(), shuffled.indices.copy()
    found = cluster_labels(shuffled, ClusterConfig(max_leaf_size=10))
    np.testing.assert_array_equal(found.order, cluster_labels(rows, ClusterConfig(max_leaf_size=10)).order)
    np.testing.assert_array_equal(shuffled.data, before[0])
    np.testing.assert_array_equal(shuffled.indices, before[1])


@pytest.mark.parametrize(
    "rows",
    [np.zeros((50, 7)), np.ones((50, 7)), np.eye(50), np.vstack([np.eye(25), np.zeros((25, 25))])],
    ids=["zero", "equal", "apart", "half zero"],
)
def test_degenerate_rows_are_still_balanced(rows):
    for features in (sp.csr_matrix(unit(rows)), unit(rows)):
        clusters = cluster_labels(features, ClusterConfig(max_leaf_size=3))
        assert_partition(clusters, 50)
        np.testing.assert_array_equal(
            clusters.order, cluster_labels(features, ClusterConfig(max_leaf_size=3)).order
        )


def test_few_labels_are_one_cluster():
    for num_labels in (1, 2, 5):
        clusters = cluster_labels(clustered_rows(num_labels), ClusterConfig(max_leaf_size=5))
        assert clusters.num_clusters == 1
        np.testing.assert_array_equal(clusters.order, np.arange(num_labels))


def test_wrong_input_is_refused():
    rows = clustered_rows(20)
    with pytest.raises(InputError, match="more than the 20 labels"):
        cluster_labels(rows, ClusterConfig(num_clusters=21))
    with pytest.raises(InputError, match="no labels"):
        cluster_labels(rows[:0], ClusterConfig())
    rows.data[3] = np.nan
    with pytest.raises(InputError, match="NaN"):
        cluster_labels(rows, ClusterConfig())


@pytest.mark.parametrize(
    "wrong", [{"max_leaf_size": 0}, {"num_clusters": 0}, {"max_iter": 0}, {"tolerance": -1.0}]
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        ClusterConfig(**wrong)


def test_large_nodes_that_start_from_a_sample():
    features = clustered_rows(9000, num_topics=32, num_columns=60)
    config = ClusterConfig(num_clusters=36)
    clusters = cluster_labels(features, config)
    assert_partition(clusters, 9000)
    np.testing.assert_array_equal(with_threads(1, features, config), clusters.order)
    dense = features.toarray()
    leaves = node_by_node(dense, 9000 // 32 + 1, seed=0)
    plain = sum(np.linalg.norm(dense[leaf].sum(0)) for leaf in leaves) / 9000
    assert mean_similarity(features, clusters) > plain - 0.005
