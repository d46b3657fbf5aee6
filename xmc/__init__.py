"""xmc: extreme multi-label text classification on Ray, from thousands to millions of labels."""

from __future__ import annotations

from typing import Any

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    # `xmc.load` without the seconds that torch and Ray take to import in every command.
    if name == "load":
        from xmc.model import load

        return load
    raise AttributeError(f"module 'xmc' has no attribute {name!r}")
