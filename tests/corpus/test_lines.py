"""Reading a file in byte ranges gives what reading it from the front gives."""

from __future__ import annotations

import gzip

import pytest

from xmc.corpus import lines

CONTENTS = {
    "plain": b"one\ntwo\nthree\n",
    "no final newline": b"one\ntwo\nthree",
    "windows": b"one\r\ntwo\r\nthree\r\n",
    "empty lines": b"\n\none\n\n\ntwo\n\n",
    "one long line": b"x" * 100 + b"\n",
    "only newlines": b"\n\n\n",
    "other breaks": "one\u2028still\x0bone\x85\ntwo\n".encode(),
    "nothing": b"",
}


def sequential(data: bytes) -> list[bytes]:
    parts = data.split(b"\n")
    if parts[-1] == b"":
        parts.pop()
    return [part.removesuffix(b"\r") for part in parts]


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("block_bytes", [1, 2, 3, 4, 5, 7, 1000])
def test_ranges_equal_sequential_reading(tmp_path, name, block_bytes):
    path = tmp_path / "file"
    path.write_bytes(CONTENTS[name])
    expected = list(enumerate(sequential(CONTENTS[name]), 1))
    found, first = [], 1
    for start, end in lines.byte_ranges(len(CONTENTS[name]), block_bytes):
        part = lines.split_lines(lines.read_range(path, start, end))
        assert lines.count_line_starts(path, start, end) == len(part)
        found += list(enumerate(part, first))
        first += len(part)
    assert found == expected


def test_index_counts_in_parallel_and_finds_lines(ray_session, tmp_path):
    path = tmp_path / "file"
    content = [f"line {number} {'x' * (number % 13)}".encode() for number in range(1, 201)]
    path.write_bytes(b"\n".join(content))
    index = lines.index_lines(path, 97)
    assert len(index.ranges) > 10
    assert index.num_lines == 200
    assert index.read_lines(1, 200) == content
    assert index.read_lines(57, 80) == content[56:136]
    assert index.read_lines(195, 50) == content[194:]
    assert index.read_lines(300, 5) == []


@pytest.mark.parametrize("block_bytes", [1, 5, 64, 10_000])
def test_gzip_blocks_are_whole_lines_with_their_numbers(tmp_path, block_bytes):
    content = [f"line {number}".encode() for number in range(1, 101)] + [b"", b"last without end"]
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(b"\n".join(content)))
    found = []
    for first, block in lines.gzip_blocks(path, block_bytes):
        found += list(enumerate(lines.split_lines(block), first))
    assert found == list(enumerate(content, 1))


def test_truncated_gzip_is_reported_with_its_line(tmp_path):
    path = tmp_path / "file.gz"
    packed = gzip.compress(b"".join(b"%d %d\n" % (n, n * 7919) for n in range(5000)))
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(lines.BrokenGzipError) as caught:
        list(lines.gzip_blocks(path, 512))
    assert 100 < caught.value.line < 5000
