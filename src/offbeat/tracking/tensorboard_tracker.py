"""TensorBoard: event files in the run directory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat.errors import MissingDependency
from offbeat.tracking.tracker import SECONDS, TrackedRun, Tracker, Value, make_directory

DIRECTORY = "tensorboard"
EVENT_FILES = "events.out.tfevents.*"
FLUSH_SECONDS = 5


@dataclass(eq=False)
class TensorBoard(Tracker):
    """Event files for TensorBoard: `tensorboard --logdir runs`.

    The time axis is that of the run, which is virtual in a simulation.
    """

    directory: str | Path | None = None
    """where the event files go; none: `tensorboard` in the run directory, or a new one in runs/tensorboard"""
    _writer: Any = field(default=None, init=False, repr=False)

    @property
    def label(self) -> str:
        return "tensorboard"

    def check(self) -> None:
        try:
            import tensorboard  # noqa: F401
            import torch.utils.tensorboard  # noqa: F401
        except ImportError:
            raise MissingDependency("tracking with tensorboard", "tensorboard", "tensorboard") from None

    def _make_place(self, run: TrackedRun) -> Path:
        if self.directory is not None or run.directory is not None:
            place = Path(self.directory) if self.directory is not None else Path(run.directory or "") / DIRECTORY
            make_directory(place)
            if not run.is_resumed and self.directory is None:
                for file in place.glob(EVENT_FILES):  # of a run that this one replaces
                    file.unlink()
            return place
        for number in itertools.count(1):
            place = Path("runs") / DIRECTORY / f"{run.name}-{number:03d}"
            if not place.exists():
                make_directory(place)
                return place
        raise AssertionError  # count does not end

    def start(self, run: TrackedRun) -> None:
        self._run, self._place, self._writer = run, self._make_place(run), None
        self._began: float | None = None
        self._seconds = 0.0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        writer, at = self._writer_from(step, values[SECONDS]), self._time(values[SECONDS])
        for name, value in values.items():
            writer.add_scalar(name, value, step, walltime=at)

    def event(self, step: int, text: str) -> None:
        writer = self._writer_from(step, self._seconds)
        writer.add_text("events", text, step, walltime=self._time(self._seconds))

    def close(self, summary: Mapping[str, Value]) -> None:
        writer, at = self._writer_from(0, self._seconds), self._time(self._seconds)
        numbers = {f"summary/{name}": value for name, value in summary.items() if not isinstance(value, str)}
        experiment, start, end = self._hparams(list(numbers))
        for part in (experiment, start, end):
            writer.file_writer.add_summary(part)
        for name, value in numbers.items():
            writer.add_scalar(name, float(value), walltime=at)
        lines = "\n".join(f"| {name} | {value} |" for name, value in summary.items())
        writer.add_text("summary", f"| metric | value |\n|---|---|\n{lines}", walltime=at)
        writer.close()

    def _hparams(self, metrics: list[str]) -> Any:
        from torch.utils.tensorboard.summary import hparams

        settings = dict(self._run.config)
        return hparams(settings, dict.fromkeys(metrics, 0.0))  # type: ignore[no-untyped-call]

    def _writer_from(self, step: int, seconds: float) -> Any:
        """The writer; what an earlier process has written from this step on is hidden by it."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            purge_step = step if self._run.is_resumed else None
            self._writer = SummaryWriter(str(self._place), purge_step=purge_step, flush_secs=FLUSH_SECONDS)
            self._began = time.time() - seconds
            lines = "\n".join(f"| {name} | {value} |" for name, value in self._run.config.items())
            self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{lines}", walltime=self._began)
        return self._writer

    def _time(self, seconds: float) -> float:
        """The time of day at which this time of the run would be, if all of it took as long as it says."""
        self._seconds = max(self._seconds, seconds)
        return (self._began or 0.0) + seconds
