"""Notices a worker whose computation hangs while its process and its link are alive.

A worker is busy from the first message that it is sent to its next answer. It hangs when that takes far longer than
such rounds take its peers, and longer than it took itself before: a worker that is merely slow is not lost again and
again. It is announced first, and treated as lost when twice that time has passed.

The hub then closes its link, and continues without it. When the worker connects again, it is asked by `Probe`, and
answers `ProbeAnswer` once its computation has ended; with that it joins the run again.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass

from offbeat.core.messages import Message
from offbeat.strategies.node_state import Stateful

OWN_FACTOR = 2.0
"""A round may last this many times as long as the worker's own round before."""
LOST_FACTOR = 2.0
"""A worker is treated as lost when its round lasts this many times as long as when it was announced."""


@dataclass(frozen=True)
class Probe(Message):
    """Asks a worker that was treated as lost whether its computation has ended."""


@dataclass(frozen=True)
class ProbeAnswer(Message):
    """The answer to `Probe`, once no computation is outstanding."""


class HangDetector(Stateful):
    """The rounds of all workers, as the hub sees them.

    factor: how many times as long as the median of its peers a round may last; 0: any time.
    seconds_min: a shorter round never hangs.
    """

    busy_since: dict[int, float]
    """rank → when it was first sent a message after its last answer"""
    last_seconds: dict[int, float]
    """rank → how long its last round took"""
    announced: set[int]
    """Ranks that were announced, and have not answered since."""

    def __init__(self, factor: float, seconds_min: float) -> None:
        self._factor = factor
        self._seconds_min = seconds_min
        self.reset()

    def reset(self) -> None:
        """No worker is busy, and nothing is known of any."""
        self.busy_since, self.last_seconds, self.announced = {}, {}, set()

    @property
    def check_seconds(self) -> float | None:
        """How long no worker can hang that is not busy yet; None: forever."""
        return self._seconds_min if self._factor > 0 else None

    def sent(self, rank: int, at: float) -> None:
        """A message was sent to a worker."""
        self.busy_since.setdefault(rank, at)

    def answered(self, rank: int, at: float) -> float | None:
        """A worker has answered; returns for how long it was busy if that was announced."""
        since = self.busy_since.pop(rank, None)
        if since is None:
            return None
        self.last_seconds[rank] = at - since
        if rank not in self.announced:
            return None
        self.announced.discard(rank)
        return at - since

    def forget(self, rank: int) -> None:
        """The link to a worker is lost: what it was busy with is void."""
        self.busy_since.pop(rank, None)
        self.announced.discard(rank)

    def limit(self, rank: int, live: Collection[int]) -> float | None:
        """Seconds after which a round of a worker hangs; None without a peer to compare it with."""
        peers = [self.last_seconds[peer] for peer in live if peer != rank and peer in self.last_seconds]
        if not peers or self._factor <= 0:
            return None
        usual = self._factor * statistics.median(peers)
        return max(self._seconds_min, usual, OWN_FACTOR * self.last_seconds.get(rank, 0.0))
