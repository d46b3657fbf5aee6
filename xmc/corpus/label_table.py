"""Makes the label table of a corpus from the labels that train uses and the rows of a label file, checked.

Label ids are positions in it: labels of train sorted by name. It knows nothing of documents.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from xmc.corpus.readers.source import LABEL_ROWS

LABELS = pa.schema(
    [("name", pa.string()), ("text", pa.string()), ("parent", pa.string()), ("train_frequency", pa.int64())]
)


def check_label_rows(rows: pa.Table) -> pa.Table:
    """LABEL_ROWS with `problem` filled for every row that cannot be used: no or broken name, repeated, in a cycle."""
    problems = np.array(rows["problem"].to_pylist(), dtype=object)

    def add(at: np.integer | int, reason: str) -> None:
        problems[at] = problems[at] or reason

    names = pc.fill_null(rows["name"], "").combine_chunks()
    for at in np.flatnonzero(~pc.match_substring_regex(names, r"\S").to_numpy(zero_copy_only=False)):
        add(at, "bad label: a row of the label file has no name")
    for at in np.flatnonzero(pc.match_substring_regex(names, r"[\r\n]").to_numpy(zero_copy_only=False)):
        add(at, f"bad label: line break in {names[int(at)].as_py()!r}")
    usable = problems == None  # noqa: E711  (elementwise)
    code_of = names.dictionary_encode().indices.to_numpy()
    _, first, inverse = np.unique(code_of, return_index=True, return_inverse=True)
    first_of = first[inverse]
    for at in np.flatnonzero(usable & (first_of < np.arange(len(names)))):
        where = rows["line"][int(first_of[at])].as_py()
        add(at, f"duplicate label row: {names[int(at)].as_py()!r} (first at line {where})")
    good = np.flatnonzero(problems == None)  # noqa: E711
    for cycle in find_cycles(
        names.take(pa.array(good)), rows["parent"].combine_chunks().take(pa.array(good))
    ):
        path = " → ".join(names[int(good[at])].as_py() for at in [*cycle, cycle[0]])
        add(good[max(cycle)], f"parent cycle: {path}")
    return rows.set_column(LABEL_ROWS.get_field_index("problem"), "problem", pa.array(problems, pa.string()))


def find_cycles(names: pa.Array, parents: pa.Array) -> list[list[int]]:
    """Each cycle among the parents as positions, beginning at the first of them."""
    root = len(names)
    parent_of = np.append(pc.fill_null(pc.index_in(parents, names), root).to_numpy(), root).astype(np.int64)
    reached = parent_of
    for _ in range(
        max(root, 1).bit_length()
    ):  # each round doubles the steps taken: in the end more than there are rows
        reached = reached[reached]
    cycles: list[list[int]] = []
    seen: set[int] = set()
    for start in np.unique(reached[reached != root]):
        if int(start) in seen:
            continue
        cycle, at = [], int(start)
        while at not in seen:
            seen.add(at)
            cycle.append(at)
            at = int(parent_of[at])
        turn = cycle.index(min(cycle))
        cycles.append(cycle[turn:] + cycle[:turn])
    return cycles


def merge_counts(keys: list[pa.Array], counts: list[pa.Array]) -> pa.Table:
    """Sum the label counts of all blocks: columns key, count."""
    table = pa.table(
        {"key": pa.chunked_array(keys, pa.string()), "count": pa.chunked_array(counts, pa.int64())}
    )
    return table.group_by("key").aggregate([("count", "sum")]).rename_columns(["key", "count"])


def make_label_table(counts: pa.Table, rows: pa.Table | None) -> tuple[pa.Array, pa.Table]:
    """The keys by which documents name the labels of train, in the order of label ids, and the LABELS table.

    After the labels of train come the file's other rows, then parents that have no row of their own.
    """
    if rows is None:
        rows = LABEL_ROWS.empty_table()
    rows = rows.combine_chunks()
    at = pc.index_in(counts["key"].combine_chunks(), rows["key"].combine_chunks())
    names = pc.coalesce(rows["name"].combine_chunks().take(at), counts["key"].combine_chunks())
    order = pc.sort_indices(names)
    at = at.take(order)
    seen = pa.table(
        {
            "name": names.take(order),
            "text": rows["text"].take(at),
            "parent": rows["parent"].take(at),
            "train_frequency": counts["count"].take(order),
        }
    )
    used = np.zeros(rows.num_rows, dtype=bool)
    used[pc.drop_null(at).to_numpy()] = True
    others = rows.filter(pa.array(~used)).select(["name", "text", "parent"]).sort_by("name")
    others = others.append_column("train_frequency", pa.array(np.zeros(others.num_rows, dtype=np.int64)))
    table = pa.concat_tables([seen, others])
    table = pa.concat_tables([table, _missing_parents(table)]).combine_chunks()
    return counts["key"].combine_chunks().take(order), _fill_texts(table).cast(LABELS)


def _missing_parents(table: pa.Table) -> pa.Table:
    parents = pc.drop_null(pc.unique(table["parent"]))
    missing = parents.filter(pc.invert(pc.is_in(parents, table["name"].combine_chunks())))
    missing = missing.take(pc.sort_indices(missing))
    nothing = pa.nulls(len(missing), pa.string())
    zeros = pa.array(np.zeros(len(missing), dtype=np.int64))
    return pa.table({"name": missing, "text": nothing, "parent": nothing, "train_frequency": zeros})


def _fill_texts(table: pa.Table) -> pa.Table:
    """A label without text is described by its name."""
    written = pc.fill_null(pc.match_substring_regex(table["text"], r"\S"), False)
    return table.set_column(1, "text", pc.if_else(written, table["text"], table["name"]))
