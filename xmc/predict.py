"""Label documents.

    python -m xmc.predict RUN_DIR INPUT -o OUTPUT -k 10

INPUT is anything that a corpus can be built from (JSON lines, CSV, Parquet …) or `-` for standard input: JSON lines, or
a text a line. OUTPUT ends in .jsonl, .csv or .parquet; without it, JSON lines go to the screen. Order is kept.
With --explain each label comes with what the model read for it, where its system can say that (as JSON lines).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from xmc.errors import InputError, exit_on_input_error

if TYPE_CHECKING:
    import pyarrow as pa


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m xmc.predict", description="Label documents.")
    parser.add_argument("run", type=Path, help="a run's directory, or a model's")
    parser.add_argument("input", help="a file or directory of documents, or - for standard input")
    parser.add_argument(
        "-o", "--output", default="-", help="a .jsonl, .csv or .parquet file (default: the screen)"
    )
    parser.add_argument("-k", type=int, default=10, help="labels a document (default: 10)")
    parser.add_argument(
        "--text-field", default="text", help="field of the text; several are joined: title,content"
    )
    parser.add_argument("--id-field", default="id", help="field of the document's id")
    parser.add_argument("--explain", action="store_true", help="say what was read for each label")
    arguments = parser.parse_args()
    from raycluster import session
    from xmc.corpus.settings import CorpusConfig
    from xmc.model import model_directory
    from xmc.predictions import check_format, standard_input_file, write

    model = model_directory(arguments.run)
    if check_format(arguments.output) != ".jsonl" and arguments.explain:
        raise InputError(
            f"{arguments.output}: explanations are written as JSON lines; let the name end in .jsonl"
        )
    config = CorpusConfig(text_field=arguments.text_field, id_field=arguments.id_field)
    with standard_input_file() if arguments.input == "-" else nullcontext(Path(arguments.input)) as path:
        session.connect()
        tables = _explained if arguments.explain else _labelled
        count = write(arguments.output, tables(model, path, config, arguments.k))
    if arguments.output != "-":
        print(f"{count:,} documents labelled: {arguments.output}", file=sys.stderr)


def _labelled(model: Path, path: Path, config: object, k: int) -> Iterator[pa.Table]:
    """Tables of id, labels and scores."""
    import pyarrow.parquet as pq

    from raycluster.inference import label_documents, to_top_k
    from xmc.corpus.documents import raise_first_problem, read_documents
    from xmc.model import LABELS_FILE
    from xmc.predictions import named
    from xmc.progress import Progress

    names = pq.ParquetFile(model / LABELS_FILE).read(["name"]).column("name").combine_chunks()
    labelled = label_documents(model, read_documents(path, config), k)  # type: ignore[arg-type]
    with Progress("labelling", 0, "documents") as progress:
        for table in labelled.iter_batches(batch_size=None, batch_format="pyarrow"):
            raise_first_problem(table)
            progress.update(len(table))
            yield named(table.column("id").combine_chunks(), to_top_k(table, k), names)


def _explained(model: Path, path: Path, config: object, k: int) -> Iterator[pa.Table]:
    """The same with a further column of what was read for each label; in this process, as it is for few documents."""
    import pyarrow as pa

    from xmc.corpus.documents import raise_first_problem, read_documents
    from xmc.model import load

    loaded = load(model)
    for table in read_documents(path, config).iter_batches(batch_size=64, batch_format="pyarrow"):  # type: ignore[arg-type]
        raise_first_problem(table)
        found = loaded.explain(table.column("text").to_pylist(), k)
        rows = [
            {
                "id": document,
                "labels": [why.pop("label") for why in read],
                "scores": [why.pop("score") for why in read],
                "explanations": read,
            }
            for document, read in zip(table.column("id").to_pylist(), found, strict=True)
        ]
        yield pa.Table.from_pylist(rows)


if __name__ == "__main__":
    exit_on_input_error(main)
