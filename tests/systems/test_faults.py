"""What a run survives, done for real: processes killed with SIGKILL, damaged checkpoints, losses that explode."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from xmc import config, run
from xmc.errors import InputError, LostWorkersError

SETTINGS = [
    "encoder.name=random:bert",
    "encoder.layers_pooled=2",
    "encoder.max_tokens=32",
    "train.epochs=2",
    "train.batch_size=48",
    "train.workers=2",
    "train.checkpoint_steps=7",
    "train.average_from=1",
    "model.mode=clustered",
    "clusters.max_leaf_size=16",
    "model.head.recalled_clusters=5",
    "model.head.rank_width=16",
]


def train(directory: Path, *more: str) -> Path:
    return run.train(config.load("light_xml", [*SETTINGS, f"run.dir={directory}", *more]))


def network(directory: Path) -> dict[str, np.ndarray]:
    """Every tensor of a run's network; label rows by their layer, whole."""
    (home,) = directory.glob("stages/train-*/network")
    tensors: dict[str, np.ndarray] = {}
    for path in sorted(home.rglob("*.safetensors")):
        for key, value in load_file(path).items():
            name = f"{path.name.split('.')[0]}/{key}"
            tensors[name] = np.concatenate([tensors[name], value]) if name in tensors else value
    return tensors


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    assert a.keys() == b.keys()
    return max(float(np.abs(a[key].astype(np.float64) - b[key]).max()) for key in a)


def steps_file(directory: Path) -> list[Path]:
    return list(directory.glob("stages/train-*/metrics.jsonl"))


def wait_for_step(
    directory: Path, step: int, process: subprocess.Popen | None = None, seconds: float = 300
) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for path in steps_file(directory):
            lines = path.read_text().splitlines()
            if lines and json.loads(lines[-1])["step"] >= step:
                return
        assert process is None or process.poll() is None, "the command ended too soon"
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


def workers(parent: int, name: str) -> list[psutil.Process]:
    """Ray's processes below `parent` that have this name."""
    children = psutil.Process(parent).children(recursive=True)
    return [child for child in children if name in " ".join(child.cmdline())]


def kill_at_step(directory: Path, step: int, name: str, killed: list[int]) -> threading.Thread:
    """A thread that kills a process of that name when the run has made this step."""

    def kill() -> None:
        wait_for_step(directory, step)
        victim = workers(os.getpid(), name)[-1]
        victim.send_signal(signal.SIGKILL)
        killed.append(victim.pid)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


@pytest.fixture(scope="module")
def undisturbed(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "undisturbed")


@pytest.mark.slow
def test_a_killed_worker_costs_nothing_but_time(undisturbed: Path, tmp_path: Path):
    killed: list[int] = []
    thread = kill_at_step(tmp_path / "run", 20, "RayTrainWorker", killed)
    train(tmp_path / "run")
    thread.join()
    assert killed
    assert same(network(undisturbed), network(tmp_path / "run")) < 1e-5


@pytest.mark.slow
def test_workers_that_die_too_often_are_named_and_the_run_goes_on_when_more_is_allowed(
    undisturbed: Path, tmp_path: Path, capfd: pytest.CaptureFixture
):
    killed: list[int] = []
    thread = kill_at_step(tmp_path / "run", 20, "RayTrainWorker", killed)
    with pytest.raises(
        LostWorkersError, match=r"train\.max_failures=0.*worker process has died(.|\n)*goes on from"
    ):
        train(tmp_path / "run", "train.max_failures=0")
    thread.join()
    assert killed
    train(tmp_path / "run", "train.max_failures=1", "train.checkpoint_steps=9")
    assert "train: goes on where it stopped" in capfd.readouterr().out
    assert same(network(undisturbed), network(tmp_path / "run")) < 1e-5


@pytest.mark.slow
def test_a_member_whose_driver_is_killed_is_tried_again_from_its_checkpoint(
    undisturbed: Path, tmp_path: Path, capfd: pytest.CaptureFixture
):
    killed: list[int] = []
    thread = kill_at_step(tmp_path / "run", 20, "_Worker", killed)
    train(tmp_path / "run", "members=[{train: {epochs: 2}}]")
    thread.join()
    assert killed
    said = capfd.readouterr().out
    assert "member 0 failed" in said
    assert "member 0: train: goes on where it stopped" in said
    assert same(network(undisturbed), network(tmp_path / "run")) < 1e-5


@pytest.mark.slow
def test_a_killed_driver_resumes_and_a_damaged_checkpoint_is_passed_over(undisturbed: Path, tmp_path: Path):
    command = [sys.executable, "-m", "xmc.train", "light_xml", *SETTINGS, f"run.dir={tmp_path / 'run'}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_step(tmp_path / "run", 25, process)
    finally:
        family = [process, *psutil.Process(process.pid).children(recursive=True)]
        for member in family:
            member.kill()
        process.wait()
    (training,) = tmp_path.glob("run/stages/train-*")
    newest = sorted(training.glob("checkpoints/step-*/checkpoint.json"))[-1].parent
    rows = next(newest.glob("rank.*.safetensors"))
    damaged = bytearray(rows.read_bytes())
    damaged[-1] ^= 1
    rows.write_bytes(damaged)
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert newest.name in again.stdout + again.stderr
    assert "goes on where it stopped" in again.stdout
    assert same(network(undisturbed), network(tmp_path / "run")) < 1e-5


@pytest.mark.slow
def test_a_loss_that_explodes_stops_with_its_step(ray_session: None, tmp_path: Path):
    with pytest.raises(InputError, match=r"loss became (nan|inf).*lower train"):
        train(tmp_path / "run", "train.label_rate=1e30", "model.mode=flat")


def test_storage_that_cannot_be_written_is_said_before_anything_starts(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        train(tmp_path / "file" / "run")
