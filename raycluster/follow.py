"""How other processes of a run speak to its driver: whole lines appended to files that the driver follows.

Ray's own forwarding of every worker's output is off (see session): it buries the few lines that a user wants.
"""

from __future__ import annotations

import os
from pathlib import Path


def append_line(path: Path, line: str) -> None:
    """Add one line; lines of several writers do not mix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(line + "\n")


class Tail:
    """New whole lines of a file that grows, may not be there yet, or is replaced by a restarted process."""

    def __init__(self, path: Path) -> None:
        self._path, self._inode, self._read = path, -1, 0

    def lines(self) -> list[str]:
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._read = inode, 0
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        return whole.decode().splitlines()
