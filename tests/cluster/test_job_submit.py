"""`ray job submit` as the README types it, against a cluster that `ray start --head` made."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.nodes import BIN, environment, free_port, kill_node, start_node

ROOT = Path(__file__).parent.parent.parent


def wait_until_jobs_are_taken(address: str, head: subprocess.Popen) -> None:
    """The dashboard answers before its agent can start jobs."""
    command = [BIN / "ray", "job", "submit", "--address", address, "--", "python", "-V"]
    for _ in range(30):
        assert head.poll() is None
        if subprocess.run(command, env=environment(), capture_output=True).returncode == 0:
            return
        time.sleep(2)
    raise AssertionError("the cluster takes no jobs")


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    """A head node of its own; its dashboard's address."""
    port, temporary = free_port(), Path("/tmp") / f"xmc-{os.getpid()}"
    subprocess.run(
        [BIN / "ray", "get-auth-token", "--generate"],
        check=True,
        env=environment(),
        stdout=subprocess.DEVNULL,
    )
    head = start_node(
        "--head", f"--port={free_port()}", f"--dashboard-port={port}", f"--temp-dir={temporary}"
    )
    try:
        address = f"http://127.0.0.1:{port}"
        wait_until_jobs_are_taken(address, head)
        yield address
    finally:
        kill_node(head)
        shutil.rmtree(temporary, ignore_errors=True)


def submit(dashboard: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [BIN / "ray", "job", "submit", "--address", dashboard, "--working-dir", ".", "--", *words]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)


@pytest.mark.slow
def test_a_job_trains_and_its_exit_code_tells_the_truth(dashboard: str, tmp_path: Path):
    small = "encoder.name=random:bert encoder.layers_pooled=2 encoder.max_tokens=16 train.epochs=1 train.batch_size=128"
    done = submit(
        dashboard, "python", "-m", "xmc.train", "light_xml", *small.split(), f"run.dir={tmp_path / 'run'}"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "train: done" in done.stdout
    assert (tmp_path / "run" / "model" / "config.yaml").exists()
    wrong = submit(
        dashboard, "python", "-m", "xmc.train", "light_xml", "train.wokers=2", f"run.dir={tmp_path}"
    )
    assert wrong.returncode != 0
    assert "did you mean train.workers" in wrong.stdout + wrong.stderr
    lost = submit(dashboard, "python", "-m", "xmc.train", "light_xml", "run.dir=runs/x")
    assert lost.returncode != 0
    assert "absolute path" in lost.stdout + lost.stderr


@pytest.mark.slow
def test_environments_and_runs_are_not_uploaded(dashboard: str):
    done = submit(dashboard, "python", "-c", "import os; print('FOUND', sorted(os.listdir('.')))")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert "'xmc'" in line
    assert not any(name in line for name in ("'.venv'", "'.venv-peers'", "'runs'", "'.cache'"))
