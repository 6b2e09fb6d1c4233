"""Counts Ctrl-C and SIGTERM, so that a supervisor can end its processes in order."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class InterruptCounter:
    """How many signals have asked this process to end, while `counting`."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count signals instead of ending. Only possible, and only needed, in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # A process that was started to ignore Ctrl-C, as a background job is, keeps ignoring it.
        caught = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._on_signal) for number in caught}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
