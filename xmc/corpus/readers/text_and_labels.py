"""The layout of AttentionXML and LightXML: `train_texts.txt` and `train_labels.txt`, one line a document in each.

Labels are separated by blanks. Where `train_raw_texts.txt` (the text before it was cut into words) is there too,
it is read instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from xmc.corpus import lines
from xmc.corpus.readers.fields import cut_labels
from xmc.corpus.readers.source import SPLITS, Chunk, Source
from xmc.corpus.rows import Origin, records
from xmc.corpus.settings import CorpusConfig
from xmc.errors import InputError

FORMAT = "AttentionXML/LightXML texts and labels"
NEEDS = "a directory with train_texts.txt (or train_raw_texts.txt) and train_labels.txt (and test_…)"


def _texts_of(path: Path, split: str) -> Path | None:
    names = (f"{split}_raw_texts.txt", f"{split}_texts.txt")
    return next((path / name for name in names if (path / name).is_file()), None)


def sniff(path: Path) -> bool:
    return path.is_dir() and _texts_of(path, "train") is not None


def open_source(path: Path, config: CorpusConfig) -> Source:
    source = Source(FORMAT, path)
    for split in SPLITS:
        texts = _texts_of(path, split)
        if texts is None:
            continue
        labels = path / f"{split}_labels.txt"
        if not labels.is_file():
            raise InputError(f"{path}: {texts.name} is there but {labels.name} is not")
        _add_pair(source, texts, labels, split, config)
    return source


def _add_pair(source: Source, texts: Path, labels: Path, split: str, config: CorpusConfig) -> None:
    file = source.add_file(texts)
    source.add_file(labels)
    origin = Origin(file, source.name_of(file), split)
    text_index = lines.index_lines(texts, config.block_bytes)
    label_index = lines.index_lines(labels, config.block_bytes)
    for byte_range, first_line in zip(text_index.ranges, text_index.first_lines, strict=True):
        read = partial(_read_pair, texts, byte_range, first_line, label_index)
        source.chunks.append(Chunk(origin, read))
    if label_index.num_lines > text_index.num_lines:
        read = partial(_read_surplus, label_index, text_index.num_lines + 1, texts.name)
        source.chunks.append(Chunk(origin, read))


def _read_pair(
    texts: Path, byte_range: tuple[int, int], first_line: int, label_index: lines.LineIndex
) -> Iterator[pa.Table]:
    text_lines = lines.split_lines(lines.read_range(texts, *byte_range))
    label_lines = label_index.read_lines(first_line, len(text_lines))
    missing = len(text_lines) - len(label_lines)
    if missing and not any(line.strip() for line in text_lines[len(label_lines) :]):
        text_lines, missing = text_lines[: len(label_lines)], 0  # blank lines at the end are no documents
    if not text_lines:
        return
    problems = np.full(len(text_lines), None, dtype=object)
    if missing:
        problems[len(label_lines) :] = (
            f"line counts: {label_index.path.name} has {label_index.num_lines:,} lines, fewer than {texts.name}"
        )
    text_array = to_strings(text_lines, problems)
    label_array = to_strings(label_lines + [b""] * missing, problems)
    yield records(
        len(text_lines),
        line=pa.array(np.arange(first_line, first_line + len(text_lines))),
        text=text_array,
        labels=cut_labels(label_array, " "),
        problem=problems,
        raw=quote_lines(text_lines, problems),
    )


def _read_surplus(label_index: lines.LineIndex, first_line: int, texts_name: str) -> Iterator[pa.Table]:
    surplus = label_index.read_lines(first_line, label_index.num_lines)
    if not any(line.strip() for line in surplus):
        return
    reason = (
        f"line counts: {label_index.path.name} has {label_index.num_lines:,} lines, more than {texts_name}"
    )
    yield records(
        len(surplus),
        line=pa.array(np.arange(first_line, first_line + len(surplus))),
        problem=[reason] * len(surplus),
        raw=[line.decode("utf-8", "backslashreplace") for line in surplus],
    )


def to_strings(values: list[bytes], problems: np.ndarray) -> pa.Array:
    """Lines as text (B,); those that are not UTF-8 become null and are noted in `problems` (B,)."""
    try:
        return pa.array(values, pa.binary()).cast(pa.string())
    except pa.ArrowInvalid:
        decoded: list[str | None] = []
        for at, value in enumerate(values):
            try:
                decoded.append(value.decode("utf-8"))
            except UnicodeDecodeError as error:
                decoded.append(None)
                problems[at] = problems[at] or f"not UTF-8: byte {error.start + 1} of the line"
        return pa.array(decoded, pa.string())


def quote_lines(values: list[bytes], problems: np.ndarray) -> pa.Array:
    """The lines that have a problem as text, null for the others."""
    quoted = np.full(len(values), None, dtype=object)
    for at in np.flatnonzero(problems != None):  # noqa: E711  (elementwise)
        quoted[at] = values[at].decode("utf-8", "backslashreplace")
    return pa.array(quoted, pa.string())
