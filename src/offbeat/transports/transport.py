"""The contract of transports: they move messages between live processes.

A transport belongs to one rank. It keeps up one *link* to each of its peers, again and again where one breaks, and
each time under a higher incarnation. Per link, messages arrive in the order in which they were sent, and at most once.

What a transport promises
- `send` never blocks, and never copies the tensors: they are immutable by contract. A message goes to the incarnation
  that is named; if that is gone, it vanishes.
- A message leaves when the peer has taken all but a few of those before it: `Departed` says so, and lets a node hold
  back what would only grow old on the way. A queued one that has not begun to leave is replaced by a newer one to the
  same peer under the same key.
- `Joined` comes before anything else of an incarnation, `Lost` after everything else of it. A closed connection is
  reported within two seconds, a silent peer after `silence_seconds`.
- What a message holds lies in buffers that are used again as soon as its tensors are gone: no allocation per message
  in the steady state. Who wants to keep it keeps the tensors, or views of them; nothing else is needed.
- A peer that sends garbage, or announces more than it may, costs its own link and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from offbeat.core.messages import Message

MESSAGE_BYTES_MAX = 1 << 34
"""What a peer may announce at the most, unless a transport is told otherwise: 16 GiB."""

SILENCE_SECONDS = 10.0
"""After so long without a byte a peer is given up."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message. `nbytes` is what it weighed on the wire."""

    source: int
    incarnation: int
    message: Message
    nbytes: int


@dataclass(frozen=True, slots=True)
class Departed:
    """A message has left: its link was busy with it for `seconds`. `key` is the one it was sent under.

    `kind` is the name of its type, and `nbytes_uncompressed` what it would have weighed on the wire uncompressed.
    """

    to: int
    incarnation: int
    key: str | None
    nbytes: int
    seconds: float
    kind: str
    nbytes_uncompressed: int


@dataclass(frozen=True, slots=True)
class Joined:
    """There is a link to `peer` now."""

    peer: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The link to `peer` is gone; `why` is for a log."""

    peer: int
    incarnation: int
    why: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A peer will not have us, and trying again would not help; `why` is the sentence that a user should read."""

    peer: int
    why: str


Incoming = Arrived | Departed | Joined | Lost | Refused


class Transport(ABC):
    """One rank's links. Every method may be called from any thread; `receive` from one at a time."""

    elapsed_at_join: tuple[float, float] | None = None
    """How long the run had lasted when rank 0 last answered, and `time.monotonic()` at that moment."""

    @abstractmethod
    def send(self, to: int, incarnation: int, message: Message, key: str | None = None) -> None:
        """Queue a message and return at once."""

    def weight(self, message: Message) -> int:
        """What a message weighs on the wire, as `Departed` will say of it."""
        return message.nbytes

    @abstractmethod
    def receive(self, timeout: float | None = None) -> Incoming | None:
        """The next that came in; None after `timeout` seconds, after `wake()`, and once closed."""

    @abstractmethod
    def wake(self) -> None:
        """Let a `receive` that waits, or else the next one, return None."""

    @abstractmethod
    def close(self, linger_seconds: float = 5.0) -> None:
        """Send what is queued, for so long at the most, then say goodbye: peers see `Lost`. Once is enough."""
