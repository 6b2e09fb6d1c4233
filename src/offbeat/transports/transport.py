"""The contract of transports, which move messages between live processes.

A transport belongs to one rank. It keeps one *link* to each of its peers and reconnects a broken one under a higher
incarnation. Within a link, messages arrive in the order in which they were sent, and at most once.

Guarantees
- `send` never blocks and never copies the tensors: they are immutable by contract. A message goes to the incarnation
  that is named; if that link is gone, the message is discarded.
- Events are those of `core/events.py`; their `at` is the `clock` of the transport when they are received.
- A message is sent when the peer has received all but a few of the earlier ones: `Sent` reports it, so that a node
  can hold back data that would only become stale in a queue. A queued message that has not begun to leave is replaced
  by a newer one to the same peer under the same key.
- `PeerJoined` is the first event of an incarnation, `PeerLost` the last. A closed connection is reported within two
  seconds, a silent peer after `silence_seconds`.
- Received tensors are views of pooled buffers, which are reused when the last view is released: no allocation per
  message in the steady state. To keep the data, keep the tensors or views of them.
- A peer that sends invalid data, or announces more than is allowed, loses its own link and affects no other.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import Empty, SimpleQueue

from offbeat.core.events import MessageArrived, PeerJoined, PeerLost, Sent
from offbeat.core.messages import Message
from offbeat.errors import OffbeatError

MESSAGE_BYTES_MAX = 1 << 34
"""The largest payload that a peer may announce: 16 GiB."""

SILENCE_SECONDS = 10.0
"""A peer from which nothing was received for so long is lost."""


TransportEvent = MessageArrived | Sent | PeerJoined | PeerLost

InboxItem = Callable[[float], TransportEvent] | OffbeatError
"""Creates an event from the time at which it is received, or is the error that `receive` raises."""


class Transport(ABC):
    """The links of one rank. Every method may be called from any thread; `receive` from one at a time."""

    elapsed_at_join: tuple[float, float] | None = None
    """Elapsed seconds of the run as rank 0 last reported them, and `time.monotonic()` at that moment."""
    clock: Callable[[], float] = time.monotonic
    """Returns the time of events; set by the engine."""

    @abstractmethod
    def send(self, to: int, incarnation: int, message: Message, key: str | None = None) -> None:
        """Queue a message and return at once.

        Args:
            to: rank of the peer.
            incarnation: of the link, as `PeerJoined` reported it; the message is discarded if that link is gone.
            message: what to send; its tensors must not be written to afterwards.
            key: a queued message with the same key is replaced by this one.
        """

    @abstractmethod
    def receive(self, timeout: float | None = None) -> TransportEvent | None:
        """The next event; None after `timeout` seconds, after `wake()`, and once closed.

        Raises `RunFailed` if a peer rejected this rank and retrying would not help, and the `ContractViolation` of a
        message of this rank that cannot be encoded.
        """

    @abstractmethod
    def wake(self) -> None:
        """Make a waiting `receive`, or else the next one, return None."""

    @abstractmethod
    def disconnect(self, peer: int, incarnation: int, why: str, final: bool = False) -> None:
        """End a link, because of what the peer sent: it is reported as lost, with `why`.

        The peer may connect again, unless `final`: then it is refused with `why`, where ranks can connect again.
        """

    @abstractmethod
    def close(self, linger_seconds: float = 5.0) -> None:
        """Send what is queued, for at most `linger_seconds`, then end all links: peers see `PeerLost`. Idempotent."""


class QueuedTransport(Transport):
    """A transport whose links put events into one queue, the inbox, from any thread.

    `receive` is for a user with one thread. Others `wait` in one thread, and take what there is by `receive_now`, in
    one thread at a time.
    """

    def __init__(self) -> None:
        self._inbox: SimpleQueue[InboxItem] = SimpleQueue()
        self._signal = threading.Event()
        """Ends a wait, which then looks for what it was."""
        self._processor: Callable[[], None] | None = None
        self._woken = self._closed = False

    # What links do

    def put(self, item: InboxItem) -> None:
        """Add an event, or the error that `receive_now` raises, for the thread that waits."""
        self._inbox.put(item)
        self._signal.set()

    def deliver(self, item: InboxItem) -> None:
        """Add an event or an error that the thread of a link has received, which may process it."""
        if self._processor is None:
            self.put(item)
        else:
            self._inbox.put(item)
            self._processor()

    # What the user does

    def process_in_links(self, process: Callable[[], None]) -> None:
        """Let the thread of a link that has received something call `process`, instead of waking the one that waits.

        That saves a thread switch per message. `process` must not wait for another thread that is processing, nor do
        anything if it is called while this thread is processing: it is they who have to look again at the end.
        """
        self._processor = process

    def receive(self, timeout: float | None = None) -> TransportEvent | None:
        return self.receive_now() if self.wait(timeout) else None

    def receive_now(self) -> TransportEvent | None:
        """As `receive`, without waiting."""
        if self._closed:
            return None
        try:
            item = self._inbox.get_nowait()
        except Empty:
            return None
        if isinstance(item, OffbeatError):
            raise item
        event = item(self.clock())
        self._on_receive(event)
        return event

    def _on_receive(self, event: TransportEvent) -> None:
        """Acknowledge an event that `receive_now` is about to return."""

    @property
    def has_received(self) -> bool:
        """Whether there is an event that was not returned yet."""
        return not self._inbox.empty()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until something is received, and return True; False after `timeout` seconds, `wake()`, or `close`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._signal.clear()  # before the looking: what is new from here on ends the wait
            if self._closed or self._woken:
                self._woken = False
                return False
            if self.has_received:
                return True
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            self._signal.wait(left)

    def wake(self) -> None:
        self._woken = True
        self._signal.set()
