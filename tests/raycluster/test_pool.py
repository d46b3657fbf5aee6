from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from raycluster import inference, pool, trainer
from raycluster.follow import append_line
from raycluster.job import TrainConfig
from xmc import config, run
from xmc.corpus.tokens import MANIFEST, Sequences
from xmc.errors import InputError, LostWorkersError


def work(number: int, directory: Path) -> int:
    """Fails once for number 1, always for number 7, which is not allowed, and for number 8, which loses workers."""
    append_line(directory / "messages.txt", f"job {number}")
    if number == 7:
        raise InputError("seven is not allowed")
    if number == 8:
        raise LostWorkersError("no memory")
    mark = directory / f"tried-{number}"
    if number == 1 and not mark.exists():
        mark.touch()
        raise RuntimeError("first try")
    return number * 10


def test_results_come_in_order_and_a_failed_job_is_tried_again(ray_session: None, tmp_path: Path, capfd):
    jobs = {f"tree {number}": partial(work, number, tmp_path) for number in range(3)}
    assert pool.run_all(jobs, 2, pool.printing(tmp_path / "messages.txt")) == [0, 10, 20]
    said = capfd.readouterr().out
    assert "tree 1 failed" in said
    assert said.count("job 1") == 2


def test_what_the_user_must_mend_is_not_tried_again(ray_session: None, tmp_path: Path):
    with pytest.raises(InputError, match="seven"):
        pool.run_all({"it": partial(work, 7, tmp_path)}, 1, lambda: None)
    assert (tmp_path / "messages.txt").read_text().count("job 7") == 1


def test_a_job_that_lost_its_workers_is_tried_again_and_then_says_so(ray_session: None, tmp_path: Path):
    with pytest.raises(LostWorkersError, match="no memory"):
        pool.run_all({"it": partial(work, 8, tmp_path)}, 1, lambda: None)
    assert (tmp_path / "messages.txt").read_text().count("job 8") == 2


@pytest.mark.parametrize(
    ("cpus", "gpus", "fit"), [(1.0, 0, 1), (0.2, 0, 4), (4.0, 0, 1), (0.2, 1, 1), (0.2, 0.5, 2)]
)
def test_as_many_jobs_at_once_as_leave_a_cpu_free(cpus: float, gpus: float, fit: int, monkeypatch):
    monkeypatch.setattr(pool.ray, "cluster_resources", lambda: {"CPU": 2.0, "GPU": 1.0})
    assert pool.room(cpus, gpus) == fit


def cluster(monkeypatch: pytest.MonkeyPatch, cpus: float, gpus: float = 0.0, nodes: int = 1) -> None:
    """As if Ray had so much, in equal nodes."""
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": cpus, "GPU": gpus})
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": cpus / nodes}}] * nodes)


def reserved(workers: int) -> float:
    """What the group of a job in this process and the job's driver hold."""
    return workers * trainer.default_cpus(workers) + pool.DRIVER_CPUS


@pytest.mark.parametrize(
    ("cpus", "gpus", "nodes", "workers", "at_once", "threads"),
    [
        (8, 0, 1, 1, 3, 2),
        (8, 8, 1, 1, 3, 2),
        (8, 2, 1, 1, 2, 4),  # GPUs are fewer
        (8, 0, 1, 4, 2, 1),
        (16, 0, 2, 1, 3, 4),  # two trees on one of the nodes
        (16, 0, 2, 8, 2, 1),
        (3, 0, 1, 1, 3, 1),
        (2, 0, 1, 1, 2, 1),
        (2, 0, 1, 2, 1, 1),
        (1, 0, 1, 1, 1, 1),
        (64, 8, 1, 4, 2, 8),
    ],
)
def test_members_divide_the_cluster(
    cpus: int, gpus: int, nodes: int, workers: int, at_once: int, threads: int, monkeypatch
):
    """Three members with one core a rank at least; together they leave a whole CPU to tasks."""
    cluster(monkeypatch, cpus, gpus, nodes)
    words = [f"train.workers={workers}", "members=[{seed: 1}, {seed: 2}, {seed: 3}]"]
    ensemble = config.load("light_xml", words)
    members = [run.member_config(ensemble, number) for number in range(3)]
    assert run.members_at_once(members) == at_once
    monkeypatch.setattr(pool, "_share", 1 / at_once)
    assert trainer.default_threads(workers) == threads
    if cpus > 1:
        assert cpus - at_once * reserved(workers) >= 1


@pytest.mark.parametrize("cpus", [2, 3, 4, 8, 96])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_levels_of_members_leave_a_whole_cpu_too(cpus: int, workers: int, monkeypatch):
    """Jobs of jobs: each level's share is a part of its member's."""
    cluster(monkeypatch, cpus)
    settings = TrainConfig(workers=workers)
    members = min(3, pool.room(*trainer.least_resources(settings)))
    monkeypatch.setattr(pool, "_share", 1 / members)
    levels = min(4, pool.room(*trainer.least_resources(settings)))
    assert members * levels <= max(1, cpus // workers)
    monkeypatch.setattr(pool, "_share", 1 / (members * levels))
    held = members * (levels * reserved(workers) + pool.DRIVER_CPUS)
    assert cpus - held >= 1 - 1e-9
    assert members * levels * workers * trainer.default_threads(workers) <= max(cpus, workers)


def its_share(of_levels: int) -> list[float]:
    """In a job: its share, and those of jobs that it starts itself."""
    jobs = {str(number): pool.share for number in range(of_levels)}
    return [pool.share(), *pool.run_all(jobs, of_levels, lambda: None)]


def test_a_job_knows_its_share(ray_session: None):
    jobs = {str(number): partial(its_share, 2) for number in range(2)}
    assert pool.run_all(jobs, 2, lambda: None) == [[0.5, 0.25, 0.25]] * 2
    assert pool.share() == 1.0


def lengths() -> inference.Network:
    return lambda sequences: {"length": sequences.lengths}


@pytest.mark.slow
def test_actors_with_a_network_wait_for_no_task(ray_session: None, tmp_path: Path):
    """Members are not counted with them (see run.members_at_once): they must come to an end without a free CPU."""
    column = Sequences.from_lists([[7], [7, 8], [7, 8, 9]]).to_arrow()
    pq.write_table(pa.table({"input_ids": column}), tmp_path / "part.parquet")
    (tmp_path / MANIFEST).write_text(json.dumps({"parts": [{"file": "part.parquet", "rows": 3}]}))
    others = ray.remote(num_cpus=1.4)(pool._Worker).remote(1.0)
    ray.get(others.run.remote(pool.share))
    try:
        inference.write_vectors(tmp_path, lengths, tmp_path / "out", "lengths")
    finally:
        ray.kill(others)
    assert inference.read_vectors(tmp_path / "out")["length"].tolist() == [1, 2, 3]


def test_a_rank_fits_on_a_node(monkeypatch: pytest.MonkeyPatch):
    cluster(monkeypatch, 12, nodes=3)
    assert trainer.default_cpus(1) == 2.0
