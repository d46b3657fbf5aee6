"""X-Transformer: the matcher's learning rates and label clusters; what a ranker's errors cost, and its beam."""

from __future__ import annotations

from typing import Any

import optuna


def space(trial: optuna.Trial, preset: Any) -> dict[str, Any]:
    encoder = trial.suggest_float("encoder_rate", 2e-5, 4e-4, log=True)
    return {
        "train.encoder_rate": encoder,
        # Cluster rows start from nothing: never slower than the encoder.
        "train.label_rate": encoder * trial.suggest_float("label_over_encoder", 1, 100, log=True),
        "clusters.num_clusters": None,
        "clusters.max_leaf_size": trial.suggest_categorical("labels_a_cluster", [4, 8, 16, 32]),
        "ranker.beam": trial.suggest_int("beam", 5, 20),
        "ranker.solver.cost": trial.suggest_float("cost", 0.1, 10, log=True),
    }
