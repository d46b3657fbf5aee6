"""Balanced clustering of the labels of debian-deps beside libpecos' hierarchical k-means, on the same features.

    python -m benchmarks.clustering

Both get the PIFA features of the same TF-IDF (bigrams, sublinear, 300,000 columns at most) from disk, the same leaf
size, seeds and number of threads. The compilation of our kernels is left out: they run once on a part of the labels.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from pathlib import Path

import numba
import numpy as np
import pyarrow as pa
import scipy.sparse as sp
from sklearn.feature_extraction.text import TfidfVectorizer

from benchmarks.record import SHARED_DATA, record, run_peer
from xmc.labels.clustering import ClusterConfig, cluster_labels
from xmc.labels.features import pifa
from xmc.labels.matrix import label_matrix

DATA = SHARED_DATA / "debian-deps"
MAX_LEAF_SIZE = 100
SEEDS = (0, 1, 2, 3, 4)
THREADS = 2


def read(name: str) -> list[dict]:
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


def label_features() -> sp.csr_matrix:
    """PIFA (L×D) of the training documents."""
    documents, ids = read("train"), {row["label"]: number for number, row in enumerate(read("labels"))}
    tfidf = TfidfVectorizer(
        sublinear_tf=True, ngram_range=(1, 2), min_df=2, max_features=300_000, dtype=np.float32
    )
    rows = tfidf.fit_transform(document["text"] for document in documents)
    lists = pa.array(
        [[ids[label] for label in document["labels"]] for document in documents], pa.list_(pa.int32())
    )
    return pifa(label_matrix(lists, len(ids)), rows)


def similarity(features: sp.csr_matrix, cluster_of: np.ndarray) -> float:
    """Mean cosine of labels to their cluster's centroid: the cosines of a cluster add up to its sum's length."""
    ones = np.ones(len(cluster_of), np.float32)
    sums = sp.csr_matrix((ones, (cluster_of, np.arange(len(cluster_of))))) @ features
    return float(np.sqrt(sums.multiply(sums).sum(axis=1)).sum() / len(cluster_of))


def main() -> None:
    numba.set_num_threads(THREADS)
    features = label_features()
    cluster_labels(features[:2000], ClusterConfig(max_leaf_size=10))
    ours_seconds, ours_similarity, sizes = [], [], set()
    for seed in SEEDS:
        start = time.perf_counter()
        clusters = cluster_labels(features, ClusterConfig(max_leaf_size=MAX_LEAF_SIZE, seed=seed))
        ours_seconds.append(time.perf_counter() - start)
        ours_similarity.append(similarity(features, clusters.cluster_of))
        sizes |= set(np.diff(clusters.offsets).tolist())
    with tempfile.TemporaryDirectory() as directory:
        sp.save_npz(Path(directory) / "features.npz", features, compressed=False)
        peer = run_peer(
            "clustering.py",
            str(Path(directory) / "features.npz"),
            str(MAX_LEAF_SIZE),
            str(THREADS),
            directory,
            *map(str, SEEDS),
        )
        leaves = [np.load(Path(directory) / f"peer-{seed}.npy") for seed in SEEDS]
    peer_similarity = [similarity(features, leaf) for leaf in leaves]
    peer_sizes = {size for leaf in leaves for size in np.bincount(leaf).tolist()}
    record(
        "clustering",
        {
            "data": "debian-deps",
            "labels": features.shape[0],
            "columns": features.shape[1],
            "entries": features.nnz,
            "max_leaf_size": MAX_LEAF_SIZE,
            "threads": THREADS,
            "seeds": list(SEEDS),
            "peer": "libpecos, hierarchicalkmeans, its defaults",
        },
        {
            "seconds": np.median(ours_seconds).round(3).item(),
            "peer_seconds": np.median(peer["seconds"]).round(3).item(),
            "time_ratio": (np.median(ours_seconds) / np.median(peer["seconds"])).round(3).item(),
            "mean_similarity": np.mean(ours_similarity).round(4).item(),
            "peer_mean_similarity": np.mean(peer_similarity).round(4).item(),
            "worst_similarity": np.min(ours_similarity).round(4).item(),
            "peer_best_similarity": np.max(peer_similarity).round(4).item(),
            "similarity_ratio": (np.mean(ours_similarity) / np.mean(peer_similarity)).round(4).item(),
            "cluster_sizes": sorted(sizes),
            "peer_cluster_sizes": sorted(peer_sizes),
        },
    )


if __name__ == "__main__":
    main()
