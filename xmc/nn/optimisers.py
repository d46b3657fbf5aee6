"""Optimisers for label rows, which live outside the data-parallel engine: SGD with momentum, AdamW, row-lazy Adam.

They work on slices of rows right after the slice's gradient is computed, so that the gradient of all rows never has to
exist. The encoder's own optimiser is torch's; `parameter_groups` says which of its weights decay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from xmc.errors import InputError
from xmc.nn import row_kernels


@dataclass(frozen=True)
class RowOptimiserConfig:
    # sgd, adamw, or lazy_adam (only touched rows move: for candidate lists)
    name: str = "adamw"
    # of sgd
    momentum: float = 0.9
    # of the Adams
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    # decoupled in the Adams (a lazy row decays when it is touched), added to the gradient in sgd; biases never decay
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        if self.name not in _KINDS:
            raise InputError(f"optimiser {self.name!r} is unknown; choose one of {', '.join(sorted(_KINDS))}")
        for key in ("momentum", "beta1", "beta2"):
            if not 0.0 <= getattr(self, key) < 1.0:
                raise InputError(f"optimiser {key} must lie in [0, 1); got {getattr(self, key)}")
        if self.eps <= 0.0 or self.weight_decay < 0.0:
            raise InputError("optimiser eps must be above 0 and weight_decay not below 0")


class RowOptimiser:
    """State for one table of rows. `begin_step` once a step, then `update` each slice (or `update_rows`) once."""

    state_names: tuple[str, ...] = ()

    def __init__(self, table: Tensor, config: RowOptimiserConfig, weight_decay: float | None = None) -> None:
        self.config = config
        self.weight_decay = config.weight_decay if weight_decay is None else weight_decay
        self.step = 0
        self._table = table

    @cached_property
    def state(self) -> dict[str, Tensor]:
        """By name, each as large as the table. Made when first asked for: rows that only predict need none."""
        return {name: torch.zeros_like(self._table) for name in self.state_names}

    def begin_step(self) -> None:
        self.step += 1

    def update(self, table: Tensor, start: int, stop: int, gradient: Tensor, lr: float) -> None:
        """Move rows [start, stop) of table (L_r × d) by their gradient (stop − start × d)."""
        raise NotImplementedError

    def update_rows(self, table: Tensor, rows: Tensor, gradient: Tensor, lr: float) -> None:
        """Move the unique `rows` (U,) of table by their gradient (U × d); the others stay as they are."""
        raise InputError(
            f"optimiser {self.config.name!r} moves every row at every step; candidate lists need lazy_adam"
        )


class Sgd(RowOptimiser):
    """torch.optim.SGD's rule. Without momentum there is no state."""

    def __init__(self, table: Tensor, config: RowOptimiserConfig, weight_decay: float | None = None) -> None:
        super().__init__(table, config, weight_decay)
        if config.momentum > 0.0:
            self.state_names = ("momentum",)

    def update(self, table: Tensor, start: int, stop: int, gradient: Tensor, lr: float) -> None:
        if start == stop:
            return
        torch._fused_sgd_(
            [table[start:stop]],
            [gradient],
            [momentum[start:stop] for momentum in self.state.values()],
            weight_decay=self.weight_decay,
            momentum=self.config.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=self.step == 1,
        )


class AdamW(RowOptimiser):
    """torch.optim.AdamW's rule."""

    state_names = ("exp_avg", "exp_avg_sq")

    def update(self, table: Tensor, start: int, stop: int, gradient: Tensor, lr: float) -> None:
        if start == stop:
            return
        torch._fused_adamw_(
            [table[start:stop]],
            [gradient],
            [self.state["exp_avg"][start:stop]],
            [self.state["exp_avg_sq"][start:stop]],
            [],
            [torch.tensor(float(self.step), device=table.device)],
            lr=lr,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            weight_decay=self.weight_decay,
            eps=self.config.eps,
            amsgrad=False,
            maximize=False,
        )


class LazyAdam(RowOptimiser):
    """torch.optim.SparseAdam's rule: untouched rows and their moments stay; the step count is the table's, not a row's.

    Weight decay, where asked for, reaches a row only when it is touched.
    """

    state_names = ("exp_avg", "exp_avg_sq")

    def update(self, table: Tensor, start: int, stop: int, gradient: Tensor, lr: float) -> None:
        self.update_rows(table, torch.arange(start, stop, device=table.device), gradient, lr)

    def update_rows(self, table: Tensor, rows: Tensor, gradient: Tensor, lr: float) -> None:
        if rows.numel() == 0:
            return
        beta1, beta2, eps = self.config.beta1, self.config.beta2, self.config.eps
        step_size = lr * math.sqrt(1.0 - beta2**self.step) / (1.0 - beta1**self.step)
        decay = 1.0 - lr * self.weight_decay
        moments = self.state["exp_avg"], self.state["exp_avg_sq"]
        if table.device.type == "cpu" and table.dim() == 2:
            row_kernels.use_torch_threads()
            arrays = [x.numpy() for x in (table, *moments, rows, gradient)]
            row_kernels.adam_rows(*arrays, step_size, decay, beta1, beta2, eps)
            return
        first = moments[0][rows].lerp_(gradient, 1.0 - beta1)
        second = moments[1][rows].mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        moments[0].index_copy_(0, rows, first)
        moments[1].index_copy_(0, rows, second)
        moved = table[rows].mul_(decay).addcdiv_(first, second.sqrt().add_(eps), value=-step_size)
        table.index_copy_(0, rows, moved)


_KINDS: dict[str, type[RowOptimiser]] = {"sgd": Sgd, "adamw": AdamW, "lazy_adam": LazyAdam}


def row_optimiser(table: Tensor, config: RowOptimiserConfig) -> RowOptimiser:
    """The optimiser that `config` names, for `table` (L_r × d) or a bias (L_r,), which does not decay."""
    return _KINDS[config.name](table, config, weight_decay=0.0 if table.dim() == 1 else None)


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Parameters of the encoder's side for torch.optim: biases and normalisation weights (all vectors) do not decay."""
    trained = [p for p in module.parameters() if p.requires_grad]
    groups: list[dict[str, object]] = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
