"""What the label layer costs on top of the encoder: step time, prediction, memory of a rank. The limit is the encoder.

    python -m benchmarks.label_layer

LightXML with MiniLM, batches of 32 × 64 tokens, in one process (and for memory in two). Steps of the encoder alone and
of the whole alternate, so that whatever else the machine does hits both; medians are compared.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.record import peak_rss_gb, record
from xmc.nn.encoders import EncoderConfig, load_encoder
from xmc.nn.engine import Engine, EngineConfig
from xmc.nn.heads.light_xml import LabelClusters, LightXmlHead, LightXmlHeadConfig, LightXmlModule
from xmc.nn.optimisers import parameter_groups
from xmc.nn.sharding import Ragged

BATCH, TOKENS, STEPS = 32, 64, 12
# labels: (clusters or None for flat, clusters recalled, width of the rank space)
CASES = {
    "20K flat": (20_000, None, 0, 0),
    "20K clustered": (20_000, 1_024, 50, 300),
    "670K clustered": (670_091, 16_384, 75, 400),
}
MOST = {"20K flat": 1.15, "20K clustered": 1.15, "670K clustered": 1.25}


def start_group(rank: int = 0, world: int = 1, port: int = 0) -> None:
    if not port:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    dist.init_process_group("gloo")


def make_head(case: str, width: int) -> LightXmlHead:
    num_labels, num_clusters, recalled, rank_width = CASES[case]
    config = LightXmlHeadConfig(recalled_clusters=max(recalled, 1), rank_width=max(rank_width, 1))
    clusters = None
    if num_clusters is not None:
        clusters = LabelClusters.from_assignment(
            torch.arange(num_labels) * num_clusters // num_labels, num_clusters
        )
    return LightXmlHead(config, num_labels, width, clusters, seed=0)


def make_module(case: str) -> LightXmlModule:
    encoder = load_encoder(EncoderConfig(name="minilm", max_tokens=TOKENS))
    return LightXmlModule(encoder, CASES[case][3] or None)


def make_batch(num_labels: int, batch: int = BATCH) -> tuple[torch.Tensor, torch.Tensor, Ragged]:
    """Full-length documents with five labels each, drawn by Zipf's law."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 30000, (batch, TOKENS), generator=generator)
    weights = 1.0 / torch.arange(1, num_labels + 1, dtype=torch.float64)
    labels = torch.multinomial(weights, batch * 5, replacement=True, generator=generator)
    return ids, torch.ones_like(ids), Ragged(labels, torch.arange(0, batch * 5 + 1, 5))


def seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def step_times(case: str) -> dict[str, float]:
    """Median seconds of a training step and of a prediction batch, with and without labels."""
    module = make_module(case)
    engine = Engine(
        module,
        [g | {"lr": 1e-5} for g in parameter_groups(module, 0.01)],
        EngineConfig(),
        torch.device("cpu"),
        BATCH,
    )
    head = make_head(case, module.encoder.width)
    ids, mask, targets = make_batch(head.num_labels)

    def encoder_only() -> None:
        outputs = engine(ids, mask)
        engine.backward(sum(output.square().mean() for output in outputs))
        engine.step()

    def whole() -> None:
        engine.backward(head.loss(engine(ids, mask), targets, lr=1e-4))
        engine.step()

    @torch.inference_mode()
    def predict_encoder() -> None:
        module(ids, mask)

    @torch.inference_mode()
    def predict_whole() -> None:
        head.top_k(module(ids, mask), 10)

    works = {"encoder": encoder_only, "whole": whole}
    times: dict[str, list[float]] = {
        name: [] for name in ("encoder", "whole", "predict_encoder", "predict_whole")
    }
    engine.train()
    for i in range(STEPS + 2):
        for name, work in works.items():
            took = seconds(work)
            if i >= 2:  # the first steps warm caches up
                times[name].append(took)
    module.eval()
    for i in range(STEPS + 2):
        for name, work in (("predict_encoder", predict_encoder), ("predict_whole", predict_whole)):
            took = seconds(work)
            if i >= 2:
                times[name].append(took)
    return {name: statistics.median(values) for name, values in times.items()}


def memory_of_rank(rank: int, world: int, port: int, batch: int) -> None:
    """Print the growth of this rank's peak memory, in MB, over three steps of the label layer at 670K labels."""
    torch.set_num_threads(1)
    start_group(rank, world, port)
    width = 1920
    _, _, targets = make_batch(CASES["670K clustered"][0], batch)
    outputs = torch.randn(batch, width, requires_grad=True), torch.randn(batch, 400, requires_grad=True)
    share = slice(rank * batch // world, (rank + 1) * batch // world)
    mine = Ragged(
        targets.ids.view(batch, 5)[share].reshape(-1), torch.arange(0, 5 * (share.stop - share.start) + 1, 5)
    )
    before = peak_rss_gb()
    head = make_head("670K clustered", width)
    for _ in range(3):
        head.loss(tuple(output[share] for output in outputs), mine, lr=1e-4).backward()
    grown = peak_rss_gb() - before
    if rank == 0:
        print(json.dumps({"mb": grown * 1e9 / 2**20}), flush=True)
    dist.destroy_process_group()


def memory(world: int, batch: int) -> float:
    """The same in fresh processes: a process's peak never falls."""
    command = [sys.executable, "-m", "benchmarks.label_layer", "memory", str(world), str(batch)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])["mb"]


def main() -> None:
    if sys.argv[1:2] == ["memory"]:
        world, batch = int(sys.argv[2]), int(sys.argv[3])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mp.spawn(memory_of_rank, (world, port, batch), nprocs=world)
        return
    start_group()
    results: dict[str, object] = {}
    for case in CASES:
        times = step_times(case)
        results[case] = {
            "encoder_step_s": round(times["encoder"], 4),
            "whole_step_s": round(times["whole"], 4),
            "step_ratio": round(times["whole"] / times["encoder"], 3),
            "step_ratio_allowed": MOST[case],
            "predict_documents_per_second": round(BATCH / times["predict_whole"], 1),
            "predict_share_of_encoder_alone": round(times["predict_encoder"] / times["predict_whole"], 3),
            "predict_share_wanted": 0.9,
        }
        print(case, results[case], flush=True)
    one, two, wide = memory(1, BATCH), memory(2, BATCH), memory(1, 2 * BATCH)
    results["memory_670K"] = {
        "one_rank_mb": round(one),
        "each_of_two_ranks_mb": round(two),
        "ratio": round(two / one, 3),
        "ratio_allowed": 0.55,
        "growth_from_32_to_64_documents_mb": round(wide - one, 1),
        "a_batch_by_labels_matrix_would_be_mb": round(BATCH * 670_091 * 4 / 1e6, 1),
    }
    record(
        "label_layer",
        {"encoder": "minilm", "batch": BATCH, "tokens": TOKENS, "steps": STEPS, "cases": CASES},
        results,
    )


if __name__ == "__main__":
    main()
