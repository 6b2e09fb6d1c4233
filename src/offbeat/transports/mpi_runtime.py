"""The one thread of a process that makes all calls of MPI, from its beginning to its end.

It never waits inside MPI, which would burn a core: it looks what has come, moves what can be moved, and sleeps, a
millisecond or two at the most, unless somebody wakes it. What to look for, transports say; it works for all of them.
"""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from offbeat.errors import ConfigurationError
from offbeat.transports.mpi_link import Frame, LinkBroken, Operation, encode_control

DIED = "its process has ended"

_log = logging.getLogger(__name__)

_FAULT_TOLERANCE = "OMPI_MCA_mpi_ft_enable"
"""How mpirun tells its processes that it was given `--with-ft ulfm`; MPI itself has no way to ask."""

_TAGS_FIRST, _TAGS = 16384, 16384
"""The upper half of the tags that every MPI has: what a user's program sends rarely has one of these."""

_SLEEP_SECONDS_MIN, _SLEEP_SECONDS_MAX = 5e-5, 1e-3
_SLEEP_SECONDS_IDLE = 2e-3
_IDLE_SECONDS = 1.0
"""After so long without anything it looks half as often, and only for frames: each time costs some 40 µs of a core."""

_SPIN_SECONDS = 0.005
"""How long to look without a pause for the rest of what is coming in."""

_BUSY_SECONDS = 0.5
"""How long to look with the shortest pauses only, while something is under way: some networks move only then."""

_ROUND_SECONDS = 0.05
"""How often to look for what is rare: ranks that died, peers that are silent, words to transports that are closed."""

_BEGIN_SECONDS = 120.0
"""How long to wait for the others when MPI begins: they may have a lot to load before."""

_WATCH = (
    "import os, select, sys\n"
    "if not select.select([0], [], [], float(sys.argv[2]))[0]:\n"
    "    print(sys.argv[3], file=sys.stderr, flush=True)\n"
    "    os.kill(int(sys.argv[1]), 9)\n"
)
"""Run by a process that ends this one, unless its standard input is closed in time."""

_EXCUSE_SECONDS = 0.5
_LEAVE_SECONDS = 30.0
"""How long to wait at exit for the others to get there."""


class Served(Protocol):
    """What the thread works for: a transport. It calls all of this but `close`."""

    frame_tag: int
    retired: bool
    """Whether it has only to be looked after now and then."""

    @property
    def settled(self) -> bool:
        """Whether it is retired, and nobody can come any more who would have to be told."""

    def work(self) -> bool:
        """Do what can be done now; whether anything moved."""

    def receiving(self) -> bool:
        """Whether something is coming in."""

    def sending(self) -> bool:
        """Whether something is leaving."""

    def died(self, ranks: set[int]) -> None: ...

    def give_up(self, why: str) -> None:
        """There is no MPI any more; let whoever receives know."""

    def make_round(self, since_seconds: float) -> None:
        """Look for what is rare, so long after the last time."""

    def close(self, linger_seconds: float = 5.0) -> None: ...


class MpiRuntime:
    """MPI in this process. All methods but those named for any thread are for its own thread only."""

    def __init__(self, MPI: Any) -> None:
        self.MPI = MPI
        self.rank, self.size = 0, 1
        self.is_fault_tolerant = False
        """Whether the others go on when a rank dies."""
        self.skip_finalize = False
        """Whether not to wait for the others at exit, since they may be waiting for this one."""
        self.suspects: set[int] = set()
        """Ranks that died or fell silent: Finalize might wait for them."""
        self.failed: set[int] = set()
        """Ranks that died."""
        self._own = not MPI.Is_initialized()
        if not self._own and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise ConfigurationError(
                "MPI was begun by this program without support for threads, which offbeat needs; begin it with "
                "MPI.Init_thread(MPI.THREAD_MULTIPLE), or leave it to offbeat"
            )
        self.errors = _Errors(MPI)
        self._lock = threading.Lock()
        self._served: list[Served] = []
        self._transports = 0
        self._limbo: list[Operation] = []
        self._bell = threading.Lock()
        """Free when somebody has rung: waiting for a lock with a limit is the cheapest sleep that can be ended."""
        self._bell.acquire()
        self._leaving = False
        self._ready = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="offbeat MPI", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise ConfigurationError(f"MPI does not begin: {self._failure}; start this process with mpirun")
        atexit.register(self._leave)

    # Any thread

    def new_tags(self) -> tuple[int, int]:
        """Two tags for a transport; the n-th of this process gets the same as the n-th of every other."""
        with self._lock:
            first = self._next_tag()
            self._transports += 1
            return first, first + 1

    def _next_tag(self) -> int:
        return _TAGS_FIRST + 2 * self._transports % _TAGS

    def serve(self, served: Served) -> None:
        with self._lock:
            self._served = [*self._served, served]
        self.wake()

    def wake(self) -> None:
        with suppress(RuntimeError):  # it has been rung already
            self._bell.release()

    def _leave(self) -> None:
        """At exit. The thread is left behind where MPI does not let go of it."""
        for served in self._served:
            served.close(0.0)
        self._leaving = True
        self.wake()
        self._thread.join(_LEAVE_SECONDS + 5.0)

    # The thread

    def _run(self) -> None:
        try:
            self._begin()
        except Exception as error:
            self._failure = error
            return
        finally:
            self._ready.set()
        moved_at = round_at = time.monotonic()
        while not self._leaving:
            active = [served for served in self._served if not served.retired]
            try:
                moved = [served.work() for served in active]
                now = time.monotonic()
                if any(moved):
                    moved_at = now
                if now - round_at > (_ROUND_SECONDS if now - moved_at < _IDLE_SECONDS else 2 * _ROUND_SECONDS):
                    self._make_round(now - round_at)
                    round_at = now
            except Exception as error:  # without this thread everybody would wait for ever
                _log.exception("MPI is given up because of a mistake")
                self._failure = error
                for served in self._served:
                    served.give_up(f"{type(error).__name__}: {error}")
                return
            self._rest(now - moved_at, active, round_at + _ROUND_SECONDS)
        self._finalize()

    def _begin(self) -> None:
        self.is_fault_tolerant = os.environ.get(_FAULT_TOLERANCE) == "1"
        if self._own:
            with _ended_unless_done() if self.is_fault_tolerant else nullcontext():
                self.MPI.Init_thread(self.MPI.THREAD_FUNNELED)
        self._status = self.MPI.Status()
        self.comm = self.MPI.COMM_WORLD
        self.comm.Set_errhandler(self.MPI.ERRORS_RETURN)
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()

    def _rest(self, quiet_seconds: float, active: list[Served], round_due: float) -> None:
        """Look again soon where something is under way, and ever later where nothing is; let others have the core."""
        longest = _SLEEP_SECONDS_MAX
        if quiet_seconds > _IDLE_SECONDS:
            self._doze([served.frame_tag for served in active], round_due + _ROUND_SECONDS)
            return
        if quiet_seconds < _BUSY_SECONDS:
            receiving = any(served.receiving() for served in active)
            if receiving and quiet_seconds < _SPIN_SECONDS:
                os.sched_yield()
                return
            if receiving or any(served.sending() for served in active):
                longest = _SLEEP_SECONDS_MIN
        self._bell.acquire(timeout=min(max(quiet_seconds / 8, _SLEEP_SECONDS_MIN), longest))

    def _doze(self, tags: list[int], until: float) -> None:
        """Sleep until somebody rings, something has come, or it is time for a round. Python's share is kept small."""
        anybody = self.MPI.ANY_SOURCE
        with suppress(self.MPI.Exception):  # a death, which is looked for elsewhere
            while not self._bell.acquire(timeout=_SLEEP_SECONDS_IDLE) and time.monotonic() < until:
                for tag in tags:
                    if self.comm.Iprobe(anybody, tag):
                        return

    def _make_round(self, since_seconds: float) -> None:
        self.look_for_dead()
        self._limbo = [operation for operation in self._limbo if not _over(operation)]
        for served in self._served:
            served.make_round(since_seconds)
        with self._lock:
            self._served = [served for served in self._served if not served.settled]

    def _finalize(self) -> None:
        """Once everybody has come here; until then words are still answered. Not where somebody might never come.

        Where losses are survived, nobody minds who leaves without it. Who has made no transport was in no run.
        """
        if self.is_fault_tolerant or self.skip_finalize:
            self._excuse()
        if not self._own or self.is_fault_tolerant or self.skip_finalize or not self._transports:
            return
        until = time.monotonic() + _LEAVE_SECONDS
        with suppress(ConnectionError), self.errors:
            everybody = self.comm.Ibarrier()
            while not self.suspects and time.monotonic() < until:
                if everybody.Test():
                    self.MPI.Finalize()
                    return
                self._make_round(0.0)
                time.sleep(_SLEEP_SECONDS_MAX)

    def _excuse(self) -> None:
        """Tell those who wait for this process to make another transport that it will not: nobody else tells them."""
        word, operations = encode_control(LinkBroken(DIED)), []
        for peer in set(range(self.size)) - self.failed - {self.rank}:
            with suppress(ConnectionError):
                operations.append(self.send(peer, self._next_tag(), word))
        until = time.monotonic() + _EXCUSE_SECONDS
        while not all(map(_over, operations)) and time.monotonic() < until:
            time.sleep(_SLEEP_SECONDS_MAX)

    # What transports ask for

    def frames(self, tag: int) -> Iterator[MatchedFrame]:
        """What has come under a tag, from anybody."""
        MPI, status = self.MPI, self._status
        while True:
            try:
                matched = self.comm.Improbe(MPI.ANY_SOURCE, tag, status)
            except MPI.Exception as error:
                before = len(self.failed)
                self.look_for_dead()
                if len(self.failed) > before:
                    continue
                raise ConnectionError(f"MPI failed: {error.Get_error_string()}") from None
            if matched is None:
                return
            yield MatchedFrame(self, matched, status.Get_source(), status.Get_count(MPI.BYTE))

    def look_for_dead(self) -> None:
        """After this, receiving from anybody works again, which fails from a death on until it is acknowledged."""
        if not self.is_fault_tolerant:
            return
        with suppress(ConnectionError), self.errors:
            group = self.comm.Get_failed()
            try:
                if group.Get_size() == len(self.failed):
                    return
                self.comm.Ack_failed(group.Get_size())
                everybody = self.comm.Get_group()
                died = set(self.MPI.Group.Translate_ranks(group, None, everybody)) - self.failed
                everybody.Free()
            finally:
                group.Free()
            self.failed |= died
            self.suspects |= died
            for served in self._served:
                served.died(died)

    def send(self, peer: int, tag: int, memory: Tensor) -> Operation:
        with self.errors:
            return _Request(self, self.comm.Isend([memory.numpy(), self.MPI.BYTE], peer, tag), memory)

    def abandon(self, peer: int, operations: Iterable[Operation], frames: Iterable[Frame]) -> None:
        """Receive what was matched and throw it away: the other side waits for that. Not from the dead."""
        self._limbo.extend(operations)
        for frame in frames if peer not in self.failed else ():
            with suppress(ConnectionError):
                self._limbo.append(frame.receive(torch.empty(frame.nbytes, dtype=torch.uint8)))


@contextmanager
def _ended_unless_done() -> Iterator[None]:
    """A rank that ends before MPI has begun leaves the others in there for ever, where mpirun tolerates losses.

    They hold Python's lock meanwhile, so it takes another process to end them.
    """
    sentence = (
        f"offbeat: MPI has not begun after {_BEGIN_SECONDS:g} seconds, as it happens where another rank ends before it "
        "gets there; look for what that one says"
    )
    line = [sys.executable, "-I", "-S", "-c", _WATCH, str(os.getpid()), str(_BEGIN_SECONDS), sentence]
    with subprocess.Popen(line, stdin=subprocess.PIPE):
        yield


class _Errors:
    """What MPI complains of becomes a ConnectionError with a plain reason. One object, since it is used so often."""

    def __init__(self, MPI: Any) -> None:
        self._exception = MPI.Exception
        self._died = {getattr(MPI, name, None) for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING")}

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: Any, trace: object) -> None:
        if isinstance(error, self._exception):
            died = error.Get_error_class() in self._died
            raise ConnectionError(DIED if died else f"MPI failed: {error.Get_error_string()}") from None


@dataclass(slots=True)
class _Request:
    """A request of MPI and the memory that it needs."""

    library: MpiRuntime
    request: Any
    memory: Tensor

    def done(self) -> bool:
        with self.library.errors:
            return bool(self.request.Test())


@dataclass(slots=True)
class MatchedFrame:
    """A message of MPI that was matched: nobody else will receive it."""

    library: MpiRuntime
    matched: Any
    source: int
    nbytes: int

    def receive(self, into: Tensor) -> Operation:
        with self.library.errors:
            request = self.matched.Irecv([into.numpy(), self.library.MPI.BYTE])
        return _Request(self.library, request, into)


def _over(operation: Operation) -> bool:
    try:
        return operation.done()
    except ConnectionError:
        return True
