"""A comparison as one HTML page that needs nothing beside it: tables, and plots as SVG inside. Computes no figure."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from xmc.evaluation.comparison import MAIN, NOTHING, Comparison, Figure, about, interval_text, number_text
from xmc.evaluation.metrics import BANDS

_COLOURS = (
    "#2f5d8a",
    "#e08e45",
    "#5f8f3e",
    "#b04a5a",
    "#6b5b95",
    "#3a9d9d",
    "#8c6d46",
    "#c35fa0",
    "#6f7680",
    "#b5a33a",
)
_STYLE = """
body { font: 15px/1.45 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: #222; background: #fff;
       max-width: 1150px; margin: 2rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { margin: .3rem 0 .8rem; color: #555; max-width: 60rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: left; vertical-align: top; border-bottom: 1px solid #e4e4e4; }
th { font-weight: 600; border-bottom: 2px solid #bbb; vertical-align: bottom; }
td.name { white-space: nowrap; position: sticky; left: 0; background: #fff; }
td.figure { white-space: nowrap; min-width: 7.5rem; } td.setting, td.run { overflow-wrap: anywhere; }
td.setting { min-width: 6rem; max-width: 20rem; } tr.group td { border-bottom: 2px solid #bbb; padding-top: 1rem;
       font-weight: 600; }
small { display: block; color: #777; font-size: .8rem; } small.apart { color: #444; }
small.better { color: #1d6b2f; font-weight: 600; } small.worse { color: #a3202f; font-weight: 600; }
.chip { display: inline-block; min-width: 1.4rem; padding: 0 .3rem; box-sizing: border-box; text-align: center;
       border-radius: .3rem; color: #fff; font-size: .85rem; font-weight: 600; }
th .run { display: block; font-weight: 400; font-size: .8rem; min-width: 7rem; max-width: 11rem;
       overflow-wrap: anywhere; }
img { max-width: 100%; height: auto; display: block; }
"""


def to_html(comparison: Comparison) -> str:
    """The whole page."""
    base = comparison.runs[comparison.baseline].name
    note = about(comparison).replace("* marks differences", "green and red are differences")
    sections = [
        f"<h1>{len(comparison.runs)} runs compared</h1>",
        f"<p>Differences are to run {comparison.baseline + 1}, {escape(base)}; {escape(note)}.</p>",
        _runs_table(comparison),
        "<h2>Figures</h2>",
        _bars(comparison, _grid(comparison, MAIN), "figures with 95 % intervals"),
    ]
    if len(comparison.runs) > 1:
        sections += [
            f"<h2>Differences to run {comparison.baseline + 1}</h2>",
            "<p>In percentage points, with 95 % intervals: one that leaves out 0 is no accident of the documents.</p>",
            _apart(comparison, _grid(comparison, MAIN)),
        ]
    sections += [
        "<h2>By how often labels occur in train</h2>",
        "<p>Precision among the predicted labels of each band: head, torso and tail hold about a third of train's "
        "assignments each, unless the settings say otherwise.</p>",
        _bars(
            comparison, _grid(comparison, tuple(f"{band}.P" for band in BANDS)), "precision by frequency band"
        ),
        *_loss_section(comparison),
        "<h2>All figures</h2>",
        _figures_table(comparison),
        "<h2>Settings that differ</h2>",
        _settings_table(comparison),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>Runs compared</title><style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


# ------------------------------------------------------------------------------------------------ tables


def _chip(number: int) -> str:
    return f'<span class="chip" style="background:{_colour(number)}">{number + 1}</span>'


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _runs_table(comparison: Comparison) -> str:
    rows = []
    for number, run in enumerate(comparison.runs):
        notes = ["baseline"] if number == comparison.baseline else []
        notes += [] if run.resampled else ["its predictions are not here: no intervals"]
        system = escape(str(run.settings.get("system", NOTHING)))
        rows.append(
            f'<tr><td>{_chip(number)}</td><td class="run">{escape(run.name)}</td><td>{system}</td>'
            f"<td>{', '.join(notes)}</td></tr>"
        )
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


def _breakable(name: str) -> str:
    """The name with places where a narrow column may break it."""
    return re.sub(r"([._/-])", r"\1<wbr>", escape(name))


def _heads(comparison: Comparison, first: str) -> str:
    names = (
        f'<th>{_chip(number)}<span class="run">{_breakable(run.name)}</span></th>'
        for number, run in enumerate(comparison.runs)
    )
    return f"<tr><th>{first}</th>{''.join(names)}</tr>"


def _figures_table(comparison: Comparison) -> str:
    rows, group = [_heads(comparison, "%")], ""
    for metric in comparison.metrics:
        if group != (group := metric.split(".")[0] if "." in metric else ""):
            title = f"{group} labels" if group else "validation"
            rows.append(
                f'<tr class="group"><td colspan="{len(comparison.runs) + 1}">{escape(title)}</td></tr>'
            )
        cells = "".join(_figure_cell(comparison.figure(metric, i)) for i in range(len(comparison.runs)))
        rows.append(f'<tr><td class="name">{escape(metric.split(".")[-1])}</td>{cells}</tr>')
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


def _figure_cell(f: Figure) -> str:
    text = number_text(f.value)
    if not math.isnan(f.low):
        text += f"<small>{interval_text(f.low, f.high)}</small>"
    if not math.isnan(f.difference):
        kind = ("better" if f.difference > 0 else "worse") if f.differs else "apart"
        within = interval_text(f.difference_low, f.difference_high, signed=True)
        within = f" ({within})" if within else ""
        text += f'<small class="{kind}">{number_text(f.difference, signed=True)}{within}</small>'
    return f'<td class="figure">{text}</td>'


def _settings_table(comparison: Comparison) -> str:
    settings = comparison.settings()
    if not settings:
        return "<p>None.</p>"
    rows = [_heads(comparison, "setting")]
    for name, texts in settings.items():
        cells = "".join(f'<td class="setting">{escape(text)}</td>' for text in texts)
        rows.append(f'<tr><td class="name">{escape(name)}</td>{cells}</tr>')
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


# ------------------------------------------------------------------------------------------------ plots


def _grid(comparison: Comparison, families: Sequence[str]) -> list[list[str]]:
    """Rows of the figures of one family, by rising k; families that no run has are left out."""
    rows = [[name for name in comparison.metrics if name.split("@")[0] == family] for family in families]
    return [row for row in rows if row]


def _panels(comparison: Comparison, grid: Sequence[Sequence[str]], shown: Sequence[int]) -> tuple[Any, Any]:
    """A figure with one axes a metric, a line for each of the runs `shown`, their names at the left."""
    from matplotlib.figure import Figure as Canvas
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = max(map(len, grid))
    layout = ConstrainedLayoutEngine(h_pad=0.12)
    figure = Canvas(figsize=(11.5, len(grid) * (0.75 + 0.27 * len(shown))), layout=layout)
    axes = figure.subplots(len(grid), columns, squeeze=False, sharey=True)
    labels = [f"{number + 1}  {_shortened(comparison.runs[number].name)}" for number in shown]
    for i, row in enumerate(grid):
        for j, ax in enumerate(axes[i]):
            ax.set_visible(j < len(row))
            ax.spines[["top", "right", "left"]].set_visible(False)
            ax.tick_params(left=False, labelsize=8)
            ax.set_yticks(range(len(shown)), labels)
            ax.set_ylim(len(shown) - 0.4, -0.6)
            ax.grid(axis="x", alpha=0.3)
            ax.set_axisbelow(True)
            if j < len(row):
                ax.set_title(row[j].replace(".", ": "), loc="left", fontsize=9, fontweight="bold")
    return figure, axes


def _shortened(name: str, longest: int = 30) -> str:
    return name if len(name) <= longest else f"{name[: longest // 2 - 1]}…{name[-longest // 2 :]}"


def _bars(comparison: Comparison, grid: Sequence[Sequence[str]], title: str) -> str:
    """Each run's figures as bars with their intervals, the numbers beside them."""
    if not grid:
        return "<p>No run has these figures.</p>"
    shown = range(len(comparison.runs))
    figure, axes = _panels(comparison, grid, shown)
    for row, row_axes in zip(grid, axes, strict=True):
        found = [[comparison.figure(metric, number) for number in shown] for metric in row]
        known = [_top(f) for figures in found for f in figures if not math.isnan(f.value)]
        reach = max(known, default=1.0) or 1.0
        for figures, ax in zip(found, row_axes, strict=False):
            ax.set_xlim(0, reach * 1.22)  # room for the numbers
            for number, f in enumerate(figures):
                if math.isnan(f.value):
                    ax.text(0, number, " " + NOTHING, va="center", fontsize=8, color="#777")
                    continue
                ax.barh(number, f.value, 0.7, color=_colour(number), alpha=0.85)
                if not math.isnan(f.low):
                    ax.plot([f.low, f.high], [number, number], color="#222", linewidth=1.2)
                ax.text(_top(f) + reach * 0.015, number, number_text(f.value), va="center", fontsize=8)
    return _image(figure, title)


def _top(f: Figure) -> float:
    return f.value if math.isnan(f.high) else max(f.value, f.high)


def _apart(comparison: Comparison, grid: Sequence[Sequence[str]]) -> str:
    """Each run's differences to the baseline as points with their intervals, the baseline a line at 0."""
    if not grid:
        return "<p>No run has these figures.</p>"
    shown = [number for number in range(len(comparison.runs)) if number != comparison.baseline]
    figure, axes = _panels(comparison, grid, shown)
    for row, row_axes in zip(grid, axes, strict=True):
        for metric, ax in zip(row, row_axes, strict=False):
            ax.axvline(0, color="#222", linewidth=0.9)
            for place, number in enumerate(shown):
                f = comparison.figure(metric, number)
                if math.isnan(f.difference):
                    ax.text(0, place, "  " + NOTHING, va="center", fontsize=8, color="#777")
                    continue
                ax.plot(f.difference, place, "o", color=_colour(number), markersize=5)
                if not math.isnan(f.difference_low):
                    within = [f.difference_low, f.difference_high]
                    ax.plot(within, [place, place], color=_colour(number), linewidth=2)
            # Around 0 even where nothing differs.
            low, high = ax.get_xlim()
            ax.set_xlim(min(low, -0.5), max(high, 0.5))
    return _image(figure, "differences to the baseline with 95 % intervals")


def _loss_section(comparison: Comparison) -> list[str]:
    if not any(run.curves for run in comparison.runs):
        return []
    note = "Running mean over a fiftieth of the steps. Losses of different systems are different quantities."
    return ["<h2>Training loss</h2>", f"<p>{note}</p>", _loss(comparison)]


def _loss(comparison: Comparison) -> str:
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(11.5, 4.2), layout="constrained")
    ax = figure.add_subplot()
    for number, run in enumerate(comparison.runs):
        for i, (stage, curve) in enumerate(run.curves.items()):
            window = max(1, len(curve) // 50)
            mean = np.convolve(curve[:, 1], np.ones(window) / window, "valid")
            name = f"{number + 1}  {_shortened(run.name, 50)}" + (f", {stage}" if len(run.curves) > 1 else "")
            style = ("-", "--", ":", "-.")[i % 4]
            steps = curve[window - 1 :, 0]
            ax.plot(steps, mean, style, color=_colour(number), linewidth=1.5, label=name)
    ax.set_yscale("log")
    ax.set_xlabel("step", fontsize=9)
    ax.set_ylabel("loss", fontsize=9)
    ax.tick_params(which="both", labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.3)
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=8)
    return _image(figure, "training loss by step")


def _image(figure: Any, title: str) -> str:
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    file = io.BytesIO()
    # Neither a date nor random ids: the same comparison is the same page.
    with rc_context({"svg.hashsalt": title}):
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None})
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="{escape(title)}" src="data:image/svg+xml;base64,{data}">'
