from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from xmc.errors import InputError
from xmc.labels.clustering import ClusterConfig, LabelClusters, _binary_levels, cluster_labels
from xmc.labels.tree import LabelTree, TreeConfig, build_tree


def clusters_of(num_labels: int, num_clusters: int) -> LabelClusters:
    order = np.random.default_rng(0).permutation(num_labels).astype(np.int32)
    offsets = np.arange(num_clusters + 1) * num_labels // num_clusters
    return LabelClusters(order, offsets, _binary_levels(num_clusters))


@pytest.fixture
def tree() -> LabelTree:
    return build_tree(clusters_of(203, 25), TreeConfig(branching=4))


def test_the_papers_example():
    """AttentionXML, Figure 1b: K = M = 8, H = 3, L = 8000."""
    rows = sp.random(8000, 300, 0.02, "csr", np.float32, np.random.default_rng(0))
    clusters = cluster_labels(rows, ClusterConfig(max_leaf_size=8))
    assert [len(bounds) - 1 for bounds in clusters.levels] == [2**level for level in range(11)]
    tree = build_tree(clusters, TreeConfig(branching=8, height=3))
    assert tree.level_sizes == (1, 16, 128, 1024, 8000)
    children = [np.diff(offsets) for offsets in tree.offsets]
    assert children[0].tolist() == [16]
    assert set(children[1]) == set(children[2]) == {8}
    assert set(children[3]) == {7, 8}


@pytest.mark.parametrize(
    ("branching", "height", "sizes"),
    [
        (8, None, (1, 2, 16, 128, 1024, 8000)),
        (8, 1, (1, 1024, 8000)),
        (64, 1, (1, 1024, 8000)),
        (16, None, (1, 4, 64, 1024, 8000)),
        (8, 9, (1, 2, 16, 128, 1024, 8000)),
        (2, 2, (1, 512, 1024, 8000)),
    ],
)
def test_compression(branching, height, sizes):
    assert build_tree(clusters_of(8000, 1024), TreeConfig(branching, height)).level_sizes == sizes


def test_one_cluster_and_one_label_a_cluster():
    assert build_tree(clusters_of(6, 1), TreeConfig()).level_sizes == (1, 1, 6)
    tree = build_tree(clusters_of(6, 6), TreeConfig(branching=2, height=1))
    assert tree.level_sizes == (1, 6, 6)
    np.testing.assert_array_equal(np.diff(tree.offsets[-1]), 1)


def test_a_number_that_is_no_power_of_two(tree):
    assert tree.level_sizes[0] == 1
    assert tree.level_sizes[-2:] == (25, 203)
    for level, offsets in enumerate(tree.offsets[:-1]):
        assert np.diff(offsets).max() <= 4, level
        assert np.diff(offsets).min() >= 1, level


def test_parents_and_ancestors_against_loops(tree):
    for level, (offsets, children) in enumerate(zip(tree.offsets, tree.children, strict=True)):
        for node in range(tree.level_sizes[level]):
            for child in children[offsets[node] : offsets[node + 1]]:
                assert tree.parents[level][child] == node
    for level in range(tree.num_levels):
        ancestors = tree.ancestors(level)
        for label in (0, 50, 202):
            node = label
            for above in range(tree.num_levels - 1, level, -1):
                node = tree.parents[above - 1][node]
            assert ancestors[label] == node
    np.testing.assert_array_equal(tree.ancestors(0), 0)
    np.testing.assert_array_equal(tree.ancestors(tree.num_levels - 1), np.arange(203))


def test_positives_are_the_sign_of_the_product(tree):
    labels = sp.random(40, 203, 0.03, "csr", np.float32, np.random.default_rng(1), data_rvs=np.ones)
    before = labels.copy()
    for level in range(tree.num_levels):
        product = (labels @ tree.level_matrix(level)).toarray()
        np.testing.assert_array_equal(tree.positives(labels, level).toarray(), product > 0)
    assert (labels != before).nnz == 0


def test_gathered_children_against_loops(tree):
    rng = np.random.default_rng(2)
    for level in range(tree.num_levels - 1):
        nodes = rng.integers(-1, tree.level_sizes[level], (7, 5))
        children, source = tree.gather_children(level, nodes)
        table = tree.child_table(level)
        expected = [
            (place, child)
            for place, node in enumerate(nodes.ravel())
            if node >= 0
            for child in tree.children[level][tree.offsets[level][node] : tree.offsets[level][node + 1]]
        ]
        assert list(zip(source, children, strict=True)) == expected
        from_table = [
            (place, c) for place, n in enumerate(nodes.ravel()) if n >= 0 for c in table[n] if c >= 0
        ]
        assert from_table == expected
    assert tree.gather_children(0, np.array([-1]))[0].size == 0


def test_a_tree_comes_back_from_disk(tree, tmp_path):
    tree.save(tmp_path / "tree.npz")
    loaded = LabelTree.load(tmp_path / "tree.npz")
    assert loaded.level_sizes == tree.level_sizes
    for mine, theirs in zip(
        (*tree.offsets, *tree.children), (*loaded.offsets, *loaded.children), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
    assert [path.name for path in tmp_path.iterdir()] == ["tree.npz"]


def test_what_is_no_tree_is_refused(tree, tmp_path):
    (tmp_path / "text.npz").write_text("no tree")
    np.savez(tmp_path / "other.npz", values=np.arange(3))
    np.savez(tmp_path / "object.npz", offsets_0=np.array([{}], object), children_0=np.arange(3))
    tree.save(tmp_path / "cut.npz")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:-200])
    for name in ("text", "other", "object", "cut"):
        with pytest.raises(InputError, match=f"{name}.npz is not a label tree"):
            LabelTree.load(tmp_path / f"{name}.npz")


def test_only_partitions_are_trees(tree):
    twice = tree.children[-1].copy()
    twice[0] = twice[1]
    with pytest.raises(InputError, match="exactly one parent"):
        LabelTree(tree.offsets, (*tree.children[:-1], twice))
    with pytest.raises(InputError, match="bounds"):
        LabelTree((*tree.offsets[:-1], tree.offsets[-1] + 1), tree.children)
    with pytest.raises(InputError, match="one root"):
        LabelTree(tree.offsets[1:], tree.children[1:])


@pytest.mark.parametrize("wrong", [{"branching": 3}, {"branching": 1}, {"height": 0}])
def test_impossible_shapes_are_refused(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        TreeConfig(**wrong)
