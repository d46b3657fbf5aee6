"""A sweep's trials as a table, as CSV and as plots. Ranks them by what was measured; measures nothing itself.

Plots: `parallel.png`, everything that the search chose as an axis and every trial as a line; where the label partition
was searched `clusters.png`, the metric by the number of label clusters, and `partitions.png`, by the partition itself
(Figures 4 and 5 of the APLC-XLNet paper); for two objectives `front.png`, each trial by both with the Pareto front.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xmc.evaluation.report import COLOURS, new_axes, write_figure
from xmc.evaluation.table import align
from xmc.evaluation.trials import Objective, Trial, best, front
from xmc.files import atomic_write_text

PARTITION = "partition.fractions"
# A positive setting whose values span more than this is drawn on a logarithmic axis.
_LOG_SPAN = 20
_LINES_A_CATEGORY = 12
_STOPPED = "stopped early, its last measurement"


# ------------------------------------------------------------------------------------------------ tables


def format_trials(trials: Sequence[Trial], objective: Objective) -> str:
    """One row a trial, the best first, then those that were stopped, then those that failed; * marks the winners."""
    keys = searched(trials)
    winners = {trial.number for trial in front(trials, objective)}
    rows = [["", "trial", "state", *objective.names, *_short_names(keys)]]
    for trial in _ranked(trials, objective):
        values = [_number(trial.value(name)) for name in objective.names]
        settings = [_text(trial.settings.get(key)) for key in keys]
        rows.append(["*" if trial.number in winners else "", trial.name, trial.state, *values, *settings])
    failed = [f"trial {trial.name} failed: {trial.error}" for trial in trials if trial.state == "failed"]
    meaning = "on the Pareto front" if objective.minimise else "the best"
    return "\n".join([*align(rows, "<<<"), *failed, f"* {meaning}"])


def write_csv(trials: Sequence[Trial], objective: Objective, path: Path) -> None:
    """One row a trial by number: state, winner (1 or 0), settings, and everything that was measured last."""
    keys = searched(trials)
    winners = {trial.number for trial in front(trials, objective)}
    measured = list(dict.fromkeys(key for trial in trials if trial.reports for key in trial.reports[-1]))
    measured = [*objective.names, *(key for key in measured if key not in objective.names)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", "state", "winner", *keys, *measured, "reports", "error"])
    for trial in trials:
        settings = [trial.settings.get(key, "") for key in keys]
        values = ["" if trial.value(key) is None else trial.value(key) for key in measured]
        won = int(trial.number in winners)
        writer.writerow([trial.number, trial.state, won, *settings, *values, len(trial.reports), trial.error])
    atomic_write_text(path, text.getvalue())


def searched(trials: Sequence[Trial]) -> list[str]:
    """The settings that trials differ in."""
    keys = list(dict.fromkeys(key for trial in trials for key in trial.settings))
    return [key for key in keys if len({_text(trial.settings.get(key)) for trial in trials}) > 1]


def _ranked(trials: Sequence[Trial], objective: Objective) -> list[Trial]:
    order = ("done", "stopped", "running", "failed")
    return sorted(trials, key=lambda t: (order.index(t.state), -(t.value(objective.metric) or 0.0), t.number))


def _short_names(keys: Sequence[str]) -> list[str]:
    """Each setting by its last part where that names no other one."""
    last = [key.rpartition(".")[2] for key in keys]
    return [key if last.count(tail) > 1 else tail for key, tail in zip(keys, last, strict=True)]


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}" if abs(value) < 1 else f"{value:.2f}"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, list | tuple):
        return "/".join(_text(item) for item in value)
    return "–" if value is None else str(value)


# ------------------------------------------------------------------------------------------------ plots


def plot_trials(trials: Sequence[Trial], objective: Objective, directory: Path) -> list[Path]:
    """Draw what the trials have to show into `directory`; return the files."""
    files = []
    measured = [trial for trial in trials if trial.value(objective.metric) is not None]
    if measured:
        files.append(plot_parallel(measured, objective, directory / "parallel.png"))
    divided = [(trial, fractions) for trial in measured if (fractions := _fractions(trial))]
    if len({len(fractions) for _, fractions in divided}) > 1:
        files.append(plot_clusters(divided, objective, directory / "clusters.png"))
    if len({fractions for _, fractions in divided}) > 1:
        files.append(plot_partitions(divided, objective, directory / "partitions.png"))
    if objective.minimise:
        done = [trial for trial in measured if trial.state == "done"]
        files.append(plot_front(done, objective, directory / "front.png"))
    return files


def _fractions(trial: Trial) -> tuple[float, ...]:
    found = [value for key, value in trial.settings.items() if key.endswith(PARTITION)]
    return tuple(round(float(part), 3) for part in found[0]) if found else ()


def plot_parallel(trials: Sequence[Trial], objective: Objective, path: Path) -> Path:
    """One vertical axis for each choice of the search and for the metric; a line a trial, stopped ones thin, grey."""
    chosen = list(dict.fromkeys(name for trial in trials for name in trial.params))
    columns = [_Column([trial.params.get(name) for trial in trials]) for name in chosen]
    columns.append(_Column([trial.value(objective.metric) for trial in trials]))
    names = [
        f"{name} (log)" if c.log else name
        for name, c in zip([*chosen, objective.metric], columns, strict=True)
    ]
    figure, (ax,) = new_axes(max(6.4, 1.5 * len(names)))
    figure.set_figheight(4.4)
    ax.grid(False)
    ax.spines[["left", "bottom"]].set_visible(False)
    places = np.arange(len(names))
    heights = np.array([column.heights for column in columns]).T
    finished = [trial.state == "done" for trial in trials]
    shade = _shades(heights[:, -1], finished)
    for row in np.argsort(heights[:, -1]):
        style = (
            {"color": shade[row], "linewidth": 1.8}
            if finished[row]
            else {"color": "#b8b8b8", "linewidth": 0.9}
        )
        ax.plot(places, heights[row], alpha=0.9, zorder=3 if finished[row] else 2, **style)
    winner = best(trials, objective)
    if winner is not None:
        ax.plot(places, heights[list(trials).index(winner)], color=COLOURS[1], linewidth=3, zorder=4)
    for place, column in zip(places, columns, strict=True):
        ax.axvline(place, color="#404040", linewidth=0.8, zorder=1)
        for height, text in column.ticks:
            ax.annotate(
                text,
                (place, height),
                (4, 0),
                textcoords="offset points",
                fontsize=7,
                va="center",
                zorder=5,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6},
            )
    ax.set_xticks(places, names, fontsize=8)
    ax.tick_params(length=0)
    ax.set_yticks([])
    ax.set_xlim(-0.15, len(names) - 0.55)
    note = "orange: the best" if all(finished) else "orange: the best; grey: stopped early"
    ax.set_title(f"{len(trials)} trials; darker: higher {objective.metric}; {note}", loc="left", fontsize=9)
    write_figure(figure, path)
    return path


class _Column:
    """Values of one axis as heights from 0 to 1, with labelled places."""

    log = False

    def __init__(self, values: Sequence[Any]) -> None:
        if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
            numbers = np.array(values, np.float64)
            low, high = numbers.min(), numbers.max()
            self.log = bool(low > 0 and high / low > _LOG_SPAN)
            scaled = np.log(numbers) if self.log else numbers
            span = scaled.max() - scaled.min()
            self.heights = (scaled - scaled.min()) / span if span else np.full(len(numbers), 0.5)
            shown = np.unique(numbers) if len(np.unique(numbers)) <= 6 else np.array([low, high])
            at = np.log(shown) if self.log else shown
            places = (at - scaled.min()) / span if span else np.full(len(shown), 0.5)
            self.ticks = [(float(h), _text(float(v))) for h, v in zip(places, shown, strict=True)]
            return
        names = sorted({_text(value) for value in values})
        place = {name: (i + 0.5) / len(names) for i, name in enumerate(names)}
        self.heights = np.array([place[_text(value)] for value in values])
        every = -(-len(names) // _LINES_A_CATEGORY)
        self.ticks = [(place[name], name) for name in names[::every]]


def _shades(heights: np.ndarray, finished: Sequence[bool]) -> list[Any]:
    """Blues, the darker the higher among the finished trials."""
    from matplotlib import colormaps

    own = heights[np.asarray(finished, bool)]
    low, span = (own.min(), max(float(np.ptp(own)), 1e-9)) if len(own) else (0.0, 1.0)
    return [colormaps["Blues"](0.3 + 0.65 * float(np.clip((h - low) / span, 0, 1))) for h in heights]


def plot_clusters(
    divided: Sequence[tuple[Trial, tuple[float, ...]]], objective: Objective, path: Path
) -> Path:
    """The metric by the number of label clusters: each trial a dot, the best of each number that went to their end
    joined. Stopped ones are grey, where they were measured last."""
    counts = np.array([len(fractions) for _, fractions in divided])
    values = np.array([trial.value(objective.metric) for trial, _ in divided])
    finished = np.array([trial.state == "done" for trial, _ in divided])
    figure, (ax,) = new_axes(5.6)
    _scatter_stopped(ax, counts[~finished], values[~finished])
    counts_done, values_done = counts[finished], values[finished]
    ax.scatter(
        counts_done, values_done, s=26, color=COLOURS[0], alpha=0.5, label="trained to its end", zorder=3
    )
    numbers = np.unique(counts_done)
    highest = [values_done[counts_done == number].max() for number in numbers]
    ax.plot(
        numbers, highest, color=COLOURS[1], marker="o", linewidth=2, label="best of that number", zorder=4
    )
    ax.set_xticks(np.unique(counts))
    ax.set_xlabel("number of clusters")
    ax.set_ylabel(f"{objective.metric} on validation")
    _legend_below(figure)
    write_figure(figure, path)
    return path


def plot_partitions(
    divided: Sequence[tuple[Trial, tuple[float, ...]]], objective: Objective, path: Path
) -> Path:
    """The metric by the partition, by number of clusters and falling share of the head: the best trial of each that
    went to its end large. Stopped ones are grey, where they were measured last."""
    partitions = sorted({fractions for _, fractions in divided}, key=lambda f: (len(f), -f[0]))
    figure, (ax,) = new_axes(max(5.6, 0.62 * len(partitions)))
    figure.set_figheight(4.6)
    named: set[int] = set()
    for place, wanted in enumerate(partitions):
        own = [(trial.state, trial.value(objective.metric)) for trial, f in divided if f == wanted]
        stopped = np.array([value for state, value in own if state != "done"])
        done = np.array([value for state, value in own if state == "done"])
        _scatter_stopped(ax, np.full(len(stopped), place), stopped)
        if len(done):
            colour = COLOURS[(len(wanted) - 2) % len(COLOURS)]
            ax.scatter(np.full(len(done), place), done, s=18, color=colour, alpha=0.6, zorder=2)
            name = None if len(wanted) in named else f"{len(wanted)} clusters"
            ax.scatter(place, done.max(), s=70, color=colour, label=name, zorder=3)
            named.add(len(wanted))
    ax.set_xlim(-0.6, len(partitions) - 0.4)
    names = ["\n".join(_text(part) for part in fractions) for fractions in partitions]
    ax.set_xticks(range(len(partitions)), names, fontsize=7)
    ax.set_xlabel("shares of the labels, the head's first")
    ax.set_ylabel(f"{objective.metric} on validation")
    _legend_below(figure)
    write_figure(figure, path)
    return path


def _scatter_stopped(ax: Any, places: np.ndarray, values: np.ndarray) -> None:
    """Trials that were stopped early; in the legend once."""
    known = any(drawn.get_label() == _STOPPED for drawn in ax.collections)
    if len(values):
        name = None if known else _STOPPED
        ax.scatter(places, values, s=18, color="#9a9a9a", marker="x", linewidth=1, label=name, zorder=1.5)


def _legend_below(figure: Any) -> None:
    """Outside of the axes: dots may lie anywhere in them."""
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)


def plot_front(trials: Sequence[Trial], objective: Objective, path: Path) -> Path:
    """Each finished trial by what it costs and what it reaches; those that no other one beats are joined."""
    assert objective.minimise is not None
    winners = sorted(front(trials, objective), key=lambda t: t.value(objective.minimise or "") or 0.0)
    figure, (ax,) = new_axes(6.0)
    for chosen, style in (
        (trials, {"color": COLOURS[0], "alpha": 0.5, "s": 28}),
        (winners, {"color": COLOURS[1], "s": 44}),
    ):
        points = [(t.value(objective.minimise), t.value(objective.metric)) for t in chosen]
        ax.scatter(*zip(*points, strict=True), zorder=3, **style)
    line = [(t.value(objective.minimise), t.value(objective.metric)) for t in winners]
    ax.step(
        *zip(*line, strict=True),
        where="post",
        color=COLOURS[1],
        linewidth=1.5,
        label="Pareto front, with trial numbers",
        zorder=2,
    )
    for trial, point in zip(winners, line, strict=True):
        ax.annotate(trial.name, point, (5, -9), textcoords="offset points", fontsize=7)
    ax.set_xlabel(objective.minimise.replace("_", " "))
    ax.set_ylabel(f"{objective.metric} on validation")
    ax.legend(frameon=False, fontsize=8)
    write_figure(figure, path)
    return path
