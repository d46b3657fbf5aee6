"""The Extreme Classification Repository's sets with label texts: `trn.json.gz`, `tst.json.gz`, `lbl.json.gz`.

A label is named by its uid; its title and content are its text. Relevances (`target_rel`) are not used.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from xmc.corpus.readers import json_lines
from xmc.corpus.readers.fields import Fields, join_text, label_rows
from xmc.corpus.readers.source import LabelFile, Source, unique_names
from xmc.corpus.settings import CorpusConfig
from xmc.errors import InputError

FORMAT = "XC Repository label features"
NEEDS = "a directory with trn.json.gz, tst.json.gz and lbl.json.gz"

_FIELDS = Fields(text=("title", "content"), labels="target_ind", id="uid", group="group", separator=None)


def _file(path: Path, stem: str) -> Path | None:
    names = (f"{stem}.json.gz", f"{stem}.json")
    return next((path / name for name in names if (path / name).is_file()), None)


def sniff(path: Path) -> bool:
    return path.is_dir() and _file(path, "trn") is not None


def open_source(path: Path, config: CorpusConfig) -> Source:
    source = Source(FORMAT, path)
    labels = _file(path, "lbl")
    if labels is None:
        raise InputError(
            f"{path}: trn.json is there but lbl.json.gz is not; documents name labels by its lines"
        )
    table = _read_labels(labels, config)
    for split, stem in (("train", "trn"), ("test", "tst")):
        file_path = _file(path, stem)
        if file_path is not None:
            json_lines.add_file(source, file_path, split, _FIELDS, config, num_label_keys=table.num_rows)
    source.labels = LabelFile(source.add_file(labels), table)
    if (path / "filter_labels_test.txt").is_file():
        source.notes.append(
            "filter_labels_test.txt (pairs to leave out of the metrics) is there and was not used"
        )
    return source


def _read_labels(path: Path, config: CorpusConfig) -> pa.Table:
    schema = pa.schema([(name, pa.string()) for name in ("uid", "title", "content")])
    tables = list(json_lines.read_columns(path, json_lines.Columns(schema), config))
    if not tables:
        raise InputError(f"{path}: no labels")
    table = pa.concat_tables(tables).combine_chunks()
    keys = pc.cast(pa.array(range(table.num_rows), pa.int64()), pa.string())
    return label_rows(
        table.num_rows,
        line=table["line"],
        key=keys,
        name=unique_names(pa.concat_arrays(table["uid"].chunks)),
        text=join_text([table["title"], table["content"]]),
        problem=table["problem"],
        raw=table["raw"],
    )
