"""MLflow: a run of an experiment, on its server or in its local store."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat.errors import MissingDependency
from offbeat.tracking.tracker import SECONDS, TrackedRun, Tracker, Value

EXPERIMENT = "offbeat"
NOTE = "mlflow.note.content"
"""The tag that MLflow shows as the description of a run."""
NOTE_MAX = 4000
"""Characters of the description; the first events make room for the last."""
BATCH_MAX = 100
"""Parameters that MLflow takes at once."""
METRICS_MAX = 1000
"""Values that it takes at once."""
SEND_SECONDS = 1.0
"""Interval between two calls with values."""


@contextmanager
def alone_in_store(uri: str) -> Iterator[None]:
    """For one process at a time: creating the tables and the experiment of a local store fails if two do so at once."""
    path = uri.removeprefix("sqlite:///")
    if path == uri or not Path(path).parent.is_dir():  # a server, or the store will say what is wrong
        yield
        return
    directory = os.open(Path(path).parent, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


@dataclass(eq=False)
class MLflow(Tracker):
    """A run of MLflow. Its environment variables apply, and what `mlflow.set_tracking_uri` and the like have set."""

    experiment: str | None = None
    """the experiment; none: that of MLFLOW_EXPERIMENT_NAME, or else offbeat"""
    uri: str | None = None
    """the server or store; none: that of MLFLOW_TRACKING_URI, or MLflow's own, mlflow.db in the working directory"""
    _client: Any = field(default=None, init=False, repr=False)

    @property
    def label(self) -> str:
        return "mlflow"

    def check(self) -> None:
        try:
            import mlflow  # noqa: F401
        except ImportError:
            raise MissingDependency("tracking with mlflow", "mlflow", "mlflow") from None

    def start(self, run: TrackedRun) -> None:
        import mlflow

        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # the creation of tables is no news
        uri = self.uri or mlflow.get_tracking_uri()
        self._began: float | None = None
        self._seconds, self._step = 0.0, 0
        self._events: list[str] = []
        self._unsent: list[Any] = []
        self._sent_at = 0.0
        known = run.recall(self.label)
        with alone_in_store(uri):
            self._client = mlflow.MlflowClient(tracking_uri=uri)
            if known is not None:
                self._id = known
                self._client.update_run(known, status="RUNNING")
                return
            created = self._client.create_run(self._experiment_id(), run_name=run.name)
        self._id = created.info.run_id
        run.remember(self.label, self._id)
        self._log_config(run.config)

    def _experiment_id(self) -> str:
        name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        chosen = os.environ.get("MLFLOW_EXPERIMENT_ID")  # which mlflow.set_experiment sets
        if name is None and chosen:
            return chosen
        known = self._client.get_experiment_by_name(name or EXPERIMENT)
        return str(known.experiment_id if known else self._client.create_experiment(name or EXPERIMENT))

    def _log_config(self, config: Mapping[str, Value]) -> None:
        from mlflow.entities import Param

        params = [Param(name, str(value)) for name, value in config.items()]
        for first in range(0, len(params), BATCH_MAX):
            self._client.log_batch(self._id, params=params[first : first + BATCH_MAX])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._seconds, self._step = max(self._seconds, values[SECONDS]), max(self._step, step)
        self._log(step, values[SECONDS], values)

    def _log(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        if self._began is None:
            self._began = time.time() - seconds
        at = round((self._began + seconds) * 1000)
        self._unsent += [Metric(name, value, at, step) for name, value in values.items()]
        if len(self._unsent) > METRICS_MAX - len(values) or time.monotonic() - self._sent_at >= SEND_SECONDS:
            self._send()

    def _send(self) -> None:
        """Send the values together: each call takes tens of milliseconds, and a short run has hundreds of points."""
        unsent, self._unsent, self._sent_at = self._unsent, [], time.monotonic()
        for first in range(0, len(unsent), METRICS_MAX):
            self._client.log_batch(self._id, metrics=unsent[first : first + METRICS_MAX])

    def event(self, step: int, text: str) -> None:
        self._events.append(f"- {step:,} samples: {text}")
        while sum(map(len, self._events)) > NOTE_MAX and len(self._events) > 1:
            self._events.pop(0)
        self._client.set_tag(self._id, NOTE, "\n".join(self._events)[:NOTE_MAX])

    def close(self, summary: Mapping[str, Value]) -> None:
        numbers = {f"summary/{name}": float(value) for name, value in summary.items() if not isinstance(value, str)}
        self._log(self._step, self._seconds, numbers)
        self._send()
        if "failure" in summary:
            self._client.set_tag(self._id, "failure", str(summary["failure"])[:NOTE_MAX])
        self._client.set_terminated(self._id, status="FAILED" if "failure" in summary else "FINISHED")
