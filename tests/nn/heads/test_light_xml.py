"""LightXML's head and module on one rank; equality with dense mathematics at several ranks is in test_ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from xmc.errors import InputError
from xmc.nn.averaging import WeightAverage
from xmc.nn.block_files import BlockReader, write_blocks
from xmc.nn.encoders import EncoderConfig, load_encoder
from xmc.nn.heads.light_xml import LabelClusters, LightXmlHead, LightXmlHeadConfig, LightXmlModule
from xmc.nn.optimisers import parameter_groups
from xmc.nn.sharding import Ragged

NUM_LABELS = 24
CLUSTERS = LabelClusters.from_assignment(torch.arange(NUM_LABELS) % 6, 6)
CONFIG = LightXmlHeadConfig(recalled_clusters=3, rank_width=8)


def _module(clusters: LabelClusters | None, activation: str = "sigmoid") -> LightXmlModule:
    torch.manual_seed(0)
    encoder = load_encoder(EncoderConfig("random:bert", layers_pooled=2, dropout=0.0, max_tokens=16))
    return LightXmlModule(encoder, CONFIG.rank_width if clusters else None, activation)


def _texts() -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """Documents whose first token says which labels they have."""
    ids = torch.randint(10, 200, (NUM_LABELS, 6), generator=torch.Generator().manual_seed(1))
    ids[:, 1] = torch.arange(NUM_LABELS) + 10
    return ids, torch.ones_like(ids), [sorted({i, (i * 7 + 1) % NUM_LABELS}) for i in range(NUM_LABELS)]


@pytest.mark.parametrize("clusters", [None, CLUSTERS], ids=["flat", "recall and rank"])
def test_it_learns(clusters: LabelClusters | None) -> None:
    module = _module(clusters)
    head = LightXmlHead(CONFIG, NUM_LABELS, module.encoder.width, clusters, seed=0)
    optimiser = torch.optim.AdamW(parameter_groups(module, 0.0), lr=3e-3)
    ids, mask, labels = _texts()
    losses = []
    for _ in range(150):
        loss = head.loss(module(ids, mask), Ragged.from_lists(labels), lr=1e-2)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]
    module.eval()
    with torch.no_grad():
        scores, best = head.top_k(module(ids, mask), 2)
    hits = [len(set(got) & set(true)) for got, true in zip(best.tolist(), labels, strict=True)]
    assert sum(hits) > 0.9 * 2 * NUM_LABELS
    assert ((scores > 0) & (scores < 1)).all()
    assert (scores[:, 0] >= scores[:, 1]).all()


@pytest.mark.parametrize("clusters", [None, CLUSTERS], ids=["flat", "recall and rank"])
def test_saved_head_continues_as_if_never_stopped(clusters: LabelClusters | None, tmp_path: Path) -> None:
    def head() -> LightXmlHead:
        return LightXmlHead(CONFIG, NUM_LABELS, 4, clusters, seed=0)

    def train(each: LightXmlHead, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            outputs = tuple(torch.randn(5, n, generator=generator).requires_grad_() for n in (4, 8))
            each.loss(outputs, Ragged.from_lists([[step], [], [3, 4], [step + 5], [23]]), lr=0.1)

    undisturbed, stopped, resumed = head(), head(), head()
    train(undisturbed, range(6))
    train(stopped, range(3))
    write_blocks(stopped.export_blocks(with_optimiser=True), tmp_path)
    resumed.load_rows(BlockReader(tmp_path), with_optimiser=True)
    resumed.load_shared_state(stopped.shared_state())
    train(resumed, range(3, 6))
    for name, tensor in undisturbed.trained_tensors().items():
        assert torch.equal(resumed.trained_tensors()[name], tensor), name


def test_rows_of_another_clustering_are_refused() -> None:
    head = LightXmlHead(CONFIG, NUM_LABELS, 4, CLUSTERS, seed=0)
    other = LabelClusters.from_assignment(torch.arange(NUM_LABELS) // 4, 6)
    with pytest.raises(InputError, match="another clustering"):
        LightXmlHead(CONFIG, NUM_LABELS, 4, other, seed=0).load_shared_state(head.shared_state())
    with pytest.raises(InputError, match="24 labels, the corpus 25"):
        LightXmlHead(CONFIG, NUM_LABELS + 1, 4, CLUSTERS, seed=0)


def test_averaged_rows_serve_predictions() -> None:
    head = LightXmlHead(CONFIG, NUM_LABELS, 4, None, seed=0)
    average = WeightAverage()
    average.update(head.trained_tensors())
    e = torch.ones(1, 4)
    before = head.top_k((e,), 3)
    head.recall.weight.neg_()
    assert not torch.equal(head.top_k((e,), 3)[1], before[1])
    with average.applied(head.trained_tensors()):
        assert torch.equal(head.top_k((e,), 3)[1], before[1])


def test_bottleneck_activation() -> None:
    ids, mask, _ = _texts()
    squashed = _module(CLUSTERS)(ids, mask)[1]
    plain = _module(CLUSTERS, "none").eval()(ids, mask)[1]
    assert ((squashed > 0) & (squashed < 1)).all()
    assert (plain < 0).any()


def test_more_true_clusters_than_are_recalled() -> None:
    head = LightXmlHead(CONFIG, NUM_LABELS, 4, CLUSTERS, seed=0)
    before = head.rank.weight.clone()
    outputs = (torch.randn(1, 4, requires_grad=True), torch.rand(1, 8, requires_grad=True))
    head.loss(outputs, Ragged.from_lists([list(range(6))]), lr=0.1)  # one label of each of the 6 clusters
    assert (head.rank.weight != before).any(1).all()


def test_validation_loss_learns_nothing() -> None:
    head = LightXmlHead(CONFIG, NUM_LABELS, 4, CLUSTERS, seed=0)
    before = {name: tensor.clone() for name, tensor in head.trained_tensors().items()}
    with torch.no_grad():
        loss = head.loss((torch.ones(2, 4), torch.ones(2, 8)), Ragged.from_lists([[1], [2]]), lr=0.1)
    head.step(0.1)
    assert float(loss) > 0
    assert all(torch.equal(before[name], tensor) for name, tensor in head.trained_tensors().items())


@pytest.mark.parametrize(
    "bad",
    [
        {"recalled_clusters": 0},
        {"bottleneck_activation": "relu"},
        {"negatives": "random"},
        {"rank_optimiser": CONFIG.recall_optimiser},
    ],
)
def test_config_is_checked(bad: dict) -> None:
    with pytest.raises(InputError, match="light_xml"):
        LightXmlHeadConfig(**bad)
