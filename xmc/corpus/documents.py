"""Documents to label: id and text of any input that a corpus can be built from, labels or none, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import ray.data

from xmc.corpus.build import Chunks
from xmc.corpus.ordered import ordered_data
from xmc.corpus.readers import find_reader
from xmc.corpus.rows import LINE_BITS
from xmc.corpus.settings import CorpusConfig
from xmc.errors import InputError


def read_documents(path: Path, config: CorpusConfig) -> ray.data.Dataset:
    """A dataset of id and text. The first row that cannot be read stops it, named by file and line."""
    config = replace(config, unlabelled="keep")
    path = path.resolve()  # Ray's workers have a working directory of their own
    source = find_reader(path).open_source(path, config)
    with ordered_data(config.block_bytes):
        rows = ray.data.read_datasource(Chunks(source.chunks, config))
        return rows.map_batches(
            partial(_id_and_text, files=[str(file) for file in source.files]),
            batch_size=None,
            batch_format="pyarrow",
        )


def _id_and_text(rows: pa.Table, files: list[str]) -> pa.Table:
    wrong = pc.is_valid(rows["problem"])
    if pc.any(wrong).as_py():
        first = rows.filter(wrong).slice(0, 1).to_pylist()[0]
        file, line = first["row"] >> LINE_BITS, first["row"] & ((1 << LINE_BITS) - 1)
        raise InputError(f"{files[file]}:{line}: {first['problem']}; mend the row, or leave it out")
    return rows.select(["id", "text"])


def raise_input_errors(rows: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Iterate over a dataset's tables; an InputError of a task is raised as itself, not in Ray's wrapping."""
    try:
        yield from rows
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, InputError):
            cause = getattr(cause, "cause", None) or cause.__cause__
        if cause is not None:
            raise cause from None
        raise
