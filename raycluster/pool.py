"""Runs independent jobs (ensemble members, trees) as Ray actors at once, as many as the cluster has room for.

Each job trains on resources of its own; where there is less room than jobs they queue. A job that fails is tried
again alone: what it has finished is on disk, so it goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from raycluster.follow import Tail
from xmc.errors import InputError


class _Worker:
    """One job's driver: its training group asks for its resources itself."""

    def run(self, job: Callable[[], Any]) -> Any:
        return job()


def room(cpus_per_job: float) -> int:
    """How many jobs fit at once, half a CPU left for Ray Data and the drivers; at least one."""
    return max(1, int((ray.cluster_resources().get("CPU", 1) - 0.5) / max(cpus_per_job, 0.01)))


def run_all(
    jobs: Sequence[Callable[[], Any]],
    at_once: int,
    messages: Path,
    attempts: int = 2,
) -> list[Any]:
    """The results of all jobs, in their order. Each may be tried `attempts` times; InputErrors are not tried again.

    What the jobs append to the file `messages` (see follow) is printed as it comes.
    """
    heard = Tail(messages)
    heard.lines()  # of an earlier process
    results: list[Any] = [None] * len(jobs)
    waiting = [(number, 1) for number in range(len(jobs))]
    running: dict[Any, tuple[int, int, Any]] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            number, attempt = waiting.pop(0)
            worker = ray.remote(num_cpus=0.1)(_Worker).remote()
            running[worker.run.remote(jobs[number])] = (number, attempt, worker)
        finished_now, _ = ray.wait(list(running), num_returns=1, timeout=1.0)
        for line in heard.lines():
            print(line, flush=True)
        if not finished_now:
            continue
        finished = finished_now[0]
        number, attempt, worker = running.pop(finished)
        try:
            results[number] = ray.get(finished)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, InputError):
                raise cause from None
            if attempt == attempts:
                raise
            print(f"member {number} failed ({type(error).__name__}); it is tried again", flush=True)
            waiting.append((number, attempt + 1))
        finally:
            ray.kill(worker)
    return results
