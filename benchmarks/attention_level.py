"""AttentionXML: what one level's step costs as its labels grow, and what a rank holds. The limit is a flat line: a step
depends on the candidates of the documents, not on the labels there are.

    python -m benchmarks.attention_level            time and memory
    python -m benchmarks.attention_level trees      three trees at once and one after another, on the bundled
                                                    sample; two where there are two cores

Batches of 32 texts of 64 words, BiLSTM 256, perceptron 256, C = 40 parents of 8 children. Steps of the sizes alternate,
so that whatever else the machine does hits all; medians of process time over threads are compared.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.label_layer import start_group
from benchmarks.record import peak_rss_gb, record
from xmc.nn.heads.attention_xml import AttentionXmlHead, AttentionXmlModule
from xmc.nn.heads.light_xml import LabelClusters
from xmc.nn.sharding import Ragged
from xmc.nn.words import BiLstm, BiLstmConfig, WordRows, WordVectorsConfig

LABELS = (20_000, 200_000, 670_091)
BATCH, WORDS, VOCABULARY, CHILDREN, CANDIDATES, STEPS = 32, 64, 50_000, 8, 40, 10
ALLOWED_GROWTH = 1.2
TREES = 3


def make_groups(num_labels: int) -> LabelClusters:
    parents = -(-num_labels // CHILDREN)
    return LabelClusters(torch.arange(num_labels), torch.arange(parents + 1) * num_labels // parents)


def make_batch(
    groups: LabelClusters, batch: int = BATCH
) -> tuple[torch.Tensor, torch.Tensor, Ragged, torch.Tensor]:
    """Texts of nearly full length with five labels each, drawn by Zipf's law, and random candidates."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(WORDS // 2, WORDS + 1, (batch, 1), generator=generator)
    mask = (torch.arange(WORDS) < lengths).long()
    ids = torch.randint(2, VOCABULARY, (batch, WORDS), generator=generator) * mask
    weights = 1.0 / torch.arange(1, groups.order.numel() + 1, dtype=torch.float64)
    labels = torch.multinomial(weights, batch * 5, replacement=True, generator=generator)
    parents = torch.stack(
        [torch.randperm(groups.num_clusters, generator=generator)[:CANDIDATES] for _ in range(batch)]
    )
    return ids, mask, Ragged(labels, torch.arange(0, batch * 5 + 1, 5)), parents


def make_step(num_labels: int) -> Callable[[], None]:
    """One training step of a level with so many labels: words, network, attention rows."""
    torch.manual_seed(0)
    module = AttentionXmlModule(BiLstm(BiLstmConfig(256), 300), (256,))
    groups = make_groups(num_labels)
    head = AttentionXmlHead(num_labels, module.encoder.width, groups, seed=0)
    words = WordRows(VOCABULARY, WordVectorsConfig(width=300), seed=0)
    optimiser = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    ids, mask, targets, parents = make_batch(groups)

    def step() -> None:
        loss = head.loss(module(words.embed(ids), mask), targets, lr=1e-3, parents=parents)
        loss.backward()
        words.learn(1.0, 1e-3)
        optimiser.step()
        optimiser.zero_grad()

    return step


def step_times() -> dict[int, float]:
    """Median seconds of a step by labels."""
    steps = {labels: make_step(labels) for labels in LABELS}
    times: dict[int, list[float]] = {labels: [] for labels in LABELS}
    for i in range(STEPS + 2):
        for labels, step in steps.items():
            began = time.process_time()
            step()
            if i >= 2:  # the first steps warm caches up
                times[labels].append((time.process_time() - began) / torch.get_num_threads())
    return {labels: statistics.median(values) for labels, values in times.items()}


def memory_of_rank(rank: int, world: int, port: int) -> None:
    """Print the growth of this rank's peak memory, in MB, over three steps of 670K labels' attention rows."""
    torch.set_num_threads(1)
    start_group(rank, world, port)
    groups = make_groups(LABELS[-1])
    share = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    _, mask, targets, parents = make_batch(groups)
    mine = Ragged(
        targets.ids.view(BATCH, 5)[share].reshape(-1), torch.arange(0, 5 * (share.stop - share.start) + 1, 5)
    )
    torch.manual_seed(0)
    module = AttentionXmlModule(BiLstm(BiLstmConfig(256), 300), (256,))
    vectors = torch.randn(BATCH, WORDS, 300)
    before = peak_rss_gb()
    head = AttentionXmlHead(LABELS[-1], module.encoder.width, groups, seed=0)
    for _ in range(3):
        outputs = module(vectors[share], mask[share])
        head.loss(outputs, mine, lr=1e-4, parents=parents[share]).backward()
    if rank == 0:
        print(json.dumps({"mb": (peak_rss_gb() - before) * 1000}), flush=True)
    dist.destroy_process_group()


def memory(world: int) -> float:
    """The same in fresh processes: a process's peak never falls."""
    command = [sys.executable, "-m", "benchmarks.attention_level", "memory", str(world)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])["mb"]


def measure_level() -> None:
    times = step_times()
    one, two = memory(1), memory(2)
    growth = times[LABELS[-1]] / times[LABELS[0]]
    results = {
        "step_s": {f"{labels:,}": round(seconds, 4) for labels, seconds in times.items()},
        "growth_20K_to_670K": round(growth, 3),
        "growth_allowed": ALLOWED_GROWTH,
        "memory_670K": {
            "one_rank_mb": round(one),
            "each_of_two_ranks_mb": round(two),
            "ratio": round(two / one, 3),
            "rows_with_their_moments_mb": round(3 * LABELS[-1] * 512 * 4 / 1e6),
        },
    }
    settings = {
        "batch": BATCH,
        "words": WORDS,
        "candidates": CANDIDATES,
        "children": CHILDREN,
        "steps": STEPS,
    }
    record("attention_level", settings, results)


def measure_trees() -> None:
    """Trees as members that train at once, one a core, and one after another, each on all cores."""
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        raise SystemExit(
            "trees at once need a core each: this machine has one, so there is nothing to compare"
        )
    trees = min(TREES, cores)
    if trees < TREES:
        print(
            f"{cores} cores are too few for {TREES} trees at once: {trees} are compared instead", flush=True
        )
    together = train_trees(trees, trees, cores)
    in_turn = train_trees(trees, 1, cores)
    results = {
        f"{trees} at once s": round(together, 1),
        "one after another s": round(in_turn, 1),
        "ratio": round(together / in_turn, 3),
    }
    record("attention_trees", {"trees": trees, "cores": cores, "data": "sample"}, results)


def train_trees(trees: int, at_once: int, cores: int) -> float:
    """Seconds of a whole run of so many trees, of which `at_once` train at the same time on so many cores."""
    with tempfile.TemporaryDirectory() as directory:
        words = [
            f"run.dir={Path(directory) / 'run'}",
            "corpus.path=sample",
            "model.mode=tree",
            "model.candidates=10",
            "tree.height=1",
            "train.epochs=3",
            "train.average_from=2",
            # Together they get what is free beside a task and their drivers, whether it is one or all.
            f"train.cpus_per_worker={(cores - 1.2) / at_once:.2f}",
            f"members={[{'seed': seed} for seed in range(1, trees + 1)]}",
        ]
        command = [sys.executable, "-m", "xmc.train", "attention_xml.sample", *words]
        began = time.perf_counter()
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        seconds = time.perf_counter() - began
    print(done.stdout, end="", flush=True)
    wanted = f"{trees} members, {at_once} at a time"
    if wanted not in done.stdout:
        raise SystemExit(f"the run did not say {wanted!r}: this is not what was to be measured")
    return seconds


def main() -> None:
    if sys.argv[1:2] == ["memory"]:
        world = int(sys.argv[2])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mp.spawn(memory_of_rank, (world, port), nprocs=world)
    elif sys.argv[1:2] == ["trees"]:
        measure_trees()
    else:
        measure_level()


if __name__ == "__main__":
    main()
