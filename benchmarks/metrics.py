"""Times the metrics of 150,000 documents × top 100 of 670,000 labels beside napkinXC's and beside reading the arrays.

    python -m benchmarks.metrics

napkinXC loops over documents in Python, so that it gets a slice of the same documents and its rate is compared.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import napkinxc.metrics as napkinxc
import numpy as np
import scipy.sparse as sp

from benchmarks.record import peak_rss_gb, record
from xmc.evaluation.metrics import Metrics, MetricsConfig
from xmc.evaluation.propensity import inverse_propensity
from xmc.evaluation.table import format_table
from xmc.labels.topk import TopK

NUM_TRAIN = 490_449
LABELS_A_DOCUMENT = 5.45


def zipf_labels(random: np.random.Generator, num_labels: int, count: int) -> np.ndarray:
    """Labels with frequencies ∝ 1/rank, by the inverse of that distribution function."""
    return (np.exp(random.random(count) * np.log(num_labels)).astype(np.int64) - 1).astype(np.int32)


def generate(
    num_documents: int, num_labels: int, k: int, seed: int
) -> tuple[TopK, sp.csr_matrix, np.ndarray]:
    """Predictions (N, k), truth (N × L) and train frequencies (L,); about a third of the true labels is predicted."""
    random = np.random.default_rng(seed)
    lengths = random.poisson(LABELS_A_DOCUMENT, num_documents)
    rows = np.repeat(np.arange(num_documents), lengths)
    columns = zipf_labels(random, num_labels, len(rows))
    truth = sp.csr_matrix(
        (np.ones(len(rows), np.float32), (rows, columns)), shape=(num_documents, num_labels)
    )
    truth.data[:] = 1
    ids = zipf_labels(random, num_labels, num_documents * k).reshape(num_documents, k)
    hit = random.random(len(rows)) < 1 / 3
    ids[rows[hit], random.integers(0, min(k, 10), hit.sum())] = columns[hit]
    scores = np.sort(random.random((num_documents, k), np.float32))[:, ::-1].copy()
    frequency = np.bincount(
        zipf_labels(random, num_labels, int(NUM_TRAIN * LABELS_A_DOCUMENT)), minlength=num_labels
    )
    return TopK(ids, scores), truth, frequency


def best_of(repeats: int, work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def napkinxc_seconds(top_k: TopK, truth: sp.csr_matrix, inverse: np.ndarray, k: int) -> float:
    """The same six metrics by napkinXC on lists, the form in which it is quickest; making the lists is not timed."""
    true_rows = [row.tolist() for row in np.split(truth.indices, truth.indptr[1:-1])]
    predicted_rows = top_k.label_ids[:, :k].tolist()

    def work() -> None:
        for metric in (
            napkinxc.precision_at_k,
            napkinxc.recall_at_k,
            napkinxc.ndcg_at_k,
            napkinxc.coverage_at_k,
        ):
            metric(true_rows, predicted_rows, k=k)
        for metric in (napkinxc.psprecision_at_k, napkinxc.psndcg_at_k):
            metric(true_rows, predicted_rows, inverse, k=k)

    return best_of(1, work)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=150_000)
    parser.add_argument("--labels", type=int, default=670_091)
    parser.add_argument("--places", type=int, default=100)
    parser.add_argument("--peer-documents", type=int, default=5_000, help="documents that napkinXC is given")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    top_k, truth, frequency = generate(args.documents, args.labels, args.places, args.seed)

    results: dict[str, float] = {}
    # Reading predictions and truth once is the least that any program can do.
    arrays = (top_k.label_ids, truth.indices, truth.indptr)
    reading = best_of(3, lambda: [array.max() for array in arrays])
    results["reading_seconds"] = round(reading, 4)
    slice_truth = truth[: args.peer_documents]
    inverse = inverse_propensity(frequency, NUM_TRAIN, 0.6, 2.6)
    for name, ks in (("at_5", (1, 3, 5)), ("at_all", (1, 3, 5, args.places))):
        config = MetricsConfig(ks=ks)

        def evaluate(config: MetricsConfig = config) -> Metrics:
            metrics = Metrics(frequency, NUM_TRAIN, config, "Amazon-670K")
            metrics.update(top_k, truth)
            metrics.result()
            return metrics

        start = time.perf_counter()
        metrics = evaluate()
        results[f"{name}_first_call_seconds"] = round(time.perf_counter() - start, 3)
        seconds = best_of(3, evaluate)
        peer = napkinxc_seconds(top_k.rows(0, args.peer_documents), slice_truth, inverse, ks[-1])
        rate, peer_rate = args.documents / seconds, args.peer_documents / peer
        results[f"{name}_seconds"] = round(seconds, 4)
        results[f"{name}_documents_per_second"] = round(rate)
        results[f"{name}_napkinxc_documents_per_second"] = round(peer_rate)
        results[f"{name}_ratio_to_napkinxc"] = round(rate / peer_rate, 1)
        results[f"{name}_ratio_to_reading"] = round(seconds / reading, 1)
        print(f"top {ks[-1]} of each document:\n{format_table(metrics.result())}\n")

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "top.parquet"
        results["save_seconds"] = round(best_of(1, lambda: top_k.save(path)), 2)
        results["load_seconds"] = round(best_of(1, lambda: TopK.load(path)), 2)
    results["peak_rss_gb"] = round(peak_rss_gb(), 2)
    record("metrics", vars(args), results)


if __name__ == "__main__":
    main()
