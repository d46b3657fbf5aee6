"""The encoder's DeepSpeed engine: ZeRO stage and precision from the settings, state that any number of ranks can load.

Only what every rank shares lives here. Label rows stay outside (see `sharding`): they have one owner each.
The state is a flat dictionary of full fp32 tensors by parameter name, so a checkpoint written under one ZeRO
stage and number of ranks resumes under another, and is read without pickle.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xmc.errors import InputError

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class EngineConfig:
    # ZeRO 0 replicates everything; 1 divides the optimiser's state, 2 also gradients, 3 also weights.
    zero_stage: Literal[0, 1, 2, 3] = 1
    # auto: 16 bits where the hardware computes in them, else fp32 (emulated bfloat16 is slower by far).
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    weight_decay: float = 0.01
    # Largest norm of the encoder's gradient; 0 leaves it as it is.
    clip_norm: float = 0.0

    def __post_init__(self) -> None:
        if self.weight_decay < 0 or self.clip_norm < 0:
            raise InputError("engine: weight_decay and clip_norm must not be negative")
        if self.precision in ("bf16", "fp16") and self.zero_stage == 0:
            raise InputError(
                "engine: 16-bit training keeps its fp32 weights in ZeRO: set zero_stage to 1, 2 or 3"
            )


def choose_precision(config: EngineConfig, device: torch.device) -> str:
    """fp32, bf16 or fp16: what was asked for, or what this device computes fastest."""
    if config.precision != "auto":
        return config.precision
    if config.zero_stage == 0:  # has no place for the fp32 weights of 16-bit training
        return "fp32"
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    flags = Path("/proc/cpuinfo")
    has_bf16 = flags.exists() and any(f in flags.read_text() for f in ("avx512_bf16", "amx_bf16"))
    return "bf16" if has_bf16 else "fp32"


def prepare_extension(say: Callable[[str], None]) -> None:
    """Compile DeepSpeed's CPU communication once, telling the user, and clear the lock of a killed compile.

    Whoever compiles holds an flock, which dies with its process. So a `lock` file of torch's found while
    holding ours belongs to nobody, and would make every later start wait for ever.
    """
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    root = Path(
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path.home() / ".cache/xmc/torch_extensions"))
    )
    build = root / ShareMemCommBuilder.NAME
    build.mkdir(parents=True, exist_ok=True)
    with open(root / ".xmc-build-lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        (build / "lock").unlink(missing_ok=True)
        if not list(build.glob("*.so")):
            say("compiling DeepSpeed's CPU communication: about 90 seconds, once")
        ShareMemCommBuilder().load(verbose=False)


class Engine:
    """A module under DeepSpeed: forward by calling it, then `backward` and `step`.

    DeepSpeed averages the ranks' gradients; heads (`averaging_engine`) scale theirs so that the result is the sum.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Iterable[dict[str, Any]],
        config: EngineConfig,
        device: torch.device,
        batch_per_rank: int,
        accumulate: int = 1,
        say: Callable[[str], None] = print,
    ) -> None:
        import deepspeed

        if device.type == "cpu":
            prepare_extension(say)
        self.precision = choose_precision(config, device)
        # One rank in fp32 has nothing to divide: ZeRO would only copy every weight and gradient once more.
        alone = dist.get_world_size() == 1 and self.precision == "fp32"
        self.zero_stage = 0 if alone else config.zero_stage
        groups = [group for group in groups if group["params"]]
        self._rates = [group["lr"] for group in groups]
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._norm_before_clipping = 0.0
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": batch_per_rank,
            "gradient_accumulation_steps": accumulate,
            "zero_optimization": {"stage": self.zero_stage},
            "gradient_clipping": config.clip_norm,
            "steps_per_print": 10**9,
        }
        if self.precision != "fp32":
            settings[self.precision] = {"enabled": True}
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=torch.optim.AdamW(groups, fused=True),
            config=settings,
            dist_init_required=False,
        )

    def __call__(self, *inputs: Tensor) -> Any:
        return self._engine(*inputs)

    @property
    def module(self) -> nn.Module:
        return self._engine.module

    def train(self, mode: bool = True) -> None:
        self._engine.train(mode)

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)

    def step(self, rate_factor: float = 1.0, clip_norm: float | None = None) -> None:
        """Update the weights, each group at its own rate times `rate_factor`; with `clip_norm`, the gradient's norm is
        limited to it in place of the settings' limit."""
        if clip_norm is not None:
            self._clip_at(clip_norm)
        for group, rate in zip(self._engine.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * rate_factor
        self._engine.step()

    def _clip_at(self, norm: float) -> None:
        if self.zero_stage > 0:
            self._engine.optimizer.clip_grad = norm
            return
        self._engine._config.gradient_clipping = norm
        gradients = [p.grad for _, p in self._named() if p.grad is not None]
        self._norm_before_clipping = float(nn.utils.get_total_norm(gradients))

    def gradient_norm(self) -> float:
        """The norm of the last step's gradient before it was clipped."""
        if self.zero_stage == 0:
            return self._norm_before_clipping
        norm = self._engine.get_global_grad_norm()
        return float(norm) if norm is not None else 0.0

    @contextmanager
    def holding(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the block the module computes with rank 0's `weights` in place of its own. Every rank must call it."""
        own = self.weights()
        self._put(weights)
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, weights: Mapping[str, Tensor]) -> None:
        """Rank 0's weights into the module alone: the optimiser keeps what it has."""
        import deepspeed

        alone = dist.get_world_size() == 1
        for name, p in self._named():
            with deepspeed.zero.GatheredParameters([p], modifier_rank=0, enabled=self.zero_stage == 3):
                if dist.get_rank() == 0:
                    p.copy_(weights[name])
                if self.zero_stage < 3 and not alone:
                    dist.broadcast(p.data, src=0)

    def weights(self) -> dict[str, Tensor]:
        """The full fp32 weights by name, on the CPU; every rank must call it."""
        from deepspeed.utils import safe_get_full_fp32_param

        if self.zero_stage == 0:
            return {name: p.detach().float().cpu().clone() for name, p in self._named()}
        return {name: safe_get_full_fp32_param(p).detach().cpu() for name, p in self._named()}

    def state(self) -> dict[str, Tensor]:
        """Weights, moments and step count: all that resuming needs. Every rank must call it."""
        state = {f"weight/{name}": value for name, value in self.weights().items()}
        step = self._step_count()
        state["step"] = torch.tensor([step], dtype=torch.float32)
        if step > 0:
            self._link_moments()
            for name, p in self._named():
                for moment in MOMENTS:
                    state[f"{moment}/{name}"] = self._get_moment(p, moment).detach().cpu().clone()
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`. The module must have been built with its weights (`load_weights`) before."""
        step = float(state["step"])
        if self.zero_stage > 0:
            self._load_master_weights(state)
        if step == 0:
            return
        self._create_moments(step)
        for name, p in self._named():
            for moment in MOMENTS:
                self._set_moment(p, moment, state[f"{moment}/{name}"])

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return [(self._names[id(p)], p) for p in self._engine.module.parameters() if p.requires_grad]

    def _base(self) -> torch.optim.Optimizer:
        optimizer = self._engine.optimizer
        return optimizer if self.zero_stage == 0 else optimizer.optimizer

    def _masters(self) -> list[Tensor]:
        """This rank's fp32 tensors that the optimiser steps: parts of flattened groups under ZeRO."""
        optimizer = self._engine.optimizer
        if self.zero_stage == 0:
            return [p for _, p in self._named()]
        if self.zero_stage == 3:
            return list(optimizer.fp32_partitioned_groups_flat)
        return list(optimizer.single_partition_of_fp32_groups)

    def _step_count(self) -> float:
        states = [self._base().state[m] for m in self._masters() if m in self._base().state]
        return float(states[0]["step"]) if states and "step" in states[0] else 0.0

    def _create_moments(self, step: float) -> None:
        for master in self._masters():
            self._base().state[master] = {
                "step": torch.tensor(step, dtype=torch.float32),
                **{moment: torch.zeros_like(master) for moment in MOMENTS},
            }
        self._link_moments()

    def _link_moments(self) -> None:
        """Tie parameters to their parts of the flat moments (ZeRO 1 and 2).

        DeepSpeed does it once, after the first group's first step, when later groups have no moments yet.
        """
        if self.zero_stage in (1, 2):
            self._engine.optimizer._hp_optimizer_states_linked = False
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _get_moment(self, p: nn.Parameter, moment: str) -> Tensor:
        from deepspeed.utils import safe_get_full_optimizer_state

        if self.zero_stage == 0:
            return self._base().state[p][moment]
        return safe_get_full_optimizer_state(p, moment)

    def _set_moment(self, p: nn.Parameter, moment: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if self.zero_stage == 0:
            self._base().state[p][moment].copy_(value)
        elif self.zero_stage == 3:
            safe_set_local_optimizer_state(p, self._my_part(p, value), moment)
        else:
            safe_set_full_optimizer_state(p, value.to(p.device), moment)

    def _load_master_weights(self, state: Mapping[str, Tensor]) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        for name, p in self._named():
            value = state[f"weight/{name}"]
            if self.zero_stage == 3:
                safe_set_local_fp32_param(p, self._my_part(p, value))
            else:
                safe_set_full_fp32_param(p, value.to(p.device))

    @staticmethod
    def _my_part(p: Any, value: Tensor) -> Tensor:
        """This rank's slice of a full tensor under ZeRO 3, padded as DeepSpeed pads it."""
        size = p.ds_tensor.numel()
        start = size * dist.get_rank()
        part = value.flatten()[start : start + size]
        return nn.functional.pad(part, (0, size - part.numel())).to(p.ds_tensor.device)


def load_weights(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put the weights of an engine's state into a module that no engine holds yet."""
    prefix = "weight/"
    weights = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    named = dict(module.named_parameters())
    with torch.no_grad():
        for name, p in named.items():
            if p.requires_grad:
                p.copy_(weights[name])
