"""Parquet files with columns of text and labels, read row group by row group. A "line" is the row in its file."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from xmc.corpus.readers.fields import LABEL_FIELDS, Fields, to_label_rows, to_records
from xmc.corpus.readers.source import SPLITS, Chunk, LabelFile, Source, find_parts
from xmc.corpus.rows import Origin
from xmc.corpus.settings import CorpusConfig
from xmc.errors import InputError

FORMAT = "Parquet"
SUFFIXES = (".parquet",)
NEEDS = "a .parquet file, or a directory with train.parquet or train/*.parquet (and test, valid, labels)"

_BATCH_ROWS = 16_384


def sniff(path: Path) -> bool:
    return "train" in find_parts(path, SUFFIXES)


def open_source(path: Path, config: CorpusConfig) -> Source:
    source = Source(FORMAT, path)
    parts = find_parts(path, SUFFIXES)
    fields = Fields.of(config)
    for split in SPLITS:
        for file_path in parts.get(split, []):
            _add_file(source, file_path, split, fields)
    if "labels" in parts:
        source.labels = _read_labels(source, parts["labels"])
    return source


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a readable Parquet file: {error}") from None


def _add_file(source: Source, path: Path, split: str, fields: Fields) -> None:
    parquet = _open(path)
    schema = parquet.schema_arrow
    fields.check(path, schema.names)
    for name in fields.all:
        if name in schema.names:
            _check_type(path, name, schema.field(name).type, name == fields.labels)
    if fields.labels in schema.names:
        fields.check_separator(path, not _is_list(schema.field(fields.labels).type))
    columns = [name for name in fields.all if name in schema.names]
    file = source.add_file(path)
    origin = Origin(file, source.name_of(file), split)
    first_row = 1
    for group in range(parquet.num_row_groups):
        source.chunks.append(Chunk(origin, partial(_read_group, path, group, first_row, columns, fields)))
        first_row += parquet.metadata.row_group(group).num_rows


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _is_name(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind)


def _check_type(path: Path, name: str, kind: pa.DataType, may_be_list: bool) -> None:
    inner = kind.value_type if may_be_list and _is_list(kind) else kind
    if not _is_name(inner):
        raise InputError(
            f"{path}: column {name!r} is {kind}; strings are needed (or lists of them for labels)"
        )


def _read_group(
    path: Path, group: int, first_row: int, columns: list[str], fields: Fields
) -> Iterator[pa.Table]:
    for batch in pq.ParquetFile(path).iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns):
        table = _with_problems(pa.Table.from_batches([batch]), first_row)
        yield to_records(table, fields)
        first_row += batch.num_rows


def _with_problems(table: pa.Table, first_row: int) -> pa.Table:
    """Add `line`, `problem` and `raw`. Parquet promises UTF-8 but its readers do not check it: this does."""
    problems = np.full(table.num_rows, None, dtype=object)
    try:
        table.validate(full=True)
    except pa.ArrowInvalid:
        good = np.array([_is_utf8(table.slice(at, 1)) for at in range(table.num_rows)])
        problems[~good] = "not UTF-8: a column holds other bytes"
        # Bad rows become null in every column: the good ones are picked back to their places around them.
        table = table.filter(pa.array(good)).take(pa.array(np.cumsum(good) - 1, mask=~good))
    lines = pa.array(np.arange(first_row, first_row + table.num_rows))
    return (
        table.append_column("line", lines)
        .append_column("problem", pa.array(problems, pa.string()))
        .append_column("raw", pa.nulls(table.num_rows, pa.string()))
    )


def _is_utf8(row: pa.Table) -> bool:
    try:
        row.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _read_labels(source: Source, paths: list[Path]) -> LabelFile:
    if len(paths) > 1:
        raise InputError(f"{source.root}: more than one label file: {', '.join(map(str, paths))}")
    parquet = _open(paths[0])
    columns = [name for name in LABEL_FIELDS if name in parquet.schema_arrow.names]
    if not {"label", "name"} & set(columns):
        raise InputError(f"{paths[0]}: no column 'label' (columns: {', '.join(parquet.schema_arrow.names)})")
    table = _with_problems(parquet.read(columns), 1)
    text = [pc.cast(table[name], pa.string()) for name in columns]
    for name, column in zip(columns, text, strict=True):
        table = table.set_column(table.column_names.index(name), name, column)
    return LabelFile(source.add_file(paths[0]), to_label_rows(table))
