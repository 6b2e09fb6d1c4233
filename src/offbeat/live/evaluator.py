"""Evaluation on a thread of its own, with a model of its own, so that it never stalls an update."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from torch import Tensor

from offbeat.core.actions import Evaluate
from offbeat.core.events import Evaluated
from offbeat.core.messages import Buffers
from offbeat.core.workload import Measured
from offbeat.live.clock import Clock

Measure = Callable[[Tensor, Buffers], Measured]
"""Loss and accuracies at these values."""


class Evaluator:
    """Measures one after the other what it is given."""

    def __init__(
        self,
        measure: Measure,
        deliver: Callable[[Evaluated], None],
        fail: Callable[[BaseException], None],
        clock: Clock,
    ) -> None:
        self._measure = measure
        self._deliver = deliver
        self._fail = fail
        self._clock = clock
        self._queue: queue.SimpleQueue[Evaluate | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, wanted: Evaluate) -> None:
        """Measure this as soon as what came before is done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="offbeat evaluation", daemon=True)
            self._thread.start()
        self._queue.put(wanted)

    def close(self) -> None:
        """End after what is being measured now."""
        self._queue.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _run(self) -> None:
        try:
            while (wanted := self._queue.get()) is not None:
                measured = self._measure(wanted.parameters, wanted.buffers)
                self._deliver(Evaluated(self._clock.now(), wanted.version, *measured))
        except Exception as error:
            self._fail(error)
