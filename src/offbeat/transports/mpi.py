"""Messages over MPI, for runs that mpirun or a cluster's launcher starts; needs `pip install 'offbeat[mpi]'`.

Tensors leave from their own memory and arrive in that of the pool. One thread makes all calls of MPI, see
`mpi_thread.py`; a link is in `mpi_links.py`.

All ranks make their transports in the same order, so the n-th transport of one talks to the n-th of another, under
tags of its own; there is no collective call that a dead rank could block. For each pair of ranks the higher one says
hello, and the lower one answers.

What MPI does and does not do, and what follows
- Without fault tolerance, mpirun ends everybody when a rank dies. With it (`mpirun --with-ft ulfm`, Open MPI) the
  others hear of it at once and go on.
- Ranks do not come back. Who was lost stays lost, even if it only stood still; what it still sends is thrown away.
- A send that was begun cannot be called back. What a lost peer never fetches keeps its memory.
- Without fault tolerance, leaving without MPI's Finalize makes mpirun complain, and Finalize waits for everybody. So it
  is called once everybody has come to the end, and not where somebody was lost.
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
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Message
from offbeat.errors import ConfigurationError, ContractViolation, MissingDependency
from offbeat.transports.link import CLOSED
from offbeat.transports.mpi_link import (
    CONTROL_BYTES_MAX,
    INCARNATION,
    ControlMessage,
    Frame,
    LinkBroken,
    LinkHello,
    LinkOptions,
    MpiLink,
    Operation,
    decode_control,
    encode_control,
    refusal,
)
from offbeat.transports.mpi_runtime import DIED, MpiRuntime
from offbeat.transports.transport import MESSAGE_BYTES_MAX, SILENCE_SECONDS, Arrived, Incoming, Refused, Transport
from offbeat.transports.wire import WIRE_VERSION, WireError, encode

_log = logging.getLogger(__name__)

_lock = threading.Lock()
_begun: list[MpiRuntime] = []


def mpi_world() -> tuple[int, int]:
    """This process's rank and the number of processes that were started together; begins MPI if need be."""
    library = _library()
    return library.rank, library.size


def check_installed() -> None:
    """Refuse to go on where mpi4py is missing, without beginning MPI."""
    try:
        import mpi4py  # noqa: F401
    except ImportError:
        raise MissingDependency("MPI", "mpi4py", "mpi") from None


def is_fault_tolerant() -> bool:
    """Whether the others go on when a rank dies: that is so under `mpirun --with-ft ulfm` of Open MPI."""
    return _library().is_fault_tolerant


def lost_ranks() -> frozenset[int]:
    """Ranks that have died, or were given up, since MPI began: they will not come back."""
    return frozenset(_library().suspects)


def dead_ranks() -> frozenset[int]:
    """Ranks that have died since MPI began, and not merely fallen silent."""
    return frozenset(_library().failed)


def exit_without_finalize() -> None:
    """This process ends because something is wrong: it is not to wait for the others at its exit."""
    for library in _begun:
        library.skip_finalize = True


def _library() -> MpiRuntime:
    with _lock:
        if not _begun:
            _begun.append(MpiRuntime(_load()))
        return _begun[0]


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


class MpiTransport(Transport):
    """The links of one rank over MPI. `elapsed` is asked on rank 0: how long the run has lasted."""

    def __init__(
        self,
        *,
        rank: int,
        processes: int,
        peers: Iterable[int],
        fingerprint: str,
        elapsed: Callable[[], float] = lambda: 0.0,
        silence_seconds: float = SILENCE_SECONDS,
        checksum: bool = False,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        library = _library()
        if library.size == 1 < processes:
            beside = Path(sys.executable).with_name("mpirun")
            raise ConfigurationError(
                "this mpirun and the MPI library of mpi4py do not know each other, so every process is alone; use the "
                f"mpirun of the same MPI, which may be the one beside this Python: {beside}"
            )
        if (rank, processes) != (library.rank, library.size):
            raise ConfigurationError(
                f"this is to be rank {rank} of {processes}, but MPI started it as rank {library.rank} of "
                f"{library.size}; start as many processes as the run has: mpirun -n {processes}"
            )
        self.rank = rank
        self.processes = processes
        self.peers = frozenset(peers) - {rank}
        self.elapsed_at_join: tuple[float, float] | None = None
        """What rank 0 said how long the run had lasted, and `time.monotonic()` when it said so."""
        self.pool = Pool()
        self.retired = False
        """Whether it was closed, and only says so to those who come late."""
        self._fingerprint = fingerprint
        self._elapsed = elapsed
        self._silence_seconds = silence_seconds
        self._incoming: SimpleQueue[Incoming | ContractViolation | None] = SimpleQueue()
        self._woken = self._closed = False
        self._lock = threading.Lock()
        self._closing = self._giving_up = self._greeted = False
        self._ended = threading.Event()
        self._words: deque[tuple[int, Tensor, Operation]] = deque()
        self._broken: dict[int, str] = {}
        self._awaiting = len(self.peers)
        """Peers of whom nothing was heard so far."""
        self._late: set[int] = set()
        """Peers of whom nothing had been heard when this was closed."""
        options = LinkOptions(silence_seconds, message_bytes_max, checksum)
        self._links = {peer: MpiLink(peer, self, options, self.pool, self._incoming.put) for peer in self.peers}
        self._library = library
        self._control_tag, self.frame_tag = library.new_tags()
        library.serve(self)

    # What the contract asks for

    def send(self, to: int, incarnation: int, message: Message, key: str | None = None) -> None:
        link = self._links.get(to)
        if link is not None and incarnation == INCARNATION and link.post(message, key):
            self._library.wake()

    def weight(self, message: Message) -> int:
        return encode(message).nbytes

    def receive(self, timeout: float | None = None) -> Incoming | None:
        """As the contract says. A message of ours that could not be written raises its ContractViolation here."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self._closed and not self._woken:
            try:
                item = self._incoming.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
            except Empty:
                return None
            if isinstance(item, ContractViolation):
                raise item
            if isinstance(item, Arrived):
                self._took(item.source)
            if item is not None:
                return item
        self._woken = False
        return None

    def _took(self, source: int) -> None:
        link = self._links.get(source)
        if link is not None and link.take():
            self._library.wake()

    def wake(self) -> None:
        self._woken = True
        self._incoming.put(None)  # only to end a wait: `_woken` is what counts, so wakes do not add up

    def close(self, linger_seconds: float = 5.0) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
        for link in self._links.values():
            link.finish()
        self._library.wake()
        if not self._ended.wait(linger_seconds):
            self._giving_up = True
            self._library.wake()
            self._ended.wait(1.0)
        self._closed = True
        self.wake()

    # What links ask for, and all that follows, in the thread of the library

    def send_frame(self, peer: int, memory: Tensor) -> Operation:
        return self._library.send(peer, self.frame_tag, memory)

    def send_control(self, peer: int, word: ControlMessage) -> None:
        with suppress(ConnectionError):
            self._library.abandon(peer, [self._library.send(peer, self._control_tag, encode_control(word))], ())

    def abandon(self, peer: int, operations: Iterable[Operation], frames: Iterable[Frame]) -> None:
        self._library.abandon(peer, operations, frames)

    # What the thread asks for

    def work(self, words: bool = False) -> bool:
        try:
            if not self._greeted:
                self._greet()
            if words or self._awaiting or self._words:
                self._read_words()
            moved = self._sort_frames()
        except Exception as error:  # it is not known of whom
            if not isinstance(error, ConnectionError):
                _log.exception("all links are dropped because of a mistake")
            for link in self._links.values():
                link.drop(str(error) or type(error).__name__)
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

    def died(self, ranks: set[int]) -> None:
        self._late -= ranks
        for rank in ranks & self._links.keys():
            link = self._links[rank]
            if not link.linked and not link.over:  # who was never there is lost as well: nobody is to wait for it
                self._awaiting -= 1
                link.join()
            link.drop(DIED, tell=False)

    def give_up(self, why: str) -> None:
        for peer in sorted(self.peers):
            self._incoming.put(Refused(peer, f"MPI failed: {why}"))

    @property
    def settled(self) -> bool:
        return self.retired and not self._late

    def make_round(self, since_seconds: float) -> None:
        """Words that say that a link is broken have time, and what came before them is to be looked at first."""
        self.work(words=True)
        while self._broken:
            peer, why = self._broken.popitem()
            if peer in self._links:
                self._links[peer].drop(why, tell=False)
        for link in self._links.values():
            self._work_on(link)
            if since_seconds > self._silence_seconds / 4:
                link.excuse()
            elif link.linked and not link.over and link.silent:
                self._library.suspects.add(link.peer)
                link.drop(f"silent for {self._silence_seconds:g} seconds")

    def _work_on(self, link: MpiLink) -> bool:
        try:
            return link.work()
        except WireError as error:
            link.drop(str(error))
        except ConnectionError as error:
            self._library.suspects.add(link.peer)
            self._library.look_for_dead()  # nothing is fetched from them any more
            link.drop(str(error))
        except Exception as error:
            _log.exception("a link is dropped because of a mistake")
            link.drop(f"{type(error).__name__}: {error}")
        return True

    def _close_links(self) -> None:
        for link in self._links.values() if self._giving_up else ():
            link.drop("closed by this side")
        if not any(link.linked and not link.over for link in self._links.values()):
            self._late = {peer for peer, link in self._links.items() if not link.linked}
            self._links, self.pool = {}, Pool()  # what is free is given back
            self.retired = True
            self._ended.set()

    def _sort_frames(self) -> bool:
        moved = False
        for frame in self._library.frames(self.frame_tag):
            link = self._links.get(frame.source)
            if link is None or link.over:
                self._library.abandon(frame.source, (), [frame])
            else:
                link.accept(frame)
            moved = True
        return moved

    # Words

    def _greet(self) -> None:
        self._greeted = True
        self.died(self._library.failed)
        for peer in self.peers:
            if peer < self.rank:
                self.send_control(peer, self._hello())

    def _hello(self) -> LinkHello:
        return LinkHello(WIRE_VERSION, self._fingerprint, self._elapsed() if self.rank == 0 else 0.0)

    def _read_words(self) -> None:
        for frame in self._library.frames(self._control_tag):
            if frame.nbytes > CONTROL_BYTES_MAX:
                self._library.abandon(frame.source, (), [frame])
                continue
            raw = torch.empty(frame.nbytes, dtype=torch.uint8)
            with suppress(ConnectionError):  # a death is noticed elsewhere
                self._words.append((frame.source, raw, frame.receive(raw)))
        while self._words:
            source, raw, operation = self._words[0]
            with suppress(ConnectionError):
                if not operation.done():
                    return
                self._hear(source, raw)
            self._words.popleft()

    def _hear(self, source: int, raw: Tensor) -> None:
        link = self._links.get(source)
        try:
            word = decode_control(raw)
        except WireError as error:
            if link is not None:
                link.drop(str(error))
            return
        if isinstance(word, LinkBroken) and link is not None and not link.linked:
            self.died({source})
        elif isinstance(word, LinkBroken):
            self._broken[source] = word.why
        elif link is not None and not link.linked and not link.over:
            self._meet(link, word)
        elif source in self._late and source > self.rank:  # for them it is a link that ends as soon as it is there
            self._late.remove(source)
            self.send_control(source, self._hello())
            self.send_control(source, LinkBroken(CLOSED))

    def _meet(self, link: MpiLink, theirs: LinkHello) -> None:
        self._awaiting -= 1
        own = self._hello()
        if link.peer > self.rank:
            self.send_control(link.peer, own)
        why = refusal(self.rank, own, link.peer, theirs)
        if why is not None:
            link.refuse(why)
            return
        if link.peer == 0:
            self.elapsed_at_join = (theirs.elapsed_seconds, time.monotonic())
        link.join()
