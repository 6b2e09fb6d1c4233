"""The one thread of a process that makes all calls of MPI, from its initialization to its end.

It never blocks inside MPI, which would occupy a core: it polls, moves what can be moved, and sleeps, a millisecond or
two at the most, unless it is woken. It serves all transports of the process.
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

from offbeat.core.events import LossReason
from offbeat.errors import ConfigurationError
from offbeat.transports.link import ConnectionLost, LinkLoss
from offbeat.transports.mpi_link import Frame, LinkBroken, Operation, encode_control

DIED = LinkLoss(LossReason.DIED, "its process has ended")

_log = logging.getLogger(__name__)

_FAULT_TOLERANCE = "OMPI_MCA_mpi_ft_enable"
"""Set by mpirun if it was given `--with-ft ulfm`; MPI itself has no function to ask."""

_TAGS_FIRST, _TAGS = 16384, 16384
"""The upper half of the tags that every MPI has: a user's program rarely uses them."""

_SLEEP_SECONDS_MIN, _SLEEP_SECONDS_MAX = 5e-5, 1e-3
_SLEEP_SECONDS_IDLE = 2e-3
_IDLE_SECONDS = 1.0
"""When nothing has moved for so long, the thread polls half as often, and only for frames: a poll costs some 40 µs."""

_SPIN_SECONDS = 0.005
"""How long to poll without a pause while a message is being received."""

_BUSY_SECONDS = 0.5
"""How long to poll with the shortest pauses while a transfer is in progress: some networks make progress only then."""

_CHECK_SECONDS = 0.05
"""How often to check for rare events: dead ranks, silent peers, control messages to closed transports."""

_BEGIN_SECONDS = 120.0
"""How long to wait for the other ranks when MPI begins: they may have much to load before."""

_WATCHDOG = (
    "import os, select, sys\n"
    "if not select.select([0], [], [], float(sys.argv[2]))[0]:\n"
    "    print(sys.argv[3], file=sys.stderr, flush=True)\n"
    "    os.kill(int(sys.argv[1]), 9)\n"
)
"""Program of a process that kills this one, unless its standard input is closed in time."""

_ANNOUNCE_SECONDS = 0.5
_EXIT_SECONDS = 30.0
"""How long to wait at exit for the other ranks to reach theirs."""


class ServedTransport(Protocol):
    """A transport as the thread sees it. The thread calls everything but `close`."""

    frame_tag: int
    retired: bool
    """Whether `check_links` suffices."""

    @property
    def finished(self) -> bool:
        """Whether it is retired, and no rank can connect any more that would need an answer."""

    def work(self) -> bool:
        """Do what can be done now; whether anything moved."""

    def receiving(self) -> bool:
        """Whether a receive is in progress."""

    def sending(self) -> bool:
        """Whether a send is in progress."""

    def on_death(self, ranks: set[int]) -> None:
        """These ranks have died."""

    def fail(self, why: str) -> None:
        """MPI cannot be used any more; report it to the user of the transport."""

    def check_links(self, since_seconds: float) -> None:
        """Handle rare events, `since_seconds` after the last time."""

    def close(self, linger_seconds: float = 5.0) -> None: ...


class MpiRuntime:
    """MPI in this process. Its own thread calls all methods but those for any thread."""

    def __init__(self, MPI: Any) -> None:
        self.MPI = MPI
        self.rank, self.size = 0, 1
        self.is_fault_tolerant = False
        """Whether the other ranks go on when one dies."""
        self.skip_finalize = False
        """Whether not to wait for the other ranks at exit, since they may be waiting for this one."""
        self.suspects: set[int] = set()
        """Ranks that died or were silent for too long: Finalize might wait for them."""
        self.failed: set[int] = set()
        """Ranks that died."""
        self._owns_mpi = not MPI.Is_initialized()
        if not self._owns_mpi and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise ConfigurationError(
                "this program initialized MPI without support for threads, which offbeat needs; call "
                "MPI.Init_thread(MPI.THREAD_MULTIPLE), or leave the initialization to offbeat"
            )
        self.errors = _Errors(MPI)
        self._lock = threading.Lock()
        self._served: list[ServedTransport] = []
        self._transports = 0
        """Number of transports made so far, which determines their tags."""
        self._abandoned: list[Operation] = []
        self._wakeup = threading.Lock()
        """Free after `wake`: acquiring a lock with a timeout is the cheapest sleep that can be interrupted."""
        self._wakeup.acquire()
        self._exiting = False
        self._ready = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="offbeat MPI", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise ConfigurationError(f"MPI cannot be initialized: {self._failure}; start this process with mpirun")
        atexit.register(self._at_exit)

    # Any thread

    def new_tags(self) -> tuple[int, int]:
        """Two tags for a transport; the n-th transport of each process gets the same."""
        with self._lock:
            first = self._next_tag()
            self._transports += 1
            return first, first + 1

    def _next_tag(self) -> int:
        return _TAGS_FIRST + 2 * self._transports % _TAGS

    def add(self, served: ServedTransport) -> None:
        with self._lock:
            self._served = [*self._served, served]
        self.wake()

    def wake(self) -> None:
        with suppress(RuntimeError):  # it was woken already
            self._wakeup.release()

    def _at_exit(self) -> None:
        """The thread is abandoned if a call of MPI does not return."""
        for served in self._served:
            served.close(0.0)
        self._exiting = True
        self.wake()
        self._thread.join(_EXIT_SECONDS + 5.0)

    # The thread

    def _run(self) -> None:
        try:
            self._begin()
        except Exception as error:
            self._failure = error
            return
        finally:
            self._ready.set()
        moved_at = checked_at = time.monotonic()
        while not self._exiting:
            active = [served for served in self._served if not served.retired]
            try:
                moved = [served.work() for served in active]
                now = time.monotonic()
                if any(moved):
                    moved_at = now
                if now - checked_at > (_CHECK_SECONDS if now - moved_at < _IDLE_SECONDS else 2 * _CHECK_SECONDS):
                    self._check(now - checked_at)
                    checked_at = now
            except Exception as error:  # without this thread all transports would wait for ever
                _log.exception("internal error, MPI is not used any more")
                self._failure = error
                for served in self._served:
                    served.fail(f"{type(error).__name__}: {error}")
                return
            self._pause(now - moved_at, active, checked_at + _CHECK_SECONDS)
        self._finalize()

    def _begin(self) -> None:
        self.is_fault_tolerant = os.environ.get(_FAULT_TOLERANCE) == "1"
        if self._owns_mpi:
            with _watchdog() if self.is_fault_tolerant else nullcontext():
                self.MPI.Init_thread(self.MPI.THREAD_FUNNELED)
        self._status = self.MPI.Status()
        self.comm = self.MPI.COMM_WORLD
        self.comm.Set_errhandler(self.MPI.ERRORS_RETURN)
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()

    def _pause(self, quiet_seconds: float, active: list[ServedTransport], check_due: float) -> None:
        """Sleep: briefly while a transfer is in progress, and the longer the less happens."""
        longest = _SLEEP_SECONDS_MAX
        if quiet_seconds > _IDLE_SECONDS:
            self._sleep_until([served.frame_tag for served in active], check_due + _CHECK_SECONDS)
            return
        if quiet_seconds < _BUSY_SECONDS:
            receiving = any(served.receiving() for served in active)
            if receiving and quiet_seconds < _SPIN_SECONDS:
                os.sched_yield()
                return
            if receiving or any(served.sending() for served in active):
                longest = _SLEEP_SECONDS_MIN
        self._wakeup.acquire(timeout=min(max(quiet_seconds / 8, _SLEEP_SECONDS_MIN), longest))

    def _sleep_until(self, tags: list[int], deadline: float) -> None:
        """Sleep until `wake`, an arrival, or a time. As little Python as possible."""
        any_source = self.MPI.ANY_SOURCE
        with suppress(self.MPI.Exception):  # a death, which is handled elsewhere
            while not self._wakeup.acquire(timeout=_SLEEP_SECONDS_IDLE) and time.monotonic() < deadline:
                for tag in tags:
                    if self.comm.Iprobe(any_source, tag):
                        return

    def _check(self, since_seconds: float) -> None:
        self.find_dead()
        self._abandoned = [operation for operation in self._abandoned if not _is_over(operation)]
        for served in self._served:
            served.check_links(since_seconds)
        with self._lock:
            self._served = [served for served in self._served if not served.finished]

    def _finalize(self) -> None:
        """Call Finalize when all ranks have reached this point, answering control messages until then.

        Not where a rank is lost and would be waited for, nor with fault tolerance, where mpirun does not require it,
        nor in a process that has made no transport and so was in no run.
        """
        if self.is_fault_tolerant or self.skip_finalize:
            self._announce_exit()
        if not self._owns_mpi or self.is_fault_tolerant or self.skip_finalize or not self._transports:
            return
        deadline = time.monotonic() + _EXIT_SECONDS
        with suppress(ConnectionLost), self.errors:
            barrier = self.comm.Ibarrier()
            while not self.suspects and time.monotonic() < deadline:
                if barrier.Test():
                    self.MPI.Finalize()
                    return
                self._check(0.0)
                time.sleep(_SLEEP_SECONDS_MAX)

    def _announce_exit(self) -> None:
        """Notify the ranks that wait for another transport of this process that there will be none."""
        message, operations = encode_control(LinkBroken(*DIED)), []
        for peer in set(range(self.size)) - self.failed - {self.rank}:
            with suppress(ConnectionLost):
                operations.append(self.send(peer, self._next_tag(), message))
        deadline = time.monotonic() + _ANNOUNCE_SECONDS
        while not all(map(_is_over, operations)) and time.monotonic() < deadline:
            time.sleep(_SLEEP_SECONDS_MAX)

    # Used by transports

    def frames(self, tag: int) -> Iterator[MatchedFrame]:
        """Frames that have arrived under a tag, from any rank."""
        MPI, status = self.MPI, self._status
        while True:
            try:
                matched = self.comm.Improbe(MPI.ANY_SOURCE, tag, status)
            except MPI.Exception as error:
                before = len(self.failed)
                self.find_dead()
                if len(self.failed) > before:
                    continue
                raise _failed(error) from None
            if matched is None:
                return
            yield MatchedFrame(self, matched, status.Get_source(), status.Get_count(MPI.BYTE))

    def find_dead(self) -> None:
        """Report and acknowledge deaths: until then, receiving from any rank fails."""
        if not self.is_fault_tolerant:
            return
        with suppress(ConnectionLost), self.errors:
            group = self.comm.Get_failed()
            try:
                if group.Get_size() == len(self.failed):
                    return
                self.comm.Ack_failed(group.Get_size())
                all_ranks = self.comm.Get_group()
                died = set(self.MPI.Group.Translate_ranks(group, None, all_ranks)) - self.failed
                all_ranks.Free()
            finally:
                group.Free()
            self.failed |= died
            self.suspects |= died
            for served in self._served:
                served.on_death(died)

    def send(self, peer: int, tag: int, memory: Tensor) -> Operation:
        with self.errors:
            return _Request(self, self.comm.Isend([memory.numpy(), self.MPI.BYTE], peer, tag), memory)

    def abandon(self, peer: int, operations: Iterable[Operation], frames: Iterable[Frame]) -> None:
        """Keep the memory of operations until they are over. Frames are received and discarded: a living peer waits."""
        self._abandoned.extend(operations)
        for frame in frames if peer not in self.failed else ():
            with suppress(ConnectionLost):
                self._abandoned.append(frame.receive(torch.empty(frame.nbytes, dtype=torch.uint8)))


@contextmanager
def _watchdog() -> Iterator[None]:
    """Kill this process if the block takes too long.

    With fault tolerance, a rank that ends before MPI has begun leaves the others in Init for ever. They hold Python's
    global lock meanwhile, so it takes another process to end them.
    """
    sentence = (
        f"offbeat: MPI has not begun after {_BEGIN_SECONDS:g} seconds, probably since another rank ended before it "
        "began; look for the error of that rank"
    )
    command = [sys.executable, "-I", "-S", "-c", _WATCHDOG, str(os.getpid()), str(_BEGIN_SECONDS), sentence]
    with subprocess.Popen(command, stdin=subprocess.PIPE):
        yield


class _Errors:
    """Turns exceptions of MPI into ConnectionLost with a plain reason. One object, since it is used so often."""

    def __init__(self, MPI: Any) -> None:
        self._exception = MPI.Exception
        self._died = {getattr(MPI, name, None) for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING")}

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: Any, trace: object) -> None:
        if isinstance(error, self._exception):
            died = error.Get_error_class() in self._died
            raise (ConnectionLost(*DIED) if died else _failed(error)) from None


def _failed(error: Any) -> ConnectionLost:
    return ConnectionLost(LossReason.BROKEN, f"MPI failed: {error.Get_error_string()}")


@dataclass(slots=True)
class _Request:
    """A request of MPI and its memory."""

    runtime: MpiRuntime
    request: Any
    memory: Tensor

    def done(self) -> bool:
        with self.runtime.errors:
            return bool(self.request.Test())


@dataclass(slots=True)
class MatchedFrame:
    """A matched message of MPI, which no other receive can get."""

    runtime: MpiRuntime
    matched: Any
    source: int
    nbytes: int

    def receive(self, into: Tensor) -> Operation:
        with self.runtime.errors:
            request = self.matched.Irecv([into.numpy(), self.runtime.MPI.BYTE])
        return _Request(self.runtime, request, into)


def _is_over(operation: Operation) -> bool:
    try:
        return operation.done()
    except ConnectionLost:
        return True
