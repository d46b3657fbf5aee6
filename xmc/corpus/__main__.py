"""`python -m xmc.corpus PATH [-o DIR] [key=value …]`: builds a corpus and tells what is in it.

PATH is a file or directory of any known format, or `sample` for the bundled one.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from xmc.corpus import Corpus, CorpusConfig, build, sample_path
from xmc.corpus.build import QUARANTINE
from xmc.errors import exit_on_input_error
from xmc.settings import from_overrides


class _LineProgress:
    """Prints what a build reports, counts at most once a second: readable in a terminal and in a file."""

    def __init__(self) -> None:
        self.last_count = 0.0

    def __call__(self, line: str) -> None:
        if line.startswith("read "):
            if time.monotonic() - self.last_count < 1:
                return
            self.last_count = time.monotonic()
        print(line, file=sys.stderr, flush=True)


def default_directory(path: str) -> Path:
    """`runs/corpus/<name of the input>`."""
    name = "sample" if path == "sample" else Path(path).resolve().name.split(".")[0]
    return Path("runs") / "corpus" / (name or "corpus")


def describe(corpus: Corpus) -> str:
    """The corpus in a few lines of text."""
    manifest = corpus.manifest
    lines = [f"{'':8}{'documents':>12}{'labels/doc':>12}{'words/doc':>12}{'shards':>8}"]
    for split, about in manifest["splits"].items():
        lines.append(
            f"{split:8}{about['documents']:>12,}{about['labels_per_document']:>12.2f}"
            f"{about['words_per_document']:>12.1f}{len(about['shards']):>8}"
        )
    lines.append(f"labels: {manifest['num_labels']:,} in train")
    if manifest["num_features"] is not None:
        lines.append(f"features: {manifest['num_features']:,}")
    lines += _describe_test(manifest)
    if manifest["repeated_labels"]:
        lines.append(f"labels named twice in one document: {manifest['repeated_labels']:,}, counted once")
    lines += _describe_bad_rows(corpus)
    lines += [f"note: {note}" for note in manifest["notes"]]
    return "\n".join(lines)


def _describe_test(manifest: dict[str, Any]) -> list[str]:
    test = manifest["splits"].get("test")
    if test is None:
        return ["no test part: give one, or set test_fraction"]
    lines = []
    if test["unseen_assignments"]:
        share = test["unseen_assignments"] / test["assignments"]
        lines.append(
            f"test labels that train never saw: {manifest['unseen_test_labels']:,} "
            f"({test['unseen_assignments']:,} assignments, {share:.1%}; metrics count them as missed), "
            f"{test['without_known_label']:,} test documents have no other"
        )
    if test["without_labels"]:
        lines.append(
            f"test documents without labels: {test['without_labels']:,}, left out of the metrics' averages"
        )
    return lines


def _describe_bad_rows(corpus: Corpus) -> list[str]:
    manifest = corpus.manifest
    if not manifest["bad_rows"]:
        return []
    total = sum(manifest["bad_rows"].values())
    where = f"in {corpus.path / QUARANTINE}" if manifest["on_bad_row"] == "quarantine" else "skipped"
    return [f"bad rows: {total:,}, {where}", *(f"  {line}" for line in manifest["bad_row_examples"])]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m xmc.corpus", description="Build a corpus from any known input format."
    )
    parser.add_argument("path", metavar="PATH", help="file or directory of documents, or `sample`")
    parser.add_argument("-o", dest="out", metavar="DIR", type=Path, help="default: runs/corpus/<name>")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings, e.g. on_bad_row=quarantine"
    )
    arguments = parser.parse_intermixed_args()
    config = from_overrides(CorpusConfig, arguments.overrides)
    path = sample_path() if arguments.path == "sample" else Path(arguments.path)
    out = arguments.out or default_directory(arguments.path)
    corpus = build(path, out, config, _LineProgress())
    print(f"{corpus.path} from {corpus.manifest['source']['format']}")
    print(describe(corpus))
    print(f"next: python -m xmc.train light_xml corpus.path={corpus.path}")


if __name__ == "__main__":
    exit_on_input_error(main)
