from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from raycluster import pool
from raycluster.follow import append_line
from xmc.errors import InputError


def work(number: int, directory: Path) -> int:
    """Fails once for number 1, always in the user's words for number 7."""
    append_line(directory / "messages.txt", f"job {number}")
    if number == 7:
        raise InputError("seven is not allowed")
    mark = directory / f"tried-{number}"
    if number == 1 and not mark.exists():
        mark.touch()
        raise RuntimeError("first try")
    return number * 10


def test_results_come_in_order_and_a_failed_job_is_tried_again(ray_session: None, tmp_path: Path, capfd):
    jobs = {f"tree {number}": partial(work, number, tmp_path) for number in range(3)}
    assert pool.run_all(jobs, 2, tmp_path / "messages.txt") == [0, 10, 20]
    said = capfd.readouterr().out
    assert "tree 1 failed" in said
    assert said.count("job 1") == 2


def test_what_the_user_must_mend_is_not_tried_again(ray_session: None, tmp_path: Path):
    with pytest.raises(InputError, match="seven"):
        pool.run_all({"it": partial(work, 7, tmp_path)}, 1, tmp_path / "messages.txt")
    assert (tmp_path / "messages.txt").read_text().count("job 7") == 1


@pytest.mark.parametrize(
    ("cpus", "gpus", "fit"), [(1.0, 0, 1), (0.2, 0, 4), (4.0, 0, 1), (0.2, 1, 1), (0.2, 0.5, 2)]
)
def test_as_many_jobs_at_once_as_leave_a_cpu_free(cpus: float, gpus: float, fit: int, monkeypatch):
    monkeypatch.setattr(pool.ray, "cluster_resources", lambda: {"CPU": 2.0, "GPU": 1.0})
    assert pool.room(cpus, gpus) == fit
