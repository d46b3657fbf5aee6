"""How APLC divides the labels: number of clusters, shape of the partition, q (decay) and d_h (hidden width).

The paper's Figure 4 is P@1 by the number of clusters, its Figure 5 P@1 by the shape; a sweep draws both.
"""

from __future__ import annotations

from typing import Any

import optuna


def fractions(clusters: int, shape: str) -> list[float]:
    """Shares of the labels, head first. For three clusters falling is (0.7, 0.2, 0.1), rising the reverse."""
    if shape == "even":
        return [1 / clusters] * clusters
    tails = [2.0**i for i in reversed(range(clusters - 1))]
    falling = [0.7, *(0.3 * tail / sum(tails) for tail in tails)]
    return falling if shape == "falling" else falling[::-1]


def space(trial: optuna.Trial, preset: Any) -> dict[str, Any]:
    clusters = trial.suggest_int("clusters", 2, 6)
    shape = trial.suggest_categorical("shape", ["even", "falling", "rising"])
    width = int(preset.model.hidden_width * trial.suggest_categorical("width_over_preset", [0.5, 1.0]))
    # The last tail sees width / decay^tails columns: at least one.
    steepest = 0.99 * width ** (1 / (clusters - 1))
    return {
        "model.partition.sizes": None,
        "model.partition.fractions": fractions(clusters, shape),
        "model.hidden_width": width,
        "model.head.decay": min(trial.suggest_categorical("decay", [1.5, 2.0, 3.0]), steepest),
    }
