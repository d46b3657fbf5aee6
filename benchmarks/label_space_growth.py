"""Time and memory of label features and a full label tree as the labels grow to those of Amazon-670K.

    python -m benchmarks.label_space_growth

The data are generated: Zipf label frequencies with every label used, 5.45 labels and about 75 words a document, of
which most belong to the labels' topics. Each size runs in a process of its own; its peak memory includes the data.
Compilation is left out: the kernels run once on little data. Beside the seconds that pass stand those of the
processor, which other work on the machine disturbs less.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import time

import numpy as np
import scipy.sparse as sp
from numba import njit

from benchmarks.record import peak_rss_gb, record
from xmc.labels.clustering import ClusterConfig, cluster_labels, mean_similarity
from xmc.labels.features import pifa
from xmc.labels.tree import TreeConfig, build_tree

SIZES = (10_000, 100_000, 670_000)
COLUMNS = 135_909
DOCUMENTS_PER_LABEL = 490_449 / 670_000
LABELS_PER_DOCUMENT = 5.45
WORDS_PER_DOCUMENT = 75
TOPIC_SIZE = 50  # labels that share a vocabulary
LIMIT_GB = 12


@njit(cache=True)
def draw_labels(counts, order, zipf, rng):
    """Label ids, document after document: each label at least once, half of the rest from the document's topic."""
    labels = np.empty(counts.sum(), np.int32)
    every = labels.size // order.size
    slot = used = topic = 0
    for count in counts:
        for place in range(count):
            if slot % every == 0 and used < order.size:
                labels[slot] = order[used]
                used += 1
            elif place > 0 and rng.random() < 0.5:
                labels[slot] = min(topic * TOPIC_SIZE + rng.integers(0, TOPIC_SIZE), order.size - 1)
            else:
                labels[slot] = np.searchsorted(zipf, rng.random())
            if place == 0:
                topic = labels[slot] // TOPIC_SIZE
            slot += 1
    return labels


@njit(cache=True)
def draw_words(starts, labels, lengths, zipf, rng):
    """Words, document after document: two in five are anyone's, two a topic's, one a label's."""
    words = np.empty(lengths.sum(), np.int32)
    slot = 0
    for document in range(lengths.size):
        for _ in range(lengths[document]):
            label = np.int64(labels[rng.integers(starts[document], starts[document + 1])])
            rank = np.searchsorted(zipf, rng.random())
            kind = rng.integers(0, 5)
            if kind == 0:
                rank = (label * 7919 + rank % 10 * 104729) % zipf.size
            elif kind < 3:
                rank = (label // TOPIC_SIZE * 15485863 + rank % 200 * 32452843) % zipf.size
            words[slot] = rank
            slot += 1
    return words


def cumulative_zipf(size: int, exponent: float) -> np.ndarray:
    weights = np.arange(1, size + 1) ** -exponent
    return np.minimum(np.cumsum(weights) / weights.sum(), 1 - 1e-12)


def generate(num_labels: int, seed: int = 0) -> tuple[sp.csr_matrix, sp.csr_matrix]:
    """Y (N×L) and X (N×D), rows of X TF-IDF-weighted and of unit length."""
    rng = np.random.default_rng(seed)
    num_documents = round(num_labels * DOCUMENTS_PER_LABEL)
    counts = 1 + rng.poisson(LABELS_PER_DOCUMENT - 1, num_documents)
    starts = np.concatenate([[0], np.cumsum(counts)])
    labels = draw_labels(counts, rng.permutation(num_labels), cumulative_zipf(num_labels, 0.8), rng)
    lengths = rng.poisson(WORDS_PER_DOCUMENT * 1.1, num_documents)  # a tenth are repetitions
    words = draw_words(starts, labels, lengths, cumulative_zipf(COLUMNS, 1.0), rng)
    y = sp.csr_matrix((np.ones(labels.size, np.float32), labels, starts), (num_documents, num_labels))
    y.sum_duplicates()
    y.data[:] = 1
    ends = np.concatenate([[0], np.cumsum(lengths)])
    x = sp.csr_matrix((np.ones(words.size, np.float32), words, ends), (num_documents, COLUMNS))
    x.sum_duplicates()
    inverse = 1 + np.log((1 + num_documents) / (1 + np.bincount(x.indices, minlength=COLUMNS)))
    x.data = ((1 + np.log(x.data)) * inverse[x.indices]).astype(np.float32)
    lengths = np.sqrt(np.add.reduceat(x.data * x.data, x.indptr[:-1]))
    x.data /= np.repeat(lengths, np.diff(x.indptr)).astype(np.float32)
    return y, x


def run(num_labels: int) -> dict:
    """Features, clusters and tree of one size."""
    small = pifa(*generate(3000))
    cluster_labels(small, ClusterConfig(max_leaf_size=8))
    y, x = generate(num_labels)
    start, start_cpu = time.perf_counter(), time.process_time()
    features = pifa(y, x)
    featured = time.perf_counter()
    clusters = cluster_labels(features, ClusterConfig(max_leaf_size=8))
    tree = build_tree(clusters, TreeConfig(branching=8, height=3))
    done = time.perf_counter()
    cpu, peak = time.process_time() - start_cpu, peak_rss_gb()
    entries = sp.csr_matrix(features).nnz
    return {
        "labels": num_labels,
        "documents": y.shape[0],
        "labels_per_document": round(y.nnz / y.shape[0], 2),
        "words_per_document": round(x.nnz / x.shape[0], 1),
        "entries": entries,
        "features_seconds": round(featured - start, 2),
        "tree_seconds": round(done - featured, 2),
        "seconds": round(done - start, 2),
        "cpu_seconds": round(cpu, 2),
        "peak_gb": round(peak, 2),
        "level_sizes": tree.level_sizes,
        "mean_similarity": round(mean_similarity(features, clusters), 4),
    }


def growth(before: dict, after: dict, key: str) -> float:
    """How much `key` grew, over how much L log L grew: 1 is just as fast."""
    work = [size["labels"] * math.log(size["labels"]) for size in (before, after)]
    return round(after[key] / before[key] / (work[1] / work[0]), 3)


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(run(int(sys.argv[1]))))
        return
    sizes = []
    for size in SIZES:
        command = [sys.executable, "-m", "benchmarks.label_space_growth", str(size)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        # What else ran: figures taken beside other work say little about growth.
        sizes.append(
            json.loads(done.stdout.splitlines()[-1]) | {"load_average": round(os.getloadavg()[0], 1)}
        )
        print(f"{size:>8,} labels: {sizes[-1]['seconds']:.1f} s, {sizes[-1]['peak_gb']:.2f} GB", flush=True)
    pairs = list(itertools.pairwise(sizes))
    record(
        "label_space_growth",
        {"columns": COLUMNS, "max_leaf_size": 8, "branching": 8, "height": 3, "limit_gb": LIMIT_GB},
        {
            "sizes": sizes,
            "seconds_over_l_log_l": [growth(*pair, "seconds") for pair in pairs],
            "cpu_seconds_over_l_log_l": [growth(*pair, "cpu_seconds") for pair in pairs],
            "memory_over_l_log_l": [growth(*pair, "peak_gb") for pair in pairs],
            "memory_ratio": round(sizes[-1]["peak_gb"] / LIMIT_GB, 3),
        },
    )


if __name__ == "__main__":
    main()
