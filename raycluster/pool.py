"""Runs independent jobs (ensemble members, trees, levels) as Ray actors at once, as many as the cluster has room for.

Each job trains on resources of its own; where there is less room than jobs they queue. A job that fails is tried
again alone: what it has finished is on disk, so it goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray

from raycluster.follow import Tail
from xmc.errors import InputError

# What a job's own actor reserves; what the job trains on asks for its resources itself.
DRIVER_CPUS = 0.05


class _Worker:
    def run(self, job: Callable[[], Any]) -> Any:
        return job()


def start(job: Callable[[], Any]) -> tuple[Any, Any]:
    """An actor that does the job, and the reference of its result. It ends when the caller's process does, or when
    nobody holds it any more, and what it started ends with it.

    It is outside of any placement group that the caller is in: what it starts may be larger than that.
    """
    worker = ray.remote(num_cpus=DRIVER_CPUS, scheduling_strategy="DEFAULT")(_Worker).remote()
    return worker, worker.run.remote(job)


def room(cpus_per_job: float, gpus_per_job: float = 0.0) -> int:
    """How many jobs fit at once beside their drivers; at least one.

    A whole CPU stays free for tasks, which ask for one: a job that waits for its tasks cannot wait for ever.
    """
    have = ray.cluster_resources()
    fits = (have.get("CPU", 1) - 1) / (cpus_per_job + DRIVER_CPUS)
    if gpus_per_job:
        fits = min(fits, have.get("GPU", 0) / gpus_per_job)
    return max(1, int(fits))


def run_all(
    jobs: Mapping[str, Callable[[], Any]],
    at_once: int,
    messages: Path,
    attempts: int = 2,
) -> list[Any]:
    """The results of all jobs, in their order; users know them by their names. Each may be tried `attempts` times,
    but not after an InputError.

    What the jobs append to the file `messages` (see follow) is printed as it comes.
    """
    heard = Tail(messages)
    heard.lines()  # of an earlier process
    results: dict[str, Any] = dict.fromkeys(jobs)
    waiting = [(name, 1) for name in jobs]
    running: dict[Any, tuple[str, int, Any]] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            name, attempt = waiting.pop(0)
            worker, result = start(jobs[name])
            running[result] = (name, attempt, worker)
        finished_now, _ = ray.wait(list(running), num_returns=1, timeout=1.0)
        for line in heard.lines():
            print(line, flush=True)
        if not finished_now:
            continue
        finished = finished_now[0]
        name, attempt, worker = running.pop(finished)
        try:
            results[name] = ray.get(finished)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, InputError):
                raise cause from None
            if attempt == attempts:
                raise
            print(f"{name} failed ({type(error).__name__}); it is tried again", flush=True)
            waiting.append((name, attempt + 1))
        finally:
            ray.kill(worker)
    return list(results.values())
