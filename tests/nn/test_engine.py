"""The engine's state: resuming from it equals going on, at every ZeRO stage, and under another one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.nn.ranks import run_checks
from xmc.nn.engine import Engine, EngineConfig, choose_precision, load_weights
from xmc.nn.optimisers import parameter_groups
from xmc.nn.sharding import rank_index, world_size


def _module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.LayerNorm(13), nn.Tanh(), nn.Linear(13, 5))


def _engine(module: nn.Module, stage: int, precision: str = "fp32") -> Engine:
    groups = [group | {"lr": 1e-2} for group in parameter_groups(module, 0.01)]
    config = EngineConfig(stage, precision, clip_norm=1.0)  # type: ignore[arg-type]
    return Engine(module, groups, config, torch.device("cpu"), batch_per_rank=3)


def _documents(step: int) -> torch.Tensor:
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(step))


def _train(engine: Engine, first: int, last: int) -> None:
    for step in range(first, last):
        mine = _documents(step)[rank_index() :: world_size()].to(next(engine.module.parameters()).dtype)
        # A mean over all documents; DeepSpeed averages over ranks.
        engine.backward(engine(mine).pow(3).sum() / 6 * world_size())
        engine.step(1.0 - 0.1 * step)


def _plain() -> dict[str, torch.Tensor]:
    module = _module()
    optimiser = torch.optim.AdamW([g | {"lr": 1e-2} for g in parameter_groups(module, 0.01)])
    for step in range(6):
        optimiser.zero_grad()
        (module(_documents(step)).pow(3).sum() / 6).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for group in optimiser.param_groups:
            group["lr"] = 1e-2 * (1.0 - 0.1 * step)
        optimiser.step()
    return {name: p.detach() for name, p in module.named_parameters()}


def _assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=tolerance, rtol=0, msg=name)


def check_engine() -> None:
    plain = _plain()
    states = {}
    for stage in range(4):
        engine = _engine(_module(), stage)
        _train(engine, 0, 3)
        states[stage] = engine.state()
        assert float(states[stage]["step"]) == 3
        _train(engine, 3, 6)
        _assert_close(engine.weights(), plain, 1e-6)
    for saved_by, stage in ((0, 0), (1, 1), (2, 2), (3, 3), (3, 1), (0, 3)):
        module = _module()
        load_weights(module, states[saved_by])
        engine = _engine(module, stage)
        engine.load_state(states[saved_by])
        _train(engine, 3, 6)
        _assert_close(engine.weights(), plain, 1e-6)


def check_bf16() -> None:
    plain = _plain()
    for stage in (1, 2, 3):
        engine = _engine(_module(), stage, "bf16")
        _train(engine, 0, 3)
        state = engine.state()
        assert {value.dtype for value in state.values()} == {torch.float32}
        _train(engine, 3, 6)
        _assert_close(engine.weights(), plain, 2e-2)  # near, and not the same: it did compute in 16 bits
        assert any(not torch.equal(engine.weights()[name], plain[name]) for name in plain)
        module = _module()
        load_weights(module, state)
        resumed = _engine(module, stage, "bf16")
        resumed.load_state(state)
        _train(resumed, 3, 6)
        _assert_close(resumed.weights(), engine.weights(), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_resuming_equals_going_on_and_plain_torch(world: int):
    errors = run_checks(world, [check_engine, check_bf16])
    assert errors == {"check_engine": [""] * world, "check_bf16": [""] * world}


def test_precision_is_what_was_asked_for_or_what_the_machine_has():
    cpu, flags = torch.device("cpu"), Path("/proc/cpuinfo").read_text()
    computes = "bf16" if "avx512_bf16" in flags or "amx_bf16" in flags else "fp32"
    assert choose_precision(EngineConfig(precision="bf16"), cpu) == "bf16"
    assert choose_precision(EngineConfig(), cpu) == computes
    assert choose_precision(EngineConfig(zero_stage=0), cpu) == "fp32"
