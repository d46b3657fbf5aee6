"""Plots of a run: its loss over the steps, its precision and recall by frequency band. Computes no metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xmc.evaluation.metrics import MetricResult
from xmc.files import atomic_file

COLOURS = ("#2f5d8a", "#e08e45", "#7a9e48", "#b04a5a", "#6b5b95")


def new_axes(width: float, columns: int = 1) -> tuple[Any, list[Any]]:
    """A figure so many inches wide, and its axes side by side."""
    # The object interface: no global state, no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, columns, i + 1) for i in range(columns)]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", alpha=0.3)
    return figure, axes


def write_figure(figure: Any, path: Path) -> None:
    """As PNG, whole or not at all."""
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def plot_loss(rows: Sequence[Mapping[str, float]], path: Path) -> None:
    """The loss of each step, pale, and its running mean."""
    figure, (ax,) = new_axes(6.4)
    steps = np.array([row["step"] for row in rows])
    loss = np.array([row["loss"] for row in rows])
    ax.plot(steps, loss, color=COLOURS[0], alpha=0.25, linewidth=0.8)
    window = max(1, len(loss) // 50)
    if len(loss) >= window:
        mean = np.convolve(loss, np.ones(window) / window, "valid")
        ax.plot(steps[window - 1 :], mean, color=COLOURS[0], linewidth=1.8, label=f"mean of {window} steps")
        ax.legend(frameon=False)
    ax.set_yscale("log")
    ax.set_xlabel("step")
    ax.set_ylabel("loss")
    write_figure(figure, path)


def plot_bands(result: MetricResult, path: Path) -> None:
    """P@k and R@k of the labels that are frequent, middling and rare in train."""
    figure, axes = new_axes(8.4, columns=2)
    names = [band.name for band in result.bands]
    places = np.arange(len(names))
    width = 0.8 / len(result.ks)
    for ax, metric, title in zip(axes, ("P", "R"), ("precision", "recall"), strict=True):
        for i, k in enumerate(result.ks):
            values = np.nan_to_num([result[f"{name}.{metric}@{k}"] for name in names])
            offset = (i - (len(result.ks) - 1) / 2) * width
            ax.bar(places + offset, values, width * 0.92, color=COLOURS[i % len(COLOURS)], label=f"@{k}")
        ax.set_xticks(places, [f"{band.name}\n{band.num_labels:,} labels" for band in result.bands])
        ax.set_ylim(0, 100)
        ax.set_title(f"{title}, %", loc="left", fontsize=10)
    axes[1].legend(frameon=False, fontsize=8, loc="upper right")  # where the tail's low bars leave room
    write_figure(figure, path)
