"""AttentionXML divided over 2 and 3 real ranks equals one process with plain torch: states gathered, labels and words
divided, the perceptron averaged as an engine averages it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.nn.ranks import run_checks
from xmc.nn.heads.attention_xml import AttentionXmlHead, AttentionXmlModule
from xmc.nn.heads.light_xml import LabelClusters
from xmc.nn.label_rows import uniform_rows
from xmc.nn.sharding import LabelBlock, Ragged, rank_index, world_size
from xmc.nn.words import BiLstm, BiLstmConfig, WordRows, WordVectorsConfig

NUM_WORDS, WORD_WIDTH, NUM_LABELS, NUM_PARENTS, LR = 40, 5, 29, 7, 0.05
SIZES = [3, 1, 4]
GROUPS = LabelClusters.from_assignment(torch.arange(NUM_LABELS) * 5 % NUM_PARENTS, NUM_PARENTS)


def _module(hidden_widths: tuple[int, ...] = (6, 3)) -> AttentionXmlModule:
    torch.manual_seed(0)
    return AttentionXmlModule(BiLstm(BiLstmConfig(4, 0.0, 0.0), WORD_WIDTH), hidden_widths).double()


def _batch(step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(ids, mask, truth, parents) of all ranks' documents."""
    generator = torch.Generator().manual_seed(step)
    count = sum(SIZES[: world_size()])
    mask = (torch.arange(8) < torch.randint(1, 9, (count, 1), generator=generator)).long()
    ids = torch.randint(2, NUM_WORDS, (count, 8), generator=generator) * mask
    truth = torch.rand(count, NUM_LABELS, generator=generator) < 0.15
    parents = torch.stack([torch.randperm(NUM_PARENTS, generator=generator)[:3] for _ in range(count)])
    parents[0, 2] = -1
    return ids, mask, truth.double(), parents


def _mine() -> slice:
    start = sum(SIZES[: rank_index()])
    return slice(start, start + SIZES[rank_index()])


def _chosen(truth: Tensor, parents: Tensor) -> Tensor:
    """(B × L) the children of true parents, and of the best other candidates as far as there is room."""
    parent_of = torch.arange(NUM_LABELS) * 5 % NUM_PARENTS
    rows = []
    for i, row in enumerate(parents.tolist()):
        true = set(parent_of[truth[i] > 0].tolist())
        others = [parent for parent in row if parent >= 0 and parent not in true]
        kept = true | set(others[: max(0, len(row) - len(true))])
        rows.append(torch.isin(parent_of, torch.tensor(sorted(kept))))
    return torch.stack(rows)


def judge(module: AttentionXmlModule, x: Tensor) -> Tensor:
    """The perceptron over mixed states (… × d)."""
    x = module.first(x)
    for layer in module.others:
        x = F.linear(torch.relu(x), layer.weight, layer.bias)
    return x[..., 0]


class _Plain:
    """Everything in one process: dense tables, the paper's order of operations, torch's optimisers."""

    def __init__(self, grouped: bool, hidden_widths: tuple[int, ...] = (6, 3)) -> None:
        self.module = _module(hidden_widths)
        self.words = torch.nn.Embedding(NUM_WORDS, WORD_WIDTH, sparse=True, dtype=torch.float64)
        self.words.weight.data.copy_(uniform_rows(LabelBlock.of_rank(NUM_WORDS, 0, 1), WORD_WIDTH, 0.5, 9))
        self.rows = torch.nn.Embedding(NUM_LABELS, 8, sparse=True, dtype=torch.float64)
        drawn = uniform_rows(LabelBlock.of_rank(NUM_LABELS, 0, 1), 8, math.sqrt(6 / (NUM_LABELS + 8)), 3)
        self.rows.weight.data[GROUPS.order if grouped else torch.arange(NUM_LABELS)] = drawn.double()
        tables = [self.words.weight, self.rows.weight]
        self.optimisers = [
            torch.optim.Adam(self.module.parameters(), lr=LR),
            torch.optim.SparseAdam(tables, lr=LR),
        ]

    def loss(self, ids: Tensor, mask: Tensor, truth: Tensor, chosen: Tensor) -> Tensor:
        """`chosen` (B × L): which labels are scored."""
        states = self.module.encoder(self.words(ids), mask)
        documents, labels = chosen.nonzero(as_tuple=True)
        scores = (states[documents] * self.rows(labels)[:, None, :]).sum(-1)
        weights = scores.masked_fill(mask[documents] == 0, float("-inf")).softmax(-1)
        x = (weights[:, :, None] * states[documents]).sum(1)
        return F.binary_cross_entropy_with_logits(judge(self.module, x), truth[chosen])

    def step(self) -> None:
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad()


def _compare(grouped: bool, micro_batches: int) -> None:
    module, plain = _module(), _Plain(grouped)
    head = AttentionXmlHead(NUM_LABELS, 8, GROUPS if grouped else None, seed=3, dtype=torch.float64)
    words = WordRows(NUM_WORDS, WordVectorsConfig(width=WORD_WIDTH), seed=9, dtype=torch.float64)
    head.layers["words"] = words
    optimiser = torch.optim.Adam(module.parameters(), lr=LR)
    lr = LR if micro_batches == 1 else None
    for step in range(3):
        for micro in range(micro_batches):
            ids, mask, truth, parents = _batch(10 * step + micro)
            chosen = torch.ones_like(truth, dtype=torch.bool)
            if grouped:
                chosen = _chosen(truth, parents)
            expected = plain.loss(ids, mask, truth, chosen)
            (expected / micro_batches).backward()
            own_length = int(mask[_mine()].sum(1).max())  # ranks' longest texts differ
            targets = Ragged.from_lists([row.nonzero()[:, 0].tolist() for row in truth[_mine()]])
            options = {"parents": parents[_mine()]} if grouped else {}
            vectors = words.embed(ids[_mine(), :own_length])
            loss = head.loss(module(vectors, mask[_mine(), :own_length]), targets, lr=lr, **options)
            (loss / micro_batches).backward()
            # The engine's averages were scaled up by the number of ranks; word rows are summed, so scaled down.
            words.learn(micro_batches / head.gradient_scale, lr)
            torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-11)
        for p in module.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world_size()
        optimiser.step()
        optimiser.zero_grad()
        if lr is None:
            head.step(LR)
        plain.step()
        for (name, p), q in zip(module.named_parameters(), plain.module.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")
        rows = plain.rows.weight.detach()[GROUPS.order] if grouped else plain.rows.weight.detach()
        for layer, whole in ((head.rows, rows), (words, plain.words.weight.detach())):
            own = whole[layer.block.start : layer.block.stop]
            torch.testing.assert_close(layer.weight, own, rtol=1e-6, atol=1e-8)


def _best(grouped: bool) -> None:
    module, plain = _module(), _Plain(grouped)
    head = AttentionXmlHead(NUM_LABELS, 8, GROUPS if grouped else None, seed=3, dtype=torch.float64)
    words = WordRows(NUM_WORDS, WordVectorsConfig(width=WORD_WIDTH), seed=9, dtype=torch.float64)
    ids, mask, _, parents = _batch(0)
    probabilities = torch.rand(parents.shape, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        states = plain.module.encoder(plain.words(ids), mask)
        weights = (
            (plain.rows.weight @ states.transpose(1, 2)).masked_fill(mask[:, None, :] == 0, -1e9).softmax(-1)
        )
        expected = torch.sigmoid(judge(plain.module, weights @ states)).float()
        if grouped:
            parent_of = torch.arange(NUM_LABELS) * 5 % NUM_PARENTS
            expected = expected * ((parents[:, :, None] == parent_of) * probabilities[:, :, None]).sum(1)
        outputs = module(words.embed(ids[_mine()]), mask[_mine()])
        beam = (parents[_mine()], probabilities[_mine()]) if grouped else None
        scores, labels = head.top_k(outputs, 4, beam)
    best = expected.topk(4, dim=1)
    torch.testing.assert_close(scores, best.values[_mine()])
    # An untrained network scores labels nearly alike: float32 may order them either way.
    torch.testing.assert_close(scores, expected[_mine()].gather(1, labels))


def check_all_labels() -> None:
    _compare(grouped=False, micro_batches=1)
    _compare(grouped=False, micro_batches=2)


def check_candidates() -> None:
    _compare(grouped=True, micro_batches=1)
    _compare(grouped=True, micro_batches=2)


def check_best_labels() -> None:
    _best(grouped=False)
    _best(grouped=True)


CHECKS = [check_all_labels, check_candidates, check_best_labels]
_errors: dict[int, dict[str, list[str]]] = {}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_ranks(world: int, check: str) -> None:
    if world not in _errors:  # starting processes costs seconds: once for all checks
        _errors[world] = run_checks(world, CHECKS)
    assert not any(_errors[world][check]), "\n".join(_errors[world][check])
