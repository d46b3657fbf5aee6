"""Cuts the bundled sample out of the debian-tags data set: `python -m benchmarks.make_sample`.

Whole source packages (the `group`) are chosen by a hash, so that the same input gives the same sample and siblings
stay together. Rows keep the split, the labels and the order that they have there.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

from benchmarks.record import SHARED_DATA
from xmc.corpus import sample_path

NUM_DOCUMENTS = {"train": 1_700, "test": 300}


def read_rows(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    # No time and no name in the header: the same rows give the same bytes.
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", compresslevel=9, fileobj=raw, mtime=0) as file:
        file.write(lines.encode())


def choose(rows: list[dict[str, Any]], num_documents: int, seed: int) -> list[dict[str, Any]]:
    """Groups in the order of their hash until there are enough documents; rows in their old order."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)

    def position(group: str) -> bytes:
        return hashlib.blake2b(f"{seed}:{group}".encode(), digest_size=8).digest()

    chosen: set[str] = set()
    count = 0
    for group in sorted(groups, key=position):
        if count >= num_documents:
            break
        chosen.add(group)
        count += len(groups[group])
    return [row for row in rows if row["group"] in chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, default=SHARED_DATA / "debian-tags")
    parser.add_argument("--out", type=Path, default=sample_path())
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    used: set[str] = set()
    for split, num_documents in NUM_DOCUMENTS.items():
        rows = choose(read_rows(arguments.source / f"{split}.jsonl.gz"), num_documents, arguments.seed)
        write_rows(arguments.out / f"{split}.jsonl.gz", rows)
        used.update(label for row in rows for label in row["labels"])
        print(f"{split}: {len(rows)} documents")
    labels = read_rows(arguments.source / "labels.jsonl.gz")
    parents = {row["parent"] for row in labels if row["label"] in used}
    kept = [row for row in labels if row["label"] in used | parents]
    write_rows(arguments.out / "labels.jsonl.gz", kept)
    print(f"labels: {len(kept)}; {sum(file.stat().st_size for file in arguments.out.glob('*.gz')):,} bytes")


if __name__ == "__main__":
    main()
