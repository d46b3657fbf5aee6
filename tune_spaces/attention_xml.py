"""AttentionXML: learning rates, dropout, widths of BiLSTM and perceptron; with model.mode=tree also its candidates."""

from __future__ import annotations

from typing import Any

import optuna


def space(trial: optuna.Trial, preset: Any) -> dict[str, Any]:
    rate = trial.suggest_float("encoder_rate", 3e-4, 3e-3, log=True)
    hidden = trial.suggest_categorical("perceptron_width", [128, 256, 512])
    settings = {
        "train.encoder_rate": rate,
        "train.label_rate": rate * trial.suggest_float("label_over_encoder", 1, 5, log=True),
        "encoder.dropout": trial.suggest_float("dropout", 0.2, 0.6, step=0.1),
        "encoder.width": trial.suggest_categorical("lstm_width", [128, 256, 512]),
        # As many layers as the preset's, each the half of the one before.
        "model.hidden_widths": [hidden // 2**layer for layer in range(len(preset.model.hidden_widths))],
    }
    if preset.model.mode == "tree":
        settings["model.candidates"] = trial.suggest_categorical("candidates", [40, 80, 160])
    return settings
