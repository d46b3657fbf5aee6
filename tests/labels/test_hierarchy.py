from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from xmc.errors import InputError
from xmc.labels.hierarchy import Hierarchy


def build(rows: dict[str, str | None], num_labels: int | None = None) -> Hierarchy:
    names, parents = pa.array(list(rows), pa.string()), pa.array(list(rows.values()), pa.string())
    return Hierarchy.from_parents(names, parents, len(rows) if num_labels is None else num_labels)


def named(hierarchy: Hierarchy, nodes: np.ndarray) -> list[str]:
    return [hierarchy.names[int(node)].as_py() for node in nodes]


def test_several_levels_roots_and_missing_parents():
    hierarchy = build(
        {"oak": "tree", "tree": "plant", "moss": "plant", "dog": None, "cat": "animal", "owl": ""}
    )
    # "plant" and "animal" are no rows: they become nodes behind the labels, by name.
    assert hierarchy.names.to_pylist() == ["oak", "tree", "moss", "dog", "cat", "owl", "animal", "plant"]
    assert hierarchy.num_labels == 6
    assert hierarchy.parent.tolist() == [1, 7, 7, -1, 6, -1, -1, -1]
    assert hierarchy.depth.tolist() == [2, 1, 1, 0, 1, 0, 0, 0]
    ancestors = hierarchy.ancestors()
    assert named(hierarchy, ancestors[0].indices) == ["tree", "plant"]
    assert named(hierarchy, ancestors[3].indices) == []
    assert ancestors.sum() == 2 + 1 + 1 + 1


def test_rows_that_train_never_saw_serve_as_inner_nodes():
    hierarchy = build({"oak": "tree", "dog": None, "tree": "plant", "plant": None}, num_labels=2)
    assert hierarchy.num_labels == 2
    assert named(hierarchy, hierarchy.ancestors()[0].indices) == ["tree", "plant"]


def test_parents_of_labels_keeps_shape_and_padding():
    hierarchy = build({"oak": "tree", "tree": None, "dog": "animal"})
    parents = hierarchy.parents_of_labels(np.array([[0, 2, -1], [1, -1, 0]], np.int32))
    assert parents.tolist() == [[1, 3, -1], [-1, -1, 1]]
    assert parents.dtype == np.int32


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"a": "a"}, "'a' → 'a'"),
        ({"a": "b", "b": "a", "c": None}, r"'a' → 'b' → 'a'|'b' → 'a' → 'b'"),
        # The start of the chain is not on the cycle and is not named.
        (
            {"x": "y", "y": "a", "a": "b", "b": "c", "c": "a", "z": "root"},
            r": '[abc]' → '[abc]' → '[abc]' → '[abc]';",
        ),
    ],
)
def test_a_cycle_is_named(rows, message):
    with pytest.raises(InputError, match=message):
        build(rows)


def test_a_long_cycle_is_named_in_short():
    rows = {f"n{i}": f"n{(i + 1) % 1000}" for i in range(1000)}
    with pytest.raises(InputError, match=r"\(1000 labels\)") as error:
        build(rows)
    assert len(str(error.value)) < 400


def test_a_name_given_twice_is_refused():
    with pytest.raises(InputError, match="'a' stands twice"):
        Hierarchy.from_parents(pa.array(["a", "b", "a"]), pa.array([None, None, "b"], pa.string()), 3)


@pytest.mark.parametrize("length", [1, 2, 3, 64, 65, 1000])
def test_chains_of_any_length(length):
    hierarchy = build({f"n{i}": f"n{i + 1}" if i + 1 < length else None for i in range(length)})
    assert hierarchy.depth.tolist() == list(range(length))[::-1]
    assert hierarchy.ancestors()[0].indices.tolist() == list(range(1, length))


def test_depths_and_ancestors_equal_a_walk_on_a_random_forest():
    random = np.random.default_rng(0)
    shuffled = random.permutation(500)
    rows = {}
    for place, node in enumerate(shuffled):
        rows[f"n{node}"] = (
            f"n{shuffled[random.integers(place)]}" if place and random.random() < 0.95 else None
        )
    hierarchy = build(rows)
    ancestors = hierarchy.ancestors()
    for i, name in enumerate(rows):
        walk = []
        while (above := rows[name]) is not None:
            walk.append(above)
            name = above
        assert named(hierarchy, ancestors.indices[ancestors.indptr[i] : ancestors.indptr[i + 1]]) == walk
        assert hierarchy.depth[i] == len(walk)


def test_from_clusters():
    hierarchy = Hierarchy.from_clusters(pa.array(["a", "b", "c"]), np.array([1, 0, 1]))
    assert hierarchy.names.to_pylist() == ["a", "b", "c", "cluster 0", "cluster 1"]
    assert hierarchy.parents_of_labels(np.arange(3)).tolist() == [4, 3, 4]
    assert hierarchy.depth.tolist() == [1, 1, 1, 0, 0]


def test_chunked_columns_and_no_labels():
    chunked = pa.chunked_array([["a"], ["b"]])
    assert Hierarchy.from_parents(
        chunked, pa.chunked_array([[None], ["a"]], pa.string()), 2
    ).parent.tolist() == [-1, 0]
    empty = build({})
    assert empty.num_nodes == 0
    assert empty.ancestors().shape == (0, 0)
