"""The matcher's head on one rank; the dense layer below it is compared with references at several ranks elsewhere."""

from __future__ import annotations

import torch

from xmc.nn.encoders import EncoderConfig, load_encoder
from xmc.nn.heads.matcher import MatcherConfig, MatcherHead, MatcherModule
from xmc.nn.sharding import Ragged

CLUSTER_OF = torch.tensor([0, 0, 1, 1, 2])


def _head(width: int) -> MatcherHead:
    return MatcherHead(MatcherConfig(), CLUSTER_OF, 3, width, seed=0, averaging_engine=False)


def test_the_loss_is_the_mean_squared_hinge_over_documents_and_clusters() -> None:
    head = _head(4)
    e = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels = [[0, 1], [2, 4], []]  # two labels of one cluster are one positive
    signs = torch.tensor([[1.0, -1, -1], [-1, 1, 1], [-1, -1, -1]])
    reference = (1 - signs * (e @ head.rows.weight.t() + head.rows.bias)).clamp_min(0).square().mean()
    expected = torch.autograd.grad(reference, e)[0]
    loss = head.loss((e,), Ragged.from_lists(labels))
    loss.backward()
    assert torch.allclose(loss, reference, atol=1e-6)
    assert torch.allclose(e.grad, expected, atol=1e-6)


def test_it_learns_clusters_and_names_the_best() -> None:
    torch.manual_seed(0)
    module = MatcherModule(
        load_encoder(EncoderConfig("random:bert", layers_pooled=1, dropout=0.0, summary="mean"))
    )
    head = _head(module.encoder.width)
    optimiser = torch.optim.AdamW(module.parameters(), lr=3e-3)
    ids = torch.tensor([[5, 20 + i, 6] for i in range(5)])
    mask = torch.ones_like(ids)
    for _ in range(60):
        loss = head.loss(module(ids, mask), Ragged.from_lists([[i] for i in range(5)]), lr=1e-2)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    margins, best = head.top_k(module(ids, mask), 2)
    assert best[:, 0].tolist() == CLUSTER_OF.tolist()
    assert (margins[:, 0] >= margins[:, 1]).all()
