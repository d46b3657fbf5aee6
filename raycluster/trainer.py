"""Trains one network on a Ray Train group and shows how it goes; all that a rank does is in `rank`.

A system gives a `Job` and finds the trained network's parts in the job's directory. A worker's death restarts the
group, the driver's the same call: both go on from the last checkpoint. Steps come as lines of a file.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray
import ray.data
import ray.train
from ray.train.torch import TorchConfig, TorchTrainer

from raycluster import groups, pool
from raycluster.follow import Tail
from raycluster.ingest import SplitByRank
from raycluster.job import FAILURE_FILE, MESSAGES_FILE, STEPS_FILE, Job, TrainConfig, total_steps
from raycluster.rank import train_rank
from xmc.errors import InputError, LostWorkersError
from xmc.progress import Progress


def fit(
    job: Job,
    documents: ray.data.Dataset,
    on_steps: Callable[[list[dict[str, float]]], None],
    validation: ray.data.Dataset | None = None,
) -> None:
    """Train until `job.out` holds the exported parts; `on_steps` gets each new row of step metrics, with `valid_…` in
    some where there are documents for `validation`.

    Raises InputError where the run cannot go on for a reason that the user can mend, LostWorkersError where ranks died
    more than `train.max_failures` times.
    """
    job.out.mkdir(parents=True, exist_ok=True)
    (job.out / FAILURE_FILE).unlink(missing_ok=True)
    groups.release(job.out)  # of an earlier driver, which was killed
    shutil.rmtree(job.out / "ray", ignore_errors=True)
    use_gpu = wants_gpu(job.train)
    resources = {"CPU": job.train.cpus_per_worker or default_cpus(job.train.workers)}
    trainer = TorchTrainer(
        train_rank,
        train_loop_config={"job": job},
        torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo"),
        scaling_config=ray.train.ScalingConfig(
            num_workers=job.train.workers, use_gpu=use_gpu, resources_per_worker=resources
        ),
        run_config=ray.train.RunConfig(
            name="group",
            storage_path=str(job.out / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=job.train.max_failures),
        ),
        datasets={"train": documents} | ({"valid": validation} if validation is not None else {}),
        dataset_config=SplitByRank(),
    )
    with _following(job, on_steps):
        try:
            trainer.fit()
        except (ray.train.TrainingFailedError, ray.exceptions.RayError) as error:
            _explain_deaths(error, job.train)
            raise
    if (job.out / FAILURE_FILE).exists():
        raise InputError((job.out / FAILURE_FILE).read_text())
    groups.release(job.out)
    shutil.rmtree(job.out / "ray", ignore_errors=True)
    shutil.rmtree(job.out / "checkpoints", ignore_errors=True)


def _explain_deaths(error: Exception, config: TrainConfig) -> None:
    """Raise LostWorkersError if processes died; an exception within one is left to the caller."""
    # Of ranks, or of the actor that watches over them. One rank's death cuts the others' connections: they fail too.
    failures = getattr(error, "worker_failures", {0: getattr(error, "controller_failure", error)}).values()
    causes = [getattr(failure, "health_check_failure", failure) for failure in failures]
    deaths = [
        cause
        for cause in causes
        if isinstance(cause, ray.exceptions.RayError) and not isinstance(cause, ray.exceptions.RayTaskError)
    ]
    if not deaths:
        return
    words = " ".join(str(deaths[-1]).split())
    why = "a machine ran out of memory" if "low on memory" in words else words
    raise LostWorkersError(
        f"processes of the training died and were not started again (train.max_failures={config.max_failures}): {why}\n"
        "The same command goes on from the last checkpoint, also with another train.max_failures. Where memory runs "
        "out, start fewer runs at once, or train anew with a lower train.batch_size or encoder.max_tokens."
    ) from None


def wants_gpu(config: TrainConfig) -> bool:
    """Whether to train on GPUs; asking for more than the cluster has is an error before anything starts."""
    gpus = ray.cluster_resources().get("GPU", 0)
    if config.device == "cuda" and gpus < config.workers:
        raise InputError(
            f"train.device is cuda with {config.workers} workers, but the cluster has {gpus:g} GPUs"
        )
    return config.device == "cuda" or (config.device == "auto" and gpus >= config.workers)


def least_resources(config: TrainConfig) -> tuple[float, float]:
    """The CPUs and GPUs with which a training group counts in `pool.room`: by default such that as many train at once
    as there are cores (and GPUs) for their ranks. With fewer beside it, a group takes more."""
    cpus = ray.cluster_resources().get("CPU", 1)
    a_core_each = max(0.01, config.workers * (cpus - 1) / cpus - pool.DRIVER_CPUS)
    reserved = config.workers * config.cpus_per_worker or a_core_each
    return reserved, config.workers if wants_gpu(config) else 0


def default_cpus(workers: int) -> float:
    """Half a rank's share of the cluster's CPUs, and less where that would leave no whole CPU: a task of Ray Data asks
    for one, and drivers of members or trials for a little. A group that waits for such a task would wait for ever, and
    so would a rank that asks for more than a node has."""
    cpus = ray.cluster_resources().get("CPU", 1)
    share = pool.share() * min(cpus / 2, cpus - 1.2) / workers
    return max(0.01, round(min(share, max(_cpus_by_node()) / 2), 2))


def default_threads(workers: int) -> int:
    """Torch threads of a rank: the CPUs of its node over the ranks that share it, those of the groups that train at the
    same time among them."""
    nodes = _cpus_by_node()
    per_node = -(-round(workers / pool.share()) // len(nodes))
    return max(1, int(max(nodes) / per_node))


def _cpus_by_node() -> list[float]:
    return [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]


@contextmanager
def _following(job: Job, on_steps: Callable[[list[dict[str, float]]], None]) -> Iterator[None]:
    """Show the progress of a training group and hand on its steps, until the block ends."""
    stop = threading.Event()
    total = total_steps(job.num_documents, job.train)

    def follow() -> None:
        steps, messages = Tail(job.out / STEPS_FILE), Tail(job.out / MESSAGES_FILE)
        messages.lines()  # of an earlier process
        with Progress("training", total, "steps") as progress:
            progress.start_at(max((json.loads(line)["step"] for line in steps.lines()), default=0))
            while True:
                last = stop.wait(0.5)
                for line in messages.lines():
                    print(line, flush=True)
                rows = [json.loads(line) for line in steps.lines()]
                if rows:
                    if rows[-1]["step"] < progress.done:  # the group went on from its checkpoint
                        progress.start_at(rows[-1]["step"])
                    progress.update(rows[-1]["step"] - progress.done, f"loss {rows[-1]['loss']:.4f}")
                    on_steps(rows)
                if last:
                    return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
