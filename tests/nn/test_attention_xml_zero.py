"""AttentionXML in a DeepSpeed engine at ZeRO 0, 1 and 3 on two ranks: the perceptron, whose weights leave the module to
be applied by the head, and words outside the engine, equal plain torch in one process. Averages held, norms clipped.
In bf16 it trains, and finds the labels that the same weights find in fp32.

The system refuses ZeRO 2: it sums gradients in the order in which they arrive, and an LSTM's arrive in an order that
depends on the lengths of a rank's texts.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.nn import test_attention_xml_ranks as plain_case
from tests.nn.ranks import run_checks
from xmc.nn.engine import Engine, EngineConfig
from xmc.nn.heads.attention_xml import AttentionXmlHead
from xmc.nn.sharding import Ragged
from xmc.nn.words import WordRows, WordVectorsConfig

LR = plain_case.LR
# Wide enough that ZeRO 3 really divides the second layer.
WIDTHS = (400, 300)


def _engine(module: torch.nn.Module, stage: int, precision: str = "fp32") -> Engine:
    groups = [{"params": list(module.parameters()), "lr": LR, "weight_decay": 0.0}]
    config = EngineConfig(zero_stage=stage, precision=precision, weight_decay=0.0)
    return Engine(module, groups, config, torch.device("cpu"), 3, say=lambda line: None)


def _compare(stage: int) -> None:
    reference = plain_case._Plain(True, WIDTHS)
    engine = _engine(plain_case._module(WIDTHS).float(), stage)
    head = AttentionXmlHead(plain_case.NUM_LABELS, 8, plain_case.GROUPS, seed=3)
    words = WordRows(plain_case.NUM_WORDS, WordVectorsConfig(width=plain_case.WORD_WIDTH), seed=9)
    mine = plain_case._mine()
    for step in range(4):
        ids, mask, truth, parents = plain_case._batch(step)
        expected = reference.loss(ids, mask, truth, plain_case._chosen(truth, parents))
        expected.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in reference.module.parameters()])
        if step == 3:  # clipped to half its norm
            for p in reference.module.parameters():
                p.grad *= 0.5
        reference.step()
        targets = Ragged.from_lists([row.nonzero()[:, 0].tolist() for row in truth[mine]])
        outputs = engine(words.embed(ids[mine]), mask[mine])
        loss = head.loss(outputs, targets, lr=LR, parents=parents[mine])
        loss.retain_grad()
        engine.backward(loss)
        words.learn(1.0 / (float(loss.grad) * head.gradient_scale), LR)
        engine.step(1.0, 0.5 * float(norm) if step == 3 else None)
        torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-5)
    assert engine.gradient_norm() == pytest.approx(float(norm), rel=1e-3)
    own = engine.weights()
    for name, p in reference.module.named_parameters():
        torch.testing.assert_close(own[name].double(), p.detach(), rtol=1e-3, atol=1e-4)
    _check_holding(engine, own, words.embed(ids[mine]).detach(), mask[mine])


def _check_holding(engine: Engine, own: dict, vectors: torch.Tensor, mask: torch.Tensor) -> None:
    """Other weights serve for a while; the engine's own come back to the bit."""
    engine.train(False)
    with torch.no_grad():
        before = engine(vectors, mask)[1]
        with engine.holding({name: torch.zeros_like(value) for name, value in own.items()}):
            assert not engine(vectors, mask)[1].any()
        assert torch.equal(engine(vectors, mask)[1], before)
    for name, value in engine.weights().items():
        assert torch.equal(value, own[name]), name


def check_zero_0() -> None:
    _compare(0)


def check_zero_1() -> None:
    _compare(1)


def check_zero_3() -> None:
    _compare(3)


def check_bf16() -> None:
    for grouped in (False, True):
        _, expected = _train(grouped, "fp32")
        probabilities, losses = _train(grouped, "bf16")
        torch.testing.assert_close(losses, expected, rtol=0.03, atol=0.0)
        torch.testing.assert_close(*probabilities, rtol=0.03, atol=0.005)


def _train(grouped: bool, precision: str) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The best labels' probabilities (b × k) after training, by the engine's module and by the same weights in fp32;
    and the losses on the way."""
    engine = _engine(plain_case._module().float(), 1, precision)
    head = AttentionXmlHead(plain_case.NUM_LABELS, 8, plain_case.GROUPS if grouped else None, seed=3)
    words = WordRows(plain_case.NUM_WORDS, WordVectorsConfig(width=plain_case.WORD_WIDTH), seed=9)
    ids, mask, truth, parents = (x[plain_case._mine()] for x in plain_case._batch(0))
    targets = Ragged.from_lists([row.nonzero()[:, 0].tolist() for row in truth])
    losses = []
    for _ in range(8):
        outputs = engine(words.embed(ids), mask)
        loss = head.loss(outputs, targets, lr=LR, **({"parents": parents} if grouped else {}))
        loss.retain_grad()
        engine.backward(loss)
        words.learn(1.0 / (float(loss.grad) * head.gradient_scale), LR)
        engine.step()
        losses.append(float(loss.detach()))
    assert outputs[0].dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
    assert losses[-1] < losses[0]
    module = plain_case._module().float()
    module.load_state_dict(engine.weights())
    beam = (parents, torch.full(parents.shape, 0.5)) if grouped else None
    with torch.no_grad():
        found = [head.top_k(m(words.embed(ids), mask), 4, beam)[0] for m in (engine, module)]
    return (found[0], found[1]), torch.tensor(losses)


CHECKS = [check_zero_0, check_zero_1, check_zero_3, check_bf16]
_errors: dict[str, list[str]] = {}


@pytest.mark.slow
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_zero(check: str) -> None:
    # DeepSpeed compiles its CPU communication once; the cache makes later starts quick.
    os.environ.setdefault(
        "TORCH_EXTENSIONS_DIR", str(Path(__file__).parents[2] / ".cache" / "torch_extensions")
    )
    if not _errors:
        _errors.update(run_checks(2, CHECKS))
    assert not any(_errors[check]), "\n".join(_errors[check])
