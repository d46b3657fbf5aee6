from __future__ import annotations

import numpy as np
import pytest

from xmc.errors import InputError
from xmc.evaluation.bootstrap import interval, resample


def parts_of(seed: int, num_documents: int = 400):
    """A mean and a ratio of sums; every fourth document has no label."""
    random = np.random.default_rng(seed)
    one = (np.arange(num_documents) % 4 > 0).astype(float)
    hits = (random.random(num_documents) < 0.6) * one
    weights = random.random(num_documents) * one
    return {"P@1": (hits, one), "PSP@1": (hits * weights, weights)}


def figure(pair) -> float:
    return 100 * pair[0].sum() / pair[1].sum()


def test_intervals_hold_the_figure_and_are_as_wide_as_theory_says():
    parts = parts_of(0)
    (resampled,) = resample([parts], 1000, seed=1)
    for name, pair in parts.items():
        low, high = interval(resampled[name])
        assert low < figure(pair) < high
    share = figure(parts["P@1"]) / 100
    assert resampled["P@1"].std() == pytest.approx(100 * np.sqrt(share * (1 - share) / 300), rel=0.1)


def test_it_is_what_drawing_documents_one_by_one_gives():
    parts = parts_of(0, 40)
    (resampled,) = resample([parts], 50, seed=3)
    labelled = np.flatnonzero(parts["P@1"][1])
    random = np.random.default_rng(3)
    for found in resampled["PSP@1"]:
        drawn = labelled[random.integers(0, len(labelled), len(labelled))]
        top, bottom = parts["PSP@1"]
        assert found == pytest.approx(100 * top[drawn].sum() / bottom[drawn].sum())


def test_a_run_does_not_differ_from_itself():
    same, other, again = resample([parts_of(0), parts_of(1), parts_of(0)], 200)
    for name in same:
        assert np.all(same[name] - again[name] == 0)
        assert np.any(same[name] - other[name] != 0)


def test_pairing_narrows_the_difference():
    # The second run is right where the first is, and in a few documents more.
    first = parts_of(0)
    hits, one = first["P@1"]
    more = hits.copy()
    more[np.flatnonzero((hits == 0) & (one == 1))[:5]] = 1
    a, b = resample([{"P@1": (hits, one)}, {"P@1": (more, one)}])
    low, high = interval(b["P@1"] - a["P@1"])
    assert 0 < low < high < 4
    own = interval(b["P@1"])
    assert own[1] - own[0] > 2 * (high - low)


def test_the_seed_decides():
    (a,), (b,), (c,) = (resample([parts_of(0)], 20, seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(a["P@1"], b["P@1"])
    assert not np.array_equal(a["P@1"], c["P@1"])


def test_resamples_without_anything_to_count_are_left_out():
    one = np.ones(30)
    rare = np.zeros(30)
    rare[0] = 1
    (resampled,) = resample([{"P@1": (one, one), "tail.P@1": (rare, rare)}], 300)
    assert np.isnan(resampled["tail.P@1"]).any()
    assert interval(resampled["tail.P@1"]) == (100, 100)
    assert np.isnan(interval(np.zeros(0))).all()


def test_documents_without_labels_alone_are_refused():
    with pytest.raises(InputError, match="true label"):
        resample([{"P@1": (np.zeros(3), np.zeros(3))}])
