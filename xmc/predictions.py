"""Prediction files: documents with the names of their best labels and scores, as JSON lines, CSV or Parquet.

JSON lines and Parquet hold a document a row: id, labels, scores (best first). CSV holds a label a row: id, rank, label,
score. Knows no model.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from xmc.corpus.store import Corpus
from xmc.errors import InputError
from xmc.files import atomic_file
from xmc.labels.topk import NO_LABEL, TopK

FORMATS = (".jsonl", ".csv", ".parquet")


def named(ids: pa.Array, top_k: TopK, names: pa.Array) -> pa.Table:
    """Rows id, labels, scores of N documents from their top-k and the label names (L,)."""
    kept = top_k.label_ids != NO_LABEL
    offsets = pa.array(np.concatenate([[0], np.cumsum(kept.sum(1))]).astype(np.int32))
    labels = names.take(pa.array(top_k.label_ids[kept]))
    scores = pa.array(top_k.scores[kept])
    columns = {
        "id": ids,
        "labels": pa.ListArray.from_arrays(offsets, labels),
        "scores": pa.ListArray.from_arrays(offsets, scores),
    }
    return pa.table(columns)


def check_format(path: str) -> str:
    """The ending that says how to write `path`; `-` is JSON lines on standard output."""
    if path == "-":
        return ".jsonl"
    if Path(path).suffix not in FORMATS:
        raise InputError(
            f"{path}: unknown ending; prediction files end in {', '.join(FORMATS)}, or - for the screen"
        )
    return Path(path).suffix


def write(path: str, tables: Iterable[pa.Table]) -> int:
    """Write tables of `named` one after another; the file appears when it is whole. Returns the documents written."""
    ending = check_format(path)
    if path == "-":
        return _write_lines(sys.stdout, tables)
    with atomic_file(Path(path)) as temporary:
        if ending == ".parquet":
            return _write_parquet(temporary, tables)
        with open(temporary, "w", newline="") as file:
            return _write_lines(file, tables) if ending == ".jsonl" else _write_csv(file, tables)


def _write_lines(file: TextIO, tables: Iterable[pa.Table]) -> int:
    count = 0
    for table in tables:
        for row in table.to_pylist():
            row["scores"] = [round(score, 6) for score in row["scores"]]
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        count += len(table)
    return count


def _write_csv(file: TextIO, tables: Iterable[pa.Table]) -> int:
    count = 0
    writer = csv.writer(file)
    writer.writerow(["id", "rank", "label", "score"])
    for table in tables:
        for row in table.to_pylist():
            pairs = zip(row["labels"], row["scores"], strict=True)
            writer.writerows([row["id"], rank, label, f"{s:.6f}"] for rank, (label, s) in enumerate(pairs, 1))
        count += len(table)
    return count


def _write_parquet(path: Path, tables: Iterable[pa.Table]) -> int:
    count = 0
    schema = pa.schema(
        [("id", pa.string()), ("labels", pa.list_(pa.string())), ("scores", pa.list_(pa.float32()))]
    )
    with pq.ParquetWriter(path, schema) as writer:
        for table in tables:
            writer.write_table(table.cast(schema))
            count += len(table)
    return count


def read_top_k(path: Path, corpus: Corpus, split: str) -> TopK:
    """The predictions of a file for the documents of a split, in the corpus' order, found by their ids."""
    ids, labels, scores = _columns(path)
    wanted = corpus.ids(split).combine_chunks()
    rows = pc.index_in(wanted, value_set=ids)
    if rows.null_count:
        missing = wanted.filter(rows.is_null())[0].as_py()
        raise InputError(
            f"{path}: {rows.null_count} documents of {split} have no prediction, the first is {missing!r}"
        )
    names = corpus.labels.names[: corpus.num_labels]
    labels, scores = labels.take(rows), scores.take(rows)
    flat = labels.flatten()
    label_ids = pc.index_in(flat, value_set=names)
    if label_ids.null_count:
        unknown = flat.filter(label_ids.is_null())[0].as_py()
        raise InputError(f"{path}: label {unknown!r} is not one of the corpus' {corpus.num_labels:,} labels")
    lengths = labels.value_lengths().to_numpy()
    places = np.arange(max(int(lengths.max(initial=0)), 1))
    kept = places < lengths[:, None]
    top = TopK(np.full(kept.shape, NO_LABEL, np.int32), np.full(kept.shape, -np.inf, np.float32))
    top.label_ids[kept] = label_ids.to_numpy()
    top.scores[kept] = scores.flatten().to_numpy(zero_copy_only=False)
    return top


def _columns(path: Path) -> tuple[pa.Array, pa.ListArray, pa.ListArray]:
    """id, labels and scores of a prediction file."""
    try:
        rows = {".jsonl": _read_lines, ".csv": _read_csv, ".parquet": _read_parquet}[check_format(str(path))](
            path
        )
        table = pa.Table.from_pylist(list(rows)) if not isinstance(rows, pa.Table) else rows
        arrays = [table.column(name).combine_chunks() for name in ("id", "labels", "scores")]
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise InputError(
            f"{path}: not a prediction file ({error}); it needs id, labels and scores"
        ) from error
    return arrays[0].cast(pa.string()), arrays[1], arrays[2]


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise InputError(f"{path}:{number}: broken JSON ({error})") from error


def _read_csv(path: Path) -> Iterator[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            document = found.setdefault(row["id"], {"id": row["id"], "labels": [], "scores": []})
            document["labels"].append(row["label"])
            document["scores"].append(float(row["score"]))
    return iter(found.values())


def _read_parquet(path: Path) -> pa.Table:
    return pq.ParquetFile(path).read()


@contextmanager
def standard_input_file() -> Iterator[Path]:
    """Standard input as a file of JSON lines: a line that is no JSON object is a document's text itself."""
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "stdin.jsonl"
        with open(path, "w") as file:
            for number, line in enumerate(sys.stdin, 1):
                if line.strip():
                    text = (
                        line
                        if line.lstrip().startswith("{")
                        else json.dumps({"id": str(number), "text": line.strip()})
                    )
                    file.write(text.rstrip("\n") + "\n")
        yield path
