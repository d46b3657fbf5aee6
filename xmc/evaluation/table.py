"""A metric result as aligned text for the terminal. Computes nothing."""

from __future__ import annotations

import math

from xmc.evaluation.metrics import Band, MetricResult


def format_table(result: MetricResult) -> str:
    """Two tables, metrics by place and bands by place, under lines that say what was counted and left out."""
    return "\n".join([*_counts(result), "", *_ranking(result), "", *_bands(result)])


def _counts(result: MetricResult) -> list[str]:
    unlabelled = result.num_unlabelled
    unseen = result.num_unseen_assignments
    share = 100 * unseen / result.num_assignments if result.num_assignments else 0.0
    lines = [
        f"documents    {result.num_documents:,}, of which {unlabelled:,} without labels (in no average)",
        f"assignments  {result.num_assignments:,}, of which {unseen:,} ({share:.1f} %) of labels that train never saw"
        " (counted as missed)",
        f"propensity   a = {result.propensity_a:g}, b = {result.propensity_b:g}",
    ]
    if result.num_unseen_labels is None:
        lines.append(
            "coverage     over the labels that train saw: the number of distinct unseen labels is not known"
        )
    return lines


def _ranking(result: MetricResult) -> list[str]:
    names = list(dict.fromkeys(name.split("@")[0] for name in result.values if "." not in name))
    rows = [["%", *(f"@{k}" for k in result.ks)]]
    rows += [[name, *(_figure(result[f"{name}@{k}"]) for k in result.ks)] for name in names]
    return align(rows, "<")


def _bands(result: MetricResult) -> list[str]:
    """Three rows a band; the band's own counts stand in the first."""
    rows = [["band", "train frequency", "labels", "assignments", "%", *(f"@{k}" for k in result.ks)]]
    for band in result.bands:
        about = [band.name, _range(band), f"{band.num_labels:,}", f"{band.num_assignments:,}"]
        for metric in ("P", "R", "contribution"):
            rows.append([*about, metric, *(_figure(result[f"{band.name}.{metric}@{k}"]) for k in result.ks)])
            about = [""] * 4
    return align(rows, "<<>><")


def _range(band: Band) -> str:
    if band.max_frequency is None:
        return f"{band.min_frequency:,} and more"
    if band.max_frequency < band.min_frequency:
        return "none"
    return f"{band.min_frequency:,} to {band.max_frequency:,}"


def _figure(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def align(rows: list[list[str]], sides: str) -> list[str]:
    """Columns of equal width; `sides` says "<" for flush left or ">", the columns beyond it are flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = sides.ljust(len(widths), ">")
    return [
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
