"""What MLflow shows of a run, also where its store fails for a while."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from raycluster import tracking
from raycluster.tracking import Tracker, TrackingConfig


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrackingConfig:
    # Making a store takes seconds.
    return TrackingConfig(f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}")


@pytest.fixture
def tracker(config: TrackingConfig, tmp_path: Path) -> Tracker:
    return Tracker(tmp_path, config, "mine")


def row(step: int, **metrics: float) -> dict[str, float]:
    return {"step": step, "time": 1.7e9 + step, "loss": 1 / step} | metrics


def logged(tracker: Tracker) -> list[int]:
    history = MlflowClient(tracker.uri).get_metric_history(tracker.run_id, "loss")
    return sorted(metric.step for metric in history)


def fail(*given: Any, **named: Any) -> None:
    raise MlflowException("database is locked")


def test_the_final_figures_are_shown_not_the_last_ones_of_training(
    tracker: Tracker, config: TrackingConfig, tmp_path: Path
):
    tracker.steps([row(1), row(2, valid_P_at_1=30.0)])
    tracker.results({"valid_P@1": 40.0, "P@1": 50.0}, [])
    shown = MlflowClient(tracker.uri).get_run(tracker.run_id).data.metrics
    assert (shown["valid_P_at_1"], shown["P_at_1"]) == (40.0, 50.0)
    again = Tracker(tmp_path, config, "mine")  # trained before, measured again now
    again.results({"valid_P@1": 20.0}, [])
    assert MlflowClient(tracker.uri).get_run(tracker.run_id).data.metrics["valid_P_at_1"] == 20.0


def test_a_run_without_steps_has_figures(tracker: Tracker):
    tracker.results({"P@1": 50.0}, [])
    assert MlflowClient(tracker.uri).get_run(tracker.run_id).data.metrics == {"P_at_1": 50.0}


def test_steps_wait_for_a_store_that_fails(tracker: Tracker, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as locked:
        locked.setattr(tracker._client, "log_batch", fail)
        tracker.steps([row(1)])
        tracker.steps([row(2)])
    assert logged(tracker) == []
    tracker.steps([row(2), row(3)])  # 2 once more: after a resume
    assert logged(tracker) == [1, 2, 3]
    with monkeypatch.context() as locked:
        locked.setattr(tracker._client, "log_batch", fail)
        tracker.steps([row(4)])
        with pytest.raises(MlflowException, match="locked"):
            tracker.finish()  # the last attempt
    tracker.finish()
    assert logged(tracker) == [1, 2, 3, 4]


def test_what_waits_is_bounded(tracker: Tracker, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tracking, "_MOST_WAITING", 3)
    with monkeypatch.context() as locked:
        locked.setattr(tracker._client, "log_batch", fail)
        for step in range(1, 6):
            tracker.steps([row(step)])
    tracker.finish()
    assert logged(tracker) == [3, 4, 5]
