"""Label documents.

    python -m xmc.predict RUN_DIR INPUT -o OUTPUT -k 10

INPUT is anything that a corpus can be built from (JSON lines, CSV, Parquet …) or `-` for standard input: JSON lines, or
a text a line. OUTPUT ends in .jsonl, .csv or .parquet; without it, JSON lines go to the screen. Order is kept.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from xmc.errors import exit_on_input_error

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
    arguments = parser.parse_args()
    from raycluster import session
    from xmc.corpus.settings import CorpusConfig
    from xmc.model import model_directory
    from xmc.predictions import check_format, standard_input_file, write

    model = model_directory(arguments.run)
    check_format(arguments.output)
    config = CorpusConfig(text_field=arguments.text_field, id_field=arguments.id_field)
    with standard_input_file() if arguments.input == "-" else nullcontext(Path(arguments.input)) as path:
        session.connect()
        count = write(arguments.output, _labelled(model, path, config, arguments.k))
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


if __name__ == "__main__":
    exit_on_input_error(main)
