"""Messages over MPI, for runs that mpirun or a cluster's launcher starts; needs `pip install 'offbeat[mpi]'`.

Tensors are sent from their own memory and received into that of the pool. One thread makes all calls of MPI, see
`mpi_runtime.py`; a link is in `mpi_link.py`.

All ranks make their transports in the same order, so the n-th transport of one rank is connected to the n-th of
another, under tags of its own; there is no collective call that a dead rank could block. For each pair of ranks the
higher one sends a hello, and the lower one answers.

Properties of MPI and their consequences
- Without fault tolerance, mpirun ends all ranks when one dies. With it (`mpirun --with-ft ulfm`, Open MPI) the others
  are notified at once and go on.
- Ranks do not come back. A lost rank stays lost, even if it was only stopped; what it still sends is discarded.
- A send cannot be cancelled once begun. What a lost peer never receives keeps its memory.
- Without fault tolerance, mpirun reports an error for a process that exits without MPI's Finalize, and Finalize waits
  for all ranks. So it is called when all ranks have reached their exit, and not where one was lost.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from offbeat.core.events import LossReason, MessageArrived
from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Message
from offbeat.core.run_identity import RunIdentity
from offbeat.errors import ConfigurationError, MissingDependency, RunFailed
from offbeat.transports.link import CLOSED, CLOSED_HERE, ConnectionLost, LinkLoss, LinkOptions, loss_of
from offbeat.transports.mpi_link import (
    CONTROL_BYTES_MAX,
    INCARNATION,
    ControlMessage,
    Frame,
    LinkBroken,
    LinkHello,
    MpiLink,
    Operation,
    decode_control,
    encode_control,
    mismatch,
)
from offbeat.transports.mpi_runtime import DIED, MpiRuntime
from offbeat.transports.transport import QueuedTransport, TransportEvent
from offbeat.transports.wire import WIRE_VERSION, WireError

_log = logging.getLogger(__name__)

_lock = threading.Lock()
_runtimes: list[MpiRuntime] = []
"""The runtime of this process, once MPI was begun."""


def mpi_world() -> tuple[int, int]:
    """Rank of this process and number of processes; begins MPI if necessary."""
    runtime = _runtime()
    return runtime.rank, runtime.size


def check_installed() -> None:
    """Raise MissingDependency where mpi4py is missing, without beginning MPI."""
    try:
        import mpi4py  # noqa: F401
    except ImportError:
        raise MissingDependency("MPI", "mpi4py", "mpi") from None


def is_fault_tolerant() -> bool:
    """Whether the other ranks go on when one dies: that is so under `mpirun --with-ft ulfm` of Open MPI."""
    return _runtime().is_fault_tolerant


def lost_ranks() -> frozenset[int]:
    """Ranks that have died or were silent for too long since MPI began: they do not come back."""
    return frozenset(_runtime().suspects)


def dead_ranks() -> frozenset[int]:
    """Ranks whose processes have ended since MPI began."""
    return frozenset(_runtime().failed)


def exit_without_finalize() -> None:
    """Do not wait for the other ranks at exit, since this process ends because of an error."""
    for runtime in _runtimes:
        runtime.skip_finalize = True


def _runtime() -> MpiRuntime:
    with _lock:
        if not _runtimes:
            _runtimes.append(MpiRuntime(_load()))
        return _runtimes[0]


def _load() -> Any:
    check_installed()
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigurationError(
            f"mpi4py is installed, but finds no MPI library ({reason}); type: pip install 'offbeat[mpi]'"
        ) from None
    return MPI


class MpiTransport(QueuedTransport):
    """The links of one rank over MPI."""

    def __init__(
        self,
        *,
        rank: int,
        processes: int,
        peers: Iterable[int],
        identity: RunIdentity,
        elapsed: Callable[[], float] = lambda: 0.0,
        options: LinkOptions = LinkOptions(),  # noqa: B008 (frozen)
    ) -> None:
        """Starts to connect at once.

        Args:
            rank: of this process, as MPI has it.
            processes: number of ranks, as MPI has it.
            peers: ranks to have links with.
            identity: of the run; ranks with different ones reject each other.
            elapsed: seconds since the run began; called on rank 0.
            options: settings of the links.
        """
        runtime = _runtime()
        if runtime.size == 1 < processes:
            beside = Path(sys.executable).with_name("mpirun")
            raise ConfigurationError(
                "this mpirun does not belong to the MPI library of mpi4py, so that every process is alone; use the "
                f"mpirun of the same MPI, which may be the one beside this Python: {beside}"
            )
        if (rank, processes) != (runtime.rank, runtime.size):
            raise ConfigurationError(
                f"this is to be rank {rank} of {processes}, but MPI started it as rank {runtime.rank} of "
                f"{runtime.size}; start as many processes as the run has: mpirun -n {processes}"
            )
        super().__init__()
        self.rank = rank
        self.processes = processes
        self.peers = frozenset(peers) - {rank}
        self.pool = Pool()
        self.retired = False
        """Whether it is closed, and only answers ranks that connect late."""
        self._identity = identity
        self._elapsed = elapsed
        self._silence_seconds = options.silence_seconds
        self._lock = threading.Lock()
        self._closing = self._out_of_time = self._hello_sent = False
        self._ended = threading.Event()
        self._control: deque[tuple[int, Tensor, Operation]] = deque()
        """Control messages that are being received, and their sources."""
        self._to_drop: SimpleQueue[tuple[int, LinkLoss]] = SimpleQueue()
        """Links that the user has ended."""
        self._broken: dict[int, LinkLoss] = {}
        """Peers that reported a broken link, and why."""
        self._awaited = len(self.peers)
        """Number of peers that have not sent a hello yet."""
        self._late: set[int] = set()
        """Peers that had not sent a hello when this transport was closed."""
        self._links = {peer: MpiLink(peer, self, options, self.pool, self.put) for peer in self.peers}
        self._runtime = runtime
        self._control_tag, self.frame_tag = runtime.new_tags()
        runtime.add(self)

    # The contract

    def send(self, to: int, incarnation: int, message: Message, key: str | None = None) -> None:
        link = self._links.get(to)
        if link is not None and incarnation == INCARNATION and link.post(message, key):
            self._runtime.wake()

    def disconnect(self, peer: int, incarnation: int, why: str, final: bool = False) -> None:
        if peer in self._links and incarnation == INCARNATION:
            self._to_drop.put((peer, LinkLoss(LossReason.INVALID, why)))
            self._runtime.wake()

    def _on_receive(self, event: TransportEvent) -> None:
        if isinstance(event, MessageArrived):
            link = self._links.get(event.source)
            if link is not None and link.acknowledge():
                self._runtime.wake()

    def close(self, linger_seconds: float = 5.0) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
        for link in self._links.values():
            link.finish()
        self._runtime.wake()
        if not self._ended.wait(linger_seconds):
            self._out_of_time = True
            self._runtime.wake()
            self._ended.wait(1.0)
        self._closed = True
        self.wake()

    # Used by links. All that follows runs in the thread of the runtime.

    def send_frame(self, peer: int, memory: Tensor) -> Operation:
        return self._runtime.send(peer, self.frame_tag, memory)

    def send_control(self, peer: int, message: ControlMessage) -> None:
        with suppress(ConnectionLost):
            self._runtime.abandon(peer, [self._runtime.send(peer, self._control_tag, encode_control(message))], ())

    def abandon(self, peer: int, operations: Iterable[Operation], frames: Iterable[Frame]) -> None:
        self._runtime.abandon(peer, operations, frames)

    # Used by the runtime

    def work(self, read_control: bool = False) -> bool:
        while not self._to_drop.empty():
            peer, reason = self._to_drop.get()
            self._links[peer].drop(reason)
        try:
            if not self._hello_sent:
                self._send_hellos()
            if read_control or self._awaited or self._control:
                self._read_control()
            moved = self._sort_frames()
        except Exception as error:  # it is not known which link it concerns
            loss = loss_of(error)
            if loss is None:
                _log.exception("internal error, all links are dropped")
                loss = LinkLoss(LossReason.LOCAL, str(error) or type(error).__name__)
            for link in self._links.values():
                link.drop(loss)
            return True
        for link in self._links.values():
            if not link.idle:
                moved = self._work_on(link) or moved
        if self._closing and not self.retired:
            self._close_links()
        return moved

    def receiving(self) -> bool:
        return any(link.receiving for link in self._links.values())

    def sending(self) -> bool:
        return any(link.sending for link in self._links.values())

    def on_death(self, ranks: set[int]) -> None:
        self._late -= ranks
        for rank in ranks & self._links.keys():
            link = self._links[rank]
            if not link.linked and not link.over:  # reported as well, so that no node waits for it to join
                self._awaited -= 1
                link.join()
            link.drop(DIED, notify=False)

    def fail(self, why: str) -> None:
        self.put(RunFailed(f"MPI failed: {why}"))

    @property
    def finished(self) -> bool:
        return self.retired and not self._late

    def check_links(self, since_seconds: float) -> None:
        """Reports of broken links are handled here, after the frames that were sent before them."""
        self.work(read_control=True)
        while self._broken:
            peer, loss = self._broken.popitem()
            if peer in self._links:
                self._links[peer].drop(loss, notify=False)
        for link in self._links.values():
            self._work_on(link)
            if since_seconds > self._silence_seconds / 4:
                link.reset_silence()
            elif link.linked and not link.over and link.silent:
                self._runtime.suspects.add(link.peer)
                link.drop(LinkLoss(LossReason.SILENT, f"silent for {self._silence_seconds:g} seconds"))

    def _work_on(self, link: MpiLink) -> bool:
        try:
            return link.work()
        except WireError as error:
            link.drop(LinkLoss(LossReason.INVALID, str(error)))
        except ConnectionLost as error:
            self._runtime.suspects.add(link.peer)
            self._runtime.find_dead()  # nothing is received from them any more
            link.drop(error.loss)
        except Exception as error:
            _log.exception("internal error, a link is dropped")
            link.drop(LinkLoss(LossReason.LOCAL, f"{type(error).__name__}: {error}"))
        return True

    def _close_links(self) -> None:
        for link in self._links.values() if self._out_of_time else ():
            link.drop(CLOSED_HERE)
        if not any(link.linked and not link.over for link in self._links.values()):
            self._late = {peer for peer, link in self._links.items() if not link.linked}
            self._links, self.pool = {}, Pool()  # releases the free buffers
            self.retired = True
            self._ended.set()

    def _sort_frames(self) -> bool:
        moved = False
        for frame in self._runtime.frames(self.frame_tag):
            link = self._links.get(frame.source)
            if link is None or link.over:
                self._runtime.abandon(frame.source, (), [frame])
            else:
                link.accept(frame)
            moved = True
        return moved

    # Control messages

    def _send_hellos(self) -> None:
        self._hello_sent = True
        self.on_death(self._runtime.failed)
        for peer in self.peers:
            if peer < self.rank:
                self.send_control(peer, self._hello())

    def _hello(self) -> LinkHello:
        return LinkHello(WIRE_VERSION, self._identity, self._elapsed() if self.rank == 0 else 0.0)

    def _read_control(self) -> None:
        for frame in self._runtime.frames(self._control_tag):
            if frame.nbytes > CONTROL_BYTES_MAX:
                self._runtime.abandon(frame.source, (), [frame])
                continue
            raw = torch.empty(frame.nbytes, dtype=torch.uint8)
            with suppress(ConnectionLost):  # a death is noticed elsewhere
                self._control.append((frame.source, raw, frame.receive(raw)))
        while self._control:
            source, raw, operation = self._control[0]
            with suppress(ConnectionLost):
                if not operation.done():
                    return
                self._on_control(source, raw)
            self._control.popleft()

    def _on_control(self, source: int, raw: Tensor) -> None:
        link = self._links.get(source)
        try:
            message = decode_control(raw)
        except WireError as error:
            if link is not None:
                link.drop(LinkLoss(LossReason.INVALID, str(error)))
            return
        if isinstance(message, LinkBroken) and link is not None and not link.linked:
            self.on_death({source})
        elif isinstance(message, LinkBroken):
            # Other reasons of the peer are about its own end, where this one finds a broken connection.
            is_end = message.reason in (LossReason.CLOSED, LossReason.DIED)
            self._broken[source] = LinkLoss(message.reason if is_end else LossReason.BROKEN, message.detail)
        elif link is not None and not link.linked and not link.over:
            self._on_hello(link, message)
        elif source in self._late and source > self.rank:  # the peer sees a link that ends as soon as it is established
            self._late.remove(source)
            self.send_control(source, self._hello())
            self.send_control(source, LinkBroken(*CLOSED))

    def _on_hello(self, link: MpiLink, theirs: LinkHello) -> None:
        self._awaited -= 1
        own = self._hello()
        if link.peer > self.rank:
            self.send_control(link.peer, own)
        why = mismatch(self.rank, own, link.peer, theirs)
        if why is not None:
            link.reject(why)
            return
        if link.peer == 0:
            self.elapsed_at_join = (theirs.elapsed_seconds, time.monotonic())
        link.join()
