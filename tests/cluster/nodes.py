"""Nodes of a Ray cluster, each a `ray start` of its own with its own processes, all on this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

BIN = Path(sys.executable).parent
_SIZE = ("--num-cpus=2", "--object-store-memory=300000000", "--block")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment() -> dict[str, str]:
    """As after `source .venv/bin/activate` and `export RAY_AUTH_MODE=token`."""
    kept = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    return kept | {"PATH": f"{BIN}:{os.environ['PATH']}", "RAY_AUTH_MODE": "token"}


def start_node(*options: str) -> subprocess.Popen:
    """`ray start` with these options, in the foreground of a process of its own."""
    # Its usual port may be another cluster's of this machine, and without its agent a node takes no jobs.
    ports = [f"--dashboard-agent-listen-port={free_port()}"]
    return subprocess.Popen(
        [BIN / "ray", "start", *_SIZE, *ports, *options],
        env=environment(),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def wait_for_port(port: int, seconds: float = 60) -> None:
    """Until something on this machine listens there."""
    deadline = time.monotonic() + seconds
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert time.monotonic() < deadline, f"nothing listens on port {port}"
        time.sleep(0.2)


def processes(node: subprocess.Popen, name: str = "") -> list[psutil.Process]:
    """A node's processes whose command line has `name` in it."""
    found = []
    for process in psutil.Process(node.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            if name in " ".join(process.cmdline()):
                found.append(process)
    return found


def kill_node(node: subprocess.Popen) -> None:
    """All processes of a node at once, as a machine that loses power."""
    for process in processes(node):
        with contextlib.suppress(psutil.Error):
            process.kill()
    node.kill()
    node.wait(60)
