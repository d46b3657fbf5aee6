"""Trains a peer's linear tree on saved TF-IDF features and predicts; runs in the peers' environment.

usage: linear.py xr_linear|napkinxc DIRECTORY THREADS OUT.npy
DIRECTORY holds X.npz and Y.npz to train on and X_test.npz to predict for. Writes each document's five best labels
to OUT.npy (−1 where there are fewer) and prints seconds and memory as JSON.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

PLACES = 5


def peak_rss_gb() -> float:
    (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) * 1024 / 1e9


def padded(rows: list[Any]) -> np.ndarray:
    """(N × PLACES) int32."""
    top = np.full((len(rows), PLACES), -1, np.int32)
    for place, row in enumerate(rows):
        top[place, : len(row)] = row
    return top


def xr_linear(x: Any, y: Any, x_test: Any, threads: int) -> tuple[float, float, np.ndarray]:
    from pecos.xmc import Indexer, LabelEmbeddingFactory  # type: ignore[import-not-found]
    from pecos.xmc.xlinear.model import XLinearModel  # type: ignore[import-not-found]

    start = time.perf_counter()
    features = LabelEmbeddingFactory.create(y, x, method="pifa")
    chain = Indexer.gen(features, indexer_type="hierarchicalkmeans", threads=threads)
    model = XLinearModel.train(x, y, C=chain, threads=threads, negative_sampling_scheme="tfn+man")
    trained = time.perf_counter()
    scores = model.predict(x_test, threads=threads, only_topk=PLACES, beam_size=10)
    done = time.perf_counter()
    rows = [scores[row] for row in range(scores.shape[0])]
    return (
        trained - start,
        done - trained,
        padded([row.indices[np.argsort(-row.data)][:PLACES] for row in rows]),
    )


def napkinxc(x: Any, y: Any, x_test: Any, threads: int) -> tuple[float, float, np.ndarray]:
    from napkinxc.models import PLT

    with tempfile.TemporaryDirectory() as directory:
        start = time.perf_counter()
        model = PLT(directory, threads=threads, seed=0)
        model.fit(x, [row.tolist() for row in np.split(y.indices, y.indptr[1:-1])])
        trained = time.perf_counter()
        rows = model.predict(x_test, top_k=PLACES)
        return trained - start, time.perf_counter() - trained, padded(rows)


PEERS = {"xr_linear": xr_linear, "napkinxc": napkinxc}


def main() -> None:
    peer, directory, threads, out = PEERS[sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    # Imported before memory is looked at: a library is no part of the data.
    __import__({"xr_linear": "pecos.xmc.xlinear.model", "napkinxc": "napkinxc.models"}[sys.argv[1]])
    x, y, x_test = (sp.load_npz(directory / f"{name}.npz") for name in ("X", "Y", "X_test"))
    baseline = peak_rss_gb()
    train, predict, top = peer(x, y, x_test, threads)
    np.save(out, top)
    figures = {
        "train_seconds": train,
        "predict_seconds": predict,
        "baseline_gb": baseline,
        "peak_gb": peak_rss_gb(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
