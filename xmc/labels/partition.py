"""The APLC partition: labels by falling frequency in a head and tails, and what a layer of that shape costs.

Holds no weights; the layer itself is a head of `xmc/nn`. Equation numbers are those of the APLC-XLNet paper.

Shapes and symbols: L labels, K tails, l_0 = l_h labels of the head, l_i of tail i, d the hidden width, q the decay,
N_b the batch; tail i sees the hidden state at width d / q^i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from xmc.errors import InputError


@dataclass(frozen=True)
class PartitionConfig:
    """How many labels go to the head and to each tail."""

    # Share of the labels a cluster, head first. A smaller head is a smaller and faster layer, at some precision.
    fractions: tuple[float, ...] = (0.5, 0.5)
    # Numbers of labels a cluster, head first, instead of the fractions.
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.sizes is not None:
            if not self.sizes or min(self.sizes) < 1:
                raise InputError(f"partition.sizes is {self.sizes}; every cluster needs at least one label")
            return
        if not self.fractions or min(self.fractions) <= 0:
            raise InputError(f"partition.fractions is {self.fractions}; every cluster needs a share above 0")
        if abs(sum(self.fractions) - 1) > 1e-6:
            raise InputError(f"partition.fractions add up to {sum(self.fractions):g}; they must add up to 1")

    def resolve(self, num_labels: int) -> NDArray[np.int64]:
        """(1 + K,) labels a cluster. Fractions are rounded at the clusters' bounds, so that the sizes add up to L."""
        if self.sizes is not None:
            if sum(self.sizes) != num_labels:
                raise InputError(
                    f"partition.sizes add up to {sum(self.sizes):,} but there are {num_labels:,} labels; "
                    "give sizes that add up to them, or partition.fractions"
                )
            return np.asarray(self.sizes, np.int64)
        bounds = np.rint(np.cumsum((0.0, *self.fractions)) * num_labels).astype(np.int64)
        sizes = np.diff(bounds)
        if sizes.min() < 1:
            raise InputError(
                f"partition.fractions {self.fractions} leave cluster {int(sizes.argmin())} of {num_labels:,} labels "
                "empty; use fewer clusters or larger fractions"
            )
        return sizes


@dataclass(frozen=True)
class Partition:
    """Cluster 0 is the head, clusters 1 … K are the tails."""

    sizes: NDArray[np.int64]
    """(1 + K,) labels a cluster."""
    cluster_of: NDArray[np.int32]
    """(L,) a label's cluster."""

    @property
    def num_labels(self) -> int:
        return len(self.cluster_of)

    @property
    def num_tails(self) -> int:
        return len(self.sizes) - 1


def partition_labels(train_frequency: NDArray, config: PartitionConfig) -> Partition:
    """Cut the labels, by falling train frequency (L,) and then by id, into the clusters that the config asks for."""
    num_labels = len(train_frequency)
    sizes = config.resolve(num_labels)
    by_frequency = np.argsort(-np.asarray(train_frequency, np.int64), kind="stable")
    cluster_of = np.empty(num_labels, np.int32)
    cluster_of[by_frequency] = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    return Partition(sizes, cluster_of)


def document_rates(label_matrix: sp.csr_matrix, partition: Partition) -> NDArray[np.float64]:
    """(K,) share of the documents that have a label in each tail, counted from the label matrix (N × L)."""
    num_documents = label_matrix.shape[0]
    num_clusters = len(partition.sizes)
    rows = np.repeat(np.arange(num_documents, dtype=np.int64), np.diff(label_matrix.indptr))
    touched = np.unique(rows * num_clusters + partition.cluster_of[label_matrix.indices])
    return np.bincount(touched % num_clusters, minlength=num_clusters)[1:] / max(num_documents, 1)


def touch_probabilities(rates: NDArray, batch_size: int) -> NDArray[np.float64]:
    """(K,) p_i = 1 − (1 − s_i)^{N_b}: the chance that a random batch has a positive label in tail i.

    s_i is the share of documents with a label in tail i. A layer that skips a tail document by document, not batch by
    batch, pays for s_i itself: batch_size 1.
    """
    return 1 - (1 - np.asarray(rates, np.float64)) ** batch_size


def tail_widths(num_tails: int, hidden: int, decay: float) -> NDArray[np.int64]:
    """(K,) width d / q^i of tail i's hidden state, rounded down."""
    if decay < 1:
        raise InputError(f"the decay of the tails' width is {decay}; it must be at least 1")
    widths = (hidden / decay ** np.arange(1, num_tails + 1)).astype(np.int64)
    if num_tails and widths[-1] < 1:
        raise InputError(
            f"a hidden width of {hidden} with decay {decay} leaves nothing for tail {int((widths < 1).argmax()) + 1}; "
            "use fewer tails, a smaller decay or a wider hidden layer"
        )
    return widths


def num_parameters(sizes: Sequence[int] | NDArray, hidden: int, decay: float) -> int:
    """N_par = d (l_h + K) + Σ_{i=1..K} (d / q^i)(d + l_i)   (equation 6), without biases."""
    widths = tail_widths(len(sizes) - 1, hidden, decay)
    tails = np.asarray(sizes[1:], np.int64)
    return int(hidden * (int(sizes[0]) + len(tails)) + (widths * (hidden + tails)).sum())


def num_flat_parameters(num_labels: int, hidden: int) -> int:
    """N_0 = d L   (equation 8), without biases."""
    return hidden * num_labels


def cost(sizes: Sequence[int] | NDArray, touch: NDArray, hidden: int, decay: float, batch_size: int) -> float:
    """C = N_b d (l_h + K) + Σ_{i=1..K} p_i N_b (d / q^i)(l_i + d)   (equations 10 and 11).

    The expected multiply-adds of one forward pass of a batch; touch: (K,) the p_i.
    """
    widths = tail_widths(len(sizes) - 1, hidden, decay)
    tails = np.asarray(sizes[1:], np.int64)
    head = batch_size * hidden * (int(sizes[0]) + len(tails))
    return float(head + (touch * batch_size * widths * (tails + hidden)).sum())


def flat_cost(num_labels: int, hidden: int, batch_size: int) -> float:
    """C_0 = N_b d L   (equation 13)."""
    return float(batch_size * hidden * num_labels)


def approximate_cost_ratio(sizes: Sequence[int] | NDArray, touch: NDArray, decay: float) -> float:
    """C_0 / C ≈ L / (l_h + Σ_{i=1..K} p_i l_i / q^i)   (equation 14, from 12 and 13; for K ≪ l_h and d ≪ l_i)."""
    sizes = np.asarray(sizes, np.float64)
    tails = touch * sizes[1:] / decay ** np.arange(1, len(sizes))
    return float(sizes.sum() / (sizes[0] + tails.sum()))


def format_plan(partition: Partition, rates: NDArray, hidden: int, decay: float, batch_size: int) -> str:
    """What the layer will hold and cost beside a flat one, as lines for the terminal; rates: (K,) document rates."""
    sizes = partition.sizes
    widths = [hidden, *tail_widths(partition.num_tails, hidden, decay)]
    touch = touch_probabilities(rates, batch_size)
    lines = [
        f"{'cluster':<8} {'labels':>12} {'width':>6} {'documents that need it':>24} {'batches that touch it':>23}"
    ]
    for i, (size, width, documents, batches) in enumerate(
        zip(sizes, widths, [1.0, *rates], [1.0, *touch], strict=True)
    ):
        name = f"tail {i}" if i else "head"
        lines.append(f"{name:<8} {size:>12,} {width:>6} {100 * documents:>22.1f} % {100 * batches:>21.1f} %")
    parameters, flat = num_parameters(sizes, hidden, decay), num_flat_parameters(partition.num_labels, hidden)
    flat_work = flat_cost(partition.num_labels, hidden, batch_size)
    work, least = (cost(sizes, share, hidden, decay, batch_size) for share in (touch, np.asarray(rates)))
    lines.append(
        f"parameters {parameters:,}: a flat layer has {flat / parameters:.2f} times as many ({flat:,})"
    )
    lines.append(
        f"multiply-adds a batch of {batch_size}: {work:.3g}, of a flat layer {flat_work / work:.2f} times as many"
    )
    lines.append(
        f"  where a tail scores the documents alone that need it: {least:.3g}, of a flat layer "
        f"{flat_work / least:.2f} times as many"
    )
    return "\n".join(lines)
