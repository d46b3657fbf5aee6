"""Row optimisers against torch.optim; sharded training with them is in test_ranks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from xmc.errors import InputError
from xmc.nn.optimisers import RowOptimiserConfig, parameter_groups, row_optimiser


def _tables(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.randn(30, 5, dtype=dtype, generator=torch.Generator().manual_seed(0))
    return table, table.clone().requires_grad_()


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_dense_rules_equal_torch(name: str) -> None:
    table, reference = _tables(torch.float64)
    ours = row_optimiser(table, RowOptimiserConfig(name=name, weight_decay=0.1))
    kinds = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1)}
    kinds["adamw"] = lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1)
    theirs = kinds[name]([reference])
    for step in range(6):
        gradient = torch.randn(30, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        ours.begin_step()
        for start in range(0, 30, 8):
            ours.update(table, start, min(start + 8, 30), gradient[start : start + 8], 0.1 / (step + 1))
        theirs.param_groups[0]["lr"] = 0.1 / (step + 1)
        reference.grad = gradient
        theirs.step()
        torch.testing.assert_close(table, reference.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lazy_adam_equals_sparse_adam(dtype: torch.dtype) -> None:
    table, reference = _tables(dtype)
    ours = row_optimiser(table, RowOptimiserConfig(name="lazy_adam", weight_decay=0.0))
    theirs = torch.optim.SparseAdam([reference], lr=0.1)
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randperm(30, generator=generator)[: 4 * step]
        gradient = torch.randn(rows.numel(), 5, dtype=dtype, generator=generator)
        ours.begin_step()
        ours.update_rows(table, rows, gradient, 0.1)
        reference.grad = torch.sparse_coo_tensor(rows[None], gradient, (30, 5), check_invariants=True)
        theirs.step()
        tolerance = 1e-5 if dtype == torch.float32 else 1e-10
        torch.testing.assert_close(table, reference.detach(), rtol=tolerance, atol=tolerance)


def test_lazy_adam_leaves_untouched_rows_and_their_state() -> None:
    table, _ = _tables(torch.float32)
    before = table.clone()
    ours = row_optimiser(table, RowOptimiserConfig(name="lazy_adam", weight_decay=0.5))
    for _ in range(3):
        ours.begin_step()
        ours.update_rows(table, torch.tensor([4, 2]), torch.ones(2, 5), 0.1)
    touched = (table != before).any(1).nonzero()[:, 0].tolist()
    assert touched == [2, 4]
    assert ours.state["exp_avg"].any(1).nonzero()[:, 0].tolist() == [2, 4]


def test_lazy_adam_formula_for_other_devices() -> None:
    """The torch formula, reached on a CPU through a three-dimensional table, equals the compiled loop."""
    flat, _ = _tables(torch.float64)
    cube = flat.clone().view(30, 5, 1)
    config = RowOptimiserConfig(name="lazy_adam", weight_decay=0.3)
    loop, formula = row_optimiser(flat, config), row_optimiser(cube, config)
    rows = torch.tensor([7, 0, 29])
    for step in range(3):
        gradient = torch.full((3, 5), step - 1.5, dtype=torch.float64)
        for optimiser, table, g in ((loop, flat, gradient), (formula, cube, gradient.view(3, 5, 1))):
            optimiser.begin_step()
            optimiser.update_rows(table, rows, g, 0.1)
    torch.testing.assert_close(cube.view(30, 5), flat, rtol=1e-10, atol=1e-12)


def test_dense_optimisers_refuse_single_rows() -> None:
    table, _ = _tables(torch.float32)
    with pytest.raises(InputError, match="lazy_adam"):
        row_optimiser(table, RowOptimiserConfig(name="adamw")).update_rows(
            table, torch.tensor([1]), torch.ones(1, 5), 0.1
        )


@pytest.mark.parametrize("bad", [{"name": "adagrad"}, {"beta1": 1.0}, {"eps": 0.0}, {"weight_decay": -1.0}])
def test_config_is_checked(bad: dict) -> None:
    with pytest.raises(InputError):
        RowOptimiserConfig(**bad)


def test_biases_and_norms_do_not_decay() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    decayed, kept = parameter_groups(module, 0.01)
    assert [p.shape for p in decayed["params"]] == [(4, 3)]
    assert decayed["weight_decay"] == 0.01
    assert len(kept["params"]) == 3
    assert kept["weight_decay"] == 0.0


def test_numba_leaves_torch_the_threads_it_has():
    """Numba sets OpenMP's threads when it starts its own; a rank that shares its machine has fewer."""
    program = (
        "import torch; from xmc.nn import row_kernels; torch.set_num_threads(1); row_kernels.use_torch_threads(); "
        "import numba; print(torch.get_num_threads(), numba.get_num_threads())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"NUMBA_NUM_THREADS": "2"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    assert done.stdout.split() == ["1", "1"]
