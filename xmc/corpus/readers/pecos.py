"""The layout of PECOS: `X.trn.txt` (texts), `Y.trn.npz` (labels), `X.trn.npz` (features, optional), the same for
`tst`, and `output-items.txt` with a label a line. Matrices are read without pickle."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
import scipy.sparse as sp

from xmc.corpus import lines
from xmc.corpus.readers.fields import label_rows
from xmc.corpus.readers.source import Chunk, LabelFile, Source, unique_names
from xmc.corpus.readers.text_and_labels import quote_lines, to_strings
from xmc.corpus.rows import Origin, lists, records
from xmc.corpus.settings import CorpusConfig
from xmc.errors import InputError

FORMAT = "PECOS"
NEEDS = "a directory with Y.trn.npz and X.trn.txt or X.trn.npz (and tst, output-items.txt)"

_ROWS = 20_000  # documents a chunk where no text file gives byte ranges

Matrix = dict[str, np.ndarray]


def sniff(path: Path) -> bool:
    return path.is_dir() and (path / "Y.trn.npz").is_file()


def open_source(path: Path, config: CorpusConfig) -> Source:
    source = Source(FORMAT, path)
    num_labels = _add_split(source, "train", "trn", config)
    if (path / "Y.tst.npz").is_file():
        columns = _add_split(source, "test", "tst", config)
        if columns != num_labels:
            raise InputError(f"{path}: Y.tst.npz has {columns:,} columns, Y.trn.npz has {num_labels:,}")
    if (path / "output-items.txt").is_file():
        source.labels = _read_items(source, path / "output-items.txt", num_labels)
    return source


@ray.remote(num_returns=2)
def _load(path: Path) -> tuple[Matrix | None, tuple[int, int] | str]:
    """A sparse matrix as indptr, indices and data, and its shape; or None and the reason why it does not load."""
    try:
        matrix = sp.csr_matrix(sp.load_npz(path))
    except (ValueError, OSError, KeyError, zipfile.BadZipFile) as error:
        return None, f"{path}: not a sparse matrix that loads without pickle: {error}"
    arrays: Matrix = {
        "indptr": matrix.indptr.astype(np.int64),
        "indices": matrix.indices.astype(np.int32),
        "data": matrix.data.astype(np.float32),
    }
    return arrays, (int(matrix.shape[0]), int(matrix.shape[1]))


def _load_remotely(path: Path) -> tuple[ray.ObjectRef, tuple[int, int]]:
    """Load in a task: the arrays go to the object store, where all chunks share them, not through the driver."""
    arrays, shape_ref = _load.remote(path)
    shape = ray.get(shape_ref)
    if isinstance(shape, str):
        raise InputError(shape)
    return arrays, shape


def _add_split(source: Source, split: str, stem: str, config: CorpusConfig) -> int:
    """Plan the chunks of one split; return the number of label columns."""
    texts, features = source.root / f"X.{stem}.txt", source.root / f"X.{stem}.npz"
    if not texts.is_file() and not features.is_file():
        raise InputError(
            f"{source.root}: Y.{stem}.npz is there but neither {texts.name} nor {features.name} is"
        )
    file = source.add_file(texts if texts.is_file() else features)
    source.add_file(source.root / f"Y.{stem}.npz")
    labels, (num_rows, num_labels) = _load_remotely(source.files[-1])
    feature_matrix = None
    if features.is_file():
        feature_matrix = _load_features(source, features, num_rows)
        if texts.is_file():
            source.add_file(features)
    origin = Origin(file, source.name_of(file), split, has_text=texts.is_file(), num_label_keys=num_labels)
    first, reason = 0, None
    if texts.is_file():
        index = lines.index_lines(texts, config.block_bytes)
        for byte_range, first_line in zip(index.ranges, index.first_lines, strict=True):
            read = partial(_read_texts, texts, byte_range, first_line, labels, feature_matrix)
            source.chunks.append(Chunk(origin, read))
        first, reason = (
            index.num_lines,
            f"line counts: Y.{stem}.npz has {num_rows:,} rows, more than {texts.name}",
        )
    for start in range(first, num_rows, _ROWS):
        read = partial(_read_rows, start, min(_ROWS, num_rows - start), labels, feature_matrix, reason)
        source.chunks.append(Chunk(origin, read))
    return num_labels


def _load_features(source: Source, path: Path, num_rows: int) -> ray.ObjectRef:
    matrix, (feature_rows, width) = _load_remotely(path)
    if feature_rows != num_rows:
        raise InputError(f"{path}: {feature_rows:,} rows, the label matrix beside it has {num_rows:,}")
    if source.num_features not in (None, width):
        raise InputError(f"{path}: {width:,} columns, X.trn.npz has {source.num_features:,}")
    source.num_features = width
    return matrix


def _read_texts(
    path: Path,
    byte_range: tuple[int, int],
    first_line: int,
    labels: ray.ObjectRef,
    features: ray.ObjectRef | None,
) -> Iterator[pa.Table]:
    text_lines = lines.split_lines(lines.read_range(path, *byte_range))
    matrix = ray.get(labels)
    num_rows = len(matrix["indptr"]) - 1
    known = max(0, min(len(text_lines), num_rows - (first_line - 1)))
    if not any(line.strip() for line in text_lines[known:]):
        text_lines = text_lines[:known]  # blank lines at the end are no documents
    if not text_lines:
        return
    problems = np.full(len(text_lines), None, dtype=object)
    problems[known:] = f"line counts: the label matrix has {num_rows:,} rows, fewer than {path.name}"
    yield records(
        len(text_lines),
        line=pa.array(np.arange(first_line, first_line + len(text_lines))),
        text=to_strings(text_lines, problems),
        **_slices(first_line - 1, len(text_lines), matrix, features),
        problem=problems,
        raw=quote_lines(text_lines, problems),
    )


def _read_rows(
    start: int, count: int, labels: ray.ObjectRef, features: ray.ObjectRef | None, reason: str | None
) -> Iterator[pa.Table]:
    """Documents without a line of text: all of a set that has features only, else rows past the text file's end."""
    yield records(
        count,
        line=pa.array(np.arange(start + 1, start + count + 1)),
        **_slices(start, count, ray.get(labels), features),
        problem=[reason] * count,
    )


def _slices(start: int, count: int, labels: Matrix, features: ray.ObjectRef | None) -> dict[str, pa.Array]:
    """The list columns of rows start … start + count − 1; rows past a matrix are empty."""
    indices, _, lengths = _rows_of(labels, start, count)
    columns = {"labels": lists(pc.cast(pa.array(indices), pa.string()), lengths)}
    if features is not None:
        indices, values, lengths = _rows_of(ray.get(features), start, count)
        columns["feature_ids"] = lists(pa.array(indices), lengths)
        columns["feature_values"] = lists(pa.array(values), lengths)
    return columns


def _rows_of(matrix: Matrix, start: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Indices, values and their number a row (count,)."""
    indptr = matrix["indptr"][start : start + count + 1]
    lengths = np.zeros(count, dtype=np.int64)
    if len(indptr) < 2:
        return matrix["indices"][:0], matrix["data"][:0], lengths
    lengths[: len(indptr) - 1] = np.diff(indptr)
    return matrix["indices"][indptr[0] : indptr[-1]], matrix["data"][indptr[0] : indptr[-1]], lengths


def _read_items(source: Source, path: Path, num_labels: int) -> LabelFile:
    """Label i is line i + 1: its text, and its name where no other label is called so."""
    items = lines.split_lines(path.read_bytes())
    if len(items) != num_labels:
        raise InputError(f"{path}: {len(items):,} lines, the label matrix has {num_labels:,} columns")
    problems = np.full(len(items), None, dtype=object)
    text = to_strings(items, problems)
    table = label_rows(
        len(items),
        line=pa.array(np.arange(1, len(items) + 1)),
        key=pc.cast(pa.array(np.arange(len(items))), pa.string()),
        name=unique_names(text),
        text=text,
        problem=pa.array(problems, pa.string()),
        raw=quote_lines(items, problems),
    )
    return LabelFile(source.add_file(path), table)
