"""The input formats, one a module, and the search for the one that a path has."""

from __future__ import annotations

from pathlib import Path

from xmc.corpus.readers import (
    csv_files,
    json_lines,
    parquet,
    pecos,
    text_and_labels,
    xc_label_features,
    xc_sparse,
)
from xmc.corpus.readers.source import Reader
from xmc.errors import InputError

READERS: tuple[Reader, ...] = (
    json_lines,
    parquet,
    csv_files,
    text_and_labels,
    xc_label_features,
    xc_sparse,
    pecos,
)

_SHOWN = 12


def find_reader(path: Path) -> Reader:
    """The reader whose format the path has; an InputError lists the formats and what was found instead."""
    if not path.exists():
        raise InputError(f"{path}: no such file or directory")
    fitting = [reader for reader in READERS if reader.sniff(path)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = " and ".join(reader.FORMAT for reader in fitting)
        raise InputError(f"{path}: looks like {names}; keep the files of one format, or name the train file")
    known = "\n".join(f"  {reader.FORMAT}: {reader.NEEDS}" for reader in READERS)
    raise InputError(f"{path}: no known format. {_what_is_there(path)}\nKnown formats:\n{known}")


def _what_is_there(path: Path) -> str:
    if path.is_file():
        return f"It is a file of {path.stat().st_size:,} bytes."
    names = sorted(entry.name + "/" * entry.is_dir() for entry in path.iterdir())
    if not names:
        return "The directory is empty."
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"Found there: {', '.join(names[:_SHOWN])}{more}."
