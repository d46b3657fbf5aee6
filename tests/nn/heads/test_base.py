"""Where label rows start: biases give each label, cluster and tail its rate as probability, at any number of ranks."""

from __future__ import annotations

import torch

from tests.nn.ranks import run_checks
from xmc.nn.heads.aplc import AplcHead, AplcHeadConfig, TailInputs
from xmc.nn.heads.base import document_rates
from xmc.nn.heads.light_xml import LabelClusters, LightXmlHead, LightXmlHeadConfig
from xmc.nn.sharding import Ragged, rank_index, world_size

NUM_LABELS, WIDTH = 6, 4
# Twelve documents: labels 0 and 1 are frequent, 5 is nobody's.
LABELS = [[0], [0, 1], [0, 1], [1], [0, 2], [0, 3], [1, 2, 3], [0], [4], [0, 1], [1], [0, 4]]
COUNTS = torch.tensor([sum(label in row for row in LABELS) for label in range(NUM_LABELS)])
CLUSTERS = LabelClusters.from_assignment(torch.tensor([0, 0, 1, 1, 2, 2]), 3)


def smoothed(counts: torch.Tensor) -> torch.Tensor:
    return (counts.double() + 0.5) / (len(LABELS) + 1.0)


def mine() -> Ragged:
    return Ragged.from_lists(LABELS[rank_index() :: world_size()])


def probabilities(layer) -> torch.Tensor:
    return torch.sigmoid(layer.bias)


def check_rates() -> None:
    torch.testing.assert_close(document_rates(mine(), NUM_LABELS), smoothed(COUNTS))
    # A document with two labels of a cluster has the cluster once.
    twice = Ragged.from_lists([[3, 3, 1]] if rank_index() == 0 else [])
    assert document_rates(twice, 4).tolist() == [0.25, 0.75, 0.25, 0.75]


def check_flat_and_clustered() -> None:
    for clusters, counts in ((None, COUNTS), (CLUSTERS, torch.tensor([11, 3, 2]))):
        head = LightXmlHead(LightXmlHeadConfig(rank_width=WIDTH), NUM_LABELS, WIDTH, clusters, seed=0)
        head.begin(mine())
        block = slice(head.recall.block.start, head.recall.block.stop)
        torch.testing.assert_close(probabilities(head.recall), smoothed(counts)[block].float())


def check_aplc() -> None:
    config = AplcHeadConfig(bias=True)
    head, inputs = AplcHead(config, CLUSTERS, WIDTH, seed=0), TailInputs(config, 2, WIDTH)
    targets = mine()
    head.begin(targets)
    inputs.start_at(head.tail_rates(targets))
    assert inputs.logits is not None
    tails = torch.sigmoid(inputs.logits.bias)
    torch.testing.assert_close(tails, smoothed(torch.tensor([3, 2])).float())
    for layer, first, above in zip((head.head, *head.tails), (0, 2, 4), (1.0, *tails), strict=True):
        labels = slice(first + layer.block.start, first + layer.block.stop)
        torch.testing.assert_close(probabilities(layer) * above, smoothed(COUNTS)[labels].float())


def test_rows_start_from_the_rates():
    for world in (1, 2, 3):
        checks = [check_rates, check_flat_and_clustered, check_aplc]
        errors = run_checks(world, checks)
        assert not any(line for lines in errors.values() for line in lines), errors
