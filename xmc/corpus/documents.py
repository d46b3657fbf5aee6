"""Documents to label: id and text of any input that a corpus can be built from, labels or none, in order."""

from __future__ import annotations

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
    """A dataset of id, text and problem: null, or what is wrong with the row, with its file and line."""
    config = replace(config, unlabelled="keep", labels_field="")  # whatever labels they have are not read
    path = path.resolve()  # Ray's workers have a working directory of their own
    source = find_reader(path).open_source(path, config)
    with ordered_data(config.block_bytes):
        rows = ray.data.read_datasource(Chunks(source.chunks, config))
        files = [str(file) for file in source.files]
        return rows.map_batches(partial(_id_and_text, files=files), batch_size=None, batch_format="pyarrow")


def _id_and_text(rows: pa.Table, files: list[str]) -> pa.Table:
    problems = [
        reason and f"{files[row >> LINE_BITS]}:{row & ((1 << LINE_BITS) - 1)}: {reason}"
        for row, reason in zip(rows["row"].to_pylist(), rows["problem"].to_pylist(), strict=True)
    ]
    text = pc.fill_null(rows["text"], "")
    return pa.table({"id": rows["id"], "text": text, "problem": pa.array(problems, pa.string())})


def raise_first_problem(rows: pa.Table) -> None:
    """Stop at the first row that could not be read."""
    for problem in rows["problem"].drop_null().to_pylist()[:1]:
        raise InputError(f"{problem}; mend the row, or leave it out")
