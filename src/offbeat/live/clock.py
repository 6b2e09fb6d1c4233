"""The clock of live runs."""

from __future__ import annotations

import threading
import time


class Clock:
    """Seconds since the start of the run; a rank that joins later synchronizes it with rank 0."""

    def __init__(self, elapsed_seconds: float = 0.0) -> None:
        self._zero = time.monotonic() - elapsed_seconds

    def now(self) -> float:
        return time.monotonic() - self._zero

    def set(self, elapsed_seconds: float, at_monotonic: float) -> None:
        """Synchronize: the run had lasted `elapsed_seconds` when `time.monotonic()` was `at_monotonic`."""
        self._zero = at_monotonic - elapsed_seconds

    def wait(self, event: threading.Event, seconds: float) -> None:
        """Block this thread for `seconds`, or until the event is set."""
        event.wait(seconds)
