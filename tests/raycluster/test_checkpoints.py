from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raycluster import checkpoints
from xmc.errors import InputError


def save(root: Path, step: int) -> None:
    def write(directory: Path) -> list[Path]:
        return [
            checkpoints.write_tensors(
                directory / "rank-00000.safetensors", {"x": torch.full((100,), float(step))}
            )
        ]

    checkpoints.save(root, step, write, {"step": step})


def newest(root: Path) -> tuple[int | None, list[str]]:
    said: list[str] = []
    found = checkpoints.newest(root, said.append)
    return (found.notes["step"] if found else None), said


def test_the_newest_of_the_two_that_are_kept(tmp_path: Path):
    assert newest(tmp_path) == (None, [])
    for step in (5, 10, 15):
        save(tmp_path, step)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-000000010", "step-000000015"]
    assert newest(tmp_path) == (15, [])
    found = checkpoints.newest(tmp_path, print)
    assert found is not None
    assert found.load("rank-00000")["x"].tolist() == [15.0] * 100


@pytest.mark.parametrize("damage", ["bit", "truncated", "missing", "record"])
def test_a_damaged_one_is_named_and_the_one_before_it_used(tmp_path: Path, damage: str):
    save(tmp_path, 5)
    save(tmp_path, 10)
    file = tmp_path / "step-000000010" / "rank-00000.safetensors"
    data = file.read_bytes()
    if damage == "bit":
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "truncated":
        file.write_bytes(data[:-7])
    elif damage == "missing":
        file.unlink()
    else:
        (file.parent / "checkpoint.json").write_text("{")
    step, said = newest(tmp_path)
    assert step == 5
    assert len(said) == 1
    assert "step-000000010 is damaged" in said[0]


def test_a_half_written_one_does_not_count(tmp_path: Path):
    save(tmp_path, 5)
    checkpoints.write_tensors(tmp_path / "step-000000010" / "rank-00000.safetensors", {"x": torch.zeros(3)})
    assert newest(tmp_path) == (5, [])


def test_storage_that_fails_is_an_error_in_the_users_words(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="could not be written"):
        save(tmp_path / "file", 5)
