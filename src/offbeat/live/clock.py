"""The time of a live run, which all of its ranks share."""

from __future__ import annotations

import time


class Clock:
    """Seconds since the run began; a rank that joins later sets it by the hub's."""

    def __init__(self, elapsed_seconds: float = 0.0) -> None:
        self._zero = time.monotonic() - elapsed_seconds

    def now(self) -> float:
        return time.monotonic() - self._zero

    def set(self, elapsed_seconds: float, at_monotonic: float) -> None:
        """It was `elapsed_seconds` when this machine's monotonic clock said `at_monotonic`."""
        self._zero = at_monotonic - elapsed_seconds
