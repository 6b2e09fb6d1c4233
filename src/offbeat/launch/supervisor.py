"""What a supervisor sees of a run: the records that its processes write."""

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


class RunObserver(Protocol):
    """Looks on while a run goes on."""

    def records(self, records: Sequence[AnyRecord]) -> None: ...
    def say(self, sentence: str) -> None: ...
    def line(self, rank: int, text: str) -> None: ...


class RunMonitor:
    """Reads on in the files of a run whenever it is called, and remembers who has ever joined or computed."""

    def __init__(self, directory: Path, watcher: RunObserver) -> None:
        self.joined: set[int] = set()
        self.rounds: Counter[int] = Counter()
        """How often each rank has computed."""
        self._zero: float | None = None
        self._tail = Tail(directory)
        self._watcher = watcher

    def has_joined(self, rank: int) -> bool:
        """Whether a rank has ever joined: others have said so, or it has computed."""
        return rank in self.joined or self.rounds[rank] > 0

    def __call__(self) -> None:
        records = self._tail.poll()
        self.joined.update(record.peer for record in records if isinstance(record, Membership) and record.joined)
        self.rounds.update(record.rank for record in records if isinstance(record, Round))
        if records:
            self._zero = min(time.monotonic() - records[-1].at, self._zero or float("inf"))
            self._watcher.records(records)

    @property
    def began(self) -> float | None:
        """When the run began, by this machine's monotonic clock: no record can be read before it was written."""
        return self._zero


# Watches over the local processes of a run: who ended and why, who is started again, and how everybody ends.
#
# A required rank, such as a hub, decides: the run is over when it ends. Among equals it is over when all have
# ended, and went well if one did. Any other rank that was killed, or that failed after it had joined, is restarted a
# few times; one that fails before it ever joined would fail again, and so fails the run.


POLL_SECONDS = 0.05
TICK_SECONDS = 0.25
GRACE_SECONDS = 10.0
"""How long who was asked to end may take; after that it is made to."""
TERM_SECONDS = 2.0
BACKOFF_SECONDS = 0.2
COMMAND_WAS_WRONG = 2
"""The exit code that says so: starting again would not help."""

Start = Callable[[int, int], Child]


def backoff_seconds(restarts: int) -> float:
    """How long to wait before a process is started again that has been so often already."""
    return float(BACKOFF_SECONDS * 2**restarts)


@dataclass
class _RankState:
    """One rank: who holds it now, or when it is held again."""

    rank: int
    child: Child | None = None
    incarnation: int = 0
    restarts: int = 0
    due: float | None = None
    """When the next life begins; None where nothing is planned."""
    back_after: float | None = None
    """Set by a fault: how long its death is to last."""
    struck: bool = False
    """Its death was planned, and says nothing against it."""
    well: bool = False
    """Whether it came to its end by itself."""
    rounds: int = 0
    """What was known of its computations when its life began."""

    @property
    def gone(self) -> bool:
        return self.child is None and self.due is None


@dataclass(order=True)
class _FaultAction:
    """Something that a fault does, so many seconds after the run began."""

    at: float
    act: Callable[[], None] = field(compare=False)


class Supervisor:
    """Starts one process per rank and looks after them until the run is over.

    `is_required` tells whether the run stands and falls with a rank. `has_joined` tells whether a rank has ever joined,
    and `rounds` how often it has computed; they are asked right after a tick. With `others`, there are ranks that are
    not started here, so a run with an essential rank may go on when all that are have gone. `on_gone` is called when a
    rank will not be started again.
    """

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
        self._start_child, self._say, self._has_joined, self._name = start, say, has_joined, name
        self._essential, self._rounds, self._on_gone = is_required, rounds, on_gone
        self._restarts_max, self._others, self._grace = restarts_max, others, grace_seconds
        self._posts = {rank: _RankState(rank) for rank in ranks}
        if 0 not in self._posts:
            raise ValueError("a supervisor looks after rank 0 and others, but rank 0 was not among them")
        check_faults(faults, self._posts, is_required)
        self._planned = sorted(event for fault in faults for event in self._events(fault))
        self._began: float | None = None
        self._standing_still: set[int] = set()
        self._interrupts = 0
        self._interrupted_at: float | None = None
        self._left_alone_at: float | None = None
        self._ticked_at = 0.0
        self._tick: Callable[[], None] = lambda: None

    def run(self, tick: Callable[[], None]) -> str | None:
        """Until the run is over: the sentence why it failed, or None. `tick` is called four times a second.

        After Ctrl-C, or SIGTERM, the run is ended in order; then this raises KeyboardInterrupt.
        """
        self._tick = tick
        try:
            with self._signals():
                for post in self._posts.values():
                    self._begin(post)
                failure = self._watch()
                if failure is None and self._is_over():
                    self._let_end()
        finally:
            self._end_all()
        tick()
        if self._interrupts:
            raise KeyboardInterrupt
        return failure

    # One look after the other

    def _watch(self) -> str | None:
        """Why the run failed; None where it is over, or was made to end."""
        while True:
            self._breathe()
            if self._interrupts and self._interrupt():
                return None
            self._strike()
            for post in sorted(self._posts.values(), key=lambda post: not self._essential(post.rank)):
                was_gone = post.gone
                failure = self._look_at(post)
                if failure is not None:
                    return failure
                if post.gone and not was_gone:
                    self._on_gone(post.rank)
                if self._is_over():
                    return None
            self._end_latecomers()

    def _breathe(self) -> None:
        time.sleep(POLL_SECONDS)
        now = time.monotonic()
        if now - self._ticked_at >= TICK_SECONDS:
            self._ticked_at = now
            self._tick()

    def _look_at(self, post: _RankState) -> str | None:
        if post.child is None:
            if post.due is not None and time.monotonic() >= post.due and not self._interrupts:
                self._begin(post)
            return None
        code = post.child.poll()
        if code is None:
            return None
        ended, post.child = post.child, None
        self._tick()  # it may have joined since the last time, or shown what it is
        post.well = code == 0
        if post.well or self._interrupts:
            return None
        if self._essential(post.rank):
            return self._why(ended, code)
        if self._ended_well():  # the others have come to the end, so there is nothing to come back to
            if not post.struck:
                self._say(f"{self._why(ended, code)} (when the run was ending)")
            return None
        if post.struck:
            return self._after_a_fault(post)
        if code == COMMAND_WAS_WRONG or (code > 0 and not self._has_joined(post.rank)):
            return self._why(ended, code)
        return self._again(post, self._why(ended, code))

    def _again(self, post: _RankState, why: str) -> str | None:
        """Plan another life, or go on without."""
        if self._among_equals() and not self._anybody_at_work():
            return f"nobody is left who knows how far the training was: {why}"
        if post.rank and self._posts[0].gone:
            self._say(f"{why}, and it is not started again: rank 0, where it would find the others, is gone")
        elif post.restarts < self._restarts_max:
            post.due = time.monotonic() + backoff_seconds(post.restarts)
            post.restarts += 1
            self._say(f"{why}; it is started again ({post.restarts} of {self._restarts_max})")
            return None
        else:
            self._say(f"{why}, and it is not started again")
        return self._unless_nobody(why)

    def _after_a_fault(self, post: _RankState) -> str | None:
        post.struck = False
        if post.back_after is None:
            return self._unless_nobody(f"{_the(self._name(post.rank))} was killed, as was asked for")
        post.due = time.monotonic() + post.back_after
        return None

    def _unless_nobody(self, why: str) -> str | None:
        workers = [post for post in self._posts.values() if not self._essential(post.rank)]
        others = self._others and not self._among_equals()  # who is elsewhere among equals has no more to do with us
        return None if others or not all(post.gone for post in workers) else f"nobody is left to compute: {why}"

    # Among equals

    def _among_equals(self) -> bool:
        return not any(map(self._essential, self._posts))

    def _ended_well(self) -> bool:
        """Whether one of equals has come to the end of the run. Workers of a hub may do so earlier."""
        return self._among_equals() and any(post.well for post in self._posts.values())

    def _anybody_at_work(self) -> bool:
        return any(map(self._at_work, self._posts.values()))

    def _at_work(self, post: _RankState) -> bool:
        """Whether it has had a part in the training in this life; who is in its first will have."""
        return post.child is not None and (post.incarnation == 1 or self._rounds(post.rank) > post.rounds)

    def _end_latecomers(self) -> None:
        """Who came back when everybody else was ending finds nobody to learn from, and would wait in vain."""
        if not self._ended_well():
            return
        for rank in sorted(self._standing_still):
            self._signal(rank, signal.SIGCONT)
        if self._anybody_at_work():
            return
        now = time.monotonic()
        self._left_alone_at = self._left_alone_at or now
        patience = self._grace if self._others else min(self._grace, TERM_SECONDS)
        for post in self._posts.values():
            post.due = None
            if post.child is not None and now - self._left_alone_at > patience:
                post.struck = True
                post.child.kill(signal.SIGKILL)
                self._say(f"{_the(self._name(post.rank))} had come back when the others were ending, and was ended")

    def _begin(self, post: _RankState) -> None:
        post.rounds = self._rounds(post.rank)
        post.child, post.due = self._start_child(post.rank, post.incarnation), None
        post.incarnation += 1

    def _why(self, ended: Child, code: int) -> str:
        name = self._name(ended.rank)
        if code < 0:
            return f"{_the(name)} was killed by {_signal_name(-code)}"
        words = ended.last_words()
        if words is None:
            return f"{_the(name)} ended with exit code {code} and said nothing"
        return words if self._essential(ended.rank) and ended.sentence else f"{name}: {words}"

    # Faults

    def _events(self, fault: Fault) -> Iterator[_FaultAction]:
        if isinstance(fault, Crash):
            yield _FaultAction(fault.at_seconds, lambda: self._crash(fault))
        elif isinstance(fault, Pause):
            yield _FaultAction(fault.at_seconds, lambda: self._signal(fault.rank, signal.SIGSTOP))
            yield _FaultAction(fault.at_seconds + fault.seconds, lambda: self._signal(fault.rank, signal.SIGCONT))

    def _strike(self) -> None:
        """Carry out what is due. The run begins when the first worker has joined."""
        if not self._planned:
            return
        if self._began is None:
            others = [rank for rank in self._posts if rank] or [0]
            if not any(map(self._has_joined, others)):
                return
            self._began = time.monotonic()
        while self._planned and time.monotonic() - self._began >= self._planned[0].at:
            self._planned.pop(0).act()

    def _crash(self, fault: Crash) -> None:
        post = self._posts[fault.rank]
        if post.child is not None:
            post.back_after, post.struck = fault.back_after_seconds, True
            post.child.kill(signal.SIGKILL)
        elif post.due is not None:
            post.due = None if fault.back_after_seconds is None else time.monotonic() + fault.back_after_seconds
        self._say(f"{_the(self._name(fault.rank))} was killed, as was asked for")

    def _signal(self, rank: int, number: signal.Signals) -> None:
        child = self._posts[rank].child
        if child is not None:
            child.kill(number)
            (self._standing_still.add if number == signal.SIGSTOP else self._standing_still.discard)(rank)
            done = "stands still" if number == signal.SIGSTOP else "goes on"
            self._say(f"{_the(self._name(rank))} {done}, as was asked for")

    # The end

    def _deciding(self) -> list[_RankState]:
        """Those by whose end the run is over: who is essential, or everybody."""
        posts = list(self._posts.values())
        return [post for post in posts if self._essential(post.rank)] or posts

    def _is_over(self) -> bool:
        """Whether the run has ended by itself, rather than that somebody's patience has."""
        return all(post.gone for post in self._deciding())

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Count Ctrl-C and SIGTERM instead of dying of them. Only the main thread may, and only it needs to."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # Who was started to ignore Ctrl-C, as a job in the background is, goes on ignoring it.
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
        """Ask once to end the run; whether the time for it is up, or a second signal ends all patience."""
        if self._interrupted_at is None:
            self._interrupted_at = time.monotonic()
            for post in self._posts.values():
                post.due = None
            asked = [post.child for post in self._deciding() if post.child is not None]
            for child in asked:
                child.kill(signal.SIGCONT)
            for rank in sorted(self._standing_still):  # the others would wait for them
                self._signal(rank, signal.SIGCONT)
            for child in asked:
                child.kill(signal.SIGINT)
        return self._interrupts > 1 or time.monotonic() - self._interrupted_at > self._grace

    def _let_end(self) -> None:
        """The run is over: whoever is still there knows, and has some time to end as well."""
        before = self._interrupts
        others = [post.child for post in self._posts.values() if post.child is not None]
        for child in others:
            child.kill(signal.SIGCONT)
        for number, seconds in ((None, self._grace), (signal.SIGTERM, TERM_SECONDS)):
            for child in others:
                if number is not None:
                    child.kill(number)
            until = time.monotonic() + seconds
            while any(child.poll() is None for child in others) and time.monotonic() < until:
                if self._interrupts > max(before, 1):
                    return
                self._breathe()
        for child in others:
            if (code := child.poll()) is not None and code > 0 and not self._interrupts:
                self._say(f"{self._why(child, code)} (after the run had ended)")

    def _end_all(self) -> None:
        children = [post.child for post in self._posts.values() if post.child is not None]
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


# Which of the faults of a cluster can be done to real processes.


def check_faults(
    faults: Iterable[Fault],
    ranks: Iterable[int] | None = None,
    is_required: Callable[[int], bool] = lambda rank: rank == 0,
) -> None:
    """Refuse what cannot be done to real processes, or to others than those that are started here.

    A rank with which the run stands and falls is not started again.
    """
    here = None if ranks is None else set(ranks)
    for fault in faults:
        if not isinstance(fault, Crash | Pause):
            raise ConfigurationError(
                f"the fault {fault.name!r} can only be simulated; a live run takes crash and pause, "
                "or type: offbeat simulate"
            )
        if here is not None and fault.rank not in here:
            raise ConfigurationError(f"the fault {fault.name!r} names rank {fault.rank}, which is not started here")
        if isinstance(fault, Crash) and is_required(fault.rank) and fault.back_after_seconds is not None:
            raise ConfigurationError(
                f"rank {fault.rank} does not come back by itself in a live run; leave out back_after_seconds, "
                "and go on with --resume"
            )
