"""Measure predictions.

python -m xmc.evaluate RUN_DIR [CORPUS]            a model, on its own corpus' test part or on another built corpus
python -m xmc.evaluate RUN_DIR --predictions FILE  a saved prediction file against the truth, row by row
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from xmc.errors import exit_on_input_error


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m xmc.evaluate", description="Measure predictions.")
    parser.add_argument("run", type=Path, help="a run's directory, or a model's")
    parser.add_argument("corpus", nargs="?", type=Path, help="a built corpus; the run's own if left out")
    parser.add_argument("--split", default="test", help="the part of the corpus (default: test)")
    parser.add_argument(
        "--predictions", type=Path, help="a prediction file (.jsonl, .csv or .parquet) instead of the model"
    )
    parser.add_argument("-k", type=int, nargs="+", help="places to measure at (default: the run's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    arguments = parser.parse_args()
    from raycluster import session
    from xmc import run
    from xmc.evaluation.table import format_table
    from xmc.files import atomic_write_text
    from xmc.model import model_directory, read_config
    from xmc.predictions import read_top_k

    model = model_directory(arguments.run)
    config = read_config(model)
    if arguments.k:
        config = replace(
            config,
            metrics=replace(config.metrics, ks=tuple(arguments.k)),
            run=replace(config.run, top_k=max(arguments.k)),
        )
    corpus = run.corpus_of(arguments.run, arguments.corpus)
    run.check_same_labels(model, corpus)
    if arguments.predictions:
        top_k = read_top_k(arguments.predictions, corpus, arguments.split)
    else:
        session.connect()
        top_k = run.predict_split(model, corpus, arguments.split, config.run.top_k)
    result = run.measure(top_k, corpus, arguments.split, config)
    print(format_table(result))
    if arguments.json:
        atomic_write_text(arguments.json, json.dumps(result.to_dict(), indent=2))


if __name__ == "__main__":
    exit_on_input_error(main)
