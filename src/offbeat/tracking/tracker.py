"""The contract of trackers, and the description of the run that they get."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from offbeat.errors import ConfigurationError

TRACKED = "tracked.json"
"""The file of a run directory with the names that trackers have given to the run, to continue it when it is resumed."""

SAMPLES, SECONDS = "run/samples", "run/seconds"
"""The values that every point has: the samples applied so far, and the time of the run, virtual if it is simulated."""

Value = bool | int | float | str
"""A setting, or a value of the summary."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run, as trackers are told of it."""

    label: str
    """The name of the strategy, or a label given by the user."""
    workload: str
    """The name of the workload, or the class of the model."""
    seed: int
    config: Mapping[str, Value] = field(default_factory=dict)
    """The settings, with dots between a part and its fields: `strategy.batch`."""
    directory: Path | None = None
    """The run directory; None if the run has none."""
    is_resumed: bool = False
    """Whether an earlier process has tracked the first part of the run, perhaps."""

    @property
    def name(self) -> str:
        return f"{self.label}-{self.workload}-seed{self.seed}"

    def remember(self, tracker: str, identifier: str) -> None:
        """Note the name that a tracker has given to this run in the run directory, if there is one.

        tracker: the name of the tracker.
        identifier: the name that it has given.
        """
        if self.directory is not None:
            known = {**self._remembered(), tracker: identifier}
            (self.directory / TRACKED).write_bytes(msgspec.json.encode(known) + b"\n")

    def recall(self, tracker: str) -> str | None:
        """What `remember` noted before the run was resumed; None for a new run, or where nothing was noted."""
        return self._remembered().get(tracker) if self.is_resumed else None

    def _remembered(self) -> dict[str, str]:
        if self.directory is not None:
            with contextlib.suppress(OSError, msgspec.MsgspecError, ValueError):
                return msgspec.json.decode((self.directory / TRACKED).read_bytes(), type=dict[str, str])
        return {}


class Tracker(ABC):
    """Receives the values and events of one run at a time; derive from it for a tracker of your own.

    `check` is called before the run begins. All other methods are called in one thread that belongs to the tracker:
    `start`, then `log` and `event`, then `close`. Meanwhile the run goes on. After an exception from one of them
    there is one warning and no further call, except that a `ConfigurationError` from `start` refuses the run.
    """

    @property
    def label(self) -> str:
        """What sentences for the user call it."""
        return type(self).__name__

    def check(self) -> None:  # noqa: B027  (optional)
        """Raise `ConfigurationError`, with what to do, if this tracker cannot be used; does nothing by default.

        Packages are imported here: what forks processes later has imported them by then.
        """

    def start(self, run: TrackedRun) -> str | None:
        """A run begins, or is resumed.

        run: its names, settings and directory.

        Returns where it can be seen, such as an address, for the user to read; None for nothing. Raises
        `ConfigurationError` if the user has to change something before the run can be tracked.
        """
        return None

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Values at a step.

        step: the samples applied so far. After a loss of work, or for a late evaluation, it can be lower than before.
        values: finite numbers by name, such as `test/loss`; `run/seconds` and `run/samples` are always among them.
        """

    def event(self, step: int, text: str) -> None:  # noqa: B027  (optional)
        """Something happened: a rank joined or was lost, or the run has a notice for the user.

        step: the samples applied so far.
        text: what happened, as the beginning of a sentence.
        """

    def close(self, summary: Mapping[str, Value]) -> None:  # noqa: B027  (optional)
        """The run has ended.

        summary: the metrics of the run by name, as `Run.summary` has them, without those that do not apply; `failure`
            is there if the run has failed, and says why.
        """


def make_directory(directory: Path) -> None:
    """Create a directory for a tracker; raises `ConfigurationError` if it cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".offbeat-writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigurationError(
            f"cannot write {directory} ({error.strerror or error}), where the run would be tracked; make it writable, "
            "or name another place for the run with out"
        ) from None
