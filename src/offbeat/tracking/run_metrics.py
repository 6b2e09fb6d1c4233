"""What trackers show of a run, computed from its records one by one: values over the samples applied, and events."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from offbeat.core.actions import Budget, Record, Samples, Seconds
from offbeat.records.metrics import finite
from offbeat.records.schema import (
    RECORD_LINES_KIND,
    Consensus,
    Dropped,
    Ended,
    Evaluation,
    Membership,
    Notice,
    Round,
    Traffic,
    Undone,
    Update,
)
from offbeat.tracking.tracker import SAMPLES, SECONDS

POINTS_MAX = 1000
"""Points of a run with values about training; those with held-out values are besides."""
RATE_POINTS = 20
"""Points over which samples per second are averaged."""


class TrackedPoint(NamedTuple):
    """Values at a number of samples applied."""

    step: int
    values: dict[str, float]


class TrackedEvent(NamedTuple):
    """Something that happened, at a number of samples applied."""

    step: int
    text: str


class _Window:
    """Sums since the last point."""

    def __init__(self) -> None:
        self.updates = 0
        self.loss_sum = 0.0
        self.loss_samples = 0
        self.compute_seconds = 0.0
        self.idle_seconds = 0.0
        self.contributions = 0
        self.staleness_sum = 0
        self.staleness_max = 0

    def add_round(self, record: Round) -> None:
        self.compute_seconds += record.seconds
        self.idle_seconds += record.idle_seconds
        if record.loss is not None:
            self.loss_sum += record.loss
            self.loss_samples += record.samples

    def add_update(self, record: Update) -> None:
        self.updates += record.updates
        for part in record.parts():
            self.contributions += part.contributions
            self.staleness_sum += part.staleness_sum
            self.staleness_max = max(self.staleness_max, part.staleness_max)

    def values(self) -> Iterator[tuple[str, float]]:
        if self.loss_samples:
            yield "train/loss", self.loss_sum / self.loss_samples
        if self.contributions:
            yield "run/staleness_mean", self.staleness_sum / self.contributions
            yield "run/staleness_max", float(self.staleness_max)
        if self.idle_seconds + self.compute_seconds > 0:
            yield "run/idle_share", self.idle_seconds / (self.idle_seconds + self.compute_seconds)


class RunMetrics:
    """Turns the records of a run into points and events.

    until: how long the run trains; points about training are spaced so that there are at most `POINTS_MAX`. None: they
        are a second apart.
    since: records up to this time of the run were tracked before it was resumed, and yield nothing; None: a new run.
    loss_names: the names of the losses: "loss", and for texts "bits_per_byte", which is the same value.
    """

    def __init__(
        self, until: Budget | None = None, since: float | None = None, loss_names: Iterable[str] = ("loss",)
    ) -> None:
        self._until, self._since, self._loss_names = until, since, tuple(loss_names)
        self._seconds = 0.0
        self._samples = self._updates = self._applied = self._dropped = 0
        self._is_decentralized = False
        self._window = _Window()
        self._marks: deque[tuple[float, int]] = deque([(0.0, 0)], maxlen=RATE_POINTS)
        self._next_point_at = 0.0
        self._is_up = {0: True}
        self._bytes_sent: dict[tuple[int, float], int] = {}
        self._has_new_traffic = False
        self._latest: dict[str, float] = {}

    def add(self, record: Record) -> Iterator[TrackedPoint | TrackedEvent]:
        """Enter a record; yields what trackers are to show of it."""
        self._seconds = max(self._seconds, record.at)
        is_new = self._since is None or record.at > self._since
        for item in self._entered(record):
            if is_new:
                yield item

    def end(self) -> Iterator[TrackedPoint]:
        """The run has ended: yields what has not been shown yet."""
        if self._window.updates or self._has_new_traffic:
            yield self._training_point()

    def _entered(self, record: Record) -> Iterator[TrackedPoint | TrackedEvent]:
        if isinstance(record, Round):
            self._window.add_round(record)
        elif isinstance(record, Update):
            self._add_update(record)
            if self._is_point_due():
                yield self._training_point()
        elif isinstance(record, Evaluation):
            yield self._evaluation_point(record)
        elif isinstance(record, Traffic):
            sent = sum(flow.bytes for kind, flow in record.sent.items() if kind != RECORD_LINES_KIND)
            self._bytes_sent[record.rank, record.since] = sent
            self._has_new_traffic = True
        elif isinstance(record, Dropped):
            self._dropped += record.samples
        elif isinstance(record, Consensus):
            self._latest["run/consensus_distance"] = record.distance
        else:
            yield from self._events(record)

    def _events(self, record: Record) -> Iterator[TrackedEvent]:
        if isinstance(record, Membership):
            # Several ranks may record the same; rank 0 begins the run and joins no one.
            if self._is_up.get(record.peer, False) != record.joined:
                self._is_up[record.peer] = record.joined
                yield TrackedEvent(self._samples, f"rank {record.peer} {'joined' if record.joined else 'was lost'}")
        elif isinstance(record, Notice):
            yield TrackedEvent(self._samples, record.text)
        elif isinstance(record, Undone):
            self._count(record.samples_total)
            text = f"{record.samples:,} samples were undone, back to the state of version {record.to_version:,}"
            yield TrackedEvent(self._samples, text)
        elif isinstance(record, Ended) and record.failure is not None:
            yield TrackedEvent(self._samples, f"rank {record.rank} failed: {record.failure}")

    def _add_update(self, record: Update) -> None:
        self._window.add_update(record)
        self._updates += record.updates
        self._applied += record.samples
        self._is_decentralized = self._is_decentralized or record.rank != 0
        if self._is_decentralized:  # a hub counts the samples of the run; peers know of a part of them
            self._count(max(self._samples, record.samples_total, self._applied))
        else:
            self._count(record.samples_total)
            self._updates = record.version
        self._latest["train/learning_rate"] = record.learning_rate

    def _count(self, samples: int) -> None:
        """Set the number of samples applied, which falls where work was undone, or a hub resumed from a checkpoint."""
        if samples < self._samples:
            self._marks.clear()
            self._next_point_at = 0.0
        self._samples = samples

    # Points about training

    def _position(self) -> float:
        """How far training is, in the unit of `until`."""
        return float(self._samples) if isinstance(self._until, Samples) else self._seconds

    def _is_point_due(self) -> bool:
        position = self._position()
        if position < self._next_point_at:
            return False
        spacing = 1.0
        if isinstance(self._until, Samples):
            spacing = self._until.count / POINTS_MAX
        elif isinstance(self._until, Seconds):
            spacing = self._until.seconds / POINTS_MAX
        self._next_point_at = (position // spacing + 1) * spacing
        return True

    def _training_point(self) -> TrackedPoint:
        window, self._window = self._window, _Window()
        values = {
            **dict(self._both(window.values())),
            **self._latest,
            "run/updates": float(self._updates),
            "run/dropped": float(self._dropped),
            "run/ranks": float(sum(self._is_up.values())),
        }
        self._has_new_traffic = False
        if self._bytes_sent:
            values["run/bytes_sent"] = float(sum(self._bytes_sent.values()))
        rate = self._samples_per_second()
        if rate is not None:
            values["run/samples_per_second"] = rate
        return self._point(self._samples, self._seconds, values)

    def _samples_per_second(self) -> float | None:
        before = self._marks[0] if self._marks else None
        self._marks.append((self._seconds, self._samples))
        if before is None or self._seconds <= before[0] or self._samples < before[1]:
            return None
        return (self._samples - before[1]) / (self._seconds - before[0])

    # Points with held-out values

    def _evaluation_point(self, record: Evaluation) -> TrackedPoint:
        measured = {
            "test/loss": finite(record.loss),
            "test/accuracy": finite(record.accuracy),
            "test/accuracy_top5": finite(record.accuracy_top5),
        }
        known = ((name, value) for name, value in measured.items() if value is not None)
        return self._point(record.samples_total, record.at, dict(self._both(known)))

    def _both(self, values: Iterable[tuple[str, float]]) -> Iterator[tuple[str, float]]:
        """The values, with losses under each of their names."""
        for name, value in values:
            group, _, what = name.partition("/")
            for other in self._loss_names if what == "loss" else (what,):
                yield f"{group}/{other}", value

    @staticmethod
    def _point(step: int, seconds: float, values: dict[str, float]) -> TrackedPoint:
        every = {**values, SAMPLES: float(step), SECONDS: float(seconds)}
        return TrackedPoint(step, {name: value for name, value in every.items() if math.isfinite(value)})
