"""Ray Data as a corpus needs it: rows keep their order, and a small job prints nothing of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ray.data import DataContext


@contextmanager
def ordered_data(block_bytes: int | None = None) -> Iterator[None]:
    """Datasets made inside keep row order. `block_bytes` bounds their blocks; running them inside is quiet."""
    context = DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    if block_bytes is not None:
        context.target_max_block_size = block_bytes
    logger = logging.getLogger("ray.data")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of what is meant, and of CPUs that are busy for a moment
    try:
        with DataContext.current(context):
            yield
    finally:
        logger.setLevel(level)
