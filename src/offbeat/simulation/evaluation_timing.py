"""How evaluations spend virtual time: one after the other, on cores that they share with the rounds beside them.

Evaluations and rounds make each other slower, by the factors of the cluster. While the process
that evaluates makes an update, the evaluation stands still and rounds are not slower: the update takes the time of the
evaluation, and the cost of a round is that of rounds beside updates. By default an evaluation takes no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from offbeat.cluster.cluster import Cluster
from offbeat.simulation.event_queue import EventQueue
from offbeat.simulation.process import EventFactory, Process
from offbeat.simulation.round_timing import Computation


class _Pending(NamedTuple):
    """An evaluation that has not ended: who gets the result, and the seconds of one core that it takes."""

    process: Process
    life: int
    evaluated: EventFactory
    seconds: float


class EvaluationTiming:
    """The evaluations of a run that have not ended.

    cluster: how long an evaluation takes, and who shares cores with it.
    processes: all processes of the run.
    queue: the clock.
    """

    def __init__(self, cluster: Cluster, processes: Sequence[Process], queue: EventQueue) -> None:
        self.schedule_round_end: Callable[[Process, Computation], None]
        """Called for each outstanding round whose end has changed; set when all parts of the simulation exist."""
        self._seconds = cluster.seconds_per_evaluation
        self._queue = queue
        workers = [process for process in processes if process.worker is not None]
        slowdown = cluster.evaluation_slowdown(len(workers))
        self._evaluation_factor, self._round_factor = slowdown
        self._sharing = {
            one.rank: one for one in workers if one.worker is not None and not cluster.is_remote(one.worker)
        }
        """The processes whose rounds are slower beside an evaluation, by rank."""
        self._pending: deque[_Pending] = deque()
        """The evaluation under way, and those that wait for it."""
        self._left = 0.0
        """Seconds that the evaluation under way takes from `_since` on, if no round is outstanding."""
        self._since = 0.0
        self._factor = 1.0
        """By how much the evaluation under way is slowed down at present."""
        self._scheduled = 0
        """The sequence number of the valid end."""
        self._resumes: float | None = None
        """When the evaluation goes on after an update; None: it is not suspended."""

    def put(self, process: Process, evaluated: EventFactory, share: float = 1.0) -> None:
        """Let a process have the result of an evaluation when it has ended; `share` is of the time of a usual one."""
        if not self._seconds:
            process.emit(self._queue.now, evaluated)
            return
        self._pending.append(_Pending(process, process.life, evaluated, share * self._seconds))
        if len(self._pending) == 1:
            self._begin()
            self._change_rounds(self._slow_down)

    def updating(self, process: Process, seconds: float) -> None:
        """A process makes an update from now on."""
        if not self._pending or process is not self._pending[0].process:
            return
        if self._resumes is None:
            self._count_progress()
            self._scheduled += 1
            self._change_rounds(self._speed_up)
        self._resumes = self._queue.now + seconds
        self._queue.schedule(self._resumes, self._resume)

    def computing_began(self, process: Process, computation: Computation) -> None:
        """A round has begun, whose end is not scheduled yet."""
        if self._is_running and process.rank in self._sharing:
            self._slow_down(computation)
            computation.fit(0.0)
            self._set_factor()

    def computing_ended(self) -> None:
        """A round has ended."""
        if self._is_running:
            self._set_factor()

    @property
    def _is_running(self) -> bool:
        return bool(self._pending) and self._resumes is None

    def _begin(self) -> None:
        self._left, self._since = self._pending[0].seconds, self._queue.now
        self._factor = self._present_factor()
        self._schedule()

    def _present_factor(self) -> float:
        return self._evaluation_factor if any(one.computation is not None for one in self._sharing.values()) else 1.0

    def _set_factor(self) -> None:
        """Take into account whether rounds are outstanding now."""
        factor = self._present_factor()
        if factor != self._factor:
            self._count_progress()
            self._factor = factor
            self._schedule()

    def _count_progress(self) -> None:
        now = self._queue.now
        self._left = max(0.0, self._left - (now - self._since) / self._factor)
        self._since = now

    def _resume(self) -> None:
        if self._queue.now != self._resumes:  # another update has begun meanwhile
            return
        self._resumes, self._since = None, self._queue.now
        self._factor = self._present_factor()
        self._schedule()
        self._change_rounds(self._slow_down)

    def _schedule(self) -> None:
        self._scheduled += 1
        self._queue.schedule(self._since + self._left * self._factor, self._end, self._scheduled)

    def _end(self, scheduled: int) -> None:
        if scheduled != self._scheduled:  # the evaluation was slowed down or sped up meanwhile
            return
        ended = self._pending.popleft()
        if self._pending:
            self._begin()
        else:
            self._change_rounds(self._speed_up)
        if ended.process.life == ended.life:
            ended.process.emit(self._queue.now, ended.evaluated)

    def _slow_down(self, computation: Computation) -> None:
        computation.slow_down(self._round_factor, self._queue.now)

    def _speed_up(self, computation: Computation) -> None:
        computation.speed_up(self._queue.now)

    def _change_rounds(self, change: Callable[[Computation], None]) -> None:
        """Change the speed of the outstanding rounds, and their ends with it."""
        if self._round_factor == 1.0:
            return
        now = self._queue.now
        for process in self._sharing.values():
            computation = process.computation
            if computation is not None and computation.ends > now:
                done = computation.done_seconds(now)
                change(computation)
                computation.fit(done)
                computation.ends = max(computation.ends, now, computation.hung_until)
                self.schedule_round_end(process, computation)
