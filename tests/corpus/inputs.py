"""Writes small inputs for the corpus tests and reads them without a build."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from xmc.corpus.readers import find_reader
from xmc.corpus.rows import LINE_BITS, finish
from xmc.corpus.settings import CorpusConfig


def document(number: int, labels: list[str] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "id": f"d{number}",
        "text": f"text number {number}",
        "labels": labels or [f"l{number % 3}"],
        "group": f"g{number // 2}",
        **more,
    }


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """Rows as JSON lines; bytes go in as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join(
        row + b"\n" if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows
    )
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def read_rows(path: Path, config: CorpusConfig | None = None) -> list[dict[str, Any]]:
    """All rows as the build would see them before duplicates are looked for, with `line` and `file`."""
    config = config or CorpusConfig(valid_fraction=0)
    source = find_reader(path).open_source(path, config)
    tables = [finish(block, chunk.origin, config) for chunk in source.chunks for block in chunk.read()]
    rows = pa.concat_tables(tables).to_pylist() if tables else []
    for row in rows:
        row["line"] = row["row"] & ((1 << LINE_BITS) - 1)
        row["file"] = source.files[row["row"] >> LINE_BITS].name
    return rows


def problems(path: Path, config: CorpusConfig | None = None) -> dict[int, str]:
    """line → problem of the bad rows."""
    return {row["line"]: row["problem"] for row in read_rows(path, config) if row["problem"]}
