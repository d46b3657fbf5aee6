"""Clusters saved label features with libpecos' hierarchical k-means; runs in the peers' environment.

usage: clustering.py FEATURES.npz MAX_LEAF_SIZE THREADS SEED OUT.npy
Writes the leaf of every label to OUT.npy and prints the seconds as JSON.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import scipy.sparse as sp
from pecos.xmc import Indexer  # type: ignore[import-not-found]


def main() -> None:
    features = sp.load_npz(sys.argv[1])
    max_leaf_size, threads, seed = map(int, sys.argv[2:5])
    start = time.perf_counter()
    chain = Indexer.gen(
        features, indexer_type="hierarchicalkmeans", max_leaf_size=max_leaf_size, threads=threads, seed=seed
    )
    seconds = time.perf_counter() - start
    np.save(sys.argv[5], chain[-1].tocsr().indices)
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
