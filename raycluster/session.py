"""Connects to the Ray cluster that there is, or starts a local one for this process."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import ray

# Ray's defaults suit large clusters. A training group on a busy laptop needs longer to come up, and Ray's
# usage statistics and per-task log lines are noise to someone who typed one command.
_DEFAULTS = {
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "1",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def cache_dir() -> Path:
    """Where compiled kernels live between runs: XMC_CACHE, or `~/.cache/xmc`."""
    return Path(os.environ.get("XMC_CACHE", Path.home() / ".cache" / "xmc")).resolve()


def connect(num_cpus: int | None = None, object_store_bytes: int | None = None) -> None:
    """Join the cluster named by RAY_ADDRESS (set inside `ray job submit`) or a running local one; else start one.

    `num_cpus` and `object_store_bytes` only shape a cluster started here.
    """
    if ray.is_initialized():
        return
    for key, value in _DEFAULTS.items():
        os.environ.setdefault(key, value)
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(cache_dir() / "torch_extensions"))
    os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_dir() / "numba"))
    if os.environ.get("RAY_ADDRESS"):
        ray.init(logging_level=logging.WARNING)
    else:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            object_store_memory=object_store_bytes,
            logging_level=logging.WARNING,
        )
