"""Starts the local processes of a run, watches and restarts them, injects faults, and ends them.

A required rank, such as a hub, decides: the run is over when it ends. Among peers, where no rank is required, it is
over when all have ended, and successful if one was. Any other rank that was killed, or that failed after it had
joined, is restarted a few times; one that fails before it ever joined would fail again, and so fails the run.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

from offbeat.cluster.faults import Crash, Fault, Pause
from offbeat.errors import ConfigurationError
from offbeat.launch.children import Child
from offbeat.launch.process_settings import hub_or_worker_name
from offbeat.records.files import Tail
from offbeat.records.schema import AnyRecord, Membership, Round

POLL_SECONDS = 0.05
TICK_SECONDS = 0.25
GRACE_SECONDS = 10.0
"""How long processes may take to end after a request; then they are killed."""
TERM_SECONDS = 2.0
BACKOFF_SECONDS = 0.2
COMMAND_WAS_WRONG = 2
"""Exit code of a configuration error: a restart would not help."""

Start = Callable[[int, int], Child]
"""Starts the process of a rank, given its rank and its incarnation."""


class RunObserver(Protocol):
    """Is notified of what happens in a run."""

    def records(self, records: Sequence[AnyRecord]) -> None: ...
    def say(self, sentence: str) -> None: ...
    def line(self, rank: int, text: str) -> None: ...


class RunMonitor:
    """Reads the new records of a run whenever it is called, and remembers which ranks have joined or computed."""

    def __init__(self, directory: Path, observer: RunObserver) -> None:
        self.joined: set[int] = set()
        self.rounds: Counter[int] = Counter()
        """Rounds that each rank has computed."""
        self.began: float | None = None
        """When the run began, by this machine's monotonic clock: no record can be read before it was written."""
        self._tail = Tail(directory)
        self._observer = observer

    def has_joined(self, rank: int) -> bool:
        """Whether a rank has ever joined: another rank recorded it, or it has computed."""
        return rank in self.joined or self.rounds[rank] > 0

    def __call__(self) -> None:
        records = self._tail.poll()
        self.joined.update(record.peer for record in records if isinstance(record, Membership) and record.joined)
        self.rounds.update(record.rank for record in records if isinstance(record, Round))
        if records:
            self.began = min(time.monotonic() - records[-1].at, self.began or float("inf"))
            self._observer.records(records)


def backoff_seconds(restarts: int) -> float:
    """How long to wait before a restart, after so many earlier ones."""
    return float(BACKOFF_SECONDS * 2**restarts)


@dataclass
class _RankState:
    """One rank: its process, or when it is started again."""

    rank: int
    child: Child | None = None
    incarnation: int = 0
    restarts: int = 0
    restart_at: float | None = None
    """When the next process is started; None where none is planned."""
    back_after: float | None = None
    """Set by a fault: seconds until the rank is started again."""
    is_fault: bool = False
    """Whether the process was killed on purpose, which does not count as a failure."""
    succeeded: bool = False
    """Whether the last process ended with exit code 0."""
    rounds: int = 0
    """Rounds that the rank had computed when its process was started."""

    @property
    def gone(self) -> bool:
        return self.child is None and self.restart_at is None


@dataclass(order=True)
class _FaultAction:
    """What a fault does, `at` seconds after the run began."""

    at: float
    act: Callable[[], None] = field(compare=False)


class Supervisor:
    """Starts one process per rank and watches them until the run is over."""

    def __init__(
        self,
        start: Start,
        ranks: Iterable[int],
        *,
        restarts_max: int = 3,
        say: Callable[[str], None],
        has_joined: Callable[[int], bool],
        rounds: Callable[[int], int] = lambda rank: 0,
        is_required: Callable[[int], bool] = lambda rank: rank == 0,
        faults: Sequence[Fault] = (),
        name: Callable[[int], str] = hub_or_worker_name,
        others: bool = False,
        on_gone: Callable[[int], None] = lambda rank: None,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        """Nothing is started before `run`.

        Args:
            start: starts a process, given its rank and its incarnation.
            ranks: those that run here, rank 0 among them.
            restarts_max: how often a rank is restarted.
            say: takes sentences for the user.
            has_joined: whether a rank has ever joined the run; called after a tick.
            rounds: rounds that a rank has computed; called after a tick.
            is_required: whether the run ends with this rank.
            faults: crashes and pauses to inject.
            name: what a rank is called in sentences.
            others: whether there are ranks elsewhere, so that a run with a required rank survives the loss of all
                others that run here.
            on_gone: called when a rank has ended and will not be restarted.
            grace_seconds: how long processes may take to end.
        """
        self._start_child, self._say, self._has_joined, self._name = start, say, has_joined, name
        self._is_required, self._rounds, self._on_gone = is_required, rounds, on_gone
        self._restarts_max, self._others, self._grace = restarts_max, others, grace_seconds
        self._ranks = {rank: _RankState(rank) for rank in ranks}
        if 0 not in self._ranks:
            raise ValueError("internal error: a supervisor needs rank 0 among its ranks")
        check_faults(faults, self._ranks, is_required)
        self._planned = sorted(action for fault in faults for action in self._actions(fault))
        self._began: float | None = None
        self._paused: set[int] = set()
        self._interrupts = 0
        self._interrupted_at: float | None = None
        self._ending_since: float | None = None
        self._ticked_at = 0.0
        self._tick: Callable[[], None] = lambda: None

    def run(self, tick: Callable[[], None]) -> str | None:
        """Until the run is over: the sentence why it failed, or None. `tick` is called four times a second.

        After Ctrl-C, or SIGTERM, the run is ended in order; then this raises KeyboardInterrupt.
        """
        self._tick = tick
        try:
            with self._signals():
                for state in self._ranks.values():
                    self._start(state)
                failure = self._watch()
                if failure is None and self._is_over():
                    self._wait_for_end()
        finally:
            self._kill_all()
        tick()
        if self._interrupts:
            raise KeyboardInterrupt
        return failure

    # Watching

    def _watch(self) -> str | None:
        """Why the run failed; None where it is over, or was interrupted."""
        while True:
            self._sleep()
            if self._interrupts and self._interrupt():
                return None
            self._inject_faults()
            for state in sorted(self._ranks.values(), key=lambda state: not self._is_required(state.rank)):
                was_gone = state.gone
                failure = self._check(state)
                if failure is not None:
                    return failure
                if state.gone and not was_gone:
                    self._on_gone(state.rank)
                if self._is_over():
                    return None
            self._end_latecomers()

    def _sleep(self) -> None:
        time.sleep(POLL_SECONDS)
        now = time.monotonic()
        if now - self._ticked_at >= TICK_SECONDS:
            self._ticked_at = now
            self._tick()

    def _check(self, state: _RankState) -> str | None:
        """Start a process that is due, or handle one that has ended; the sentence why that fails the run."""
        if state.child is None:
            if state.restart_at is not None and time.monotonic() >= state.restart_at and not self._interrupts:
                self._start(state)
            return None
        code = state.child.poll()
        if code is None:
            return None
        ended, state.child = state.child, None
        self._tick()  # it may have joined, or computed, since the last tick
        state.succeeded = code == 0
        if state.succeeded or self._interrupts:
            return None
        if self._is_required(state.rank):
            return self._reason(ended, code)
        if self._is_ending():  # the other peers have finished, so there is nothing to come back to
            if not state.is_fault:
                self._say(f"{self._reason(ended, code)} (when the run was ending)")
            return None
        if state.is_fault:
            return self._after_fault(state)
        if code == COMMAND_WAS_WRONG or (code > 0 and not self._has_joined(state.rank)):
            return self._reason(ended, code)
        return self._restart(state, self._reason(ended, code))

    def _start(self, state: _RankState) -> None:
        state.rounds = self._rounds(state.rank)
        state.child, state.restart_at = self._start_child(state.rank, state.incarnation), None
        state.incarnation += 1

    def _restart(self, state: _RankState, why: str) -> str | None:
        """Plan a restart, or go on without the rank."""
        if self._has_only_peers() and not self._is_any_training():
            return f"no process is left that has the state of the training: {why}"
        if state.rank and self._ranks[0].gone:
            self._say(f"{why}, and it is not started again: rank 0, where it would find the others, is gone")
        elif state.restarts < self._restarts_max:
            state.restart_at = time.monotonic() + backoff_seconds(state.restarts)
            state.restarts += 1
            self._say(f"{why}; it is started again ({state.restarts} of {self._restarts_max})")
            return None
        else:
            self._say(f"{why}, and it is not started again")
        return self._unless_all_gone(why)

    def _after_fault(self, state: _RankState) -> str | None:
        state.is_fault = False
        if state.back_after is None:
            return self._unless_all_gone(f"{_the(self._name(state.rank))} was killed by an injected fault")
        state.restart_at = time.monotonic() + state.back_after
        return None

    def _unless_all_gone(self, why: str) -> str | None:
        workers = [state for state in self._ranks.values() if not self._is_required(state.rank)]
        others = self._others and not self._has_only_peers()  # peers elsewhere cannot continue the run of these
        return None if others or not all(state.gone for state in workers) else f"no process is left to compute: {why}"

    def _reason(self, ended: Child, code: int) -> str:
        name = self._name(ended.rank)
        if code < 0:
            return f"{_the(name)} was killed by {_signal_name(-code)}"
        reason = ended.failure_reason()
        if reason is None:
            return f"{_the(name)} ended with exit code {code} and without a message"
        return reason if self._is_required(ended.rank) and ended.sentence else f"{name}: {reason}"

    # Runs without a required rank

    def _has_only_peers(self) -> bool:
        return not any(map(self._is_required, self._ranks))

    def _is_ending(self) -> bool:
        """Whether a peer has finished the run. Workers of a hub may end earlier."""
        return self._has_only_peers() and any(state.succeeded for state in self._ranks.values())

    def _is_any_training(self) -> bool:
        return any(map(self._is_training, self._ranks.values()))

    def _is_training(self, state: _RankState) -> bool:
        """Whether this process takes part in the training. A restarted one does once it has computed."""
        return state.child is not None and (state.incarnation == 1 or self._rounds(state.rank) > state.rounds)

    def _end_latecomers(self) -> None:
        """Kill peers that were restarted when the others were ending: they wait in vain for a peer to copy."""
        if not self._is_ending():
            return
        for rank in sorted(self._paused):
            self._signal(rank, signal.SIGCONT)
        if self._is_any_training():
            return
        now = time.monotonic()
        self._ending_since = self._ending_since or now
        limit = self._grace if self._others else min(self._grace, TERM_SECONDS)
        for state in self._ranks.values():
            state.restart_at = None
            if state.child is not None and now - self._ending_since > limit:
                state.is_fault = True
                state.child.kill(signal.SIGKILL)
                self._say(f"{_the(self._name(state.rank))} had come back when the others were ending, and was ended")

    # Faults

    def _actions(self, fault: Fault) -> Iterator[_FaultAction]:
        if isinstance(fault, Crash):
            yield _FaultAction(fault.at_seconds, lambda: self._crash(fault))
        elif isinstance(fault, Pause):
            yield _FaultAction(fault.at_seconds, lambda: self._signal(fault.rank, signal.SIGSTOP))
            yield _FaultAction(fault.at_seconds + fault.seconds, lambda: self._signal(fault.rank, signal.SIGCONT))

    def _inject_faults(self) -> None:
        """Carry out the actions that are due. The run begins when the first worker has joined."""
        if not self._planned:
            return
        if self._began is None:
            others = [rank for rank in self._ranks if rank] or [0]
            if not any(map(self._has_joined, others)):
                return
            self._began = time.monotonic()
        while self._planned and time.monotonic() - self._began >= self._planned[0].at:
            self._planned.pop(0).act()

    def _crash(self, fault: Crash) -> None:
        state = self._ranks[fault.rank]
        if state.child is not None:
            state.back_after, state.is_fault = fault.back_after_seconds, True
            state.child.kill(signal.SIGKILL)
        elif state.restart_at is not None:
            back_after = fault.back_after_seconds
            state.restart_at = None if back_after is None else time.monotonic() + back_after
        self._say(f"{_the(self._name(fault.rank))} was killed by an injected fault")

    def _signal(self, rank: int, number: signal.Signals) -> None:
        child = self._ranks[rank].child
        if child is not None:
            child.kill(number)
            (self._paused.add if number == signal.SIGSTOP else self._paused.discard)(rank)
            done = "was paused by an injected fault" if number == signal.SIGSTOP else "goes on after the pause"
            self._say(f"{_the(self._name(rank))} {done}")

    # The end

    def _deciding(self) -> list[_RankState]:
        """Ranks with whose end the run is over: the required ones, or all."""
        states = list(self._ranks.values())
        return [state for state in states if self._is_required(state.rank)] or states

    def _is_over(self) -> bool:
        return all(state.gone for state in self._deciding())

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Count Ctrl-C and SIGTERM instead of ending. Only possible, and only needed, in the main thread."""
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
        self._interrupts += 1

    def _interrupt(self) -> bool:
        """Ask once to end the run; True after the grace time, or after a second signal."""
        if self._interrupted_at is None:
            self._interrupted_at = time.monotonic()
            for state in self._ranks.values():
                state.restart_at = None
            children = [state.child for state in self._deciding() if state.child is not None]
            for child in children:
                child.kill(signal.SIGCONT)
            for rank in sorted(self._paused):  # the others would wait for them
                self._signal(rank, signal.SIGCONT)
            for child in children:
                child.kill(signal.SIGINT)
        return self._interrupts > 1 or time.monotonic() - self._interrupted_at > self._grace

    def _wait_for_end(self) -> None:
        """The run is over: the remaining processes know, and have some time to end as well."""
        before = self._interrupts
        children = [state.child for state in self._ranks.values() if state.child is not None]
        for child in children:
            child.kill(signal.SIGCONT)
        for number, seconds in ((None, self._grace), (signal.SIGTERM, TERM_SECONDS)):
            for child in children:
                if number is not None:
                    child.kill(number)
            deadline = time.monotonic() + seconds
            while any(child.poll() is None for child in children) and time.monotonic() < deadline:
                if self._interrupts > max(before, 1):
                    return
                self._sleep()
        for child in children:
            if (code := child.poll()) is not None and code > 0 and not self._interrupts:
                self._say(f"{self._reason(child, code)} (after the run had ended)")

    def _kill_all(self) -> None:
        children = [state.child for state in self._ranks.values() if state.child is not None]
        for child in children:
            child.kill(signal.SIGKILL)
        for child in children:
            child.wait()


def _the(name: str) -> str:
    return name if any(sign.isdigit() for sign in name) else f"the {name}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


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
        if not isinstance(fault, Crash | Pause):
            raise ConfigurationError(
                f"the fault {fault.name!r} can only be simulated; a live run takes crash and pause, "
                "or type: offbeat simulate"
            )
        if local is not None and fault.rank not in local:
            raise ConfigurationError(f"the fault {fault.name!r} names rank {fault.rank}, which is not started here")
        if isinstance(fault, Crash) and is_required(fault.rank) and fault.back_after_seconds is not None:
            raise ConfigurationError(
                f"rank {fault.rank} does not come back by itself in a live run; leave out back_after_seconds, "
                "and go on with --resume"
            )
