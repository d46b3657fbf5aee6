"""A training step of APLC's label layer beside a flat layer at 670K labels. The limit is the paper's equation 14.

    python -m benchmarks.aplc_layer

Amazon-670K's layer (Table 2: width 512, decay 2, quarters) with batches of 32 documents whose labels are drawn by
Zipf's law, in one process. Steps of the two layers alternate, so that other work on the machine hits both. Products
are made document by document (the larger prediction), but a touched tail's rows are all moved by their optimiser.
"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.record import record
from xmc.labels.partition import (
    PartitionConfig,
    approximate_cost_ratio,
    partition_labels,
    touch_probabilities,
)
from xmc.nn.heads.aplc import AplcHeadConfig
from xmc.nn.heads.light_xml import LabelClusters
from xmc.nn.sharding import Ragged
from xmc.systems.aplc_xlnet import time_layers

LABELS, WIDTH, BATCH, LABELS_A_DOCUMENT, STEPS = 670_091, 512, 32, 5, 12
FRACTIONS = (0.25, 0.25, 0.25, 0.25)
ALLOWED = 0.25


def zipf_batches(num_labels: int, count: int) -> list[Ragged]:
    """Label lists of random documents; label i comes up in proportion to 1 / (i + 1)."""
    generator = torch.Generator().manual_seed(0)
    weights = 1.0 / torch.arange(1, num_labels + 1, dtype=torch.float64)
    offsets = torch.arange(0, BATCH * LABELS_A_DOCUMENT + 1, LABELS_A_DOCUMENT)
    draw = lambda: torch.multinomial(weights, int(offsets[-1]), replacement=True, generator=generator)  # noqa: E731
    return [Ragged(draw(), offsets) for _ in range(count)]


def main() -> None:
    share = 1.0 / np.arange(1, LABELS + 1)
    partition = partition_labels(1e12 * share, PartitionConfig(FRACTIONS))
    mass = np.bincount(partition.cluster_of, weights=share / share.sum())[1:]
    rates = touch_probabilities(mass, LABELS_A_DOCUMENT)  # a document is a batch of labels
    touch = touch_probabilities(rates, BATCH)
    config = AplcHeadConfig()
    predicted = approximate_cost_ratio(partition.sizes, touch, config.decay)
    clusters = LabelClusters.from_assignment(torch.from_numpy(partition.cluster_of), len(FRACTIONS))
    times = time_layers(config, clusters, zipf_batches(LABELS, STEPS), WIDTH, torch.device("cpu"))
    measured = times.flat / times.aplc
    record(
        "aplc_layer",
        {"labels": LABELS, "width": WIDTH, "batch": BATCH, "labels_a_document": LABELS_A_DOCUMENT}
        | {"fractions": FRACTIONS, "decay": config.decay, "steps": STEPS},
        {
            "aplc_step_s": round(times.aplc, 4),
            "flat_step_s": round(times.flat, 4),
            "flat_over_aplc": round(measured, 3),
            "equation_14": round(predicted, 3),
            "equation_14_document_by_document": round(
                approximate_cost_ratio(partition.sizes, rates, config.decay), 3
            ),
            "measured_over_predicted": round(measured / predicted, 3),
            "allowed_difference": ALLOWED,
            "documents_with_a_label_in_each_tail": [round(float(rate), 3) for rate in rates],
            "batches_that_touch_each_tail": [round(float(p), 3) for p in touch],
        },
    )


if __name__ == "__main__":
    main()
