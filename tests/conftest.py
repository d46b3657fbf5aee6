"""One Ray for the whole test run: starting one costs seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import ray

from raycluster import session


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    session.connect(local=True, num_cpus=2, object_store_bytes=512 * 2**20)
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address  # commands that tests run join it too
    yield
    del os.environ["RAY_ADDRESS"]
    ray.shutdown()
