"""The linear tree beside libpecos' XR-Linear and napkinXC's PLT on the Debian sets: precision, time and memory.

    python -m benchmarks.linear [DATA]

One figure of precision on 3,000 documents is known to half a point or so: differences have their 95 % interval beside
them, and debian-tags is measured on six tenths of its training groups too, each held out in turn. (Our threshold there
was chosen on the other four.)
All read the same TF-IDF (bigrams, sublinear, 300,000 columns at most) from disk, each in a process of its own, and
use the same number of threads. Time is of everything between features and model: label features, tree, classifiers;
compilation of our kernels is left out: those in use run once on little data. Memory is the peak of the process; what
it had with its libraries and the data loaded, before training, stands beside it. Our settings are the presets'.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass, fields, replace
from itertools import compress
from operator import not_
from pathlib import Path

import numba
import numpy as np
import scipy.sparse as sp

from benchmarks.record import SHARED_DATA, peak_rss_gb, record, run_peer
from xmc.labels.clustering import ClusterConfig, cluster_labels
from xmc.labels.features import pifa
from xmc.labels.topk import TopK
from xmc.labels.tree import LabelTree, TreeConfig, build_tree
from xmc.linear.inputs import Inputs
from xmc.linear.tree import LinearConfig, LinearTree, flat_tree
from xmc.settings import from_mapping, to_mapping

THREADS = len(os.sched_getaffinity(0))
PLACES = 5
PEERS = ("xr_linear", "napkinxc")
PROGRAMS = ("xmc", *PEERS)
SETS = ("debian-tags", "debian-deps")
# The set of which tenths are held out, and which.
HELD_OUT, TENTHS = "debian-tags", range(4, 10)


def read(path: Path) -> list[dict]:
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def label_matrix(documents: list[dict], ids: dict[str, int]) -> sp.csr_matrix:
    labels = [ids[label] for document in documents for label in document["labels"]]
    starts = np.cumsum([0] + [len(document["labels"]) for document in documents])
    return sp.csr_matrix((np.ones(len(labels), np.float32), labels, starts), shape=(len(documents), len(ids)))


def parts(data: Path, tenth: int | None) -> tuple[list[dict], list[dict]]:
    """Train and test; or train without a tenth of its groups, and these."""
    train = read(data / "train.jsonl.gz")
    if tenth is None:
        return train, read(data / "test.jsonl.gz")
    out = [zlib.crc32(document["group"].encode()) % 10 == tenth for document in train]
    return list(compress(train, map(not_, out))), list(compress(train, out))


def prepare(data: Path, directory: Path, tenth: int | None = None) -> None:
    """Save X, Y, X_test and Y_test of a data set."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    train, test = parts(data, tenth)
    ids = {row["label"]: number for number, row in enumerate(read(data / "labels.jsonl.gz"))}
    tfidf = TfidfVectorizer(
        sublinear_tf=True, ngram_range=(1, 2), min_df=2, max_features=300_000, dtype=np.float32
    )
    matrices = {
        "X": tfidf.fit_transform(document["text"] for document in train),
        "X_test": tfidf.transform(document["text"] for document in test),
        "Y": label_matrix(train, ids),
        "Y_test": label_matrix(test, ids),
    }
    for name, matrix in matrices.items():
        matrix.sort_indices()
        sp.save_npz(directory / f"{name}.npz", matrix, compressed=False)


@dataclass(frozen=True)
class Settings:
    """What of the linear system's settings is measured here."""

    flat_below: int
    clusters: ClusterConfig
    tree: TreeConfig
    linear: LinearConfig
    # Trees whose scores are averaged, by their settings; none: one tree of these settings.
    members: tuple[dict, ...]


def preset(name: str) -> dict:
    """The settings of a user who trains on this data set. Kept out of the measured process, with Ray and torch."""
    from xmc import config

    values = to_mapping(config.load(f"linear.{name.replace('-', '_')}"))
    return {key.name: values[key.name] for key in fields(Settings)}


def label_trees(features: sp.csr_matrix, labels: sp.csr_matrix, settings: Settings) -> list[LabelTree]:
    """As the system makes them."""
    if labels.shape[1] < settings.flat_below:
        return [flat_tree(labels.shape[1])]
    label_features = pifa(labels, features)
    seeds = [member["seed"] for member in settings.members] or [0]
    return [
        build_tree(cluster_labels(label_features, replace(settings.clusters, seed=seed)), settings.tree)
        for seed in seeds
    ]


def predict(models: list[LinearTree], inputs: Inputs) -> TopK:
    """One tree's best labels, or those by the mean of several trees' scores."""
    if len(models) == 1:
        return models[0].predict(inputs, PLACES)
    from xmc.evaluation.combine import Combination, wider

    places = wider(PLACES, models[0].tree.num_labels)
    return Combination("mean")([model.predict(inputs, places) for model in models], PLACES)


def warm_up(settings: Settings, num_labels: int) -> None:
    """Run the kernels that so many labels take once, on few documents."""
    rng = np.random.default_rng(0)
    features = sp.random(2000, 500, 0.02, format="csr", dtype=np.float32, rng=rng)
    chosen = np.unique(np.repeat(np.arange(2000), 8) * num_labels + rng.integers(num_labels, size=16_000))
    entries = np.ones(len(chosen), np.float32), np.divmod(chosen, num_labels)
    labels = sp.csr_matrix(entries, shape=(2000, num_labels))
    inputs = Inputs(features)
    trees = label_trees(features, labels, settings)
    predict([LinearTree.train(inputs, labels, tree, settings.linear) for tree in trees], inputs)


def resident_gb() -> float:
    """What this process has in memory now, in GB."""
    (line,) = re.findall(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) * 1024 / 1e9


def ours(directory: Path, out: Path) -> dict[str, float]:
    """Train and predict in this process."""
    numba.set_num_threads(THREADS)
    settings = from_mapping(Settings, json.loads((directory / "settings.json").read_text()), "settings")
    features, labels, test = (sp.load_npz(directory / f"{part}.npz") for part in ("X", "Y", "X_test"))
    warm_up(settings, labels.shape[1])
    baseline = resident_gb()  # not the peak so far: what the warm-up gave back is there for training to take
    start = time.perf_counter()
    models = [
        LinearTree.train(Inputs(features), labels, tree, settings.linear, num_threads=THREADS)
        for tree in label_trees(features, labels, settings)
    ]
    trained = time.perf_counter()
    top = predict(models, Inputs(test))
    done = time.perf_counter()
    np.save(out, top.label_ids)
    return {
        "train_seconds": trained - start,
        "predict_seconds": done - trained,
        "baseline_gb": baseline,
        "peak_gb": peak_rss_gb(),
        "model_mb": sum(weights.num_bytes for model in models for weights in model.levels) / 1e6,
    }


def hits_of(truth: sp.csr_matrix, top: np.ndarray) -> np.ndarray:
    """(N × k) 1 where a document has the label named there; −1 names none."""
    rows = np.repeat(np.arange(len(top)), top.shape[1])
    return np.asarray(truth[rows, np.maximum(top, 0).ravel()]).reshape(top.shape) * (top >= 0)


def precision(directory: Path, top: np.ndarray) -> dict[str, float]:
    """P@k and PSP@k as everyone computes them, labels that train never saw in the denominators."""
    truth, labels = sp.load_npz(directory / "Y_test.npz"), sp.load_npz(directory / "Y.npz")
    frequencies = np.bincount(labels.indices, minlength=labels.shape[1])
    scale = (np.log(labels.shape[0]) - 1) * 2.5**0.55
    inverse = 1 + scale * (frequencies + 1.5) ** -0.55
    known, hits = np.maximum(top, 0), hits_of(truth, top)
    best = sp.csr_matrix((inverse[truth.indices], truth.indices, truth.indptr), shape=truth.shape)
    ideal = [
        np.sort(best.data[start:stop])[::-1]
        for start, stop in zip(best.indptr[:-1], best.indptr[1:], strict=True)
    ]
    figures = {f"P@{k}": 100 * float(hits[:, :k].mean()) for k in (1, 3, 5)}
    for k in (1, 3, 5):
        gained = (hits[:, :k] * inverse[known[:, :k]]).sum()
        figures[f"PSP@{k}"] = float(100 * gained / sum(row[:k].sum() for row in ideal))
    return figures


def compared(ours: np.ndarray, peer: np.ndarray) -> dict[str, float]:
    """By how much our P@1 is higher than a peer's, from the hits (N,) of both on the same documents, and half the width
    of its 95 % interval."""
    difference = 100 * (ours - peer)
    half_width = 1.96 * difference.std() / np.sqrt(len(difference))
    return {"P@1_difference": round(float(difference.mean()), 2), "known_to": round(float(half_width), 2)}


def run_program(program: str, directory: Path) -> tuple[dict[str, float], np.ndarray]:
    """A program's figures on what `prepare` left, and its hits (N,) at the first place."""
    out = directory / f"{program}.npy"
    if program == "xmc":
        command = [sys.executable, "-m", "benchmarks.linear", "--ours", str(directory), str(out)]
        # once unmeasured: the compiler's memory is no part of training
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        figures = json.loads(done.stdout.splitlines()[-1])
    else:
        figures = run_peer("linear.py", program, str(directory), str(THREADS), str(out))
    top, truth = np.load(out), sp.load_npz(directory / "Y_test.npz")
    figures["predict_ms"] = 1000 * figures.pop("predict_seconds") / len(top)
    figures["growth_gb"] = figures["peak_gb"] - figures["baseline_gb"]
    figures = precision(directory, top) | figures
    print(program, {key: round(value, 3) for key, value in figures.items()}, flush=True)
    return figures, hits_of(truth, top[:, :1])[:, 0]


def measure(data: Path, tenth: int | None = None) -> tuple[dict[str, dict], dict[str, np.ndarray]]:
    """The figures of all three programs on one data set, or on a tenth of its training groups, and their hits."""
    results: dict[str, dict[str, float]] = {}
    hits: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as place:
        prepare(data, Path(place), tenth)
        (Path(place) / "settings.json").write_text(json.dumps(preset(data.name)))
        for program in PROGRAMS:
            results[program], hits[program] = run_program(program, Path(place))
    return results, hits


def beside_peers(results: dict[str, dict[str, float]], hits: dict[str, np.ndarray]) -> dict:
    """All three programs' figures, and ours over the better of the two peers."""
    better = max(PEERS, key=lambda peer: hits[peer].mean())
    smaller = {
        f"{key}_ratio": results["xmc"][key] / min(results[peer][key] for peer in PEERS)
        for key in ("train_seconds", "predict_ms", "peak_gb", "growth_gb")
    }
    return {
        **{
            program: {key: round(value, 3) for key, value in values.items()}
            for program, values in results.items()
        },
        "over_better_peer": compared(hits["xmc"], hits[better])
        | {key: round(value, 3) for key, value in smaller.items()},
    }


def measure_tenths(data: Path) -> dict:
    """The same from all tenths together: means of the figures, and hits on the documents of all."""
    runs = [measure(data, tenth) for tenth in TENTHS]
    means = {
        program: {key: float(np.mean([run[program][key] for run, _ in runs])) for key in runs[0][0][program]}
        for program in PROGRAMS
    }
    return beside_peers(
        means, {program: np.concatenate([hits[program] for _, hits in runs]) for program in PROGRAMS}
    )


def main() -> None:
    if sys.argv[1:2] == ["--ours"]:
        print(json.dumps(ours(Path(sys.argv[2]), Path(sys.argv[3]))))
        return
    data = Path(sys.argv[1]) if len(sys.argv) > 1 else SHARED_DATA
    record(
        "linear",
        {
            "threads": THREADS,
            "tfidf": "1-2 grams, sublinear, at least 2 documents, 300,000 columns at most",
            "xmc": "presets linear.debian_tags (no tree), linear.debian_deps (two trees, up to 100 labels a cluster)",
            "xr_linear": "libpecos, hierarchical k-means, tfn+man, beam 10",
            "napkinxc": "PLT, defaults",
        },
        {name: beside_peers(*measure(data / name)) for name in SETS}
        | {f"{HELD_OUT} held out": measure_tenths(data / HELD_OUT)},
    )


if __name__ == "__main__":
    main()
