"""A run as a list of stages: what is done is skipped, what is half done goes on, what changed is done anew.

A stage's key is the hash of its settings and of its inputs' keys, so a changed setting redoes the stages that
depend on it and no others. Each stage writes one directory below the run's; its record, written last, says that
it is whole. Only one process works in a run's directory at a time; members of an ensemble share it, and where two
need the same stage one does it while the other waits.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xmc.errors import InputError
from xmc.files import atomic_write_text

RECORD = "stage.json"
PARTIAL = "partial.json"


@dataclasses.dataclass(frozen=True)
class Stage:
    """One step of a run.

    `run(out, inputs)` fills the directory `out` from the directories of the stages named in `inputs`. With
    `resumes`, it finds in `out` what an interrupted attempt with the same key left there, and goes on from it.
    """

    name: str
    settings: Mapping[str, Any]
    run: Callable[[Path, Mapping[str, Path]], None]
    inputs: tuple[str, ...] = ()
    resumes: bool = False


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the run's directory; a second process is refused instead of writing over the first one's work."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{directory}: another process is working on this run; wait for it or use another run.dir"
            ) from None
        yield


class Runner:
    """Brings stages up to date below `root`, one after the other, each after those that it takes as inputs."""

    def __init__(self, root: Path, say: Callable[[str], None] = print) -> None:
        self.root = root
        self._say = say
        self._keys: dict[str, str] = {}
        self.done: dict[str, Path] = {}

    def key(self, stage: Stage) -> str:
        """The hash of what the stage is made from."""
        made_from = [stage.name, stage.settings, [self._keys[name] for name in stage.inputs]]
        return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()

    def run(self, stage: Stage) -> Path:
        """Do the stage unless it is done; return its directory."""
        key = self._keys[stage.name] = self.key(stage)
        out = self.done[stage.name] = self.root / f"{stage.name}-{key[:10]}"
        with _held(out.with_name(f".{out.name}.lock")):
            if is_done(out):
                self._say(f"{stage.name}: up to date")
                return out
            started = time.monotonic()
            self._say(f"{stage.name}: {'goes on where it stopped' if (out / PARTIAL).exists() else 'starts'}")
            _run(stage, key, out, {name: self.done[name] for name in stage.inputs})
            self._say(f"{stage.name}: done in {time.monotonic() - started:.0f} s")
        return out


@contextmanager
def _held(file: Path) -> Iterator[None]:
    """Wait for the lock file and hold it; it is freed with the process, however that ends."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def is_done(directory: Path) -> bool:
    return (directory / RECORD).exists()


def prune(root: Path, keep: Mapping[str, Path]) -> None:
    """Remove what earlier settings left: directories of the same stages with other keys, and locks."""
    for lock in root.glob(".*.lock"):
        lock.unlink()
    for name, current in keep.items():
        for old in root.glob(f"{name}-" + "?" * 10):
            if old != current:
                shutil.rmtree(old)


def _run(stage: Stage, key: str, out: Path, inputs: Mapping[str, Path]) -> None:
    """Fill `out`, or a directory beside it that takes its name only when whole, and record it."""
    started = time.time()
    working = out if stage.resumes else out.with_name(f".{out.name}.tmp")
    if not stage.resumes:
        shutil.rmtree(working, ignore_errors=True)
    working.mkdir(parents=True, exist_ok=True)
    if stage.resumes:
        atomic_write_text(working / PARTIAL, json.dumps({"key": key}))
    stage.run(working, inputs)
    record = {
        "stage": stage.name,
        "key": key,
        "settings": stage.settings,
        "inputs": {name: path.name for name, path in inputs.items()},
        "seconds": round(time.time() - started, 1),
    }
    atomic_write_text(working / RECORD, json.dumps(record, indent=2))
    if stage.resumes:
        (working / PARTIAL).unlink()
    else:
        os.replace(working, out)
