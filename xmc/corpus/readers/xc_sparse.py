"""The Extreme Classification Repository's sparse files: `train.txt` and `test.txt` with an `N D L` header, then
a document a line, `l1,l2 f:v f:v`. Features without text; a document may have no labels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from xmc.corpus import lines
from xmc.corpus.readers.fields import cut_labels
from xmc.corpus.readers.source import SPLITS, Chunk, FileProblem, Source
from xmc.corpus.readers.text_and_labels import quote_lines, to_strings
from xmc.corpus.rows import Origin, flat, lists, records
from xmc.corpus.settings import CorpusConfig
from xmc.errors import InputError

FORMAT = "XC Repository sparse features"
NEEDS = "a directory with train.txt and test.txt whose first line is `N D L`"

_HEADER = re.compile(rb"\s*(\d+)\s+(\d+)\s+(\d+)\s*")


def read_header(path: Path) -> tuple[int, int, int] | None:
    """(N, D, L) of the first line, None where it is no header."""
    with open(path, "rb") as file:
        match = _HEADER.fullmatch(file.readline(200))
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def sniff(path: Path) -> bool:
    train = path / "train.txt"
    return train.is_file() and read_header(train) is not None


def open_source(path: Path, config: CorpusConfig) -> Source:
    source = Source(FORMAT, path)
    shapes: dict[str, tuple[int, int, int]] = {}
    for split in SPLITS:
        file_path = path / f"{split}.txt"
        if file_path.is_file():
            header = read_header(file_path)
            if header is None:
                raise InputError(f"{file_path}:1: no `N D L` header")
            shapes[split] = header
            _add_file(source, file_path, split, header, shapes["train"], config)
    source.num_features = shapes["train"][1]
    return source


def _add_file(
    source: Source,
    path: Path,
    split: str,
    header: tuple[int, int, int],
    train_header: tuple[int, int, int],
    config: CorpusConfig,
) -> None:
    file = source.add_file(path)
    source.expected_rows[file] = header[0]
    if header[1:] != train_header[1:]:
        found = f"says D={header[1]} and L={header[2]}, that of train says {train_header[1]} and {train_header[2]}"
        source.problems.append(FileProblem(file, 1, f"header: {found}"))
    origin = Origin(file, source.name_of(file), split, has_text=False, num_label_keys=train_header[2])
    index = lines.index_lines(path, config.block_bytes)
    for byte_range, first_line in zip(index.ranges, index.first_lines, strict=True):
        source.chunks.append(Chunk(origin, partial(_read, path, byte_range, first_line, train_header[1])))


def _read(path: Path, byte_range: tuple[int, int], first_line: int, num_features: int) -> Iterator[pa.Table]:
    rows = lines.split_lines(lines.read_range(path, *byte_range))
    numbers = np.arange(first_line, first_line + len(rows))
    if first_line == 1:
        rows, numbers = rows[1:], numbers[1:]
    # An empty line is no document: one without labels still has features.
    full = np.array([bool(row) for row in rows], dtype=bool)
    if not full.all():
        rows, numbers = [row for row in rows if row], numbers[full]
    if rows:
        yield parse_rows(rows, numbers, num_features)


def parse_rows(rows: list[bytes], numbers: np.ndarray, num_features: int) -> pa.Table:
    """RECORDS of sparse rows; those that do not fit are marked."""
    problems = np.full(len(rows), None, dtype=object)
    text = pc.fill_null(to_strings(rows, problems), "")
    parsed = _parse_fast(text)
    if parsed is None:
        good = _keep_well_formed(text, problems)
        parsed = _parse_fast(good)
        assert parsed is not None  # only well-formed rows are left
    labels, ids, values, lengths = parsed
    row_of = np.repeat(np.arange(len(rows)), lengths)
    for at in np.flatnonzero(ids >= num_features)[::-1]:
        problems[row_of[at]] = (
            f"index out of range: feature {ids[at]} where there are {num_features:,} features"
        )
    for at in np.flatnonzero(~np.isfinite(values)):
        problems[row_of[at]] = f"wrong type: the value of feature {ids[at]} is not finite"
    ids = np.minimum(ids, np.iinfo(np.int32).max).astype(np.int32)
    return records(
        len(rows),
        line=pa.array(numbers),
        labels=cut_labels(labels, ","),
        feature_ids=lists(pa.array(ids), lengths),
        feature_values=lists(pa.array(values), lengths),
        problem=problems,
        raw=quote_lines(rows, problems),
    )


def _parse_fast(text: pa.Array) -> tuple[pa.Array, np.ndarray, np.ndarray, np.ndarray] | None:
    """Label strings (N,), feature ids and values (all rows', int64 and float32) and their number a row (N,).

    None where any row is not well formed.
    """
    tokens, counts = flat(pc.split_pattern(pc.replace_substring(text, "\t", " "), " "))
    if len(tokens) == 0:
        return text, np.zeros(0, np.int64), np.zeros(0, np.float32), counts
    is_feature = pc.match_substring(tokens, ":").to_numpy(zero_copy_only=False)
    row_of = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    is_first = np.zeros(len(tokens), dtype=bool)
    is_first[first] = True
    stray = ~is_feature & ~is_first
    if stray.any() and pc.any(pc.not_equal(tokens.filter(pa.array(stray)), "")).as_py():
        return None
    labels = pc.if_else(pa.array(is_feature[first]), "", tokens.take(pa.array(first)))
    pieces, widths = flat(pc.split_pattern(tokens.filter(pa.array(is_feature)), ":"))
    if (widths != 2).any():
        return None
    try:
        ids = pc.cast(pieces[0::2] if len(pieces) else pieces, pa.int64()).to_numpy(zero_copy_only=False)
        values = pc.cast(pieces[1::2] if len(pieces) else pieces, pa.float32()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        return None
    if (ids < 0).any():
        return None
    return labels, ids, values, np.bincount(row_of[is_feature], minlength=len(counts))


def _keep_well_formed(text: pa.Array, problems: np.ndarray) -> pa.Array:
    """Blank the rows that are not `labels feature:value …` and note why."""
    kept = text.to_pylist()
    for at, row in enumerate(kept):
        reason = _what_is_wrong(row)
        if reason:
            problems[at] = problems[at] or reason
            kept[at] = ""
    return pa.array(kept, pa.string())


def _what_is_wrong(row: str) -> str | None:
    tokens = row.replace("\t", " ").split(" ")
    for token in tokens if ":" in tokens[0] else tokens[1:]:
        if not token:
            continue
        index, colon, value = token.partition(":")
        if not colon or not index.isascii() or not index.isdigit() or len(index) > 18:
            return f"wrong type: {token!r} is not feature:value"
        try:
            pc.cast(pa.scalar(value), pa.float32())
        except pa.ArrowInvalid:
            return f"wrong type: {token!r} is not feature:value"
    return None
