"""Connects to the Ray cluster that there is, or starts a local one for this process."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import ray
import ray.data

from xmc.errors import InputError

# Ray's defaults suit large clusters: a training group on a busy laptop needs longer to come up, and its
# notices are noise to someone who typed one command. What the user has set stays.
_ENVIRONMENT = {
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    # glibc gives large blocks back to the system at once, so that every training step on a CPU faults its memory
    # in anew, page by small page: kept, in one arena and in huge pages, it saves a tenth of a step.
    "GLIBC_TUNABLES": ":".join(
        f"glibc.malloc.{name}"
        for name in ("hugetlb=1", "arena_max=1", f"trim_threshold={2**32}", f"mmap_threshold={2**32}")
    ),
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
    address = None if local else running_cluster()
    if address:
        try:
            ray.init(address=address, **_QUIET)
            return
        except ConnectionError:
            if os.environ.get("RAY_ADDRESS"):
                raise InputError(f"RAY_ADDRESS is {address}, but no Ray cluster answers there") from None
            # The machine was restarted without `ray stop`: what the file names is gone.
    ray.init(
        address="local",
        num_cpus=num_cpus,
        object_store_memory=object_store_bytes,
        include_dashboard=False,  # a dozen processes that nobody looks at while one command runs
        **_QUIET,
    )


def running_cluster() -> str | None:
    """The address of the cluster to join: RAY_ADDRESS, or what `ray start` left on this machine.

    Not address="auto": that also finds clusters which other processes started for themselves, and which end with them.
    """
    if os.environ.get("RAY_ADDRESS"):
        return os.environ["RAY_ADDRESS"]
    file = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    return file.read_text().strip() if file.exists() else None


def _configure_data() -> None:
    """Rows keep their order, whatever task ends first; commands show their own progress in place of Ray Data's."""
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
