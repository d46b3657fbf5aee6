"""Clusters saved label features with libpecos' hierarchical k-means; runs in the peers' environment.

usage: clustering.py FEATURES.npz MAX_LEAF_SIZE THREADS OUT_DIR SEED…
Writes each seed's clusters (the leaf of every label) to OUT_DIR and prints the seconds as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from pecos.xmc import Indexer


def main() -> None:
    features = sp.load_npz(sys.argv[1])
    max_leaf_size, threads, out = int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    seconds = []
    for seed in map(int, sys.argv[5:]):
        start = time.perf_counter()
        chain = Indexer.gen(
            features,
            indexer_type="hierarchicalkmeans",
            max_leaf_size=max_leaf_size,
            threads=threads,
            seed=seed,
        )
        seconds.append(time.perf_counter() - start)
        np.save(out / f"peer-{seed}.npy", chain[-1].tocsr().indices)
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
