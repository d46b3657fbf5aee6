"""Weights on disk: the same when read back, and damaged files refused."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.linear.problems import even_groups, random_inputs, random_labels
from xmc.errors import InputError
from xmc.linear.problem import Problem
from xmc.linear.solver import SolverConfig
from xmc.linear.training import train_block
from xmc.linear.weights import LevelWeights, concatenate, join_files


@pytest.fixture(scope="module")
def parts() -> list[LevelWeights]:
    rng = np.random.default_rng(0)
    inputs = random_inputs(rng, 60, 50, 3)
    problem = Problem.build(random_labels(rng, 60, 30, 0.1), even_groups(rng, 30, 5), "tfn")
    return [train_block(inputs, problem, span, SolverConfig()) for span in ((0, 12), (12, 30))]


def test_saved_weights_are_read_back(parts: list[LevelWeights], tmp_path: Path):
    weights = concatenate(parts)
    weights.save(tmp_path / "level.safetensors")
    loaded = LevelWeights.load(tmp_path / "level.safetensors")
    for field in fields(weights):
        wanted, found = getattr(weights, field.name), getattr(loaded, field.name)
        np.testing.assert_array_equal(found, wanted)
        assert np.asarray(found).dtype == np.asarray(wanted).dtype
    assert loaded.num_bytes == weights.num_bytes > 0
    assert loaded.num_entries > 0
    assert not loaded.values.flags.owndata


def test_files_of_parts_are_joined_into_the_file_of_the_whole(parts: list[LevelWeights], tmp_path: Path):
    files = [tmp_path / f"{part.first}.safetensors" for part in parts]
    for part, file in zip(parts, files, strict=True):
        part.save(file)
    join_files(files, tmp_path / "joined.safetensors")
    concatenate(parts).save(tmp_path / "whole.safetensors")
    assert (tmp_path / "joined.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    # It is what others call safetensors.
    found = load_file(tmp_path / "joined.safetensors")
    np.testing.assert_array_equal(found["values"], concatenate(parts).values)
    assert found["dense"].shape == (30, 3)


def test_parts_must_follow_one_another(parts: list[LevelWeights]):
    with pytest.raises(ValueError, match="order"):
        concatenate(parts[::-1])


def test_damaged_files_are_refused(parts: list[LevelWeights], tmp_path: Path):
    path = tmp_path / "level.safetensors"
    weights = concatenate(parts)
    bad = [
        replace(weights, children=weights.children + np.uint16(100)),
        replace(weights, entry_bounds=weights.entry_bounds + 1),
        replace(weights, intercepts=weights.intercepts[:-1]),
        replace(weights, entry_ends=weights.entry_ends[::-1].copy()),
        replace(weights, num_columns=7),
    ]
    for broken in bad:
        broken.save(path)
        with pytest.raises(InputError, match=r"level\.safetensors"):
            LevelWeights.load(path)
    weights.save(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(InputError, match=r"level\.safetensors"):
        LevelWeights.load(path)
    path.write_bytes(b"no weights")
    with pytest.raises(InputError, match=r"level\.safetensors"):
        LevelWeights.load(path)
