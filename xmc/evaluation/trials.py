"""The trials of a sweep as plain records on disk: what was chosen, what was measured, which ones win. Runs nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from xmc.files import atomic_write_text

RECORD = "trial.json"


@dataclass(frozen=True)
class Objective:
    """What a sweep looks for: the highest `metric`, and if `minimise` is given with as little of that as can be."""

    metric: str
    minimise: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.metric,) if self.minimise is None else (self.metric, self.minimise)


@dataclass
class Trial:
    """One configuration that a sweep tries."""

    number: int
    # What the search chose, by the names that the space gave.
    params: dict[str, Any]
    # The settings that follow from it, put over the preset's: dotted name → value.
    settings: dict[str, Any]
    # done: measured to its end; stopped: fell behind and was ended early; failed: see `error`.
    state: Literal["running", "done", "stopped", "failed"] = "running"
    # What it measured on its way, the last one at its end.
    reports: list[dict[str, float]] = field(default_factory=list)
    error: str = ""

    @property
    def name(self) -> str:
        return f"{self.number:03d}"

    def value(self, name: str) -> float | None:
        """The last measured value of a metric, None where there is none."""
        found = self.reports[-1].get(name) if self.reports else None
        return None if found is None or not math.isfinite(found) else found

    def save(self, root: Path) -> None:
        """Write the record into the trial's own directory below `root`."""
        atomic_write_text(root / self.name / RECORD, json.dumps(asdict(self), indent=2))

    @classmethod
    def load(cls, directory: Path) -> Trial:
        return cls(**json.loads((directory / RECORD).read_text()))


def load_trials(root: Path) -> list[Trial]:
    """The trials below `root`, by number."""
    return sorted((Trial.load(path.parent) for path in root.glob(f"*/{RECORD}")), key=lambda t: t.number)


def best(trials: Iterable[Trial], objective: Objective) -> Trial | None:
    """The finished trial with the highest metric, the first of equals."""
    found = [trial for trial in trials if _measured(trial, objective)]
    return max(found, key=lambda trial: (trial.value(objective.metric), -trial.number), default=None)


def front(trials: Sequence[Trial], objective: Objective) -> list[Trial]:
    """The finished trials that no other one beats: for two objectives the Pareto front, for one the best trial."""
    if objective.minimise is None:
        winner = best(trials, objective)
        return [] if winner is None else [winner]
    points = {t.number: _point(t, objective) for t in trials if _measured(t, objective)}
    return [
        trial
        for trial in trials
        if trial.number in points
        and not any(_beats(other, points[trial.number]) for other in points.values())
    ]


def _measured(trial: Trial, objective: Objective) -> bool:
    return trial.state == "done" and all(trial.value(name) is not None for name in objective.names)


def _point(trial: Trial, objective: Objective) -> tuple[float, float]:
    """(metric, minus what is minimised): more of both is better."""
    assert objective.minimise is not None
    gained, spent = trial.value(objective.metric), trial.value(objective.minimise)
    assert gained is not None
    assert spent is not None
    return gained, -spent


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] >= other[0] and one[1] >= other[1]
