"""Linear levels trained on Ray: a level's labels are cut into blocks of about equal work, each a task of its own.

A task holds one block's weights and writes them when they are done, so memory is bounded by a block and a killed run
goes on with the blocks that are missing. All read the same inputs in the object store: a node has them once.
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
from xmc.linear.problem import Problem, plan_blocks
from xmc.linear.solver import SolverConfig
from xmc.linear.training import train_block
from xmc.linear.tree import LinearConfig, LinearTree
from xmc.linear.weights import LevelWeights, join_files
from xmc.progress import Progress

# Tasks a CPU: enough that none waits long for the last one, few enough that starting them costs nothing.
_TASKS_A_CPU = 4


class Level(NamedTuple):
    """A problem, and the file for its weights."""

    problem: Problem
    seed: int
    file: Path


def train_tree(
    shared: ray.ObjectRef, labels: sp.csr_matrix, tree: LabelTree, config: LinearConfig, seed: int, out: Path
) -> None:
    """Train a linear tree on `shared` Inputs into `out`/tree: all levels at once where none needs to know what the one
    above it finds."""
    inputs: Inputs = ray.get(shared)
    files = [out / f"level-{level}.safetensors" for level in range(tree.num_levels - 1)]
    model = LinearTree(tree, (), config)
    at_once = len(files) if "man" not in config.negatives else 1
    for first in range(0, len(files), at_once):
        todo = [i for i in range(first, first + at_once) if not files[i].exists()]
        problems = [Level(model.problem(i, inputs, labels), seed + i, files[i]) for i in todo]
        teach(shared, problems, config.solver)
        loaded = (LevelWeights.load(file) for file in files[first : first + at_once])
        model = LinearTree(tree, (*model.levels, *loaded), config)
    model.save(out / "tree")
    for file in files:
        file.unlink()


def teach(shared: ray.ObjectRef, levels: Sequence[Level], config: SolverConfig) -> None:
    """Train all levels at once on `shared` Inputs; what is on disk already is kept."""
    todo = [level for level in levels if not level.file.exists()]
    if not todo:
        return
    cpus = int(ray.cluster_resources().get("CPU", 1))
    inputs: Inputs = ray.get(shared)
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
        join_files(paths, level.file)
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
