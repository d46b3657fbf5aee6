"""A trained model: load it from its directory, ask it for labels. Loading runs no code from the directory.

    model = xmc.load("runs/light_xml")
    model.predict(["a text to label"], k=5)      # [[("label", 0.93), …]]

A model directory: `config.yaml`, `labels.parquet`, the system's own files. An ensemble's instead holds the models of
its members, of one system or of several, in `members/`, and in `ensemble.json` how their lists become one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow.parquet as pq
import scipy.sparse as sp

from xmc.config import CommonConfig, read_yaml
from xmc.errors import InputError
from xmc.evaluation.combine import Combination, wider
from xmc.labels.topk import TopK
from xmc.settings import from_mapping
from xmc.systems import SYSTEMS, find_system

CONFIG_FILE = "config.yaml"
LABELS_FILE = "labels.parquet"
MEMBERS, ENSEMBLE_FILE = "members", "ensemble.json"
# What stands for the system in the settings of an ensemble of several systems.
SEVERAL_SYSTEMS = "ensemble"


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

    def top_k_of_features(self, features: sp.csr_matrix, k: int = 10) -> TopK:
        """The same (N, k) for documents that are sparse features (N × D), where the system reads such."""
        if not hasattr(self.predictor, "top_k_of_features"):
            raise InputError("this model reads texts; documents that have features only need system=linear")
        return self.predictor.top_k_of_features(features, k)

    def predict(self, texts: Sequence[str], k: int = 10) -> list[list[tuple[str, float]]]:
        """For each text its k best labels by name with their scores, best first."""
        if isinstance(texts, str):
            raise InputError("predict takes a list of texts; put the one text into a list")
        top = self.top_k(texts, k)
        return [
            [(str(self.label_names[i]), float(score)) for i, score in zip(ids, scores, strict=True) if i >= 0]
            for ids, scores in zip(top.label_ids, top.scores, strict=True)
        ]

    def explain(self, texts: Sequence[str], k: int = 10) -> list[list[dict[str, Any]]]:
        """For each text its k best labels, best first, as {"label", "score", …} with what the system says that it read
        for them, e.g. AttentionXML "words": [{"word", "weight"}, …]."""
        top = self.top_k(texts, k)
        read = explanations(self.predictor, texts, top)
        return [
            [
                {"label": str(self.label_names[i]), "score": float(score), **why}
                for i, score, why in zip(*row, strict=True)
                if i >= 0
            ]
            for row in zip(top.label_ids, top.scores, read, strict=True)
        ]


def explanations(predictor: Predictor, texts: Sequence[str], top: TopK) -> list[list[dict[str, Any]]]:
    """What a predictor read for each text and each of its labels (N × k), where its system can say it."""
    if not hasattr(predictor, "explain"):
        raise InputError(
            "this model's system does not say what it read for a label; attention_xml and treader_xml do"
        )
    return predictor.explain(texts, top)


class Ensemble:
    """The predictor of several models: each is asked for more labels than are wanted, and their lists are combined."""

    def __init__(self, members: Sequence[Model], combination: Combination) -> None:
        self._members, self._combination = members, combination

    def top_k(self, texts: Sequence[str], k: int) -> TopK:
        return self._combined(lambda member, wide: member.top_k(texts, wide), k)

    def top_k_of_features(self, features: sp.csr_matrix, k: int) -> TopK:
        return self._combined(lambda member, wide: member.top_k_of_features(features, wide), k)

    def explain(self, texts: Sequence[str], top: TopK) -> list[list[dict[str, Any]]]:
        """What the first member that says it read."""
        able = [member.predictor for member in self._members if hasattr(member.predictor, "explain")]
        return explanations((able or [self._members[0].predictor])[0], texts, top)

    def _combined(self, ask: Callable[[Model, int], TopK], k: int) -> TopK:
        wide = wider(k, len(self._members[0].label_names))
        return self._combination([ask(member, wide) for member in self._members], k)


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
    system = values.get("system")
    if system not in (*SYSTEMS, SEVERAL_SYSTEMS):
        raise InputError(f"{file}: system is {system!r}, which this version does not know")
    kind = CommonConfig if system == SEVERAL_SYSTEMS else find_system(system).Config
    return from_mapping(kind, values, str(file))


def load(path: str | Path) -> Model:
    """Load the model of a run or model directory."""
    directory = model_directory(path)
    try:
        names = pq.ParquetFile(directory / LABELS_FILE).read(["name"]).column("name").to_numpy()
    except (OSError, ValueError) as error:
        raise InputError(f"{directory / LABELS_FILE}: damaged or missing ({error})") from error
    return Model(names, _load_predictor(directory, names))


def _load_predictor(directory: Path, names: np.ndarray) -> Predictor:
    if (directory / MEMBERS).is_dir():
        homes = sorted((directory / MEMBERS).iterdir(), key=lambda home: int(home.name))
        members = [Model(names, _load_predictor(home, names)) for home in homes]
        return Ensemble(members, Combination.load(directory / ENSEMBLE_FILE, len(members)))
    config = read_config(directory)
    return find_system(config.system).load_predictor(directory, config, len(names))
