"""Runs side by side: which settings differ, what they measure, and by how much they differ from one of them.

As text for the terminal, Markdown and CSV; the page with plots is compare_page. Reads no run.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmc.evaluation.bootstrap import interval
from xmc.evaluation.metrics import BANDS
from xmc.evaluation.table import align

NOTHING = "–"
# What stands in the terminal and in plots; files hold every figure. Trials of a sweep have only those of validation.
MAIN = ("P", "nDCG", "PSP", "valid_P", "valid_nDCG")
# In the order of a run's own table.
_FAMILIES = ("P", "R", "nDCG", "PSP", "PSnDCG", "coverage", "contribution")
_GROUPS = ("", *BANDS)
# Where a run is kept, and what is made of several: no settings of what it learnt.
_NOT_COMPARED = ("run.dir", "tracking.", "variants")


@dataclass(frozen=True)
class Run:
    """One run. Figures are in percent; `resampled` ((R,) a figure) is empty where no predictions were kept."""

    name: str
    # flat: "train.epochs" → value
    settings: dict[str, Any]
    values: dict[str, float]
    resampled: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    # of each stage that trained a network: (S, 2) step and loss
    curves: dict[str, NDArray[np.float64]] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """A value with its 95 % interval, and the same of its difference to the baseline's; NaN where not known."""

    value: float
    low: float = math.nan
    high: float = math.nan
    difference: float = math.nan
    difference_low: float = math.nan
    difference_high: float = math.nan

    @property
    def differs(self) -> bool:
        """Whether the difference's interval leaves out 0."""
        return self.difference_low > 0 or self.difference_high < 0


@dataclass(frozen=True)
class Comparison:
    """Runs and the place of the one that the others are compared with."""

    runs: Sequence[Run]
    baseline: int
    # Test documents that were counted; 0 where no run has its predictions.
    num_documents: int
    num_resamples: int

    @property
    def metrics(self) -> list[str]:
        """Every figure that some run has, in the order of the runs' own tables; those of validation come last."""
        return sorted({name for run in self.runs for name in run.values}, key=_place)

    @property
    def main_metrics(self) -> list[str]:
        return [name for name in self.metrics if name.split("@")[0] in MAIN]

    def figure(self, metric: str, number: int) -> Figure:
        """A run's figure beside the baseline's."""
        run, base = self.runs[number], self.runs[self.baseline]
        value = run.values.get(metric, math.nan)
        low, high = interval(run.resampled.get(metric, np.zeros(0)))
        if number == self.baseline:
            return Figure(value, low, high)
        difference = value - base.values.get(metric, math.nan)
        apart = np.zeros(0)
        if metric in run.resampled and metric in base.resampled:
            apart = run.resampled[metric] - base.resampled[metric]
        return Figure(value, low, high, difference, *interval(apart))

    def settings(self) -> dict[str, list[str]]:
        """Settings that are not the same in all runs: a text each; those that most runs have come first."""
        names = dict.fromkeys(name for run in self.runs for name in run.settings)
        found = {name: [_text(run.settings.get(name)) for run in self.runs] for name in names}
        found = {
            name: texts
            for name, texts in found.items()
            if len(set(texts)) > 1 and not name.startswith(_NOT_COMPARED)
        }
        return dict(sorted(found.items(), key=lambda item: item[1].count(NOTHING)))


def _place(metric: str) -> tuple[bool, int, int, int]:
    """Where a figure such as "valid_tail.P@5" stands among all."""
    name, _, k = metric.removeprefix("valid_").partition("@")
    group, _, family = name.rpartition(".")
    at = _GROUPS.index(group) if group in _GROUPS else len(_GROUPS)
    kind = _FAMILIES.index(family) if family in _FAMILIES else len(_FAMILIES)
    return metric.startswith("valid_"), at, kind, int(k) if k.isdigit() else 0


def _text(value: Any) -> str:
    return NOTHING if value is None or value == "" else str(value)


def number_text(value: float, signed: bool = False) -> str:
    """Two decimals with a true minus; a dash for what is not known."""
    if math.isnan(value):
        return NOTHING
    return f"{value:{'+' if signed else ''}.2f}".replace("-", "−")


def interval_text(low: float, high: float, signed: bool = False) -> str:
    return "" if math.isnan(low) else f"{number_text(low, signed)} … {number_text(high, signed)}"


# ------------------------------------------------------------------------------------------------ terminal


def format_comparison(comparison: Comparison) -> str:
    """The runs, the settings that at least two of them have and that differ, and the main figures."""
    lines = [*_run_lines(comparison), ""]
    shared, rest = {}, 0
    for name, texts in comparison.settings().items():
        if len(texts) - texts.count(NOTHING) > 1:
            shared[name] = texts
        else:
            rest += 1
    if shared:
        rows = [["setting", *(str(i + 1) for i in range(len(comparison.runs)))]]
        rows += [[name, *map(_short, texts)] for name, texts in shared.items()]
        lines += align(rows, "<" * len(rows[0]))
    if rest:
        lines.append(f"and {rest} settings that one run alone has (in --csv, --markdown and --html)")
    lines += ["", *align(_figure_rows(comparison), "<<>>>>"), "", about(comparison)]
    return "\n".join(lines)


def about(comparison: Comparison) -> str:
    """What the intervals are."""
    if not comparison.num_documents:
        return "figures as MLflow has them, without intervals: no run's predictions are here"
    return (
        f"intervals: 95 % over {comparison.num_documents:,} test documents, {comparison.num_resamples:,} resamples, "
        f"the same for all runs; * marks differences to run {comparison.baseline + 1} whose interval leaves out 0"
    )


def _run_lines(comparison: Comparison) -> list[str]:
    rows = []
    for number, run in enumerate(comparison.runs):
        note = "baseline" if number == comparison.baseline else ""
        if not run.resampled:
            note = ", ".join(filter(None, [note, "no predictions here: no intervals"]))
        rows.append([str(number + 1), run.name, _text(run.settings.get("system")), note])
    return align([["run", "", "system", ""], *rows], "><<<")


def _figure_rows(comparison: Comparison) -> list[list[str]]:
    rows = [["%", "run", "", "95 %", "difference", "95 %", ""]]
    for metric in comparison.main_metrics:
        for number in range(len(comparison.runs)):
            f = comparison.figure(metric, number)
            own = number == comparison.baseline
            rows.append(
                [
                    metric if number == 0 else "",
                    str(number + 1),
                    number_text(f.value),
                    interval_text(f.low, f.high),
                    "" if own else number_text(f.difference, signed=True),
                    interval_text(f.difference_low, f.difference_high, signed=True),
                    "*" if f.differs else "",
                ]
            )
    return rows


def _short(text: str, longest: int = 28) -> str:
    """The text with its middle left out where it is long: both ends of a path or a list tell something."""
    if len(text) <= longest:
        return text
    half = (longest - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


# ------------------------------------------------------------------------------------------------ files


def to_markdown(comparison: Comparison) -> str:
    """Two tables: the settings that differ, and every figure with its interval and difference."""
    heads = [f"{i + 1}: {run.name}" for i, run in enumerate(comparison.runs)]
    settings = [[name, *texts] for name, texts in comparison.settings().items()]
    figures = [
        [metric, *(_markdown_figure(comparison.figure(metric, i)) for i in range(len(comparison.runs)))]
        for metric in comparison.metrics
    ]
    parts = [_markdown_table(["%", *heads], figures), about(comparison).replace("*", "**bold**")]
    if settings:
        parts.insert(0, _markdown_table(["setting", *heads], settings))
    return "\n\n".join(parts) + "\n"


def _markdown_figure(f: Figure) -> str:
    text = number_text(f.value)
    if not math.isnan(f.low):
        text += f" ({interval_text(f.low, f.high)})"
    if not math.isnan(f.difference):
        apart = number_text(f.difference, signed=True)
        if not math.isnan(f.difference_low):
            apart += f" ({interval_text(f.difference_low, f.difference_high, signed=True)})"
        text += f"<br>{f'**{apart}**' if f.differs else apart}"
    return text


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def to_csv(comparison: Comparison) -> str:
    """One row for each setting that differs and each figure, of each run; numbers are not rounded."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(
        ["kind", "name", "run", "value", "low", "high", "difference", "difference_low", "difference_high"]
    )
    for name, texts in comparison.settings().items():
        for run, text in zip(comparison.runs, texts, strict=True):
            writer.writerow(["setting", name, run.name, "" if text == NOTHING else text, *[""] * 5])
    for metric in comparison.metrics:
        for number, run in enumerate(comparison.runs):
            f = comparison.figure(metric, number)
            numbers = [f.value, f.low, f.high, f.difference, f.difference_low, f.difference_high]
            writer.writerow(
                ["figure", metric, run.name, *("" if math.isnan(n) else float(n) for n in numbers)]
            )
    return file.getvalue()
