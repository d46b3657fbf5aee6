"""Time and memory of the linear ranker as the labels grow to those of Amazon-670K.

    python -m benchmarks.linear_growth

The data are those of `label_space_growth`; clusters are two of its topics each, and every document is also a negative
of five clusters drawn at random, as a matcher would name them. The level is trained in blocks as tasks of a cluster
would, one after the other with all threads. Each size runs in a process of its own; its peak memory includes the
data. Compilation is left out: the kernels run once on little data.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time

import numpy as np

from benchmarks.label_space_growth import COLUMNS, LIMIT_GB, TOPIC_SIZE, generate
from benchmarks.record import peak_rss_gb, record
from xmc.labels.topk import TopK
from xmc.linear.inputs import Inputs
from xmc.linear.problem import Groups, Problem, plan_blocks
from xmc.linear.scoring import CombineConfig, score_children
from xmc.linear.solver import SolverConfig
from xmc.linear.training import train_block
from xmc.linear.weights import LevelWeights, concatenate

SIZES = (20_000, 200_000, 670_000)
CLUSTER_SIZE = 2 * TOPIC_SIZE
NAMED = 5
BLOCKS = 16
PREDICTED = 2_000


def ranker(num_labels: int) -> tuple[Inputs, Problem, TopK]:
    labels, features = generate(num_labels)
    num_clusters = -(-num_labels // CLUSTER_SIZE)
    offsets = np.minimum(np.arange(num_clusters + 1, dtype=np.int64) * CLUSTER_SIZE, num_labels)
    groups = Groups(np.arange(num_labels, dtype=np.int32), offsets)
    rng = np.random.default_rng(1)
    # Five different ones: a random first, and steps that go round the clusters less than once.
    first = rng.integers(0, num_clusters, (labels.shape[0], 1))
    named = (first + np.arange(NAMED) * (num_clusters // NAMED)) % num_clusters
    matched = TopK(named.astype(np.int32), np.ones(named.shape, np.float32))
    return Inputs(features), Problem.build(labels, groups, "tfn+man", matched), matched


def train(inputs: Inputs, problem: Problem) -> tuple[LevelWeights, list[float]]:
    parts, seconds = [], []
    for span in plan_blocks(problem, inputs, BLOCKS):
        start = time.perf_counter()
        parts.append(train_block(inputs, problem, span, SolverConfig()))
        seconds.append(time.perf_counter() - start)
    return concatenate(parts), seconds


def run(num_labels: int) -> dict:
    """One size: training in blocks, then scoring some documents."""
    small = ranker(3000)
    score_children(train(*small[:2])[0], small[1].groups, small[0], small[2], 5, CombineConfig())
    inputs, problem, matched = ranker(num_labels)
    data_gb = peak_rss_gb()
    start, start_cpu = time.perf_counter(), time.process_time()
    weights, seconds = train(inputs, problem)
    done, cpu = time.perf_counter(), time.process_time() - start_cpu
    top = score_children(
        weights, problem.groups, inputs.rows(0, PREDICTED), matched.rows(0, PREDICTED), 5, CombineConfig()
    )
    scored = time.perf_counter() - done
    return {
        "labels": num_labels,
        "documents": len(inputs),
        "rows": len(problem.rows),
        "seconds": round(done - start, 2),
        "cpu_seconds": round(cpu, 2),
        "longest_block_seconds": round(max(seconds), 2),
        "mean_block_seconds": round(float(np.mean(seconds)), 2),
        "score_ms": round(1000 * scored / len(top), 3),
        "weights_per_label": round(weights.num_entries / num_labels, 1),
        "weights_gb": round(weights.num_bytes / 1e9, 3),
        "data_gb": round(data_gb, 2),
        "peak_gb": round(peak_rss_gb(), 2),
    }


def growth(before: dict, after: dict, key: str) -> float:
    """How much `key` grew, over how much the labels did: 1 is just as fast."""
    return round(after[key] / before[key] / (after["labels"] / before["labels"]), 3)


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(run(int(sys.argv[1]))))
        return
    sizes = []
    for size in SIZES:
        command = [sys.executable, "-m", "benchmarks.linear_growth", str(size)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        sizes.append(
            json.loads(done.stdout.splitlines()[-1]) | {"load_average": round(os.getloadavg()[0], 1)}
        )
        print(f"{size:>8,} labels: {sizes[-1]['seconds']:.1f} s, {sizes[-1]['peak_gb']:.2f} GB", flush=True)
    pairs = list(itertools.pairwise(sizes))
    record(
        "linear_growth",
        {
            "columns": COLUMNS,
            "cluster_size": CLUSTER_SIZE,
            "named_clusters": NAMED,
            "blocks": BLOCKS,
            "limit_gb": LIMIT_GB,
        },
        {
            "sizes": sizes,
            "seconds_over_labels": [growth(*pair, "seconds") for pair in pairs],
            "cpu_seconds_over_labels": [growth(*pair, "cpu_seconds") for pair in pairs],
            "memory_ratio": round(sizes[-1]["peak_gb"] / LIMIT_GB, 3),
        },
    )


if __name__ == "__main__":
    main()
