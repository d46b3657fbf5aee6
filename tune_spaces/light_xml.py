"""LightXML: both learning rates, dropout, layers that are pooled; with model.mode=clustered also clusters and beam."""

from __future__ import annotations

from typing import Any

import optuna


def space(trial: optuna.Trial, preset: Any) -> dict[str, Any]:
    encoder = trial.suggest_float("encoder_rate", 2e-5, 4e-4, log=True)
    settings = {
        "train.encoder_rate": encoder,
        # Label rows start from nothing: never slower than the encoder.
        "train.label_rate": encoder * trial.suggest_float("label_over_encoder", 1, 100, log=True),
        "encoder.dropout": trial.suggest_float("dropout", 0.1, 0.6, step=0.1),
        "encoder.layers_pooled": trial.suggest_categorical(
            "layers_pooled", sorted({1, preset.encoder.layers_pooled})
        ),
    }
    if preset.model.mode == "clustered":
        settings["clusters.max_leaf_size"] = trial.suggest_categorical("labels_a_cluster", [20, 40, 80])
        settings["model.head.recalled_clusters"] = trial.suggest_int("recalled", 10, 80, log=True)
    return settings
