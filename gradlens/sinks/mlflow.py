"""MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

from gradlens.history.histograms import Histogram
from gradlens.sinks.sink import Sink, library

if TYPE_CHECKING:
    from mlflow.entities import Metric

MOST = 1000
"""Metrics in one call of ``log_batch``."""

SECONDS = 5.0
"""Metrics are collected for so long, as a call takes milliseconds to files and more to a server."""


@final
class MLflow(Sink):
    """Logs to a run of MLflow, by default the active one.

    Numbers are metrics, which are written together, every few seconds and when the cockpit is
    closed or the program ends. Notes are the artifact ``gradlens/notes.txt``. MLflow has no
    histograms. ``options`` are those of ``Sink``. ``ImportError`` without mlflow, and
    ``ValueError`` if no run is active.
    """

    def __init__(self, run_id: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        mlflow = library("mlflow", "mlflow")
        active = mlflow.active_run()
        if run_id is None and active is None:
            raise ValueError(
                "no run of MLflow is active: call mlflow.start_run() first, or pass a run_id"
            )
        self._run_id = active.info.run_id if run_id is None else run_id
        self._client = mlflow.MlflowClient()
        self._metric = mlflow.entities.Metric
        self._waiting: list[Metric] = []
        self._notes: list[str] = []
        self._written = time.monotonic()

    def record(
        self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        stamp = int(1000 * time.time())
        self._waiting += [self._metric(name, value, stamp, step) for name, value in scalars.items()]
        if len(self._waiting) >= MOST or time.monotonic() - self._written > SECONDS:
            self._write()

    def note(self, step: int, text: str) -> None:
        self._notes.append(f"step {step}: {text}\n")
        self._client.log_text(self._run_id, "".join(self._notes), f"{self.prefix}/notes.txt")

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), MOST):
            self._client.log_batch(self._run_id, waiting[start : start + MOST])
        self._written = time.monotonic()
