"""A trained model: load it from its directory, ask it for labels. Loading runs no code from the directory.

    model = xmc.load("runs/light_xml")
    model.predict(["a text to label"], k=5)      # [[("label", 0.93), …]]

A model directory: `config.yaml`, `labels.parquet`, the system's own files, `metrics.json`. An ensemble's instead holds
the models of its members in `members/` and averages their scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow.parquet as pq
import scipy.sparse as sp

from xmc.config import read_yaml
from xmc.errors import InputError
from xmc.labels.topk import TopK, top_k_of_csr
from xmc.settings import from_mapping
from xmc.systems import SYSTEMS, find_system

CONFIG_FILE = "config.yaml"
LABELS_FILE = "labels.parquet"
# An ensemble asks each member for this many times as many labels as it is asked for: what one ranks low, another
# may rank high.
_WIDER = 5


class Predictor(Protocol):
    def top_k(self, texts: Sequence[str], k: int) -> TopK:
        """(N, k) best labels of N texts."""
        ...


@dataclass(frozen=True)
class Model:
    """Names best labels of texts. `label_names` (L,) by label id."""

    label_names: np.ndarray
    predictor: Predictor

    def top_k(self, texts: Sequence[str], k: int = 10) -> TopK:
        """Label ids and scores (N, k), best first."""
        if k < 1:
            raise InputError(f"k is {k}; ask for at least one label")
        return self.predictor.top_k(texts, k)

    def predict(self, texts: Sequence[str], k: int = 10) -> list[list[tuple[str, float]]]:
        """For each text its k best labels by name with their scores, best first."""
        if isinstance(texts, str):
            raise InputError("predict takes a list of texts; put the one text into a list")
        top = self.top_k(texts, k)
        return [
            [(str(self.label_names[i]), float(score)) for i, score in zip(ids, scores, strict=True) if i >= 0]
            for ids, scores in zip(top.label_ids, top.scores, strict=True)
        ]


class MeanOfMembers:
    """An ensemble: the mean of the members' scores, a label that a member does not name counting 0 there."""

    def __init__(self, members: Sequence[Predictor], num_labels: int) -> None:
        self._members, self._num_labels = members, num_labels

    def top_k(self, texts: Sequence[str], k: int) -> TopK:
        wide = min(_WIDER * k, self._num_labels)
        parts = [member.top_k(texts, wide) for member in self._members]
        total = _matrix(parts[0], self._num_labels)
        for part in parts[1:]:
            total = total + _matrix(part, self._num_labels)
        return top_k_of_csr(sp.csr_matrix(total / len(parts)), k)


def _matrix(top: TopK, num_labels: int) -> sp.csr_matrix:
    """(N × L) sparse scores."""
    kept = top.label_ids >= 0
    indptr = np.concatenate([[0], np.cumsum(kept.sum(1))])
    return sp.csr_matrix((top.scores[kept], top.label_ids[kept], indptr), shape=(len(top), num_labels))


def model_directory(path: str | Path) -> Path:
    """The model directory that a run's directory or the path itself is."""
    path = Path(path)
    for candidate in (path / "model", path):
        if (candidate / CONFIG_FILE).is_file():
            return candidate.resolve()
    if (path / "stages").is_dir():
        raise InputError(
            f"{path}: this run has no finished model yet; give its training command again to finish it"
        )
    raise InputError(
        f"{path}: no model there ({CONFIG_FILE} is missing); train one: python -m xmc.train PRESET run.dir=DIR"
    )


def read_config(directory: Path) -> Any:
    """The settings that a model was trained with."""
    file = directory / CONFIG_FILE
    values = read_yaml(file)
    if values.get("system") not in SYSTEMS:
        raise InputError(f"{file}: system is {values.get('system')!r}, which this version does not know")
    return from_mapping(find_system(values["system"]).Config, values, str(file))


def load(path: str | Path) -> Model:
    """Load the model of a run or model directory."""
    directory = model_directory(path)
    try:
        names = pq.ParquetFile(directory / LABELS_FILE).read(["name"]).column("name").to_numpy()
    except (OSError, ValueError) as error:
        raise InputError(f"{directory / LABELS_FILE}: damaged or missing ({error})") from error
    members = sorted((directory / "members").glob("*"))
    if members:
        predictors = [_load_predictor(member, len(names)) for member in members]
        return Model(names, MeanOfMembers(predictors, len(names)))
    return Model(names, _load_predictor(directory, len(names)))


def _load_predictor(directory: Path, num_labels: int) -> Predictor:
    config = read_config(directory)
    return find_system(config.system).load_predictor(directory, config, num_labels)
