"""JSON lines, plain or .gz: one object a line with text and labels, and `labels.jsonl` with label, text, parent.

Blocks are parsed by Arrow; one it refuses is parsed again line by line, so that bad lines get their numbers.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json

from xmc.corpus import lines
from xmc.corpus.readers.fields import LABEL_FIELDS, Fields, label_rows, to_label_rows, to_records
from xmc.corpus.readers.source import SPLITS, Chunk, LabelFile, Source, find_parts
from xmc.corpus.rows import NAMES, Origin
from xmc.corpus.settings import CorpusConfig
from xmc.errors import InputError

FORMAT = "JSON lines"
SUFFIXES = tuple(kind + gz for kind in (".jsonl", ".ndjson", ".json") for gz in ("", ".gz"))
NEEDS = "a .jsonl or .jsonl.gz file, or a directory with train.jsonl[.gz] (and test., valid., labels.)"

_PEEK_LINES = 100
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Columns:
    """The fields to take out of each object."""

    schema: pa.Schema
    labels: str | None = None  # the field that holds labels
    separator: str | None = None  # what cuts it where it is a string


def sniff(path: Path) -> bool:
    return "train" in find_parts(path, SUFFIXES)


def open_source(path: Path, config: CorpusConfig) -> Source:
    source = Source(FORMAT, path)
    parts = find_parts(path, SUFFIXES)
    fields = Fields.of(config)
    for split in SPLITS:
        for file_path in parts.get(split, []):
            add_file(source, file_path, split, fields, config)
    if "labels" in parts:
        source.labels = read_label_files(source, parts["labels"], config)
    return source


def add_file(
    source: Source,
    path: Path,
    split: str,
    fields: Fields,
    config: CorpusConfig,
    num_label_keys: int | None = None,
) -> None:
    """Plan the chunks of one file of documents."""
    first = peek(path)
    if first:
        found = list(dict.fromkeys(itertools.chain.from_iterable(first)))
        fields.check(path, found)
        labels = next((row[fields.labels] for row in first if row.get(fields.labels) is not None), None)
        fields.check_separator(path, isinstance(labels, str))
    columns = guess_columns(first, fields)
    file = source.add_file(path)
    origin = Origin(file, source.name_of(file), split, num_label_keys=num_label_keys)
    for read_blocks in plan_blocks(path, config.block_bytes):
        source.chunks.append(Chunk(origin, partial(_read_records, read_blocks, columns, fields)))


def peek(path: Path) -> list[dict[str, Any]]:
    """The objects among the first lines; lines that are none are left for the parser to report."""
    found = []
    with gzip.open(path, "rb") if path.name.endswith(".gz") else open(path, "rb") as file:
        try:
            for line in itertools.islice(file, _PEEK_LINES):
                try:
                    row = json.loads(line.removeprefix(_BOM))
                except ValueError:
                    continue
                if isinstance(row, dict):
                    found.append(row)
        except (OSError, EOFError) as error:
            raise InputError(f"{path}: cannot be read: {error}") from None
    return found


def guess_columns(first: list[dict[str, Any]], fields: Fields) -> Columns:
    """The fields with their Arrow types, from the first values that are not null."""

    def example(name: str) -> Any:
        return next((row[name] for row in first if row.get(name) not in (None, [])), None)

    def scalar(value: Any) -> pa.DataType:
        return pa.int64() if type(value) is int else pa.string()

    types = dict.fromkeys(fields.text, pa.string())
    types |= {name: scalar(example(name)) for name in (fields.id, fields.group)}
    labels = example(fields.labels)
    types[fields.labels] = (
        pa.string() if isinstance(labels, str) else pa.list_(scalar(labels[0] if labels else None))
    )
    return Columns(pa.schema(types.items()), fields.labels, fields.separator)


def plan_blocks(path: Path, block_bytes: int) -> list[Callable[[], Iterator[tuple[int, bytes]]]]:
    """Functions that yield (first line, whole lines): one a byte range, or one for all of a .gz."""
    if path.name.endswith(".gz"):
        return [partial(lines.gzip_blocks, path, block_bytes)]
    index = lines.index_lines(path, block_bytes)
    return [
        partial(_one_block, path, byte_range, first_line)
        for byte_range, first_line in zip(index.ranges, index.first_lines, strict=True)
    ]


def _one_block(path: Path, byte_range: tuple[int, int], first_line: int) -> Iterator[tuple[int, bytes]]:
    yield first_line, lines.read_range(path, *byte_range)


def _read_records(
    read_blocks: Callable[[], Iterator[tuple[int, bytes]]], columns: Columns, fields: Fields
) -> Iterator[pa.Table]:
    for table in _parse_blocks(read_blocks, columns):
        yield to_records(table, fields)


def _parse_blocks(
    read_blocks: Callable[[], Iterator[tuple[int, bytes]]], columns: Columns
) -> Iterator[pa.Table]:
    try:
        for first_line, data in read_blocks():
            if data:
                yield parse_block(data, first_line, columns)
    except lines.BrokenGzipError as error:
        yield _table([error.line], [{}], columns, [f"broken gzip: {error}"], [""])


def parse_block(data: bytes, first_line: int, columns: Columns) -> pa.Table:
    """The columns with `line`, `problem` and `raw`: one row for every line that is not blank."""
    if first_line == 1:
        data = data.removeprefix(_BOM)
    table = _parse_fast(data, columns.schema)
    if table is not None:
        numbers = _line_numbers(data, first_line, table.num_rows)
        if numbers is not None:
            nothing = pa.nulls(table.num_rows, pa.string())
            return (
                table.append_column("line", pa.array(numbers))
                .append_column("problem", nothing)
                .append_column("raw", nothing)
            )
    return _parse_slowly(data, first_line, columns)


def _parse_fast(data: bytes, schema: pa.Schema) -> pa.Table | None:
    """Arrow's parse of the block, or None where it finds anything that does not fit."""
    try:
        table = pa.json.read_json(
            pa.BufferReader(data),
            read_options=pa.json.ReadOptions(use_threads=False, block_size=len(data) + 1),
            parse_options=pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
        table.validate(full=True)  # it takes bytes that are not UTF-8 as they come
    except pa.ArrowException:
        return None
    return table.combine_chunks()


def _line_numbers(data: bytes, first_line: int, num_rows: int) -> np.ndarray | None:
    """The line of every row, or None where rows and lines do not match one to one. Blank lines have no row."""
    content = np.frombuffer(data, dtype=np.uint8)
    ends = np.flatnonzero(content == 10)
    if len(ends) == 0 or ends[-1] != len(content) - 1:
        ends = np.append(ends, len(content))
    starts = np.concatenate(([0], ends[:-1] + 1))
    length = ends - starts
    full = np.flatnonzero(
        (length > 1) | ((length == 1) & (content[np.minimum(starts, len(content) - 1)] != 13))
    )
    return full + first_line if len(full) == num_rows else None


def _parse_slowly(data: bytes, first_line: int, columns: Columns) -> pa.Table:
    numbers: list[int] = []
    rows: list[dict[str, Any]] = []
    problems: list[str | None] = []
    raws: list[str | None] = []
    for number, line in enumerate(lines.split_lines(data), first_line):
        if not line.strip():
            continue
        row, problem = _parse_line(line, columns)
        numbers.append(number)
        rows.append(row)
        problems.append(problem)
        raws.append(line.decode("utf-8", "backslashreplace") if problem else None)
    return _table(numbers, rows, columns, problems, raws)


def _table(
    numbers: list[int],
    rows: list[dict[str, Any]],
    columns: Columns,
    problems: Sequence[str | None],
    raws: Sequence[str | None],
) -> pa.Table:
    """Parsed rows as columns: names as text, whatever type the fast parser would have given them."""
    arrays = {
        "line": pa.array(numbers, pa.int64()),
        "problem": pa.array(problems, pa.string()),
        "raw": pa.array(raws, pa.string()),
    }
    for name in columns.schema.names:
        kind = NAMES if name == columns.labels else pa.string()
        arrays[name] = pa.array([row.get(name) for row in rows], kind)
    return pa.table(arrays)


def _parse_line(line: bytes, columns: Columns) -> tuple[dict[str, Any], str | None]:
    """The fields of one line, or the reason why there are none."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return {}, f"not UTF-8: byte {error.start + 1} of the line"
    except (ValueError, RecursionError) as error:
        return {}, f"broken JSON: {error}"
    if not isinstance(row, dict):
        return {}, f"wrong type: the line holds {_kind(row)}, not an object"
    values: dict[str, Any] = {}
    try:
        for name in columns.schema.names:
            values[name] = _convert(row.get(name), name, columns)
    except UnicodeEncodeError:
        return {}, f"not UTF-8: half a surrogate pair in {name}"
    except TypeError as error:
        return {}, f"wrong type: {error}"
    return values, None


def _convert(value: Any, name: str, columns: Columns) -> str | list[str | None] | None:
    """A field as text or list of texts; TypeError says what it is instead."""
    if value is None:
        return None
    if name != columns.labels:
        return _as_text(value, name)
    if isinstance(value, str) and columns.separator is not None:
        blank_separated = columns.separator == " "
        pieces = (
            value.split() if blank_separated else [part.strip() for part in value.split(columns.separator)]
        )
        value = pieces if value.strip() else []
    if not isinstance(value, list):
        raise TypeError(f"{name} is {_kind(value)}, not a list")
    return [None if label is None else _as_text(label, "a label") for label in value]


def _as_text(value: Any, what: str) -> str:
    if type(value) is int:
        return str(value)
    if not isinstance(value, str):
        raise TypeError(f"{what} is {_kind(value)}, not a string")
    value.encode()  # JSON can spell half a surrogate pair, which no UTF-8 file can hold
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def read_label_files(source: Source, paths: list[Path], config: CorpusConfig) -> LabelFile:
    """The rows of `labels.jsonl`: label (or name), text, parent."""
    if len(paths) > 1:
        raise InputError(f"{source.root}: more than one label file: {', '.join(map(str, paths))}")
    schema = pa.schema([(name, pa.string()) for name in LABEL_FIELDS])
    tables = [to_label_rows(table) for table in read_columns(paths[0], Columns(schema), config)]
    file = source.add_file(paths[0])
    return LabelFile(file, pa.concat_tables(tables) if tables else label_rows(0))


def read_columns(path: Path, columns: Columns, config: CorpusConfig) -> Iterator[pa.Table]:
    """All blocks of a file as columns with `line`, `problem` and `raw`, in this process."""
    for read_blocks in plan_blocks(path, config.block_bytes):
        yield from _parse_blocks(read_blocks, columns)
