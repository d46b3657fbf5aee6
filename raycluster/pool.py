"""Runs independent jobs (ensemble members, trees, levels) as Ray actors at once, as many as the cluster has room for.

Each job has an equal share of the cluster, from which the CPUs and threads of what it trains follow; where there is
less room than jobs they queue. A job that fails is tried again alone: what it has finished is on disk, so it goes on
from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray

from raycluster.follow import Tail
from xmc.errors import InputError, LostWorkersError

# What a job's own actor reserves; what the job trains on asks for its resources itself.
DRIVER_CPUS = 0.05
_share = 1.0


def share() -> float:
    """The part of the cluster that this process may use: less than all in a job that runs beside others. It is no
    setting: a stage that was made with another share is the same stage."""
    return _share


class _Worker:
    def __init__(self, share: float) -> None:
        global _share
        _share = share

    def run(self, job: Callable[[], Any]) -> Any:
        return job()


def start(job: Callable[[], Any], at_once: int = 1) -> tuple[Any, Any]:
    """An actor that does the job, one of `at_once` that divide the caller's share, and the reference of its result. It
    ends when the caller's process does, or when nobody holds it any more, and what it started ends with it.

    It is outside of any placement group that the caller is in: what it starts may be larger than that.
    """
    actor = ray.remote(num_cpus=DRIVER_CPUS, scheduling_strategy="DEFAULT")(_Worker)
    worker = actor.remote(share() / at_once)
    return worker, worker.run.remote(job)


def room(cpus_per_job: float, gpus_per_job: float = 0.0) -> int:
    """How many jobs fit at once, beside their drivers, into this process's share; at least one.

    A whole CPU stays free for tasks, which ask for one: a job that waits for its tasks cannot wait for ever.
    """
    have = ray.cluster_resources()
    fits = share() * (have.get("CPU", 1) - 1) / (cpus_per_job + DRIVER_CPUS)
    if gpus_per_job:
        fits = min(fits, share() * have.get("GPU", 0) / gpus_per_job)
    return max(1, int(fits + 1e-6))  # fractions that should fill a whole may sum to a little less


def run_all(
    jobs: Mapping[str, Callable[[], Any]],
    at_once: int,
    meanwhile: Callable[[], None],
    attempts: int = 2,
) -> list[Any]:
    """The results of all jobs, in their order; users know them by their names. Each may be tried `attempts` times,
    but not after an InputError.

    `meanwhile` is called each second and when a job has ended: it shows what the jobs have written.
    """
    results: dict[str, Any] = dict.fromkeys(jobs)
    waiting = [(name, 1) for name in jobs]
    running: dict[Any, tuple[str, int, Any]] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            name, attempt = waiting.pop(0)
            worker, result = start(jobs[name], at_once)
            running[result] = (name, attempt, worker)
        finished_now, _ = ray.wait(list(running), num_returns=1, timeout=1.0)
        meanwhile()
        if not finished_now:
            continue
        finished = finished_now[0]
        name, attempt, worker = running.pop(finished)
        try:
            results[name] = ray.get(finished)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, InputError) or (attempt == attempts and isinstance(cause, LostWorkersError)):
                raise cause from None
            if attempt == attempts:
                raise
            print(f"{name} failed ({type(error).__name__}); it is tried again", flush=True)
            waiting.append((name, attempt + 1))
        finally:
            ray.kill(worker)
    return list(results.values())


def printing(messages: Path) -> Callable[[], None]:
    """For `run_all`: prints what is appended to the file from now on (see follow)."""
    heard = Tail(messages)
    heard.lines()  # of an earlier process

    def show() -> None:
        for line in heard.lines():
            print(line, flush=True)

    return show
