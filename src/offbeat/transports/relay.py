"""Rank 0 relays between two peers that cannot reach each other: one behind a firewall or a NAT, for example.

The higher rank asks rank 0 for a relay to the lower one. Rank 0 asks the lower one, over the connection by which it is
registered, to open a connection for it, and from then on copies bytes from each of the two connections to the other.
The ranks see one connection, on which they agree on a link as usual. Both have shown the token to rank 0, which vouches
for each of them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from offbeat.transports.byte_stream import ByteStream
from offbeat.transports.link import ConnectionLost
from offbeat.transports.rendezvous import REPLY_SECONDS, ControlConnection, Rejected, RelayAccepted, RelayRequest

_COPY_BYTES = 256 << 10

_log = logging.getLogger(__name__)


class Relays:
    """The relays of rank 0. Every method may be called from any thread."""

    def __init__(self, silence_seconds: float) -> None:
        self._silence_seconds = silence_seconds
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        """Two requests to one rank must not mix."""
        self._closed = False
        self._awaited: dict[int, _Awaited] = {}
        self._count = 0
        self._streams: set[ByteStream] = set()
        self._mentioned: set[tuple[int, int]] = set()

    def ask(self, asking: ControlConnection, rank: int, about: int, ask_peer: Callable[[RelayRequest], None]) -> None:
        """Serve a rank that asks for a relay, until it ends. `ask_peer` sends a request to the rank that it asks for.

        Raises Rejected if that one does not answer in time.
        """
        awaited = _Awaited()
        with self._lock:
            self._count += 1
            number = self._count
            self._awaited[number] = awaited
        try:
            answering = self._await_answer(awaited, number, ask_peer)
            if answering is None:
                raise Rejected(f"rank {about} did not answer to a request for a relay", final=False)
            asking.send(RelayAccepted())
            self._mention(rank, about)
            self._copy_both_ways(asking.detach(self._silence_seconds), answering.detach(self._silence_seconds))
        finally:
            awaited.over.set()  # also for an answer that came too late

    def _await_answer(
        self, awaited: _Awaited, number: int, ask_peer: Callable[[RelayRequest], None]
    ) -> ControlConnection | None:
        try:
            with self._asking:
                ask_peer(RelayRequest(number))
            awaited.answered.wait(REPLY_SECONDS)
        finally:
            with self._lock:
                del self._awaited[number]
        return awaited.connection

    def answer(self, answering: ControlConnection, number: int) -> None:
        """Serve a rank that answers to a request, until the relay ends."""
        with self._lock:
            awaited = self._awaited.get(number)
            if awaited is None or awaited.connection is not None or self._closed:
                raise Rejected(f"relay {number} is not awaited any more", final=False)
            awaited.connection = answering
        awaited.answered.set()
        awaited.over.wait()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            streams = list(self._streams)
            awaited = list(self._awaited.values())
        for one in awaited:
            one.answered.set()
        for stream in streams:
            stream.break_off()

    def _mention(self, rank: int, about: int) -> None:
        with self._lock:
            is_new = (rank, about) not in self._mentioned
            self._mentioned.add((rank, about))
        if is_new:
            _log.warning(
                "offbeat: ranks %d and %d cannot reach each other; their messages go through rank 0, which takes "
                "longer; let the firewall admit connections from rank %d to rank %d",
                about,
                rank,
                rank,
                about,
            )

    def _copy_both_ways(self, one: ByteStream, other: ByteStream) -> None:
        with self._lock:
            self._streams |= {one, other}
            if self._closed:
                one.break_off()
        back = threading.Thread(target=_copy, args=(other, one), name="offbeat relay", daemon=True)
        try:
            back.start()
            _copy(one, other)
            back.join()
        except RuntimeError as error:  # the limit of threads is reached
            _log.warning("offbeat: a relay was closed: %s", error)
        finally:
            with self._lock:
                self._streams -= {one, other}
            for stream in (one, other):
                stream.break_off()
                stream.close()


class _Awaited:
    """A relay that waits for the second connection."""

    def __init__(self) -> None:
        self.connection: ControlConnection | None = None
        self.answered = threading.Event()
        self.over = threading.Event()


def _copy(source: ByteStream, target: ByteStream) -> None:
    """Until either is closed, which closes both."""
    memory = memoryview(bytearray(_COPY_BYTES))
    try:
        while True:
            count = source.read_some(memory)
            target.write([memory[:count]])
    except ConnectionLost as error:
        _log.debug("a relay ended: %s", error)
    finally:
        source.break_off()
        target.break_off()
