"""Label ids, the rows around them, and what is wrong with a label file."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from xmc.corpus.label_table import check_label_rows, find_cycles, make_label_table, merge_counts
from xmc.corpus.readers.fields import label_rows


def rows_of(*rows: tuple[str | None, str | None]) -> pa.Table:
    names, parents = zip(*rows, strict=True)
    return label_rows(
        len(rows),
        line=pa.array(range(1, len(rows) + 1)),
        key=pa.array(names, pa.string()),
        name=pa.array(names, pa.string()),
        parent=pa.array(parents, pa.string()),
    )


def test_train_labels_come_first_sorted_then_the_others_then_missing_parents():
    counts = merge_counts([pa.array(["b", "a"]), pa.array(["b"])], [pa.array([2, 1]), pa.array([3])])
    keys, table = make_label_table(counts, rows_of(("z", None), ("b", "top"), ("c", "z")))
    assert keys.to_pylist() == ["a", "b"]
    assert table.to_pydict() == {
        "name": ["a", "b", "c", "z", "top"],
        "text": ["a", "b", "c", "z", "top"],
        "parent": [None, "top", "z", None, None],
        "train_frequency": [1, 5, 0, 0, 0],
    }


def test_names_and_keys_may_differ():
    counts = merge_counts([pa.array(["0", "2"])], [pa.array([1, 1])])
    rows = rows_of(("0", None), ("1", None), ("2", None)).set_column(
        2, "name", pa.array(["zebra", "m", "ant"])
    )
    keys, table = make_label_table(counts, rows)
    assert keys.to_pylist() == ["2", "0"]
    assert table["name"].to_pylist() == ["ant", "zebra", "m"]


def test_bad_label_rows():
    checked = check_label_rows(
        rows_of(("a", "b"), ("b", "c"), ("c", "a"), ("d", "a"), ("d", None), (None, None), ("e\nf", None))
    )
    assert checked["problem"].to_pylist() == [
        None,
        None,
        "parent cycle: a → b → c → a",
        None,
        "duplicate label row: 'd' (first at line 4)",
        "bad label: a row of the label file has no name",
        "bad label: line break in 'e\\nf'",
    ]


def test_empty_label_file():
    assert check_label_rows(label_rows(0)).num_rows == 0


def test_every_cycle_is_found_in_a_large_forest():
    rng = np.random.default_rng(0)
    size = 20_000
    names = pa.array([f"n{at}" for at in range(size)])
    parent_of = np.array([rng.integers(0, at) if at else -1 for at in range(size)])
    parent_of[100], parent_of[200], parent_of[300] = 200, 300, 100
    parent_of[7] = 7
    parents = pa.array([None if at < 0 else f"n{at}" for at in parent_of])
    assert sorted(map(sorted, find_cycles(names, parents))) == [[7], [100, 200, 300]]
    parent_of[[100, 7]] = -1
    parents = pa.array([None if at < 0 else f"n{at}" for at in parent_of])
    assert find_cycles(names, parents) == []
