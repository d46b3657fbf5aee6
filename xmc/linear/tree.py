"""The linear label tree: a level of classifiers under each node, trained from the root down and searched by beam.

It trains in this process; a cluster's tasks train the same levels through `training.py`.
Legend: N documents, L labels, k places.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from xmc.errors import InputError
from xmc.files import atomic_directory
from xmc.labels.topk import TopK
from xmc.labels.tree import LabelTree
from xmc.linear.inputs import Inputs
from xmc.linear.problem import Groups, Negatives, Problem
from xmc.linear.scoring import CombineConfig, score_children
from xmc.linear.solver import SolverConfig
from xmc.linear.training import train_block
from xmc.linear.weights import LevelWeights


@dataclass(frozen=True)
class LinearConfig:
    """How a linear tree is trained and searched."""

    solver: SolverConfig = field(default_factory=SolverConfig)
    scores: CombineConfig = field(default_factory=CombineConfig)
    # Documents that train the children of a node below the root: tfn, man or tfn+man (see problem.py).
    negatives: Negatives = "tfn+man"
    # With man: the nodes of a level that a document is a negative of. More take longer, and help only `margin`.
    negative_beam: int = 5
    # Nodes of a level that are followed in prediction.
    beam: int = 10

    def __post_init__(self) -> None:
        if self.beam < 1 or self.negative_beam < 1:
            raise InputError(
                f"beam={self.beam}, negative_beam={self.negative_beam}: at least one node is needed"
            )
        if self.negatives == "all":
            raise InputError("negatives='all' is for the root; below it choose tfn, man or tfn+man")


def flat_tree(num_labels: int) -> LabelTree:
    """All labels under the root: a classifier a label over all documents, for up to a few thousand labels."""
    offsets = np.array([0, num_labels], np.int64)
    return LabelTree((offsets,), (np.arange(num_labels, dtype=np.int32),))


@dataclass(frozen=True)
class LinearTree:
    """A label tree with weights for every level below the root."""

    tree: LabelTree
    levels: tuple[LevelWeights, ...]
    config: LinearConfig

    @classmethod
    def train(
        cls,
        inputs: Inputs,
        labels: sp.csr_matrix,
        tree: LabelTree,
        config: LinearConfig,
        seed: int = 0,
        num_threads: int | None = None,
    ) -> LinearTree:
        """From documents and their labels Y (N×L)."""
        model = cls(tree, (), config)
        for level in range(tree.num_levels - 1):
            problem = model.problem(level, inputs, labels)
            span = (0, problem.groups.num_children)
            weights = train_block(inputs, problem, span, config.solver, seed + level, num_threads)
            model = cls(tree, (*model.levels, weights), config)
        return model

    def problem(self, level: int, inputs: Inputs, labels: sp.csr_matrix) -> Problem:
        """What the children of `level` train on; with matcher-aware negatives `levels` must hold all above it."""
        groups = Groups.of_level(self.tree, level)
        positives = self.tree.positives(labels, level + 1)
        if level == 0:
            return Problem.build(positives, groups, "all")
        negatives, beam = self.config.negatives, self.config.negative_beam
        matched = self._search(inputs, beam, level) if "man" in negatives else None
        return Problem.build(positives, groups, negatives, matched)

    def predict(self, inputs: Inputs, k: int, beam: int | None = None) -> TopK:
        """The k best labels of each document with their scores; a wider beam finds more and takes longer."""
        beam = self.config.beam if beam is None else beam
        above = self._search(inputs, beam, len(self.levels) - 1) if len(self.levels) > 1 else None
        return self._descend(inputs, above, len(self.levels) - 1, k)

    def _search(self, inputs: Inputs, beam: int, level: int) -> TopK:
        """The best `beam` nodes of `level`."""
        above = None
        for upper in range(level):
            above = self._descend(inputs, above, upper, beam)
        assert above is not None
        return above

    def _descend(self, inputs: Inputs, above: TopK | None, level: int, k: int) -> TopK:
        groups = Groups.of_level(self.tree, level)
        return score_children(self.levels[level], groups, inputs, above, k, self.config.scores)

    def save(self, directory: Path) -> None:
        """Write the tree, a weights file a level, and the settings."""
        with atomic_directory(directory) as temporary:
            self.tree.save(temporary / "tree.npz")
            for level, weights in enumerate(self.levels):
                weights.save(temporary / f"level-{level}.safetensors")
            (temporary / "linear.json").write_text(json.dumps(asdict(self.config), indent=2) + "\n")

    @classmethod
    def load(cls, directory: Path) -> LinearTree:
        """Read what `save` wrote; weights are mapped into memory."""
        path = directory / "linear.json"
        try:
            settings = json.loads(path.read_text())
            config = LinearConfig(
                SolverConfig(**settings.pop("solver")), CombineConfig(**settings.pop("scores")), **settings
            )
        except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise InputError(
                f"{path} is not the settings of a linear tree ({error}): train it again"
            ) from error
        tree = LabelTree.load(directory / "tree.npz")
        levels = [
            LevelWeights.load(directory / f"level-{level}.safetensors")
            for level in range(tree.num_levels - 1)
        ]
        return cls(tree, tuple(levels), config)
