"""Every run as an MLflow run: settings, metrics a step, tables, plots and the model. A resumed run continues its own.

The default store is an SQLite file beside the run's directory, so that all runs of one folder are compared in one
place; the MLflow run's id is kept in the run's directory.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmc.files import atomic_write_text

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells of every table of its store
RUN_FILE = "mlflow.json"
# Begins the names of the figures that a sweep's own run has: those of its best trial.
BEST_OF_SWEEP = "best_"
# The store takes at most this many at once, and values no longer than this.
_PARAMS_AT_ONCE, _METRICS_AT_ONCE, _LONGEST_VALUE = 100, 1000, 500
# As many steps wait for a store that cannot be reached; the file of the stage has them all.
_MOST_WAITING = 10_000


@dataclass(frozen=True)
class TrackingConfig:
    # MLflow's store; empty: the file mlflow.db beside the run's directory.
    uri: str = ""
    experiment: str = "xmc"


class Tracker:
    """One MLflow run, found again by the file in the run's directory."""

    def __init__(self, run_dir: Path, config: TrackingConfig, name: str, parent: str | None = None) -> None:
        from mlflow.tracking import MlflowClient

        self.uri = config.uri or f"sqlite:///{run_dir.resolve().parent / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=self.uri)
        self._file = run_dir / RUN_FILE
        self.run_id = self._resume() or self._create(run_dir, config.experiment, name, parent)
        self._last_step = self._steps_logged()
        self._waiting: list[Mapping[str, float]] = []

    def parameters(self, flat: Mapping[str, Any]) -> None:
        """Log settings; what was logged before stays (MLflow refuses changed ones)."""
        from mlflow.entities import Param

        known = self._client.get_run(self.run_id).data.params
        new = [Param(key, str(value)[:_LONGEST_VALUE]) for key, value in flat.items() if key not in known]
        for start in range(0, len(new), _PARAMS_AT_ONCE):
            self._client.log_batch(self.run_id, params=new[start : start + _PARAMS_AT_ONCE])

    def steps(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Log rows of metrics with `step` and `time` (seconds); steps that the store has already are left out.

        A store that fails (locked by another trial, its server restarted) gets them with the next call, or at the end.
        """
        from mlflow.exceptions import MlflowException

        self._waiting += rows
        try:
            self._log_waiting()
        except MlflowException:
            del self._waiting[:-_MOST_WAITING]

    def results(self, metrics: Mapping[str, float], files: Iterable[Path]) -> None:
        """Log the final metrics, and files (tables, plots) as artifacts."""
        self._log_waiting()
        # The value that MLflow shows is that of the last step.
        step = max(self._last_step, 0)
        for key, value in metrics.items():
            self._client.log_metric(self.run_id, key.replace("@", "_at_"), value, step=step)
        for path in files:
            self._client.log_artifact(self.run_id, str(path))

    def model(self, directory: Path) -> None:
        """Log a model directory as a pyfunc. Its code is this package's, so loading it unpickles nothing."""
        import mlflow
        from mlflow.models import ModelSignature
        from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

        import xmc.mlflow_model

        texts = Schema([ColSpec("string")])  # unnamed: a list of texts, or a table of one column
        signature = ModelSignature(inputs=texts, params=ParamSchema([ParamSpec("k", "long", 10)]))
        previous = mlflow.get_tracking_uri()
        mlflow.set_tracking_uri(self.uri)
        try:
            with mlflow.start_run(run_id=self.run_id), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of type hints, which the signature makes needless
                mlflow.pyfunc.log_model(
                    name="model",
                    python_model=xmc.mlflow_model.__file__,
                    artifacts={"model": str(directory)},
                    signature=signature,
                    pip_requirements=[f"xmc=={importlib.metadata.version('xmc')}"],
                )
        finally:
            mlflow.set_tracking_uri(previous)

    def finish(self, status: str = "FINISHED") -> None:
        self._log_waiting()
        self._client.set_terminated(self.run_id, status)

    def _log_waiting(self) -> None:
        from mlflow.entities import Metric

        fresh = [row for row in self._waiting if row["step"] > self._last_step]
        metrics = [
            Metric(key, float(value), int(row["time"] * 1000), int(row["step"]))
            for row in fresh
            for key, value in row.items()
            if key not in ("step", "time")
        ]
        for start in range(0, len(metrics), _METRICS_AT_ONCE):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + _METRICS_AT_ONCE])
        self._last_step = max((int(row["step"]) for row in fresh), default=self._last_step)
        self._waiting = []

    def _resume(self) -> str | None:
        from mlflow.exceptions import MlflowException

        if not self._file.exists():
            return None
        run_id = json.loads(self._file.read_text())["run_id"]
        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException:  # another store, or the run was deleted there
            return None
        return run_id

    def _create(self, run_dir: Path, experiment: str, name: str, parent: str | None) -> str:
        found = self._client.get_experiment_by_name(experiment)
        artifacts = (
            (run_dir.resolve().parent / "mlartifacts").as_uri() if self.uri.startswith("sqlite") else None
        )
        experiment_id = (
            found.experiment_id
            if found
            else self._client.create_experiment(experiment, artifact_location=artifacts)
        )
        tags = {"mlflow.parentRunId": parent} if parent else {}
        run = self._client.create_run(experiment_id, run_name=name, tags=tags)
        atomic_write_text(self._file, json.dumps({"run_id": run.info.run_id, "uri": self.uri}))
        return run.info.run_id

    def _steps_logged(self) -> int:
        history = self._client.get_metric_history(self.run_id, "loss")
        return max((metric.step for metric in history), default=-1)
