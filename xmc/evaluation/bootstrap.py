"""How far figures would move with other test documents: the paired bootstrap. Measures nothing itself.

Documents are drawn with replacement, as many as there are, and every run is measured on the same draws: what makes a
draw easy or hard for all of them cancels in the difference between two.

Shapes: N documents, R resamples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from xmc.errors import InputError

# What each document adds to a figure: (numerators (N,), denominators (N,)); see Metrics.parts.
Parts = Mapping[str, tuple[NDArray, NDArray]]

# Resamples that are drawn at once: bounds the (resamples, N) counts.
_AT_ONCE = 32


def resample(
    runs: Sequence[Parts], num_resamples: int = 1000, seed: int = 0
) -> list[dict[str, NDArray[np.float64]]]:
    """Each run's figures in percent on the same resamples of the N documents: (R,) a figure.

    NaN where a resample holds nothing to count, such as no prediction of a rare label.
    """
    counted = np.any([denominators > 0 for _, denominators in runs[0].values()], axis=0)
    stacked = [_columns(parts, counted) for parts in runs]
    generator = np.random.default_rng(seed)
    num_documents = int(counted.sum())
    if num_documents == 0:
        raise InputError("no document has a true label: there is nothing to compare")
    sums: list[list[NDArray]] = [[] for _ in runs]
    for start in range(0, num_resamples, _AT_ONCE):
        counts = np.stack(
            [
                np.bincount(generator.integers(0, num_documents, num_documents), minlength=num_documents)
                for _ in range(min(_AT_ONCE, num_resamples - start))
            ]
        ).astype(np.float64)
        # A product a run, of one shape: equal runs come out equal to the last bit.
        for found, (columns, _) in zip(sums, stacked, strict=True):
            found.append(counts @ columns)
    return [_figures(np.concatenate(found), places) for found, (_, places) in zip(sums, stacked, strict=True)]


def _columns(parts: Parts, counted: NDArray[np.bool_]) -> tuple[NDArray, dict[str, tuple[int, int]]]:
    """(N, columns) of all that is to be summed, and each figure's two columns; arrays in several figures stand once."""
    arrays: dict[int, NDArray] = {id(array): array for pair in parts.values() for array in pair}
    at = {identity: column for column, identity in enumerate(arrays)}
    columns = np.stack([array[counted] for array in arrays.values()], axis=1)
    return columns, {name: (at[id(top)], at[id(bottom)]) for name, (top, bottom) in parts.items()}


def _figures(sums: NDArray, places: Mapping[str, tuple[int, int]]) -> dict[str, NDArray[np.float64]]:
    with np.errstate(divide="ignore", invalid="ignore"):
        return {name: 100 * sums[:, top] / sums[:, bottom] for name, (top, bottom) in places.items()}


def interval(resampled: NDArray[np.float64]) -> tuple[float, float]:
    """The middle 95 % of resampled figures (R,); resamples with nothing to count are left out."""
    known = resampled[np.isfinite(resampled)]
    if not known.size:
        return (np.nan, np.nan)
    low, high = np.quantile(known, [0.025, 0.975])
    return float(low), float(high)
