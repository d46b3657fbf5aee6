"""One Ray for the whole test run: starting one costs seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from raycluster import session


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    session.connect(local=True, num_cpus=2, object_store_bytes=512 * 2**20)
    yield
    ray.shutdown()
