"""Vectors on disk: all of them, or a rank's own part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from raycluster.inference import read_vectors


@pytest.mark.parametrize("of_parts", [1, 2, 3, 9])
def test_parts_are_contiguous_and_make_up_the_whole(tmp_path: Path, of_parts: int):
    whole = np.arange(14, dtype=np.float32).reshape(7, 2)
    for first, last in ((0, 4), (4, 5), (5, 7)):
        arrays = {"vectors": whole[first:last], "numbers": np.arange(first, last)}
        save_file(arrays, tmp_path / f"part-{first:09d}.safetensors")
    parts = [read_vectors(tmp_path, part, of_parts) for part in range(of_parts)]
    assert [len(part["numbers"]) for part in parts] == [
        7 * (n + 1) // of_parts - 7 * n // of_parts for n in range(of_parts)
    ]
    np.testing.assert_array_equal(np.concatenate([part["vectors"] for part in parts]), whole)
    np.testing.assert_array_equal(np.concatenate([part["numbers"] for part in parts]), np.arange(7))
