"""Atomic writes: a file or directory is there whole, or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sibling(path: Path) -> Path:
    """A temporary name beside `path`: the same file system, so that the rename is atomic."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; it becomes `path` when the block ends well and vanishes otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _sibling(path)
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write_bytes(path: Path, data: bytes) -> None:
    with atomic_file(path) as temporary:
        temporary.write_bytes(data)


def atomic_write_text(path: Path, text: str) -> None:
    atomic_write_bytes(path, text.encode())


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory to fill; it replaces `path` when the block ends well and vanishes otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _sibling(path)
    temporary.mkdir()
    try:
        yield temporary
        if path.exists():
            old = _sibling(path)
            os.replace(path, old)
            os.replace(temporary, path)
            shutil.rmtree(old)
        else:
            os.replace(temporary, path)
        _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
