"""TReaderXML: its learning rates in their order, how much of the neighbours' labels is read, dropout, bottleneck."""

from __future__ import annotations

from typing import Any

import optuna


def space(trial: optuna.Trial, preset: Any) -> dict[str, Any]:
    encoder = trial.suggest_float("encoder_rate", 2e-5, 4e-4, log=True)
    hidden = encoder * trial.suggest_float("hidden_over_encoder", 1, 20, log=True)
    return {
        "train.encoder_rate": encoder,
        # Towers and label rows start from nothing: never slower than what lies below them.
        "train.hidden_rate": hidden,
        "train.label_rate": hidden * trial.suggest_float("label_over_hidden", 1, 30, log=True),
        "teacher.neighbours.num_neighbours": trial.suggest_categorical("neighbours", [5, 10, 20]),
        "teacher.scope.max_nodes": trial.suggest_categorical("scope_nodes", [16, 32, 64]),
        "model.dropout": trial.suggest_float("dropout", 0.0, 0.5, step=0.1),
        "model.bottleneck_width": trial.suggest_categorical("bottleneck_width", [128, 256, 512]),
    }
