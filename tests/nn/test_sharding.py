"""Blocks, ragged lists and keys that need no second rank."""

from __future__ import annotations

import itertools

import pytest
import torch

from xmc.nn.label_rows import uniform_rows
from xmc.nn.sharding import (
    LabelBlock,
    Ragged,
    best_keys,
    best_of_scores,
    gather_embeddings,
    rank_keys,
    unpack_keys,
)


@pytest.mark.parametrize(("num_labels", "world"), [(10, 3), (2, 5), (0, 2), (670_091, 7)])
def test_blocks_cover_all_labels_evenly(num_labels: int, world: int) -> None:
    blocks = [LabelBlock.of_rank(num_labels, rank, world) for rank in range(world)]
    assert blocks[0].start == 0
    assert blocks[-1].stop == num_labels
    assert all(a.stop == b.start for a, b in itertools.pairwise(blocks))
    sizes = [block.size for block in blocks]
    assert max(sizes) - min(sizes) <= 1


def test_owns() -> None:
    block = LabelBlock.of_rank(10, 1, 2)
    assert block.owns(torch.tensor([[-1, 4], [5, 9]])).tolist() == [[False, False], [True, True]]


def test_rows_do_not_depend_on_the_division() -> None:
    whole = uniform_rows(LabelBlock.of_rank(9000, 0, 1), 3, 0.5, seed=4)
    for world in (2, 3):
        parts = [uniform_rows(LabelBlock.of_rank(9000, rank, world), 3, 0.5, seed=4) for rank in range(world)]
        assert torch.equal(torch.cat(parts), whole)
    assert whole.abs().max() <= 0.5
    assert whole.unique().numel() > 20_000
    assert not torch.equal(uniform_rows(LabelBlock.of_rank(9000, 0, 1), 3, 0.5, seed=5), whole)


def test_ragged() -> None:
    lists = Ragged.from_padded(torch.tensor([[3, -1, 5], [-1, -1, -1], [7, 1, 2]]))
    assert lists.ids.tolist() == [3, 5, 7, 1, 2]
    assert lists.offsets.tolist() == [0, 2, 2, 5]
    assert lists.documents().tolist() == [0, 0, 2, 2, 2]
    assert len(lists) == 3


def test_keys_keep_scores_and_ids() -> None:
    scores = torch.tensor([[-1e30, -1.5, 0.0, 3e-39, 2.0, float("-inf"), float("inf")]])
    ids = torch.tensor([[0, 2**31 - 2, 5, 7, 1, 3, 4]])
    got_scores, got_ids = unpack_keys(best_keys(rank_keys(scores, ids), 7))
    order = scores.argsort(descending=True)
    assert torch.equal(got_scores, scores.gather(1, order))
    assert torch.equal(got_ids, ids.gather(1, order))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("k", [1, 6, 50, 80])
def test_best_of_scores(ties: bool, k: int) -> None:
    scores = torch.randn(9, 50, generator=torch.Generator().manual_seed(1))
    scores = scores.round() if ties else scores
    got_scores, got_ids = unpack_keys(best_of_scores(scores, 100, k))
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(got_ids[:, :50], order + 100)
    assert torch.equal(got_scores[:, :50], scores.gather(1, order))
    assert (got_ids[:, 50:] == -1).all()


def test_gather_without_a_group() -> None:
    e = torch.ones(2, 3, requires_grad=True)
    gather_embeddings(e, gradient_scale=3.0).sum().backward()
    assert torch.equal(e.grad, torch.full((2, 3), 3.0))
