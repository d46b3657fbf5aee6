"""X-Transformer beside libpecos' XR-Transformer: the same documents, encoder, tokens and steps, one after the other.

    python -m benchmarks.x_transformer [DOCUMENTS STEPS]

Both fine-tune MiniLM at 64 tokens for STEPS updates in all, on batches of 32 of debian-tags' first DOCUMENTS training
documents, write the vectors of all of them and train rankers on TF-IDF and vectors. Time is of everything between
TF-IDF and the trained model, tokenisation included; ours has the start of its training group in it. Each computes as it
does by default: ours in bfloat16 where the processor does, XR-Transformer in fp32. Steps cost the same early and late:
few of them tell the ratio, 27112 and 1500 train whole models.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.linear import THREADS, precision, prepare, read
from benchmarks.quality import measured, stage_seconds
from benchmarks.record import SHARED_DATA, record, run_peer

DATA = SHARED_DATA / "debian-tags"
# What our command does besides: it reads the corpus, makes TF-IDF, and measures.
LEFT_OUT = ("corpus", "tfidf", "evaluate")


def copy_part(directory: Path, documents: int) -> None:
    """The data set with its first training documents only, as our command reads it."""
    directory.mkdir()
    for name in ("train", "test", "labels"):
        rows = read(DATA / f"{name}.jsonl.gz")
        with gzip.open(directory / f"{name}.jsonl.gz", "wt") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows[: documents if name == "train" else None])


def ours(data: Path, run: Path, steps: int) -> dict[str, float]:
    """Seconds of each stage of our command, and its figures on test."""
    command = [sys.executable, "-m", "xmc.train", "x_transformer.debian_tags"]
    options = [f"corpus.path={data}", "corpus.valid_fraction=0", f"run.dir={run}", f"train.updates={steps}"]
    subprocess.run([*command, *options], check=True)
    counted = {name: value for name, value in stage_seconds(run).items() if name not in LEFT_OUT}
    return {
        "seconds": round(sum(counted.values()), 1),
        **{f"of_it_{name}": value for name, value in counted.items()},
        **{key: value for key, value in measured(run).items() if key.split("@")[0] in ("P", "PSP")},
    }


def peer(data: Path, directory: Path, steps: int) -> dict[str, float]:
    """XR-Transformer's seconds and figures on test."""
    directory.mkdir()
    prepare(data, directory)
    texts = {split: [row["text"] for row in read(data / f"{split}.jsonl.gz")] for split in ("train", "test")}
    (directory / "texts.json").write_text(json.dumps(texts))
    out = directory / "top.npy"
    figures = run_peer("xr_transformer.py", str(directory), str(THREADS), str(steps), str(out))
    return {key: round(value, 2) for key, value in (figures | precision(directory, np.load(out))).items()}


def main() -> None:
    documents, steps = (int(value) for value in sys.argv[1:3] or ("6000", "200"))
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        copy_part(root / "data", documents)
        own = ours(root / "data", root / "run", steps)
        other = peer(root / "data", root / "peer", steps)
    record(
        "x_transformer",
        {"documents": documents, "steps": steps, "batch": 32, "tokens": 64, "threads": THREADS},
        {
            "xmc": own,
            "xr_transformer": other,
            "seconds_ratio": round(own["seconds"] / other["train_seconds"], 3),
        },
    )


if __name__ == "__main__":
    main()
