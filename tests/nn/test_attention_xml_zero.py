"""AttentionXML in a DeepSpeed engine at ZeRO 0, 1 and 3 on two ranks: the perceptron, whose weights leave the module to
be applied by the head, and words outside the engine, equal plain torch in one process. Averages held, norms clipped.

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


def _engine(module: torch.nn.Module, stage: int) -> Engine:
    groups = [{"params": list(module.parameters()), "lr": LR, "weight_decay": 0.0}]
    config = EngineConfig(zero_stage=stage, precision="fp32", weight_decay=0.0)
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


CHECKS = [check_zero_0, check_zero_1, check_zero_3]
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
