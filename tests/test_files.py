from __future__ import annotations

from pathlib import Path

import pytest

from xmc.files import atomic_directory, atomic_file, atomic_write_text


def test_a_failed_write_leaves_the_old_file_and_no_remains(tmp_path: Path):
    target = tmp_path / "a.txt"
    atomic_write_text(target, "old")
    with pytest.raises(RuntimeError), atomic_file(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_directory_is_replaced_whole(tmp_path: Path):
    target = tmp_path / "d"
    for content in ("one", "two"):
        with atomic_directory(target) as temporary:
            (temporary / content).write_text(content)
    assert [p.name for p in target.iterdir()] == ["two"]
    with pytest.raises(RuntimeError), atomic_directory(target) as temporary:
        (temporary / "three").write_text("3")
        raise RuntimeError
    assert [p.name for p in target.iterdir()] == ["two"]
    assert [p.name for p in tmp_path.iterdir()] == ["d"]
