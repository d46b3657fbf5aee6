"""What all heads have in common: they learn from a module's 16-bit outputs nearly as from fp32 ones, small gradients
outlive fp16 under a loss scale, and a head that only predicts holds no optimiser state.

The module's outputs stand for the module: they are what is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from xmc.nn.block_files import BlockReader, write_blocks
from xmc.nn.candidates import CandidateLabelLayer, label_candidates
from xmc.nn.dense_layer import DenseLabelLayer
from xmc.nn.heads.aplc import AplcHead, AplcHeadConfig
from xmc.nn.heads.attention_xml import AttentionRows, AttentionXmlHead, Texts
from xmc.nn.heads.base import LabelHead
from xmc.nn.heads.light_xml import LabelClusters, LightXmlHead, LightXmlHeadConfig
from xmc.nn.heads.matcher import MatcherConfig, MatcherHead
from xmc.nn.heads.treader_xml import TReaderConfig, TReaderHead
from xmc.nn.optimisers import RowOptimiserConfig
from xmc.nn.sharding import LabelBlock, Ragged, known_gradients
from xmc.nn.words import WordRows, WordVectorsConfig

NUM_DOCUMENTS, NUM_LABELS, NUM_CLUSTERS, WIDTH, LENGTH = 6, 24, 6, 8, 5
CLUSTER_OF = torch.arange(NUM_LABELS) % NUM_CLUSTERS
CLUSTERS = LabelClusters.from_assignment(CLUSTER_OF, NUM_CLUSTERS)
TARGETS = Ragged.from_lists([[i, (i * 7 + 8) % NUM_LABELS] for i in range(NUM_DOCUMENTS)])
MASK = (torch.arange(LENGTH) < torch.tensor([5, 3, 1, 4, 5, 2])[:, None]).long()
NODES = torch.arange(3).repeat(NUM_DOCUMENTS, 1)
LOSS_SCALE = 65536.0


def flat() -> LightXmlHead:
    return LightXmlHead(LightXmlHeadConfig(), NUM_LABELS, WIDTH, None, seed=0)


def clustered() -> LightXmlHead:
    config = LightXmlHeadConfig(recalled_clusters=NUM_CLUSTERS, rank_width=4)
    return LightXmlHead(config, NUM_LABELS, WIDTH, CLUSTERS, seed=0)


def matcher() -> MatcherHead:
    return MatcherHead(MatcherConfig(), CLUSTER_OF, NUM_CLUSTERS, WIDTH, seed=0)


def aplc() -> AplcHead:
    thirds = LabelClusters.from_assignment(torch.arange(NUM_LABELS) // 8, 3)
    return AplcHead(AplcHeadConfig(), thirds, WIDTH, seed=0)


def treader() -> TReaderHead:
    words = WordRows(30, WordVectorsConfig(width=4), seed=1)
    return TReaderHead(TReaderConfig(bottleneck_width=WIDTH), NUM_LABELS, None, words, seed=0)


def attention() -> AttentionXmlHead:
    return AttentionXmlHead(NUM_LABELS, WIDTH, None, seed=0)


def attention_of_groups() -> AttentionXmlHead:
    return AttentionXmlHead(NUM_LABELS, WIDTH, CLUSTERS, seed=0)


# The shapes of the float outputs that each head reads.
OF_ATTENTION = [(NUM_DOCUMENTS, LENGTH, WIDTH), (NUM_DOCUMENTS, LENGTH, 4), (1, 4), (1,)]
HEADS: dict[Callable[[], LabelHead], list[tuple[int, ...]]] = {
    flat: [(NUM_DOCUMENTS, WIDTH)],
    clustered: [(NUM_DOCUMENTS, WIDTH), (NUM_DOCUMENTS, 4)],
    matcher: [(NUM_DOCUMENTS, WIDTH)],
    aplc: [(NUM_DOCUMENTS, width) for width in (WIDTH, 2, 4, 2)],
    treader: [(NUM_DOCUMENTS, WIDTH)],
    attention: OF_ATTENTION,
    attention_of_groups: OF_ATTENTION,
}
every_head = pytest.mark.parametrize("build", HEADS, ids=lambda build: build.__name__)


def leaves(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def outputs_of(head: LabelHead, parts: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    cast = [part.to(dtype) for part in parts]
    return (*cast[:2], MASK, *cast[2:]) if isinstance(head, AttentionXmlHead) else tuple(cast)


def best(head: LabelHead, outputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    if isinstance(head, AttentionXmlHead) and head.groups is not None:
        return head.top_k(outputs, 3, (NODES, torch.full(NODES.shape, 0.5)))
    return head.top_k(outputs, 3)


def train(
    build: Callable[[], LabelHead], dtype: torch.dtype, loss_scale: float
) -> tuple[list[float], list[Tensor], Tensor]:
    """Losses of some steps, the last gradients of the outputs, and the scores of the best labels afterwards."""
    head, parts, losses = build(), leaves(HEADS[build]), []
    grouped: dict[str, Any] = {"parents": NODES} if build is attention_of_groups else {}
    optimiser = torch.optim.SGD(parts, lr=0.5)
    for step in range(4):
        at_once = 0.01 if step % 2 else None
        loss = head.loss(outputs_of(head, parts, dtype), TARGETS, lr=at_once, **grouped)
        assert loss.dtype == torch.float32  # a loss scale of 2¹⁶ is infinite in fp16
        optimiser.zero_grad()
        (loss * loss_scale).backward()
        for part in parts:
            part.grad /= loss_scale
        optimiser.step()
        if at_once is None:
            head.step(0.01)
        losses.append(float(loss.detach()))
    return losses, [part.grad for part in parts], best(head, outputs_of(head, parts, dtype))[0]


@every_head
@pytest.mark.parametrize(("dtype", "loss_scale"), [(torch.bfloat16, 1.0), (torch.float16, LOSS_SCALE)])
def test_training_and_predicting_in_16_bits(
    build: Callable[[], LabelHead], dtype: torch.dtype, loss_scale: float
) -> None:
    expected, found = train(build, torch.float32, 1.0), train(build, dtype, loss_scale)
    assert found[0][-1] < found[0][0]
    assert found[0] == pytest.approx(expected[0], rel=0.01)
    for gradient, wanted in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=0.05, atol=0.02 * float(wanted.abs().max()))
    torch.testing.assert_close(found[2], expected[2], rtol=0.02, atol=0.01)


@every_head
def test_a_head_that_only_predicts_has_no_optimiser_state(
    build: Callable[[], LabelHead], tmp_path: Path
) -> None:
    trained, head = build(), build()
    write_blocks(trained.export_blocks(), tmp_path)
    head.load_rows(BlockReader(tmp_path))
    head.load_shared_state(trained.shared_state())
    with torch.no_grad():
        best(head, outputs_of(head, leaves(HEADS[build]), torch.float32))
    for layer in head.layers.values():
        assert not any("state" in vars(optimiser) for optimiser in layer.optimisers.values())


# --- small gradients ------------------------------------------------------------------------------------------------

BLOCK, ADAM = LabelBlock.of_rank(NUM_LABELS), RowOptimiserConfig(name="lazy_adam")
SMALL = 1e-9


def dense_loss(x: Tensor) -> Tensor:
    layer = DenseLabelLayer(BLOCK, WIDTH, ADAM, bound=0.5, seed=0)
    return layer.loss(x, torch.zeros(0, dtype=torch.int64), 1 / SMALL)[0]


def candidates_loss(x: Tensor) -> Tensor:
    layer = CandidateLabelLayer(BLOCK, WIDTH, ADAM, bound=0.5, seed=0)
    candidates = label_candidates(TARGETS, BLOCK)
    return layer.loss(x, candidates, torch.zeros(0, dtype=torch.int64), 1 / SMALL)


def attention_loss(x: Tensor) -> Tensor:
    layer = AttentionRows(BLOCK, WIDTH, ADAM, bound=0.5, seed=0)
    first, *weights = (part.detach().to(x.dtype) for part in leaves(OF_ATTENTION)[1:])
    texts = Texts(
        x[:, None].expand(-1, LENGTH, -1) * torch.arange(LENGTH)[:, None], first, MASK != 0, tuple(weights)
    )
    return layer.loss_of_all(texts, torch.zeros(0, dtype=torch.int64), 1 / SMALL, None, 1.0)


@pytest.mark.parametrize("loss", [dense_loss, candidates_loss, attention_loss])
def test_small_gradients_reach_fp16_with_the_loss_scale(loss: Callable[[Tensor], Tensor]) -> None:
    wide = leaves([(NUM_DOCUMENTS, WIDTH)])[0]
    half = wide.detach().half().requires_grad_()
    for x in (wide, half):
        (loss(x) * LOSS_SCALE).backward()
    assert float(wide.grad.abs().max()) / LOSS_SCALE < 2**-25  # itself it would be 0 in fp16
    torch.testing.assert_close(half.grad.float(), wide.grad, rtol=0.02, atol=1e-6)


def test_a_known_gradient_is_rounded_after_the_loss_scale() -> None:
    x = torch.ones(3, dtype=torch.float16, requires_grad=True)
    (known_gradients(torch.ones(()), [torch.full((3,), SMALL)], [x]) * LOSS_SCALE).backward()
    torch.testing.assert_close(x.grad.float(), torch.full((3,), SMALL * LOSS_SCALE), rtol=0.01, atol=0.0)
