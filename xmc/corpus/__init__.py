"""Corpora: readers of every input format, the build into one Parquet form, and the opened result."""

from __future__ import annotations

from pathlib import Path

from xmc.corpus.build import build
from xmc.corpus.settings import CorpusConfig
from xmc.corpus.store import Corpus, LabelTable

__all__ = ["Corpus", "CorpusConfig", "LabelTable", "build", "sample_path"]


def sample_path() -> Path:
    """The bundled sample: real documents and labels to try everything with."""
    return Path(__file__).parent / "sample"
