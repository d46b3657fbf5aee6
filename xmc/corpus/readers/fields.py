"""Turns named columns (of JSON, Parquet or CSV) into records: joins text fields, cuts label strings, names ids."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from xmc.corpus.readers.source import LABEL_ROWS
from xmc.corpus.rows import NAMES, flat, lists, records
from xmc.corpus.settings import CorpusConfig
from xmc.errors import InputError

# The columns of a label file; `name` may stand for `label`.
LABEL_FIELDS = ("label", "name", "text", "parent")


@dataclass(frozen=True)
class Fields:
    """Which column is what."""

    text: tuple[str, ...]
    labels: str
    id: str
    group: str
    separator: str | None
    needs_labels: bool = True

    @classmethod
    def of(cls, config: CorpusConfig) -> Fields:
        return cls(
            config.text_fields,
            config.labels_field,
            config.id_field,
            config.group_field,
            config.label_separator,
            config.unlabelled != "keep",
        )

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(name for name in dict.fromkeys((*self.text, self.labels, self.id, self.group)) if name)

    def check(self, path: Path, found: list[str]) -> None:
        """Refuse a file whose columns lack the text or the labels, before a million rows say so one by one."""
        there = ", ".join(found)
        if not any(name in found for name in self.text):
            raise InputError(
                f"{path}: no field {' or '.join(map(repr, self.text))} (fields: {there}); set text_field"
            )
        if self.needs_labels and self.labels not in found:
            raise InputError(f"{path}: no field {self.labels!r} (fields: {there}); set labels_field")

    def check_separator(self, path: Path, labels_are_strings: bool) -> None:
        if labels_are_strings and self.separator is None:
            raise InputError(
                f"{path}: {self.labels!r} holds strings, not lists; "
                "set label_separator to what stands between two labels, on the command line in quotes: "
                "'label_separator=\";\"'"
            )


def to_records(table: pa.Table, fields: Fields) -> pa.Table:
    """RECORDS from a table with `line`, `problem`, `raw` and the columns that the fields name (some may lack)."""
    columns = {
        "line": table["line"],
        "problem": table["problem"],
        "raw": table["raw"],
        "text": join_text([table[name] for name in fields.text if name in table.column_names]),
    }
    for target, name in (("id", fields.id), ("group", fields.group)):
        if name in table.column_names:
            columns[target] = pc.cast(table[name], pa.string())
    if fields.labels in table.column_names:
        columns["labels"] = _to_lists(table[fields.labels], fields.separator)
    return records(table.num_rows, **{name: column for name, column in columns.items() if column is not None})


def to_label_rows(table: pa.Table) -> pa.Table:
    """LABEL_ROWS from a table with `line`, `problem`, `raw` and columns of LABEL_FIELDS; the name is the key."""
    columns = {name: table[name] for name in table.column_names}
    columns["name"] = pc.coalesce(
        *(pc.cast(columns[name], pa.string()) for name in ("label", "name") if name in columns)
    )
    columns["key"] = columns["name"]
    return label_rows(table.num_rows, **columns)


def label_rows(num_rows: int, **columns: pa.Array | pa.ChunkedArray) -> pa.Table:
    """LABEL_ROWS with nulls for the columns that are not given."""
    arrays = [
        pc.cast(columns[field.name], field.type) if columns.get(field.name) is not None
        else pa.nulls(num_rows, field.type)
        for field in LABEL_ROWS
    ]  # fmt: skip
    return pa.Table.from_arrays(arrays, schema=LABEL_ROWS)


def join_text(columns: list[pa.ChunkedArray]) -> pa.ChunkedArray | None:
    """Several columns joined by a space, blank ones left out; a row is null where all are. One column as it is."""
    if not columns:
        return None
    joined = pc.cast(columns[0], pa.string())
    # Pair by pair: Arrow's own skipping of nulls loses rows in which every column is null.
    for column in columns[1:]:
        more = pc.cast(column, pa.string())
        more = pc.if_else(pc.match_substring_regex(more, r"\S"), more, None)
        joined = pc.if_else(pc.match_substring_regex(joined, r"\S"), joined, None)
        joined = pc.coalesce(pc.binary_join_element_wise(joined, more, " "), joined, more)
    return joined


def _to_lists(column: pa.ChunkedArray, separator: str | None) -> pa.Array | pa.ChunkedArray:
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_null(kind):
        return pc.cast(column, NAMES)
    return cut_labels(pc.cast(column, pa.string()), separator or " ")


def cut_labels(column: pa.Array | pa.ChunkedArray, separator: str) -> pa.ListArray:
    """Cut label strings at the separator, blanks around a label dropped; a blank string has no labels.

    A space as separator stands for any run of blanks; after another one an empty piece stays, as a bad label.
    """
    if separator.isspace() and separator != "\t":
        pieces, lengths = flat(pc.ascii_split_whitespace(column))
        keep = pc.not_equal(pieces, "").to_numpy(zero_copy_only=False)
    else:
        values, lengths = flat(pc.split_pattern(column, separator))
        pieces = pc.utf8_trim_whitespace(values)
        alone = np.repeat(lengths == 1, lengths)
        keep = ~(alone & pc.equal(pieces, "").to_numpy(zero_copy_only=False))
    if keep.all():
        return lists(pieces, lengths)
    row_of = np.repeat(np.arange(len(lengths)), lengths)
    return lists(pieces.filter(pa.array(keep)), np.bincount(row_of[keep], minlength=len(lengths)))
