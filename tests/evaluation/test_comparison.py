from __future__ import annotations

import csv
import io
import math
import re

import numpy as np
import pytest

from xmc.evaluation.compare_page import to_html
from xmc.evaluation.comparison import Comparison, Run, format_comparison, to_csv, to_markdown

METRICS = [f"{name}@{k}" for name in ("P", "R", "nDCG", "PSP") for k in (1, 3, 5)]
METRICS += [f"{band}.P@{k}" for band in ("head", "torso", "tail") for k in (1, 3, 5)]


def run(name: str, shift: float, **settings) -> Run:
    random = np.random.default_rng(0)
    values = {metric: 50 + shift + i for i, metric in enumerate(METRICS)} | {"coverage@1": 40.0 + shift}
    resampled = {metric: values[metric] + random.normal(0, 1, 500) for metric in METRICS}
    curve = np.stack([np.arange(1, 101), np.exp(-np.arange(100) / 50) + 0.1], axis=1)
    return Run(name, {"system": "light_xml", "seed": 1} | settings, values, resampled, {"train": curve})


@pytest.fixture
def three() -> Comparison:
    elsewhere = Run("kept in MLflow only", {"system": "linear", "seed": "1"}, {"P@1": 61.0})
    runs = [run("first", 0, **{"train.epochs": 3}), run("<second>|", 2, **{"train.epochs": 5}), elsewhere]
    return Comparison(runs, 0, 300, 500)


def test_figures_and_differences(three: Comparison):
    base, second, elsewhere = (three.figure("P@1", number) for number in range(3))
    assert base.low < base.value < base.high
    assert math.isnan(base.difference)
    # Both were resampled with the same draws, so the difference is 2 in each of them.
    assert (second.difference, second.difference_low, second.difference_high) == pytest.approx((2, 2, 2))
    assert second.differs
    assert elsewhere.difference == pytest.approx(11)
    assert math.isnan(elsewhere.difference_low)
    assert not elsewhere.differs
    assert math.isnan(three.figure("PSP@5", 2).value)
    assert math.isnan(three.figure("coverage@1", 1).low)  # no sum over documents
    assert three.figure("coverage@1", 1).difference == pytest.approx(2)


def test_only_settings_that_differ(three: Comparison):
    # Types do not count: MLflow keeps texts. What fewer runs have comes last.
    assert three.settings() == {
        "system": ["light_xml", "light_xml", "linear"],
        "train.epochs": ["3", "5", "–"],
    }
    where = [run("a", 0, **{"run.dir": "x", "tracking.uri": "y"}), run("b", 0, **{"run.dir": "z"})]
    assert Comparison(where, 0, 300, 500).settings() == {}


def test_terminal(three: Comparison):
    text = format_comparison(three)
    assert re.search(r"^P@1 +1 +50\.00 ", text, re.M)
    assert re.search(r"\+2\.00 +\+2\.00 … \+2\.00 +\*$", text, re.M)
    assert "R@1" not in text
    assert "300 test documents" in text
    assert "no predictions here" in text


def test_csv_has_every_number(three: Comparison):
    rows = list(csv.DictReader(io.StringIO(to_csv(three))))
    figures = {(row["name"], row["run"]): row for row in rows if row["kind"] == "figure"}
    assert len(figures) == 3 * (len(METRICS) + 1)
    assert float(figures["P@1", "<second>|"]["difference_low"]) == pytest.approx(2)
    assert figures["PSP@5", "kept in MLflow only"]["value"] == ""
    settings = {(row["name"], row["run"]): row["value"] for row in rows if row["kind"] == "setting"}
    assert settings["train.epochs", "<second>|"] == "5"


def test_markdown(three: Comparison):
    lines = to_markdown(three).splitlines()
    assert lines[0] == r"| setting | 1: first | 2: <second>\| | 3: kept in MLflow only |"
    (p1,) = (line for line in lines if line.startswith("| P@1 "))
    assert "**+2.00 (+2.00 … +2.00)**" in p1
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 5 for line in lines if line.startswith("|"))


def test_page_stands_alone(three: Comparison):
    page = to_html(three)
    assert "&lt;second&gt;" in page
    assert "<second>" not in page
    assert page.count("data:image/svg+xml;base64,") == 4  # figures, differences, bands, loss
    outside = re.sub(r'"data:image[^"]*"', "", page)
    assert not re.search(r"https?://|<script|<link", outside)
    assert to_html(three) == page


def test_page_of_many_runs_and_of_one():
    many = [run(f"runs/a_very_long_directory_name_of_the_run_with_number_{i}", i / 3) for i in range(12)]
    assert to_html(Comparison(many, 5, 300, 500)).count('class="chip"') == 12 * 2
    alone = to_html(Comparison([Run("only", {}, {"P@1": 3.0})], 0, 0, 500))
    assert "Differences to" not in alone
    assert "Training loss" not in alone
    assert "No run has these figures" in alone  # of bands
