"""The linear tree: what an error costs, how wide its clusters and its beam are. Trials take seconds to minutes."""

from __future__ import annotations

from typing import Any

import optuna


def space(trial: optuna.Trial, preset: Any) -> dict[str, Any]:
    return {
        "linear.solver.cost": trial.suggest_float("cost", 0.1, 10, log=True),
        "clusters.max_leaf_size": trial.suggest_categorical("labels_a_cluster", [16, 32, 64, 128]),
        "linear.beam": trial.suggest_int("beam", 5, 40, log=True),
    }
