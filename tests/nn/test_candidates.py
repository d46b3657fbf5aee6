"""Candidate lists: what is selected, and that compiled loops and torch formulas compute the same."""

from __future__ import annotations

import pytest
import torch

from xmc.nn import candidates as module
from xmc.nn import row_kernels
from xmc.nn.candidates import (
    CandidateLabelLayer,
    Candidates,
    best_of_pairs,
    group_candidates,
    label_candidates,
)
from xmc.nn.optimisers import RowOptimiserConfig
from xmc.nn.sharding import LabelBlock, Ragged, unpack_keys

OFFSETS = torch.tensor([0, 4, 4, 9, 20])


def _random(block: LabelBlock, seed: int = 0) -> Candidates:
    chosen = torch.rand(6, 4, generator=torch.Generator().manual_seed(seed)) < 0.5
    documents, groups = chosen.nonzero(as_tuple=True)
    return group_candidates(groups, documents, OFFSETS, block, 6)


def test_groups_are_cut_at_the_block() -> None:
    block = LabelBlock(start=2, stop=12, num_labels=20, rank=1, world=3)
    got = group_candidates(torch.tensor([3, 0, 1, 3, 0]), torch.tensor([1, 0, 0, 0, 0]), OFFSETS, block, 2)
    assert got.groups.tolist() == [0, 3, 3]  # group 1 is empty, (0, 0) came twice
    assert got.documents.tolist() == [0, 0, 1]
    assert got.rows().tolist() == [0, 1, 7, 8, 9]
    assert got.rows_of_pairs().tolist() == [0, 1, 7, 8, 9, 7, 8, 9]
    assert got.num_pairs == 8


def test_locate_finds_candidates_only() -> None:
    block = LabelBlock.of_rank(20, 0, 1)
    got = _random(block)
    documents = got.documents[got.entry_of_pair()]
    assert torch.equal(got.locate(got.rows_of_pairs(), documents), torch.arange(got.num_pairs))
    present = set(zip(got.rows_of_pairs().tolist(), documents.tolist(), strict=True))
    absent = [(row, i) for row in range(20) for i in range(6) if (row, i) not in present]
    assert absent
    rows, owners = torch.tensor(absent).t().contiguous()
    assert got.locate(rows, owners).numel() == 0


def test_label_lists_are_groups_of_one() -> None:
    got = label_candidates(Ragged.from_lists([[5, 1], [], [5, 19]]), LabelBlock(1, 19, 20, 0, 2))
    assert got.rows().tolist() == [0, 4]
    assert got.documents.tolist() == [0, 0, 2]


def test_kernels_equal_torch_formulas() -> None:
    block = LabelBlock.of_rank(20, 0, 1)
    candidates = _random(block)
    config = RowOptimiserConfig(name="lazy_adam")
    layer = CandidateLabelLayer(block, 5, config, bound=0.5, seed=0, dtype=torch.float64)
    E = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scores = layer.scores(E, candidates)
    torch.testing.assert_close(scores, module._scores_torch(layer.weight, E, candidates, 7))
    derivative = torch.randn_like(scores)
    dW, dE = module._gradients_torch(layer.weight, E, candidates, derivative, 7)
    torch.testing.assert_close(layer._learn(E, candidates, derivative, None), dE)
    torch.testing.assert_close(layer._mean_gradient()[1], dW)


def test_result_does_not_depend_on_the_number_of_threads() -> None:
    block = LabelBlock.of_rank(20, 0, 1)
    candidates = _random(block)
    E = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            config = RowOptimiserConfig(name="lazy_adam")
            layer = CandidateLabelLayer(block, 5, config, bound=0.5, seed=0, chunk_bytes=100)
            x = E.clone().requires_grad_()
            layer.loss(x, candidates, torch.tensor([0, 3]), 10.0, lr=0.1).backward()
            results.append((x.grad, layer.weight))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert row_kernels.PARTS > 1


@pytest.mark.parametrize("k", [1, 3, 40])
def test_best_of_pairs(k: int) -> None:
    candidates = _random(LabelBlock.of_rank(20, 0, 1), seed=3)
    scores = torch.rand(candidates.num_pairs, generator=torch.Generator().manual_seed(2))
    got_scores, got_ids = unpack_keys(best_of_pairs(candidates, scores, candidates.rows_of_pairs(), k))
    dense = torch.full((6, 20), float("-inf"))
    dense[candidates.documents[candidates.entry_of_pair()], candidates.rows_of_pairs()] = scores
    expected = dense.topk(min(k, 20), dim=1)
    assert torch.equal(got_scores[:, : min(k, 20)], expected.values)
    found = expected.values > float("-inf")
    assert torch.equal(got_ids[:, : min(k, 20)][found], expected.indices[found])
    assert (got_ids[:, : min(k, 20)][~found] == -1).all()
