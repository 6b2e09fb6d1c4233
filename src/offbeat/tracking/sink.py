"""Feeds the records of one run to its trackers. Never waits for them, and never raises what they raise."""

from __future__ import annotations

import collections
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from offbeat.core.actions import Record
from offbeat.errors import OffbeatError, shortened
from offbeat.records.metrics import Summary
from offbeat.tracking.run_metrics import RunMetrics, TrackedEvent, TrackedPoint
from offbeat.tracking.tracker import TrackedRun, Tracker, Value
from offbeat.tracking.tracker_thread import QUEUE_MAX, TrackerThread

START_SECONDS = 10.0
"""How long the run waits for its trackers to start; a slower one starts while the run goes on."""
CLOSE_SECONDS = 30.0
"""How long the end of a run waits for what trackers have not written yet."""
CLOSE_SECONDS_FAILED = 5.0
"""The same after Ctrl-C or a failure."""


def print_sentence(sentence: str) -> None:
    """Print a sentence for the user on standard error."""
    print(f"offbeat: {sentence}", file=sys.stderr, flush=True)


class TrackingSink:
    """Receives the records of a run, and tells trackers of them. Its methods are for one thread.

    trackers: each is called in a thread of its own.
    run: what they are told of the run.
    metrics: turns records into points and events.
    say: receives sentences for the user, in the thread that calls the methods.
    queue_max: points and events that wait for a slow tracker, at most.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        run: TrackedRun,
        metrics: RunMetrics,
        say: Callable[[str], None] = print_sentence,
        queue_max: int = QUEUE_MAX,
    ) -> None:
        self._metrics, self._say = metrics, say
        self._sentences: collections.deque[str] = collections.deque()
        self._threads = [TrackerThread(each, run, self._sentences.append, queue_max) for each in trackers]
        self._is_broken = False

    def start(self, seconds: float = START_SECONDS) -> None:
        """Start the trackers, and wait for them, at most so long.

        Raises `ConfigurationError` if one of them refuses the run.
        """
        for thread in self._threads:
            thread.start()
        deadline = time.monotonic() + seconds
        try:
            for thread in self._threads:
                thread.wait_until_started(max(0.0, deadline - time.monotonic()))
        except OffbeatError as error:
            for thread in self._threads:
                thread.close({"failure": str(error)})
            raise
        self._say_pending()

    def records(self, records: Iterable[Record]) -> None:
        """Tell the trackers of records, in the order of time as far as possible."""
        if not self._threads or self._is_broken:
            return
        try:
            for record in records:
                self._put(self._metrics.add(record))
        except Exception as error:
            self._is_broken = True
            self._sentences.append(
                f"internal error: a record cannot be tracked ({shortened(f'{type(error).__name__}: {error}')}); the "
                "run goes on without trackers; please report this"
            )
        self._say_pending()

    def close(self, summary: Summary | None, failure: str | None = None, seconds: float | None = None) -> None:
        """Close the trackers, and wait for them.

        summary: the metrics of the run; None if it has none.
        failure: why it failed, if the summary does not know.
        seconds: how long to wait at most; None: a while after a success, and shorter after a failure.
        """
        if not self._is_broken:
            self._put(self._metrics.end())
        values = {} if summary is None else summary_values(summary)
        if failure is not None:
            values["failure"] = failure
        if seconds is None:
            seconds = CLOSE_SECONDS_FAILED if "failure" in values else CLOSE_SECONDS
        for thread in self._threads:
            thread.close(values)
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.wait_until_closed(max(0.0, deadline - time.monotonic()))
        self._say_pending()

    def _put(self, items: Iterable[TrackedPoint | TrackedEvent]) -> None:
        for item in items:
            for thread in self._threads:
                thread.put(item)

    def _say_pending(self) -> None:
        while self._sentences:
            self._say(self._sentences.popleft())


def summary_values(summary: Summary) -> dict[str, Value]:
    """The metrics of a run that apply to it and are single values."""
    plain: dict[str, Any] = msgspec.structs.asdict(summary)
    del plain["directory"]
    return {
        name: value
        for name, value in plain.items()
        if isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
    }
