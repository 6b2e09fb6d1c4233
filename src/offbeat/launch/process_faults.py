"""Faults that are injected into the local processes of a live run: crashes and pauses, by signals.

A hang is not one of them: the process that computes injects it itself, see `live/live_round.py`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from offbeat.cluster.faults import Crash, Fault, Hang, Pause
from offbeat.errors import ConfigurationError
from offbeat.launch.rank_processes import RankProcesses


@dataclass(order=True)
class _FaultAction:
    """What a fault does, `at` seconds after the run began."""

    at: float
    act: Callable[[], None] = field(compare=False)


class ProcessFaults:
    """Injects faults when they are due; `say` takes a sentence for the user about each."""

    def __init__(self, faults: Iterable[Fault], processes: RankProcesses, say: Callable[[str], None]) -> None:
        self._processes, self._say = processes, say
        self._planned = sorted(action for fault in faults for action in self._actions(fault))
        self._began: float | None = None
        self._paused: set[int] = set()

    def _actions(self, fault: Fault) -> Iterator[_FaultAction]:
        if isinstance(fault, Crash):
            yield _FaultAction(fault.at_seconds, lambda: self._crash(fault))
        elif isinstance(fault, Pause):
            yield _FaultAction(fault.at_seconds, lambda: self._pause(fault.rank))
            yield _FaultAction(fault.at_seconds + fault.seconds, lambda: self._resume(fault.rank))

    def inject(self) -> None:
        """Carry out what is due; call it often. Times count from the moment when the first worker has joined."""
        if not self._planned:
            return
        if self._began is None:
            if not self._processes.has_begun():
                return
            self._began = time.monotonic()
        while self._planned and time.monotonic() - self._began >= self._planned[0].at:
            self._planned.pop(0).act()

    def resume_paused(self) -> None:
        """Let all paused processes go on, since others wait for them."""
        for rank in sorted(self._paused):
            self._resume(rank)

    def _crash(self, fault: Crash) -> None:
        process = self._processes[fault.rank]
        if process.child is not None:
            process.back_after, process.is_fault = fault.back_after_seconds, True
            process.child.kill(signal.SIGKILL)
        elif process.restart_at is not None:
            back_after = fault.back_after_seconds
            process.restart_at = None if back_after is None else time.monotonic() + back_after
        self._say(f"{self._processes.name(fault.rank)} was killed by an injected fault")

    def _pause(self, rank: int) -> None:
        if (child := self._processes[rank].child) is not None:
            child.kill(signal.SIGSTOP)
            self._paused.add(rank)
            self._say(f"{self._processes.name(rank)} was paused by an injected fault")

    def _resume(self, rank: int) -> None:
        if (child := self._processes[rank].child) is not None:
            child.kill(signal.SIGCONT)
            self._paused.discard(rank)
            self._say(f"{self._processes.name(rank)} goes on after the pause")


def check_faults(
    faults: Iterable[Fault],
    ranks: Iterable[int] | None = None,
    is_required: Callable[[int], bool] = lambda rank: rank == 0,
) -> None:
    """Raise ConfigurationError for faults that cannot be injected into the local processes of a live run.

    Args:
        faults: to be injected.
        ranks: that run here; None if they are not known yet.
        is_required: whether the run ends with this rank, so that it cannot come back.
    """
    local = None if ranks is None else set(ranks)
    for fault in faults:
        if not isinstance(fault, Crash | Pause | Hang):
            raise ConfigurationError(
                f"the fault {fault.name!r} can only be simulated; a live run takes crash, pause and hang, "
                "or type: offbeat simulate"
            )
        if local is not None and fault.rank not in local:
            raise ConfigurationError(f"the fault {fault.name!r} names rank {fault.rank}, which is not started here")
        if isinstance(fault, Crash) and is_required(fault.rank) and fault.back_after_seconds is not None:
            raise ConfigurationError(
                f"rank {fault.rank} does not come back by itself in a live run; leave out back_after_seconds, "
                "and go on with --resume"
            )
