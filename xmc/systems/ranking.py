"""Linear levels trained on Ray: a level's labels are cut into blocks of about equal work, each a task of its own.

A task holds one block's weights and writes them when they are done, so memory is bounded by a block and a killed run
goes on with the blocks that are missing.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import ray
import scipy.sparse as sp

from xmc.corpus.tokens import gather
from xmc.labels.tree import LabelTree
from xmc.linear.inputs import Inputs
from xmc.linear.problem import Groups, Problem, plan_blocks
from xmc.linear.solver import SolverConfig
from xmc.linear.training import train_block
from xmc.linear.tree import LinearConfig, LinearTree
from xmc.linear.weights import LevelWeights, concatenate
from xmc.progress import Progress

# Tasks a CPU: enough that none waits long for the last one, few enough that starting them costs nothing.
_TASKS_A_CPU = 4


class Level(NamedTuple):
    """A problem, and the file for its weights."""

    problem: Problem
    seed: int
    file: Path


def train_tree(
    inputs: Inputs, labels: sp.csr_matrix, tree: LabelTree, config: LinearConfig, seed: int, out: Path
) -> None:
    """Train a linear tree into `out`/tree: all levels at once where none needs to know what the one above it finds."""
    files = [out / f"level-{level}.safetensors" for level in range(tree.num_levels - 1)]
    model = LinearTree(tree, (), config)
    if "man" not in config.negatives:
        teach(
            inputs,
            [Level(_taught(tree, labels, i), seed + i, file) for i, file in enumerate(files)],
            config.solver,
        )
        model = LinearTree(tree, tuple(LevelWeights.load(file) for file in files), config)
    while len(model.levels) < len(files):
        level, file = len(model.levels), files[len(model.levels)]
        if not file.exists():
            teach(inputs, [Level(model.next_problem(inputs, labels), seed + level, file)], config.solver)
        model = LinearTree(tree, (*model.levels, LevelWeights.load(file)), config)
    model.save(out / "tree")
    for file in files:
        file.unlink()


def _taught(tree: LabelTree, labels: sp.csr_matrix, level: int) -> Problem:
    """The children of a level's nodes with the documents that the labels send there."""
    positives = tree.positives(labels, level + 1)
    return Problem.build(positives, Groups.of_level(tree, level), "tfn" if level else "all")


def teach(inputs: Inputs, levels: Sequence[Level], config: SolverConfig) -> None:
    """Train all levels at once; what is on disk already is kept."""
    todo = [level for level in levels if not level.file.exists()]
    cpus = int(ray.cluster_resources().get("CPU", 1))
    shared = ray.put(inputs)
    waiting: dict[ray.ObjectRef, int] = {}
    parts: list[list[Path]] = []
    for problem, seed, file in todo:
        directory = file.with_suffix(".parts").resolve()
        directory.mkdir(parents=True, exist_ok=True)
        blocks = plan_blocks(problem, inputs, cpus * _TASKS_A_CPU)
        parts.append([directory / f"{first:09d}-{last:09d}.safetensors" for first, last in blocks])
        described = ray.put(problem)
        for block, path in zip(blocks, parts[-1], strict=True):
            if not path.exists():
                task = _train_block.remote(shared, described, block, config, seed, path)
                waiting[task] = block[1] - block[0]
    _wait(waiting)
    for level, paths in zip(todo, parts, strict=True):
        concatenate([LevelWeights.load(path) for path in paths]).save(level.file)
        shutil.rmtree(level.file.with_suffix(".parts"))


@ray.remote(num_cpus=1)
def _train_block(
    inputs: Inputs, problem: Problem, block: tuple[int, int], config: SolverConfig, seed: int, path: Path
) -> None:
    train_block(inputs, problem, block, config, seed, num_threads=1).save(path)


def _wait(tasks: dict[ray.ObjectRef, int]) -> None:
    with Progress("ranking", sum(tasks.values()), "labels") as progress:
        left = list(tasks)
        while left:
            done, left = ray.wait(left)
            gather(done)
            progress.update(sum(tasks[task] for task in done))
