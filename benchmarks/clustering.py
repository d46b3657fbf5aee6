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
    seconds, peer_seconds, ours, peer = [], [], [], []
    with tempfile.TemporaryDirectory() as directory:
        saved = Path(directory) / "features.npz"
        sp.save_npz(saved, features, compressed=False)
        # By turns, so that whatever else the machine does falls on both.
        for seed in SEEDS:
            start = time.perf_counter()
            clusters = cluster_labels(features, ClusterConfig(max_leaf_size=MAX_LEAF_SIZE, seed=seed))
            seconds.append(time.perf_counter() - start)
            ours.append(clusters.cluster_of)
            out = Path(directory) / f"peer-{seed}.npy"
            done = run_peer(
                "clustering.py", str(saved), str(MAX_LEAF_SIZE), str(THREADS), str(seed), str(out)
            )
            peer_seconds.append(done["seconds"])
            peer.append(np.load(out))
    similarities = [similarity(features, cluster_of) for cluster_of in ours]
    peer_similarities = [similarity(features, cluster_of) for cluster_of in peer]
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
            "seconds": round(float(np.median(seconds)), 3),
            "peer_seconds": round(float(np.median(peer_seconds)), 3),
            "time_ratio": round(float(np.median(np.divide(seconds, peer_seconds))), 3),
            "mean_similarity": round(float(np.mean(similarities)), 4),
            "peer_mean_similarity": round(float(np.mean(peer_similarities)), 4),
            "worst_similarity": round(min(similarities), 4),
            "peer_best_similarity": round(max(peer_similarities), 4),
            "similarity_ratio": round(float(np.mean(similarities) / np.mean(peer_similarities)), 4),
            "cluster_sizes": sorted({int(size) for found in ours for size in np.bincount(found)}),
            "peer_cluster_sizes": sorted({int(size) for found in peer for size in np.bincount(found)}),
        },
    )


if __name__ == "__main__":
    main()
