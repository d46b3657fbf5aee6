"""APLC-XLNet's three learning rates, each log-uniform, in their order: encoder < hidden layer < clusters."""

from __future__ import annotations

from typing import Any

import optuna


def space(trial: optuna.Trial, preset: Any) -> dict[str, Any]:
    encoder = trial.suggest_float("encoder_rate", 1e-5, 3e-4, log=True)
    hidden = encoder * trial.suggest_float("hidden_over_encoder", 1.1, 20, log=True)
    clusters = hidden * trial.suggest_float("clusters_over_hidden", 1.1, 50, log=True)
    return {
        "train.encoder_rate": encoder,
        "train.hidden_rate": hidden,
        "train.label_rate": clusters,
        "train.warmup": trial.suggest_categorical("warmup", [0.0, 0.1]),
    }
