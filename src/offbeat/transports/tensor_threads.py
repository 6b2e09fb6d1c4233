"""Threads that handle tensors: they must have ended before the interpreter does.

PyTorch releases the interpreter's lock while it frees a tensor. When Python exits, a daemon thread that waits for the
lock is ended where it stands, and if that is inside PyTorch, the whole process aborts: "terminate called without an
active exception". Threads that are no daemons would be waited for, but before the exit handlers that tell them to end.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

EXIT_SECONDS = 10.0
"""How long an exit waits for threads that were told to end."""

_threads: weakref.WeakSet[TensorThread] = weakref.WeakSet()


class TensorThread(threading.Thread):
    """A daemon thread for which the exit of the process waits.

    target: what it runs.
    name: of the thread.
    finish: tells it to end; called at exit, after all handlers that were registered later than this module's.
    limit_seconds: how long the exit waits for it; None: as long as it takes.
    """

    def __init__(
        self,
        target: Callable[[], None],
        name: str,
        finish: Callable[[], None] = lambda: None,
        limit_seconds: float | None = EXIT_SECONDS,
    ) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.finish = finish
        self.limit_seconds = limit_seconds
        _threads.add(self)


@atexit.register
def _join_all() -> None:
    alive = [thread for thread in _threads if thread.is_alive()]
    for thread in alive:
        thread.finish()
    begun = time.monotonic()
    for thread in alive:
        limit = thread.limit_seconds
        thread.join(None if limit is None else max(0.0, begun + limit - time.monotonic()))
