"""Connects to the Ray cluster that there is, or starts a local one for this process."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import ray
import ray.data

# Ray's defaults suit large clusters: a training group on a busy laptop needs longer to come up, and its
# notices are noise to someone who typed one command. What the user has set stays.
_ENVIRONMENT = {
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
}
# What a worker prints stays in Ray's logs; what the user must know of it comes another way (see follow).
_QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}


def cache_dir() -> Path:
    """Where compiled kernels live between runs: XMC_CACHE, or `~/.cache/xmc`."""
    return Path(os.environ.get("XMC_CACHE", Path.home() / ".cache" / "xmc")).resolve()


def connect(
    *, local: bool = False, num_cpus: int | None = None, object_store_bytes: int | None = None
) -> None:
    """Join the cluster of RAY_ADDRESS (set inside `ray job submit`) or of this machine's `ray start`.

    Where there is none, or with `local`, start one that ends with this process; `num_cpus` and
    `object_store_bytes` shape only such a cluster.
    """
    if ray.is_initialized():
        return
    _configure_data()
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(cache_dir() / "torch_extensions"))
    if not local:
        try:
            ray.init(address="auto", **_QUIET)
            return
        except ConnectionError:
            if os.environ.get("RAY_ADDRESS"):
                raise
    ray.init(
        address="local",
        num_cpus=num_cpus,
        object_store_memory=object_store_bytes,
        **_QUIET,
    )


def _configure_data() -> None:
    """Rows keep their order, whatever task ends first; commands show their own progress in place of Ray Data's."""
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
