"""What every system's settings have in common, and how a preset with `key=value` words becomes checked settings.

A system adds its own sections by subclassing `CommonConfig` beside its code; `load` finds the class by the preset's
`system`. So a setting that a system does not have is refused instead of ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from raycluster.tracking import TrackingConfig
from xmc.corpus.settings import CorpusConfig
from xmc.errors import InputError
from xmc.evaluation.combine import EnsembleConfig
from xmc.evaluation.metrics import MetricsConfig
from xmc.settings import from_mapping, merge, parse_overrides
from xmc.systems import SYSTEMS, find_system

PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class CorpusSection(CorpusConfig):
    # A directory or file that a reader knows, a built corpus, or `sample` for the bundled one.
    path: str = "sample"
    # The data set's published name (Amazon-670K …), which its propensity curve goes by.
    name: str = ""


@dataclass(frozen=True)
class RunConfig:
    # Where the run keeps its stages, model and results; empty: runs/<preset>.
    dir: str = ""
    # Labels a document in the saved predictions for the test part; at least the largest of metrics.ks.
    top_k: int = 10

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise InputError(f"run.top_k is {self.top_k}; it must be at least 1")


@dataclass(frozen=True)
class CommonConfig:
    # One of the five systems, or linear.
    system: str
    # Everything random follows from it, but for the corpus' split (corpus.seed): same seeds and workers, same result.
    seed: int = 1
    run: RunConfig = field(default_factory=RunConfig)
    corpus: CorpusSection = field(default_factory=CorpusSection)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    # An ensemble: each member is this configuration with settings put over it, e.g. {seed: 2} or {encoder: {name: …}}.
    members: tuple[dict, ...] = ()
    ensemble: EnsembleConfig = field(default_factory=EnsembleConfig)
    # An ablation: each is this configuration with settings put over it, and a `name`; all are trained and measured.
    variants: tuple[dict, ...] = ()

    def __post_init__(self) -> None:
        if self.run.top_k < max(self.metrics.ks):
            raise InputError(
                f"run.top_k is {self.run.top_k}, but metrics.ks asks for {max(self.metrics.ks)} places; raise run.top_k"
            )

    def validates_labels(self, num_labels: int) -> bool:
        """Whether what training measures on validation is about labels, not about clusters of them, which differ
        between configurations."""
        return hasattr(self, "train")


def load(preset: str, overrides: Sequence[str] = ()) -> Any:
    """The checked settings of a preset (a name, or a YAML file's path) with overrides put over it."""
    path = preset_path(preset)
    values = merge(read_preset(path), parse_overrides(overrides))
    name = values.get("system")
    if name not in SYSTEMS:
        raise InputError(f"{path}: system is {name!r}; it is one of: {', '.join(SYSTEMS)}")
    values = merge({"run": {"dir": f"runs/{path.stem}"}}, values)
    return from_mapping(find_system(name).Config, values, str(preset))


def read_preset(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A preset's settings, put over those of the one that it `extends`; it is extended itself by those `above`."""
    values = read_yaml(path)
    base = values.pop("extends", None)
    if base is None:
        return values
    if path in above:
        raise InputError(f"{path}: extends itself, by way of {' and '.join(p.stem for p in above)}")
    return merge(read_preset(preset_path(str(base)), (*above, path)), values)


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: holds no settings")
    return values


def preset_path(preset: str) -> Path:
    """The file of a preset's name, or the YAML file that is named itself."""
    if preset.endswith((".yaml", ".yml")):
        path = Path(preset)
        if not path.is_file():
            raise InputError(f"{preset}: no such file")
        return path
    path = PRESETS / f"{preset}.yaml"
    if not path.is_file():
        names = sorted(p.stem for p in PRESETS.glob("*.yaml"))
        close = difflib.get_close_matches(preset, names, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(
            f"there is no preset {preset!r}; {hint}known are: {', '.join(names)}; or give a .yaml file"
        )
    return path
