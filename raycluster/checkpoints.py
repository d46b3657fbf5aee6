"""Checkpoints that cannot be half there or silently wrong: safetensors, checksums, the record written last.

Each rank writes its own files into a step's directory; when all are there, rank 0 writes the record with every
file's checksum. Reading takes the newest checkpoint that is whole, and names each broken one that it passes over.
The directory must be visible to all ranks (a shared file system on a cluster).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from xmc.errors import InputError
from xmc.files import atomic_file, atomic_write_text

RECORD = "checkpoint.json"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: its directory and what its writer noted (step, position in the epoch …)."""

    path: Path
    notes: dict[str, Any]

    def load(self, name: str) -> dict[str, Tensor]:
        """All tensors of `<name>.safetensors`."""
        with safe_open(self.path / f"{name}.safetensors", framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def save(
    root: Path, step: int, write: Callable[[Path], list[Path]], notes: Mapping[str, Any], keep: int = 2
) -> None:
    """Make the checkpoint of `step`: every rank calls it, and its `write` puts files of its own into the directory.

    The `keep` newest whole checkpoints stay, so that there is one before a broken one.
    """
    directory = root / f"step-{step:09d}"
    sums = _agree(lambda: {path.name: _checksum(path) for path in write(directory)})
    if _rank() == 0:
        checksums = {name: checksum for part in sums for name, checksum in part.items()}
        atomic_write_text(
            directory / RECORD, json.dumps({"step": step, "notes": dict(notes), "sha256": checksums})
        )
        for old in _candidates(root)[keep:]:
            shutil.rmtree(old)
    if dist.is_initialized():
        dist.barrier()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    """One safetensors file, whole or not at all."""
    with atomic_file(path) as temporary:
        save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, temporary)
    return path


def newest(root: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint below `root`; `say` hears of each broken one passed over. Ranks agree on it."""
    choice: list[str | None] = [None]
    if _rank() == 0:
        choice[0] = next((path.name for path in _candidates(root) if _is_whole(path, say)), None)
    if dist.is_initialized():
        dist.broadcast_object_list(choice, src=0)
    if choice[0] is None:
        return None
    path = root / choice[0]
    return Checkpoint(path, json.loads((path / RECORD).read_text())["notes"])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _candidates(root: Path) -> list[Path]:
    """Directories with a record, newest first."""
    return sorted((path.parent for path in root.glob(f"step-*/{RECORD}")), reverse=True)


def _is_whole(path: Path, say: Callable[[str], None]) -> bool:
    try:
        expected = json.loads((path / RECORD).read_text())["sha256"]
        wrong = [name for name, checksum in expected.items() if _checksum(path / name) != checksum]
    except (OSError, ValueError, KeyError) as error:
        wrong = [str(error)]
    if wrong:
        say(f"checkpoint {path} is damaged ({wrong[0]}); the one before it is used")
    return not wrong


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _agree(work: Callable[[], dict[str, str]]) -> list[dict[str, str]]:
    """Every rank's checksums; if one rank could not write, all raise: nobody waits for it for ever."""
    result: dict[str, str] | str
    try:
        result = work()
    except Exception as error:  # safetensors raises its own kinds for a full disk
        result = f"{type(error).__name__}: {error}"
    results: list[Any] = [result]
    if dist.is_initialized():
        results = [None] * dist.get_world_size()
        dist.all_gather_object(results, result)
    problems = [r for r in results if isinstance(r, str)]
    if problems:
        raise InputError(
            f"the checkpoint could not be written ({problems[0]}); free space or mend the storage, then give the "
            "same command again: it goes on from the checkpoint before"
        )
    return results
