"""Messages between the ranks of a probe, over any transport, with an end to every wait.

A rank that is lost would leave holes in the measurement, so a probe does not wait for it to come back: it fails with a
sentence that names it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from offbeat.core.messages import Message
from offbeat.errors import RunFailed
from offbeat.transports.transport import Arrived, Joined, Lost, Refused, Transport

LOOK_SECONDS = 0.25
"""How often it is looked whether something else than a message ends the wait."""

LOST_RANK_0 = "lost rank 0"
"""What a rank says of itself that has lost the one which leads."""


class LinkLost(RunFailed):
    """The link to a peer is gone."""

    def __init__(self, peer: int, why: str) -> None:
        super().__init__(f"rank {peer} was lost ({why})")
        self.peer, self.why = peer, why

    @contextmanager
    def told_also(self) -> Iterator[None]:
        """Where the other end only says that it has lost this one, the cause is what this end knows."""
        try:
            yield
        except RunFailed as failed:
            if LOST_RANK_0 in str(failed):
                raise RunFailed(f"{failed}; at rank 0: {self.why}") from None
            raise


class Silence(RunFailed):
    """Nobody has said anything for too long."""


class Mail:
    """One rank's messages, those to itself included. `look` may raise what ends a wait early."""

    def __init__(self, transport: Transport, rank: int, ranks: int, look: Callable[[], None] = lambda: None) -> None:
        self.rank, self.ranks = rank, ranks
        self._transport, self._look = transport, look
        self._incarnations: dict[int, int] = {}
        self._kept: deque[tuple[int, Message]] = deque()
        """What this rank said to itself, and what others said before it was connected with everybody."""

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank != self.rank and rank not in self._incarnations]

    def connect(self, wait_seconds: float) -> None:
        """Wait until there is a link to everybody."""
        until = time.monotonic() + wait_seconds
        while self.missing:
            if time.monotonic() >= until:
                names = ", ".join(map(str, self.missing))
                raise RunFailed(
                    f"rank {self.rank} waited {wait_seconds:g} s for a link to rank {names}; start every rank, or wait "
                    "longer with --wait SECONDS"
                )
            taken = self._take(min(LOOK_SECONDS, until - time.monotonic()))
            if taken is not None:
                self._kept.append(taken)

    def send(self, to: int, message: Message) -> None:
        if to == self.rank:
            self._kept.append((self.rank, message))
        else:
            self._transport.send(to, self._incarnations[to], message)

    def next(self, patience_seconds: float) -> tuple[int, Message]:
        """The next message and who sent it; `Silence` is raised where nobody says anything for so long."""
        until = time.monotonic() + patience_seconds
        while not self._kept:
            taken = self._take(LOOK_SECONDS)
            if taken is not None:
                return taken
            if time.monotonic() >= until:
                raise Silence(f"rank {self.rank} has not heard from anybody for {patience_seconds:.0f} s")
        return self._kept.popleft()

    def _take(self, seconds: float) -> tuple[int, Message] | None:
        incoming = self._transport.receive(max(0.0, seconds))
        if isinstance(incoming, Arrived):
            return incoming.source, incoming.message
        if isinstance(incoming, Joined):
            self._incarnations[incoming.peer] = incoming.incarnation
        elif isinstance(incoming, Lost):
            lost = LinkLost(incoming.peer, incoming.why)
            with lost.told_also():
                self._look()  # a process that was started here may say more about it
            raise lost
        elif isinstance(incoming, Refused):
            raise RunFailed(incoming.why)
        elif incoming is None:
            self._look()
        return None
