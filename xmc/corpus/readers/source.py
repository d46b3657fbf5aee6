"""What every reader hands to the build: the files, the chunks to parse, the label rows. Parses nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from xmc.corpus.rows import Origin
from xmc.corpus.settings import CorpusConfig
from xmc.errors import InputError

SPLITS = ("train", "valid", "test")
_SUFFIXES = (".gz", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".npz")

# Rows of a label file. `key` is what documents call the label: its name, or its index as text.
LABEL_ROWS = pa.schema(
    [
        ("line", pa.int64()),
        ("key", pa.string()),
        ("name", pa.string()),
        ("text", pa.string()),
        ("parent", pa.string()),
        ("problem", pa.string()),
        ("raw", pa.string()),
    ]
)


@dataclass(frozen=True)
class Chunk:
    """A part of the input that one task reads: `read` yields tables of RECORDS in the order of their lines."""

    origin: Origin
    read: Callable[[], Iterator[pa.Table]]


@dataclass(frozen=True)
class LabelFile:
    file: int  # index into the source's files
    table: pa.Table  # LABEL_ROWS


@dataclass(frozen=True)
class FileProblem:
    """Something wrong with a file as a whole; it is reported and treated like a bad row."""

    file: int
    line: int
    reason: str


@dataclass
class Source:
    """An input that a reader has looked at: everything about it but its rows."""

    format: str
    root: Path
    files: list[Path] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)  # train first, then valid, then test
    labels: LabelFile | None = None
    num_features: int | None = None  # D, where documents come with sparse features
    expected_rows: dict[int, int] = field(default_factory=dict)  # file → documents that its header promises
    problems: list[FileProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_file(self, path: Path) -> int:
        """Remember a file; its index goes into row keys, so files are added in reading order."""
        self.files.append(path)
        return len(self.files) - 1

    def name_of(self, file: int) -> str:
        """The file's name inside the source without suffixes, for documents without an id."""
        path = self.files[file]
        name = path.name if path == self.root else path.relative_to(self.root).as_posix()
        while name.endswith(_SUFFIXES):
            name = name[: name.rindex(".")]
        return name


class Reader(Protocol):
    """One input format: a module of this package."""

    FORMAT: str  # its name
    NEEDS: str  # what a path must hold to be read so, for the error that lists the known formats

    def sniff(self, path: Path) -> bool:
        """Whether the path has this format, from names and at most a first line."""

    def open_source(self, path: Path, config: CorpusConfig) -> Source:
        """Look at the input and plan its chunks."""


def find_parts(path: Path, suffixes: tuple[str, ...]) -> dict[str, list[Path]]:
    """The files of train, valid, test and labels: a single file is all train; in a directory `train.jsonl`,
    `train-*.jsonl` or `train/*.jsonl`, for each of the suffixes."""
    if path.is_file():
        return {"train": [path]} if path.name.endswith(suffixes) else {}
    parts = {}
    for part in (*SPLITS, "labels"):
        whole = [path / (part + suffix) for suffix in suffixes if (path / (part + suffix)).is_file()]
        if len(whole) > 1:
            raise InputError(
                f"{path}: {' and '.join(file.name for file in whole)} are both there; keep one of them"
            )
        pieces = [file for file in path.glob(f"{part}-*") if file.name.endswith(suffixes)]
        pieces += [file for file in path.glob(f"{part}/*") if file.name.endswith(suffixes)]
        if whole or pieces:
            parts[part] = whole or sorted(pieces)
    return parts


def unique_names(names: pa.Array) -> pa.Array:
    """Names of labels that are known by position: repeated or empty ones get their position appended."""
    names = pc.fill_null(names, "")
    encoded = names.dictionary_encode()
    code_of = encoded.indices.to_numpy()
    blank = ~pc.match_substring_regex(names, r"\S").to_numpy(zero_copy_only=False)
    shared = (np.bincount(code_of, minlength=len(encoded.dictionary)) > 1)[code_of] | blank
    if not shared.any():
        return names
    taken = set(encoded.dictionary.to_pylist())
    result = names.to_pylist()
    for at in np.flatnonzero(shared):
        name = f"{result[at]} #{at}".strip()
        while name in taken:
            name += "'"
        taken.add(name)
        result[at] = name
    return pa.array(result, pa.string())
