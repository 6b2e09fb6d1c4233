"""Who may sit where: rank 0 hands out ranks to whoever joins, and tells them what is trained."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from offbeat.transports.rendezvous import Assignment, CallRequest

RESERVED_SECONDS = 60.0
"""For so long a rank is kept for a member that has asked for the terms but has not come yet."""


@dataclass
class RankAllocator:
    """Answers everyone who has shown the token. A member that comes again gets the rank that it had."""

    processes: int
    computing: tuple[int, ...]
    reserved: frozenset[int]
    now: Callable[[], float]
    experiment: bytes | None
    is_elastic: bool
    """Whether more may come than were expected: not where the data is split among those."""
    full: str
    """What who comes then is told."""
    linked: Callable[[], frozenset[int]] = frozenset
    """Which ranks are there."""
    _members: dict[str, tuple[int, float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, request: CallRequest) -> Assignment | str:
        with self._lock:
            rank = request.rank if request.rank is not None else self._rank_for(request.member, self.linked())
            if rank is None:
                return self.full
            if request.rank is None or request.member:
                self._members[request.member] = rank, time.monotonic()
        return Assignment(rank, self.processes, self.now(), self.experiment)

    def _rank_for(self, member: str, linked: frozenset[int]) -> int | None:
        if member in self._members:
            return self._members[member][0]
        now = time.monotonic()
        kept = {rank for rank, at in self._members.values() if now - at < RESERVED_SECONDS}
        free = (rank for rank in self.computing if rank and rank not in self.reserved | linked | kept)
        rank = next(free, None)
        if rank is None and self.is_elastic:
            rank = max([self.processes - 1, *linked, *kept]) + 1
        return rank
