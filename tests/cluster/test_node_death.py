"""A node of the cluster dies while trees train on it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.nodes import environment, free_port, kill_node, processes, start_node, wait_for_port

ROOT = Path(__file__).parent.parent.parent
SETTINGS = [
    "words.vectors.width=24",
    "words.max_words=40",
    "encoder.width=16",
    "model.hidden_widths=[16]",
    "model.mode=tree",
    "model.candidates=6",
    "clusters.max_leaf_size=8",
    "tree.branching=4",
    "tree.height=1",
    "train.epochs=3",
    "train.average_from=0",
    "train.batch_size=16",
    "train.checkpoint_steps=10",
    "members=[{seed: 1}, {seed: 2}, {seed: 3}]",
]


@pytest.fixture
def cluster() -> Iterator[tuple[str, subprocess.Popen]]:
    """The address of a cluster of two nodes, and its second node."""
    port, temporary = free_port(), Path("/tmp") / f"xmc-nodes-{os.getpid()}"
    address = f"127.0.0.1:{port}"
    options = ("--include-dashboard=false", f"--temp-dir={temporary}")
    nodes = [start_node("--head", f"--port={port}", *options)]
    try:
        wait_for_port(port)
        nodes.append(start_node(f"--address={address}"))
        yield address, nodes[1]
    finally:
        for node in nodes:
            if node.poll() is None:
                kill_node(node)
        shutil.rmtree(temporary, ignore_errors=True)


def steps(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def trained_on(node: subprocess.Popen) -> set[Path]:
    """The stages' directories whose first rank is on the node: it holds their file of steps open."""
    found = set()
    for rank in processes(node, "RayTrainWorker"):
        with contextlib.suppress(psutil.Error):  # it has ended
            found |= {
                Path(file.path).parent for file in rank.open_files() if file.path.endswith("metrics.jsonl")
            }
    return found


def wait_for_a_checkpoint(node: subprocess.Popen, process: subprocess.Popen) -> Path:
    """Until training on the node has left a checkpoint; the stage's directory."""
    deadline = time.monotonic() + 300
    while True:
        for home in trained_on(node):
            if list(home.glob("checkpoints/step-*/checkpoint.json")):
                return home
        assert process.poll() is None, "the command ended too soon"
        assert time.monotonic() < deadline, "nothing is trained on the second node"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_dead_node_costs_its_trees_the_steps_since_their_checkpoints(
    cluster: tuple[str, subprocess.Popen], tmp_path: Path
):
    address, second = cluster
    command = [sys.executable, "-m", "xmc.train", "attention_xml", *SETTINGS, f"run.dir={tmp_path / 'run'}"]
    with open(tmp_path / "said.txt", "w") as said:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment() | {"RAY_ADDRESS": address}, stdout=said, stderr=said
        )
    try:
        hit = wait_for_a_checkpoint(second, process)
        kill_node(second)
        code = process.wait(600)
    finally:
        process.kill()
    text = (tmp_path / "said.txt").read_text()
    assert code == 0, text
    assert "3 members, 3 at a time" in text
    trained = {path.parent: steps(path) for path in tmp_path.glob("run/stages/level-*/metrics.jsonl")}
    assert len(trained) == 6, "three trees of two levels"
    assert all(made == list(range(1, made[-1] + 1)) for made in trained.values())
    assert "goes on from step" in (hit / "messages.txt").read_text()
