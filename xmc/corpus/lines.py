"""Reads line files in parts that can be parsed apart from each other: byte ranges of plain files, blocks of a .gz.

A line ends at "\\n" and nowhere else, a "\\r" before it belongs to the line end. Nothing here decodes text.
"""

from __future__ import annotations

import gzip
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ray


class BrokenGzipError(Exception):
    """A .gz file that ends early or is damaged; carries the line after the last whole one."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


@dataclass(frozen=True)
class LineIndex:
    """Byte ranges of a file with the number of the first line that begins in each. Lines count from 1."""

    path: Path
    ranges: tuple[tuple[int, int], ...]
    first_lines: tuple[int, ...]
    num_lines: int

    def read_lines(self, first: int, count: int) -> list[bytes]:
        """Lines `first` … `first + count − 1`, as many of them as exist."""
        at = max(bisect_right(self.first_lines, first) - 1, 0)
        lines: list[bytes] = []
        while at < len(self.ranges) and self.first_lines[at] < first + count:
            skip = max(first - self.first_lines[at], 0)
            part = split_lines(read_range(self.path, *self.ranges[at]))
            lines += part[skip : skip + count - len(lines)]
            at += 1
        return lines


def byte_ranges(size: int, block_bytes: int) -> list[tuple[int, int]]:
    """Cut `size` bytes into ranges of at most `block_bytes`."""
    return [(start, min(start + block_bytes, size)) for start in range(0, size, block_bytes)]


def read_range(path: Path, start: int, end: int) -> bytes:
    """The lines that begin in [start, end), whole: the last may reach past `end`."""
    with open(path, "rb") as file:
        if start > 0:
            file.seek(start - 1)
            file.readline()
        begin = file.tell()
        if begin >= end:
            return b""
        data = file.read(end - begin)
        if not data.endswith(b"\n"):
            data += file.readline()
        return data


def count_line_starts(path: Path, start: int, end: int) -> int:
    """How many lines begin in [start, end)."""
    with open(path, "rb") as file:
        if start == 0:
            return 1 + file.read(end - 1).count(b"\n")
        file.seek(start - 1)
        return file.read(end - start).count(b"\n")


_count_remotely = ray.remote(count_line_starts)


def index_lines(path: Path, block_bytes: int) -> LineIndex:
    """Count the lines of every byte range, in parallel tasks where there is more than one."""
    ranges = byte_ranges(path.stat().st_size, block_bytes)
    if len(ranges) <= 1:
        counts = [count_line_starts(path, *byte_range) for byte_range in ranges]
    else:
        counts = ray.get([_count_remotely.remote(path, *byte_range) for byte_range in ranges])
    first_lines, total = [], 0
    for count in counts:
        first_lines.append(total + 1)
        total += count
    return LineIndex(path, tuple(ranges), tuple(first_lines), total)


def split_lines(data: bytes) -> list[bytes]:
    """Cut bytes into lines without their ends. A last line without "\\n" counts, an empty rest does not."""
    lines = data.replace(b"\r\n", b"\n").split(b"\n") if b"\r\n" in data else data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    return lines


def gzip_blocks(path: Path, block_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Stream a .gz file as (number of the first line, whole lines); never more than a block and a line in memory."""
    line, rest = 1, b""
    with gzip.open(path, "rb") as file:
        while True:
            try:
                data = file.read(block_bytes)
            except (EOFError, OSError, zlib.error) as error:
                raise BrokenGzipError(line, str(error)) from None
            if not data:
                break
            cut = data.rfind(b"\n") + 1
            if cut == 0:
                rest += data
                continue
            block, rest = rest + data[:cut], data[cut:]
            yield line, block
            line += block.count(b"\n")
    if rest:
        yield line, rest
