"""Encoder in a DeepSpeed engine at ZeRO 0 to 3, label rows outside it: equal to an unsharded reference."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.nn.ranks import run_checks
from xmc.nn.heads.light_xml import LabelClusters, LightXmlHead, LightXmlHeadConfig
from xmc.nn.label_rows import uniform_rows
from xmc.nn.optimisers import RowOptimiserConfig
from xmc.nn.sharding import LabelBlock, Ragged, rank_index, world_size

NUM_LABELS, WIDTH, RANK_WIDTH, BATCH = 23, 8, 6, 4


class _Tower(nn.Module):
    """Stands for encoder and bottleneck."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, WIDTH))
        self.bottleneck = nn.Linear(WIDTH, RANK_WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        e = self.encoder(x)
        return e, torch.sigmoid(self.bottleneck(e))


def _data(step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + micro)
    x = torch.randn(BATCH * world_size(), 5, generator=generator)
    return x, (torch.rand(x.shape[0], NUM_LABELS, generator=generator) < 0.15).float()


def _clusters() -> LabelClusters:
    return LabelClusters.from_assignment(torch.arange(NUM_LABELS) // 4, 6)


def _engine(model: nn.Module, stage: int, accumulation: int):
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    return deepspeed.initialize(model=model, optimizer=optimiser, config=config)[0]


def _sharded(stage: int, accumulation: int) -> tuple[list[float], dict[str, torch.Tensor], LightXmlHead]:
    import deepspeed

    engine = _engine(_Tower(), stage, accumulation)
    config = LightXmlHeadConfig(
        recalled_clusters=2,
        rank_width=RANK_WIDTH,
        rank_optimiser=RowOptimiserConfig(name="lazy_adam", weight_decay=0.0),
    )
    head = LightXmlHead(config, NUM_LABELS, WIDTH, _clusters(), seed=3)
    losses = []
    for step in range(5):
        for micro in range(accumulation):
            x, y = _data(step, micro)
            mine = slice(rank_index() * BATCH, (rank_index() + 1) * BATCH)
            targets = Ragged.from_lists([row.nonzero()[:, 0].tolist() for row in y[mine]])
            loss = head.loss(engine(x[mine]), targets, lr=0.01 if accumulation == 1 else None)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        if accumulation > 1:
            head.step(0.01)
    parameters = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=stage == 3):
        weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    engine.destroy()
    return losses, weights, head


def _plain(accumulation: int) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """The same training with dense matrices on one rank."""
    tower = _Tower()
    clusters = _clusters()
    cluster_of = torch.arange(NUM_LABELS) // 4
    recall = uniform_rows(LabelBlock.of_rank(6, 0, 1), WIDTH, WIDTH**-0.5, 3).requires_grad_()
    bias = torch.zeros(6, requires_grad=True)
    table = nn.Embedding(NUM_LABELS, RANK_WIDTH, sparse=True)
    bound = (6.0 / (NUM_LABELS + RANK_WIDTH)) ** 0.5
    table.weight.data.copy_(uniform_rows(LabelBlock.of_rank(NUM_LABELS, 0, 1), RANK_WIDTH, bound, 4))
    assert torch.equal(clusters.order, torch.arange(NUM_LABELS))
    optimisers = [
        torch.optim.AdamW(tower.parameters(), lr=0.01),
        torch.optim.AdamW([{"params": [recall]}, {"params": [bias], "weight_decay": 0.0}], lr=0.01),
        torch.optim.SparseAdam(table.parameters(), lr=0.01),
    ]
    losses = []
    for step in range(5):
        for micro in range(accumulation):
            x, y = _data(step, micro)
            e, h = tower(x)
            scores = e @ recall.t() + bias
            truth = torch.zeros_like(scores).index_add_(1, cluster_of, y).clamp_max(1.0)
            order = (scores.detach() + 1e4 * truth).argsort(1, descending=True)
            mask = torch.stack(
                [
                    torch.isin(cluster_of, row[: max(2, int(n))])
                    for row, n in zip(order, truth.sum(1), strict=True)
                ]
            )
            owners, labels = mask.nonzero(as_tuple=True)
            rank = F.binary_cross_entropy_with_logits((table(labels) * h[owners]).sum(1), y[mask])
            loss = F.binary_cross_entropy_with_logits(scores, truth) + rank
            (loss / accumulation).backward()
            losses.append(float(loss.detach()))
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
    weights = {name: parameter.detach() for name, parameter in tower.named_parameters()}
    return losses, weights, recall.detach(), table.weight.detach()


def _compare(stage: int, accumulation: int) -> None:
    losses, weights, head = _sharded(stage, accumulation)
    expected_losses, expected, recall, table = _plain(accumulation)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected_losses), rtol=1e-5, atol=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(
            weight, expected[name], rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    for layer, whole in ((head.recall, recall), (head.rank, table)):
        mine = whole[layer.block.start : layer.block.stop]
        torch.testing.assert_close(layer.weight, mine, rtol=1e-5, atol=2e-6)


def check_zero_0() -> None:
    _compare(0, 1)


def check_zero_1() -> None:
    _compare(1, 1)


def check_zero_2() -> None:
    _compare(2, 1)


def check_zero_3() -> None:
    _compare(3, 1)


def check_zero_2_accumulation() -> None:
    _compare(2, 2)


def check_zero_3_accumulation() -> None:
    _compare(3, 2)


CHECKS = [
    check_zero_0,
    check_zero_1,
    check_zero_2,
    check_zero_3,
    check_zero_2_accumulation,
    check_zero_3_accumulation,
]
_errors: dict[int, dict[str, list[str]]] = {}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_zero(world: int, check: str) -> None:
    # DeepSpeed compiles its CPU communication once; the cache makes later starts quick.
    cache = Path(__file__).parents[2] / ".cache" / "torch_extensions"
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(cache))
    if world not in _errors:
        _errors[world] = run_checks(world, CHECKS)
    assert not any(_errors[world][check]), "\n".join(_errors[world][check])
