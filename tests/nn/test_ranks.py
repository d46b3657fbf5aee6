"""The sharded computation equals the unsharded one, at 1, 2 and 3 real ranks."""

from __future__ import annotations

import pytest

from tests.nn.rank_checks import CHECKS
from tests.nn.ranks import run_checks

_errors: dict[int, dict[str, list[str]]] = {}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_ranks(world: int, check: str) -> None:
    if world not in _errors:  # starting processes costs seconds: once for all checks
        _errors[world] = run_checks(world, CHECKS)
    assert not any(_errors[world][check]), "\n".join(_errors[world][check])
