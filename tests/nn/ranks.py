"""Run functions on several real ranks (processes joined by gloo), started once for many checks."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _worker(rank: int, world: int, port: int, checks: list[Callable[[], None]], results) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=120))
    for check in checks:
        error = ""
        try:
            check()
        except Exception:
            error = traceback.format_exc()
        results.put((check.__name__, rank, error))
    dist.barrier()
    dist.destroy_process_group()


def run_checks(world: int, checks: list[Callable[[], None]]) -> dict[str, list[str]]:
    """Run every check on every rank; returns each check's errors, one a rank, empty where it passed."""
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    workers = mp.spawn(_worker, (world, free_port(), checks, results), nprocs=world, join=False)
    errors: dict[str, list[str]] = {check.__name__: ["did not run"] * world for check in checks}
    for _ in range(world * len(checks)):
        name, rank, error = results.get()
        errors[name][rank] = error
        if error:  # the ranks may now be out of step: the other checks say nothing
            for process in workers.processes:
                process.terminate()
            return errors
    while not workers.join():
        pass
    return errors
