"""CSV and TSV files (.gz too) with a header: a column of text and one of labels with a separator.

A quoted cell may span lines, so that a file is one stream: for speed on large inputs prefer JSON lines or Parquet.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa

from xmc.corpus.readers.fields import LABEL_FIELDS, Fields, label_rows, to_label_rows, to_records
from xmc.corpus.readers.source import SPLITS, Chunk, LabelFile, Source, find_parts
from xmc.corpus.rows import Origin
from xmc.corpus.settings import CorpusConfig
from xmc.errors import InputError

FORMAT = "CSV"
SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
NEEDS = "a .csv or .tsv file with a header, or a directory with train.csv (and test., valid., labels.)"

_LONGEST_CELL = 2**30


def sniff(path: Path) -> bool:
    return "train" in find_parts(path, SUFFIXES)


def open_source(path: Path, config: CorpusConfig) -> Source:
    source = Source(FORMAT, path)
    parts = find_parts(path, SUFFIXES)
    fields = Fields.of(config)
    for split in SPLITS:
        for file_path in parts.get(split, []):
            header = read_header(file_path)
            if header:
                fields.check(file_path, header)
                fields.check_separator(file_path, labels_are_strings=fields.labels in header)
            file = source.add_file(file_path)
            read = partial(_read_records, file_path, fields, config.block_bytes)
            source.chunks.append(Chunk(Origin(file, source.name_of(file), split), read))
    if "labels" in parts:
        source.labels = _read_labels(source, parts["labels"], config)
    return source


def _open(path: Path) -> TextIO:
    # Bytes that are not UTF-8 come through as lone surrogates: their row is found and named, not the whole file lost.
    opened: Any = gzip.open if path.name.endswith(".gz") else open
    return opened(path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="")


def _cells(path: Path, file: TextIO) -> Iterator[list[str]]:
    csv.field_size_limit(_LONGEST_CELL)
    return csv.reader(file, delimiter="\t" if ".tsv" in path.name else ",", strict=True)


def read_header(path: Path) -> list[str]:
    try:
        with _open(path) as file:
            return next(iter(_cells(path, file)), [])
    except (csv.Error, OSError, EOFError) as error:
        raise InputError(f"{path}:1: {error}") from None


def read_tables(path: Path, wanted: tuple[str, ...], block_bytes: int) -> Iterator[pa.Table]:
    """The wanted columns, those that exist, with `line`, `problem` and `raw`, about `block_bytes` of text at a time."""
    with _open(path) as file:
        reader: Any = _cells(path, file)
        header: list[str] = next(reader, [])
        at = [header.index(name) for name in wanted if name in header]
        names = [header[index] for index in at]
        block = _Block(names)
        line = reader.line_num + 1
        while True:
            try:
                cells = next(reader)
            except StopIteration:
                break
            except csv.Error as error:
                block.add_bad(line, f"broken CSV: {error}", "")
                line = reader.line_num + 1
                continue
            except (OSError, EOFError, zlib.error) as error:
                block.add_bad(line, f"broken gzip: {error}", "")
                break
            block.add(line, cells, len(header), at)
            line = reader.line_num + 1
            if block.size >= block_bytes:
                yield block.table()
                block = _Block(names)
        if block.lines:
            yield block.table()


class _Block:
    """Rows of one CSV file on their way into a table."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.lines: list[int] = []
        self.rows: list[list[str | None]] = []
        self.problems: list[str | None] = []
        self.raws: list[str | None] = []
        self.size = 0

    def add(self, line: int, cells: list[str], width: int, at: list[int]) -> None:
        if not cells:
            return
        self.size += sum(map(len, cells))
        if len(cells) != width:
            self.add_bad(
                line, f"broken CSV: {len(cells)} cells where the header has {width}", ",".join(cells)
            )
            return
        kept = [cells[index] or None for index in at]
        try:
            "".join(filter(None, kept)).encode()
        except UnicodeEncodeError:
            self.add_bad(line, "not UTF-8: a cell holds other bytes", ",".join(cells))
            return
        self.lines.append(line)
        self.rows.append(kept)
        self.problems.append(None)
        self.raws.append(None)

    def add_bad(self, line: int, reason: str, raw: str) -> None:
        self.lines.append(line)
        self.rows.append([None] * len(self.names))
        self.problems.append(reason)
        self.raws.append(raw.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"))

    def table(self) -> pa.Table:
        arrays = {
            "line": pa.array(self.lines, pa.int64()),
            "problem": pa.array(self.problems, pa.string()),
            "raw": pa.array(self.raws, pa.string()),
        }
        for name, cells in zip(self.names, zip(*self.rows, strict=True), strict=True):
            arrays[name] = pa.array(cells, pa.string())
        return pa.table(arrays)


def _read_records(path: Path, fields: Fields, block_bytes: int) -> Iterator[pa.Table]:
    for table in read_tables(path, fields.all, block_bytes):
        yield to_records(table, fields)


def _read_labels(source: Source, paths: list[Path], config: CorpusConfig) -> LabelFile:
    if len(paths) > 1:
        raise InputError(f"{source.root}: more than one label file: {', '.join(map(str, paths))}")
    header = read_header(paths[0])
    if not {"label", "name"} & set(header):
        raise InputError(f"{paths[0]}: no column 'label' (columns: {', '.join(header)})")
    tables = [to_label_rows(table) for table in read_tables(paths[0], LABEL_FIELDS, config.block_bytes)]
    return LabelFile(source.add_file(paths[0]), pa.concat_tables(tables) if tables else label_rows(0))
