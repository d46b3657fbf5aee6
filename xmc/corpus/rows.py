"""The block of documents that flows through a build: its columns, its checks, and the split a row belongs to.

Readers make records from their formats; `finish` makes them rows. Knows no file format and writes nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from xmc.corpus.settings import CorpusConfig

# A row's part of the corpus. The vocabulary counts rows of the train file only: TRAIN and VALID_OF_TRAIN.
TRAIN, VALID_OF_TRAIN, VALID_GIVEN, TEST = range(4)
SPLIT_OF_PART = ("train", "valid", "valid", "test")
GIVEN_PART = {"train": TRAIN, "valid": VALID_GIVEN, "test": TEST}

# A row's key is its file's index and its line, so that keys sort in reading order.
LINE_BITS = 40

NAMES = pa.list_(pa.string())
FEATURE_IDS = pa.list_(pa.int32())
FEATURE_VALUES = pa.list_(pa.float32())

# What a reader yields. A row with a `problem` may leave everything else but its line and `raw` null.
RECORDS = pa.schema(
    [
        ("line", pa.int64()),
        ("id", pa.string()),
        ("group", pa.string()),
        ("text", pa.string()),
        ("labels", NAMES),
        ("feature_ids", FEATURE_IDS),
        ("feature_values", FEATURE_VALUES),
        ("problem", pa.string()),
        ("raw", pa.string()),
    ]
)

# What a build keeps. `repeated` counts labels that the document named more than once.
ROWS = pa.schema(
    [
        ("row", pa.int64()),
        ("part", pa.int8()),
        ("id", pa.string()),
        ("group", pa.string()),
        ("text", pa.string()),
        ("labels", NAMES),
        ("repeated", pa.int32()),
        ("feature_ids", FEATURE_IDS),
        ("feature_values", FEATURE_VALUES),
        ("problem", pa.string()),
        ("raw", pa.string()),
    ]
)


@dataclass(frozen=True)
class Origin:
    """Where a block comes from and what holds for all of its rows."""

    file: int  # index into the source's files
    name: str  # the file's name without suffixes: documents without an id are called name:line
    split: str  # train, valid or test
    has_text: bool = True
    num_label_keys: int | None = None  # labels are indices below this; None: they are names


def records(num_rows: int, **columns: Any) -> pa.Table:
    """A table of RECORDS from the columns that a format has; the others are null."""
    arrays = [
        columns[field.name] if field.name in columns else pa.nulls(num_rows, field.type) for field in RECORDS
    ]
    arrays = [
        array if isinstance(array, pa.Array | pa.ChunkedArray) else pa.array(array, field.type)
        for array, field in zip(arrays, RECORDS, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=RECORDS)


def bad_records(lines: Sequence[int], problems: Sequence[str], raws: Sequence[str]) -> pa.Table:
    """Rows of which nothing but the problem is known."""
    return records(len(lines), line=lines, problem=problems, raw=raws)


def lists(values: pa.Array, lengths: np.ndarray) -> pa.ListArray:
    """A list column from its values and the number of them a row."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def flat(column: pa.Array | pa.ChunkedArray) -> tuple[pa.Array, np.ndarray]:
    """A list column's values and lengths (int64); null lists are empty."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # a table without rows combines to no chunk
        array = pa.array([], column.type)
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return array.flatten(), lengths


class _Problems:
    """The first problem found of each row of a block."""

    def __init__(self, given: pa.ChunkedArray) -> None:
        self.reasons = np.full(len(given), None, dtype=object)
        if given.null_count < len(given):
            self.reasons[:] = given.to_pylist()

    def add(self, mask: np.ndarray, reason: str) -> None:
        self.reasons[mask & (self.reasons == None)] = reason  # noqa: E711  (elementwise)

    def add_one(self, row: int, reason: str) -> None:
        if self.reasons[row] is None:
            self.reasons[row] = reason


def finish(block: pa.Table, origin: Origin, config: CorpusConfig) -> pa.Table:
    """Check a table of RECORDS, name and split its rows: a table of ROWS, one a record, bad ones marked."""
    lines = block["line"].to_numpy()
    problems = _Problems(block["problem"])
    if origin.has_text:
        blank = pc.invert(pc.fill_null(pc.match_substring_regex(block["text"], r"\S"), False))
        problems.add(blank.to_numpy(), "no text")
    values, lengths = flat(block["labels"])
    values, lengths, repeated = _check_labels(values, lengths, problems, origin.num_label_keys)
    ids = _name_rows(block["id"], lines, origin.name)
    parts = _assign_parts(block["group"], ids, origin.split, config)
    if config.unlabelled == "bad":
        problems.add((lengths == 0) & (parts <= VALID_OF_TRAIN), "no labels")
    rows = pa.Table.from_arrays(
        [
            pa.array((np.int64(origin.file) << LINE_BITS) | lines),
            pa.array(parts),
            ids,
            block["group"],
            block["text"],
            lists(values, lengths),
            pa.array(repeated),
            block["feature_ids"],
            block["feature_values"],
            pa.array(problems.reasons, pa.string()),
            block["raw"],
        ],
        schema=ROWS,
    )
    return _keep_raw(rows)


def _check_labels(
    values: pa.Array, lengths: np.ndarray, problems: _Problems, num_keys: int | None
) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """Mark rows with impossible labels and drop repeats: values, lengths and repeats (int32) a row."""
    encoded = values.dictionary_encode()
    names = encoded.dictionary
    code_of = pc.fill_null(encoded.indices, len(names)).to_numpy(zero_copy_only=False).astype(np.int64)
    row_of = np.repeat(np.arange(len(lengths)), lengths)
    reasons = _impossible_labels(names, num_keys)
    impossible = np.zeros(len(names) + 1, dtype=bool)
    impossible[list(reasons)] = True
    for at in np.flatnonzero(impossible[code_of]):
        problems.add_one(row_of[at], reasons[int(code_of[at])])
    # One key a (row, label) pair: a key seen twice is a repeat.
    _, first = np.unique(row_of * (len(names) + 1) + code_of, return_index=True)
    repeated = np.zeros(len(lengths), dtype=np.int32)
    if len(first) < len(code_of):
        first.sort()
        distinct = np.bincount(row_of[first], minlength=len(lengths))
        repeated = (lengths - distinct).astype(np.int32)
        values, lengths = values.take(pa.array(first)), distinct
    return values, lengths, repeated


def _impossible_labels(names: pa.Array, num_keys: int | None) -> dict[int, str]:
    """The reason for each distinct label that cannot be one, by code; the code past the last stands for null."""
    reasons = {len(names): "bad label: a label is null"}
    if num_keys is not None:
        digits = pc.match_substring_regex(names, r"^[0-9]{1,18}$")
        keys = pc.fill_null(pc.cast(pc.if_else(digits, names, None), pa.int64()), -1).to_numpy()
        for code in np.flatnonzero((keys < 0) | (keys >= num_keys)):
            label = names[int(code)].as_py()
            reasons[int(code)] = f"index out of range: label {label!r} where there are {num_keys:,} labels"
    for code in np.flatnonzero(pc.match_substring_regex(names, r"[\r\n]").to_numpy(zero_copy_only=False)):
        reasons[int(code)] = f"bad label: line break in {names[int(code)].as_py()!r}"
    for code in np.flatnonzero(~pc.match_substring_regex(names, r"\S").to_numpy(zero_copy_only=False)):
        reasons[int(code)] = "bad label: a label is empty"
    return reasons


def _name_rows(ids: pa.ChunkedArray, lines: np.ndarray, name: str) -> pa.Array:
    """Ids with `name:line` where a row has none."""
    array = pa.concat_arrays(ids.chunks) if ids.num_chunks else pa.array([], pa.string())
    if array.null_count == 0:
        return array
    default = pc.binary_join_element_wise(name, pc.cast(pa.array(lines), pa.string()), ":")
    return pc.coalesce(array, default)


def _assign_parts(groups: pa.ChunkedArray, ids: pa.Array, split: str, config: CorpusConfig) -> np.ndarray:
    """The part (int8) of every row: that of its file, or for train rows by a hash of the seed and the group."""
    parts = np.full(len(ids), GIVEN_PART[split], dtype=np.int8)
    if split != "train" or not (config.valid_fraction or config.test_fraction):
        return parts
    encoded = pc.coalesce(groups, ids).combine_chunks().dictionary_encode()
    names = encoded.dictionary.to_pylist()
    code_of = encoded.indices.to_numpy(zero_copy_only=False)
    if config.valid_fraction:
        parts[_below(names, "valid", config.seed, config.valid_fraction)[code_of]] = VALID_OF_TRAIN
    if config.test_fraction:
        parts[_below(names, "test", config.seed, config.test_fraction)[code_of]] = TEST
    return parts


def _below(names: list[str], purpose: str, seed: int, fraction: float) -> np.ndarray:
    """Which names hash into the first `fraction` of the hash range: (len(names),) bool."""
    salt = f"{purpose}\x1f{seed}\x1f".encode()
    digests = b"".join(hashlib.blake2b(salt + name.encode(), digest_size=8).digest() for name in names)
    return np.frombuffer(digests, dtype="<u8") < np.uint64(fraction * 2**64)


def _keep_raw(rows: pa.Table) -> pa.Table:
    """Give bad rows that their reader did not quote a JSON form of what was read."""
    unquoted = pc.and_(pc.is_valid(rows["problem"]), pc.is_null(rows["raw"])).to_numpy()
    if not unquoted.any():
        return rows
    raw = np.array(rows["raw"].to_pylist(), dtype=object)
    for at in np.flatnonzero(unquoted):
        raw[at] = quote_row(rows.slice(at, 1))
    return rows.set_column(rows.schema.get_field_index("raw"), "raw", pa.array(raw, pa.string()))


def quote_row(row: pa.Table) -> str:
    """One row of ROWS as JSON, for the quarantine."""
    fields = row.select(["id", "text", "labels", "feature_ids", "feature_values"]).to_pylist()[0]
    return json.dumps({key: value for key, value in fields.items() if value is not None}, ensure_ascii=False)
