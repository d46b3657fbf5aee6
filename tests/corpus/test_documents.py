from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from xmc.corpus.documents import raise_first_problem, read_documents
from xmc.corpus.settings import CorpusConfig
from xmc.errors import InputError

IDS, TEXTS = ["a", "b", "c"], ["one", "two, three", "four"]


def write(path: Path, **more: list) -> Path:
    table = pa.table({"id": IDS, "text": TEXTS, **more})
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".csv":
        pyarrow.csv.write_csv(table, path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return path


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("more", [{}, {"labels": ["x;y", "z", ""]}], ids=["without labels", "with labels"])
def test_documents_are_read_in_order_with_labels_or_none(
    ray_session: None, tmp_path: Path, ending: str, more: dict
):
    rows = read_documents(write(tmp_path / f"in.{ending}", **more), CorpusConfig()).take_all()
    assert [(row["id"], row["text"], row["problem"]) for row in rows] == [
        (i, t, None) for i, t in zip(IDS, TEXTS, strict=True)
    ]


def test_a_bad_row_is_named(ray_session: None, tmp_path: Path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": "a", "text": "one"}\n{"id": "b"}\n')
    rows = read_documents(path, CorpusConfig()).take_all()
    with pytest.raises(InputError, match=r"in\.jsonl:2: no text"):
        raise_first_problem(pa.Table.from_pylist(rows))
