"""The thread in which one tracker is called, and the queue of what it has not been told yet."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping

from offbeat.errors import ConfigurationError, shortened
from offbeat.tracking.run_metrics import TrackedEvent, TrackedPoint
from offbeat.tracking.tracker import TrackedRun, Tracker, Value

QUEUE_MAX = 10_000
"""Points and events that wait for a slow tracker, at most; later ones are dropped."""

Say = Callable[[str], None]
"""Receives a sentence for the user; called in the tracker's thread, or in the one that puts items."""


class TrackerThread:
    """Calls a tracker in a thread of its own. Only `wait_*` wait, and only `wait_until_started` raises.

    tracker: the tracker.
    run: what it is told of the run.
    say: receives one sentence if the tracker fails, and one if it is too slow.
    queue_max: points and events that wait, at most.
    """

    def __init__(self, tracker: Tracker, run: TrackedRun, say: Say, queue_max: int = QUEUE_MAX) -> None:
        self._tracker, self._run, self._say, self._queue_max = tracker, run, say, queue_max
        self._changed = threading.Condition()
        self._items: deque[TrackedPoint | TrackedEvent] = deque()
        self._summary: Mapping[str, Value] | None = None
        """What to close the tracker with; None while the run goes on."""
        self._started = threading.Event()
        self._ended = threading.Event()
        self.dropped = 0
        """Points and events that were dropped because the queue was full."""
        self.refused: ConfigurationError | None = None
        """Why the tracker cannot start, if the user can mend it."""
        self._awaits_start = True
        # A daemon: a tracker that hangs does not keep the process from ending.
        self._thread = threading.Thread(target=self._main, name=f"offbeat tracker {tracker.label}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_until_started(self, seconds: float) -> None:
        """Wait until the tracker has started, or has failed to, at most so long.

        Raises the `ConfigurationError` that the tracker has raised.
        """
        self._started.wait(seconds)
        with self._changed:
            self._awaits_start = False
            refused = self.refused
        if refused is not None:
            raise refused

    def put(self, item: TrackedPoint | TrackedEvent) -> None:
        """Let the tracker be told something, unless too much waits already."""
        with self._changed:
            if self._ended.is_set() or self._summary is not None:
                return
            if len(self._items) >= self._queue_max:
                self.dropped += 1
                is_first = self.dropped == 1
            else:
                is_first = False
                self._items.append(item)
                self._changed.notify()
        if is_first:
            self._say(
                f"the tracker {self._tracker.label} is slower than the run, so values are dropped while "
                f"{self._queue_max:,} wait for it; the run and its records are complete"
            )

    def close(self, summary: Mapping[str, Value]) -> None:
        """Let the tracker be closed once it has been told the rest."""
        with self._changed:
            self._summary = summary
            self._changed.notify()

    def wait_until_closed(self, seconds: float) -> None:
        """Wait until the tracker is closed, or has failed, at most so long."""
        if not self._ended.wait(seconds):
            self._say(
                f"the tracker {self._tracker.label} has not finished in time after the run, so its last values may be "
                "missing there; the run and its records are complete"
            )

    # In the thread

    def _main(self) -> None:
        try:
            place = self._tracker.start(self._run)
            self._started.set()
            if place is not None:
                self._say(f"tracked by {self._tracker.label}: {place}")
            step = 0
            while (item := self._next()) is not None:
                step = item.step
                if isinstance(item, TrackedPoint):
                    self._tracker.log(step, dict(item.values))
                else:
                    self._tracker.event(step, item.text)
            if self.dropped:
                missing = f"{self.dropped:,} values are missing, since the tracker was slower than the run"
                self._tracker.event(step, missing)
            self._tracker.close(self._summary or {})
        except BaseException as error:  # SystemExit too: what ends a tracker does not end the run
            self._fail(error)
        finally:
            with self._changed:
                self._ended.set()
                self._items.clear()
            self._started.set()

    def _next(self) -> TrackedPoint | TrackedEvent | None:
        """What the tracker is told next; None once it has been told all and the run has ended."""
        with self._changed:
            while not self._items and self._summary is None:
                self._changed.wait()
            return self._items.popleft() if self._items else None

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if isinstance(error, ConfigurationError) and not self._started.is_set() and self._awaits_start:
                self.refused = error
                return
        text = shortened(f"{type(error).__name__}: {error}")  # it may hold a whole answer of a server
        self._say(f"the tracker {self._tracker.label} has failed and is no longer told of the run ({text})")
