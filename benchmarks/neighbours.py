"""The neighbour stage of TReaderXML: documents a second, recall and memory, as train grows. The limit is exact search.

    python -m benchmarks.neighbours [VECTORS]

VECTORS: the directory `vectors-…` of a run, measured too. Else vectors are generated: clusters within clusters, every
tenth document a copy of the next, as wide as MiniLM's. Each size runs in a process and a Ray of its own, the index is
built and searched by the stage's own code, and a second is one that passes with all cores at work.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import faiss
import numpy as np
import psutil
from safetensors.numpy import save_file

from benchmarks.record import record
from raycluster import session
from xmc.labels.neighbours import NeighbourConfig, duplicate_groups
from xmc.systems import teaching
from xmc.systems.teaching import TeacherConfig
from xmc.systems.vectors import VECTORS

SIZES = (50_000, 500_000)
WIDTH, PIECE, EXACT_QUERIES = 384, 4096, 512
CONFIG = TeacherConfig(neighbours=NeighbourConfig(num_neighbours=10, index="ivf"))


def generate(count: int, directory: Path) -> None:
    """Write the files that the stage `vectors` would leave."""
    random = np.random.default_rng(0)
    coarse = random.normal(size=(100, WIDTH)).astype(np.float32)
    fine = coarse[random.integers(100, size=count // 25)] + 0.7 * random.normal(size=(count // 25, WIDTH))
    fine = fine.astype(np.float32)
    (directory / "train").mkdir(parents=True)
    for start in range(0, count, PIECE):
        rows = min(PIECE, count - start)
        noise = 0.5 * random.standard_normal((rows, WIDTH), np.float32)
        vectors = fine[random.integers(len(fine), size=rows)] + noise
        copied = vectors[1::10]
        vectors[: 10 * len(copied) : 10] = copied
        save_file({VECTORS: vectors}, directory / "train" / f"part-00000-{start:09d}.safetensors")


class MemoryWatch:
    """The largest resident memory, in GB, of one process of this family and of all together."""

    def __init__(self) -> None:
        self.largest = self.together = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stop.wait(0.2):
            sizes = []
            for process in psutil.Process().children(recursive=True):
                try:
                    if "ray::" in " ".join(process.cmdline()):
                        sizes.append(process.memory_full_info().pss / 1e9)
                except psutil.Error:
                    continue
            self.largest = max(self.largest, *sizes, 0.0)
            self.together = max(self.together, sum(sizes))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def exact_documents_per_second(vectors: Path, count: int) -> float:
    """Of faiss' exact search on all cores, from some queries."""
    pieces = teaching.load_pieces(teaching.list_pieces(vectors))
    faiss.normalize_L2(pieces)
    index = faiss.IndexFlatIP(pieces.shape[1])
    index.add(pieces)
    queries = pieces[:: max(1, count // EXACT_QUERIES)][:EXACT_QUERIES]
    index.search(queries[:64], CONFIG.neighbours.num_neighbours)
    began = time.perf_counter()
    index.search(queries, CONFIG.neighbours.num_neighbours)
    return len(queries) / (time.perf_counter() - began)


def measure(vectors: Path) -> dict[str, float]:
    """In a process of its own: build, search, compare."""
    session.connect(local=True)
    pieces = teaching.list_pieces(vectors / "train")
    count = pieces[-1][2]
    # Copies stand in one group, as the same token ids would put them.
    groups = np.concatenate([piece[1] + duplicate_groups(teaching.load_pieces([piece])) for piece in pieces])
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        watch, began = MemoryWatch(), time.perf_counter()
        teaching.find_neighbours(vectors, groups, CONFIG.neighbours, CONFIG.shard_rows, out)
        seconds = time.perf_counter() - began
        watch.stop()
        recall = teaching.measure_recall(vectors / "train", groups, out, CONFIG, seed=0)["recall"]
        index_gb = sum(f.stat().st_size for f in out.glob("index/**/*") if f.is_file()) / 1e9
    exact = exact_documents_per_second(vectors / "train", count)
    size = count * WIDTH * 4 / 1e9
    return {
        "documents": count,
        "seconds": round(seconds, 1),
        "documents_per_second": round(count / seconds),
        "exact_documents_per_second": round(exact),
        "times_as_fast_as_exact": round(count / seconds / exact, 2),
        "recall_at_10": round(recall, 4),
        "vectors_gb": round(size, 3),
        "index_gb": round(index_gb, 3),
        "largest_task_gb": round(watch.largest, 2),
        "all_tasks_gb": round(watch.together, 2),
    }


def main() -> None:
    if sys.argv[1:2] == ["measure"]:
        print(json.dumps(measure(Path(sys.argv[2]))), flush=True)
        return
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        given = {f"{size:,} generated": Path(scratch) / str(size) for size in SIZES}
        for size, directory in zip(SIZES, given.values(), strict=True):
            generate(size, directory)
        if len(sys.argv) > 1:
            given["of a run"] = Path(sys.argv[1])
        for name, directory in given.items():
            command = [sys.executable, "-m", "benchmarks.neighbours", "measure", str(directory)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            results[name] = json.loads(done.stdout.strip().splitlines()[-1])
            print(name, results[name], flush=True)
    settings = {"width": WIDTH, "index": CONFIG.neighbours.index, "shard_rows": CONFIG.shard_rows}
    record("neighbours", settings | {"probes": CONFIG.neighbours.ivf_probes}, results)


if __name__ == "__main__":
    main()
