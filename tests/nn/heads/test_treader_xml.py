"""TReaderXML's attention against torch's own, its masks, and its tables at several ranks against one process."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.nn.ranks import run_checks
from xmc.errors import InputError
from xmc.nn.encoders import EncoderConfig, load_encoder
from xmc.nn.heads.treader_xml import (
    SelfAttention,
    Tower,
    TReaderConfig,
    TReaderHead,
    TReaderModule,
    allowed_pairs,
)
from xmc.nn.label_rows import uniform_rows
from xmc.nn.sharding import LabelBlock, Ragged, rank_index, world_size
from xmc.nn.words import WordRows, WordVectorsConfig

WIDTH, HEADS = 12, 4
CONFIG = TReaderConfig(bottleneck_width=8, dropout=0.0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def lengths_mask(lengths: list[int], length: int) -> Tensor:
    return torch.arange(length) < torch.tensor(lengths)[:, None]


def torchs_own(ours: SelfAttention) -> nn.MultiheadAttention:
    theirs = nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True)
    theirs.in_proj_weight.data.copy_(ours.qkv.weight)
    theirs.out_proj.weight.data.copy_(ours.out.weight)
    return theirs


@pytest.mark.parametrize("masked", [True, False])
def test_attention_equals_torchs(masked: bool) -> None:
    torch.manual_seed(0)
    ours = SelfAttention(WIDTH, HEADS)
    theirs = torchs_own(ours)
    x, real = normal(3, 7, WIDTH), lengths_mask([7, 4, 1], 7)
    y = x.clone().requires_grad_()
    x.requires_grad_()
    causal = torch.ones(7, 7, dtype=torch.bool).triu(1) if masked else None
    expected, _ = theirs(y, y, y, key_padding_mask=~real, attn_mask=causal, need_weights=False)
    found = ours(x, allowed_pairs(real, masked=masked))
    torch.testing.assert_close(found[real], torch.tanh(expected)[real])
    found[real].square().sum().backward()
    torch.tanh(expected)[real].square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(ours.qkv.weight.grad, theirs.in_proj_weight.grad)


def test_a_tower_is_masked_attention_with_residual_then_plain_attention() -> None:
    torch.manual_seed(0)
    tower = Tower(WIDTH, CONFIG)
    x, real = normal(2, 5, WIDTH), lengths_mask([5, 3], 5)
    first, second = (torchs_own(layer) for layer in tower.layers)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    between = x + torch.tanh(first(x, x, x, key_padding_mask=~real, attn_mask=causal)[0])
    expected = torch.tanh(second(between, between, between, key_padding_mask=~real)[0])
    torch.testing.assert_close(tower(x, real)[real], expected[real])


@pytest.mark.parametrize(
    ("reading", "residual", "kinds"),
    [
        ("none", True, ()),
        ("masked", True, ("masked",)),
        ("plain", True, ("plain",)),
        ("plain_masked", True, ("plain", "masked")),
        ("masked_plain", False, ("masked", "plain")),
    ],
)
def test_the_switches_of_the_ablation(reading: str, residual: bool, kinds: tuple[str, ...]) -> None:
    tower = Tower(WIDTH, dataclasses.replace(CONFIG, reading=reading, residual=residual))
    x, real = normal(2, 5, WIDTH), lengths_mask([5, 3], 5)
    expected = x
    for number, (kind, layer) in enumerate(zip(kinds, tower.layers, strict=True)):
        read = layer(expected, allowed_pairs(real, masked=kind == "masked"))
        expected = expected + read if number == 0 and residual else read
    torch.testing.assert_close(tower(x, real), expected)


def make_module(pooling: str = "towers", encoder: str = "") -> TReaderModule:
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, pooling=pooling)
    if encoder:
        built = load_encoder(EncoderConfig(encoder, layers_pooled=1, dropout=0.0))
        return TReaderModule(built, built.width, config).eval()
    return TReaderModule(None, WIDTH, config).eval()


def moved(x: Tensor, before: int, behind: int, filling: float) -> Tensor:
    """x (b × T × …) with so many places of padding put before and behind."""
    shape = list(x.shape)
    parts = []
    for count in (before, behind):
        shape[1] = count
        parts.append(x.new_full(shape, filling))
    return torch.cat([parts[0], x, parts[1]], dim=1)


@pytest.mark.parametrize("pooling", ["towers", "mean", "max", "last"])
@pytest.mark.parametrize("places", [(0, 3), (2, 0), (1, 4)])
def test_padding_changes_nothing_wherever_it_stands(pooling: str, places: tuple[int, int]) -> None:
    module = make_module(pooling)
    text, scope = normal(3, 6, WIDTH, seed=1), normal(3, 4, WIDTH, seed=2)
    mask, weights = torch.ones(3, 6), torch.tensor([[0.9, 0.5, 0.4, 0.1]] * 3)
    (expected,) = module(text, mask, scope, weights)
    (wide,) = module(
        moved(text, *places, 7.0),
        moved(mask, *places, 0),
        moved(scope, *places, -5.0),
        moved(weights, *places, 0),
    )
    torch.testing.assert_close(wide, expected, rtol=1e-4, atol=1e-5)
    # In the middle too: only the order of real places counts.
    order = torch.tensor([0, 1, 6, 2, 3, 4, 5])
    text_7, mask_7 = moved(text, 0, 1, 3.0)[:, order], moved(mask, 0, 1, 0)[:, order]
    torch.testing.assert_close(module(text_7, mask_7, scope, weights)[0], expected, rtol=1e-4, atol=1e-5)


def test_an_encoder_below_may_be_padded_on_either_side() -> None:
    for name, side in (("random:bert", (0, 3)), ("random:xlnet", (3, 0))):
        module = make_module(encoder=name)
        width = module.bottleneck.in_features
        ids, mask = (
            torch.randint(5, 200, (2, 6), generator=torch.Generator().manual_seed(0)),
            torch.ones(2, 6),
        )
        scope, weights = normal(2, 3, width), torch.ones(2, 3)
        (expected,) = module(ids, mask.long(), scope, weights)
        found = module(moved(ids, *side, 0), moved(mask.long(), *side, 0), scope, weights)
        torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-5)


def test_an_empty_scope_is_as_good_as_none() -> None:
    module = make_module()
    text, mask = normal(2, 5, WIDTH, seed=1), torch.ones(2, 5)
    nothing = torch.zeros(2, 1)
    found = [module(text, mask, normal(2, 1, WIDTH, seed=seed), nothing)[0] for seed in (3, 4)]
    assert torch.isfinite(found[0]).all()
    torch.testing.assert_close(found[0], found[1])
    scoped = module(text, mask, normal(2, 1, WIDTH, seed=3), nothing + 1)[0]
    assert not torch.allclose(found[0], scoped)


def test_the_scope_reaches_every_word_and_words_not_the_scope() -> None:
    module = make_module("last")
    text, mask = normal(1, 4, WIDTH, seed=1).requires_grad_(), torch.ones(1, 4)
    scope = normal(1, 3, WIDTH, seed=2).requires_grad_()
    result = module(text, mask, scope, torch.ones(1, 3))[0]
    (
        result * normal(*result.shape, seed=3)
    ).sum().backward()  # a plain sum of a normalised vector is constant
    assert (scope.grad.abs().sum(2) > 0).all()
    assert (text.grad.abs().sum(2) > 0).all()


def test_weights_scale_the_scope_only_if_asked() -> None:
    text, mask, scope = normal(2, 4, WIDTH), torch.ones(2, 4), normal(2, 3, WIDTH, seed=1)
    results = {}
    for weighted in (False, True):
        torch.manual_seed(0)
        config = dataclasses.replace(CONFIG, scope_weighted=weighted)
        module = TReaderModule(None, WIDTH, config).eval()
        results[weighted] = [
            module(text, mask, scope, torch.full((2, 3), weight))[0] for weight in (0.25, 1.0)
        ]
    torch.testing.assert_close(results[False][0], results[False][1])
    assert not torch.allclose(results[True][0], results[True][1])
    torch.testing.assert_close(results[True][1], results[False][1])


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(InputError, match=r"model\.bottleneck_width"):
        TReaderConfig(bottleneck_width=30)
    with pytest.raises(InputError, match=r"model\.heads"):
        TReaderModule(None, 10, CONFIG)


def test_a_scope_counts_as_much_as_the_text_and_its_nodes_by_their_weights() -> None:
    module = make_module()
    z = normal(2, 5, CONFIG.bottleneck_width)
    real, weights = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 0]]).bool(), torch.tensor([[3.0, 1], [0, 0]])
    found = module._pool(z, real, weights)
    torch.testing.assert_close(found[0], 0.75 * z[0, 0] + 0.25 * z[0, 1] + z[0, 2:].mean(0))
    torch.testing.assert_close(found[1], z[1, 2:4].mean(0))  # nothing was found to be read beside it


# --- ranks ----------------------------------------------------------------------------------------------------------

NUM_NODES, NUM_WORDS, NUM_LABELS, LR = 17, 30, 13, 0.02
SIZES = [3, 1, 2]


def table(num_rows: int, seed: int, trained: bool = True) -> WordRows:
    return WordRows(num_rows, WordVectorsConfig(width=WIDTH, trained=trained), seed=seed, dtype=torch.float64)


def batch(step: int) -> tuple[Tensor, ...]:
    """(word ids, mask, nodes, weights, truth) of all ranks' documents."""
    generator = torch.Generator().manual_seed(step)
    count = sum(SIZES[: world_size()])
    mask = lengths_mask(torch.randint(1, 7, (count,), generator=generator).tolist(), 6).long()
    weights = torch.rand(count, 4, generator=generator, dtype=torch.float64)
    weights[0] = 0
    words = torch.randint(2, NUM_WORDS, (count, 6), generator=generator)
    nodes = torch.randint(0, NUM_NODES, (count, 4), generator=generator)
    truth = (torch.rand(count, NUM_LABELS, generator=generator) < 0.2).double()
    return words, mask, nodes, weights, truth


def without_padding(rows: nn.Embedding) -> None:
    """Drop the rows of a sparse gradient that are zero: torch would move them by their momentum."""
    gradient = rows.weight.grad.coalesce()
    taught = gradient.values().any(1)
    parts = gradient.indices()[:, taught], gradient.values()[taught]
    rows.weight.grad = torch.sparse_coo_tensor(*parts, gradient.shape, is_coalesced=True)


def plain_training(accumulate: int) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """Everything in one process with torch's own layers and optimisers: module, scope, words, labels' weights."""
    module = make_module().double()
    tables = []
    for num_rows, seed in ((NUM_NODES, 5), (NUM_WORDS, 6)):
        rows = nn.Embedding(num_rows, WIDTH, sparse=True, dtype=torch.float64)
        rows.weight.data.copy_(uniform_rows(LabelBlock.of_rank(num_rows, 0, 1), WIDTH, 0.5, seed))
        tables.append(rows)
    scope, words = tables
    labels = nn.Linear(8, NUM_LABELS, dtype=torch.float64)
    block = LabelBlock.of_rank(NUM_LABELS, 0, 1)
    labels.weight.data.copy_(uniform_rows(block, 8, 1 / math.sqrt(8), 7))
    nn.init.zeros_(labels.bias)
    optimisers = [
        torch.optim.SGD(module.parameters(), lr=LR),
        torch.optim.SparseAdam([scope.weight, words.weight], lr=LR),
        torch.optim.Adam(labels.parameters(), lr=LR),
    ]
    for step in range(4):
        text, mask, nodes, weights, truth = batch(step)
        (e,) = module(words(text), mask, scope(nodes), weights)
        (F.binary_cross_entropy_with_logits(labels(e), truth) / accumulate).backward()
        if (step + 1) % accumulate == 0:
            for rows in tables:
                without_padding(rows)
            for optimiser in optimisers:
                optimiser.step()
                optimiser.zero_grad()
    return module, scope.weight, words.weight, labels.weight


def sharded_training(accumulate: int) -> tuple[nn.Module, TReaderHead]:
    """The same on this rank's documents and rows; gradients of the module are averaged as an engine does, and the loss
    divided by the micro-batches and multiplied as 16 bits ask for."""
    module, scale = make_module().double(), 64.0
    head = TReaderHead(
        CONFIG, NUM_LABELS, table(NUM_NODES, 5), table(NUM_WORDS, 6), seed=7, dtype=torch.float64
    )
    optimiser = torch.optim.SGD(module.parameters(), lr=LR)
    start = sum(SIZES[: rank_index()])
    mine = slice(start, start + SIZES[rank_index()])
    lr = LR if accumulate == 1 else None
    for step in range(4):
        text, mask, nodes, weights, truth = (part[mine] for part in batch(step))
        outputs = module(*head.look_up(text, mask, nodes, weights))
        loss = head.loss(outputs, Ragged.from_lists([row.nonzero()[:, 0].tolist() for row in truth]), lr=lr)
        (loss * scale / accumulate).backward()
        head.learn(lr, accumulate / scale)
        if (step + 1) % accumulate:
            continue
        for p in module.parameters():
            if world_size() > 1:
                dist.all_reduce(p.grad)
            p.grad /= world_size() * scale
        optimiser.step()
        optimiser.zero_grad()
        if lr is None:
            head.step(LR)
    return module, head


def check_ranks_equal_one_process() -> None:
    for accumulate in (1, 2):
        expected, *tables = plain_training(accumulate)
        module, head = sharded_training(accumulate)
        for (name, p), q in zip(module.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7, msg=name)
        for layer, whole in zip((*head.tables.values(), head.recall), tables, strict=True):
            rows = slice(layer.block.start, layer.block.stop)
            torch.testing.assert_close(layer.weight, whole.detach()[rows], rtol=1e-5, atol=1e-7)


def check_fixed_scopes_stay() -> None:
    scope = table(NUM_NODES, 5, trained=False)
    before = scope.weight.clone()
    head = TReaderHead(CONFIG, NUM_LABELS, scope, seed=7, dtype=torch.float64)
    module = make_module().double()
    start = sum(SIZES[: rank_index()])
    _, mask, nodes, weights, _ = (part[start : start + SIZES[rank_index()]] for part in batch(0))
    outputs = module(*head.look_up(normal(*mask.shape, WIDTH).double(), mask, nodes, weights))
    head.loss(outputs, Ragged.from_lists([[0]] * len(mask)), lr=LR).backward()
    head.learn(LR, 1.0)
    assert torch.equal(scope.weight, before)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks(world: int) -> None:
    errors = run_checks(world, [check_ranks_equal_one_process, check_fixed_scopes_stay])
    assert not any(line for lines in errors.values() for line in lines), errors
