"""Assignment of ranks: rank 0 assigns a rank to every process that joins, and sends it the experiment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from offbeat.transports.rendezvous import Assignment, CallRequest

RESERVED_SECONDS = 60.0
"""For how long a rank is reserved for a member that got its assignment but has not connected yet."""


@dataclass
class RankAllocator:
    """Answers authenticated requests for a rank. A member that asks again gets the rank it had. Thread-safe."""

    processes: int
    computing: tuple[int, ...]
    reserved: frozenset[int]
    now: Callable[[], float]
    experiment: bytes | None
    is_elastic: bool
    """Whether ranks beyond `processes` may join; not if the data is split among the initial ones."""
    full: str
    """The rejection when no rank is free."""
    linked: Callable[[], frozenset[int]] = frozenset
    """Returns the ranks that are linked now."""
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
        pending = {rank for rank, at in self._members.values() if now - at < RESERVED_SECONDS}
        free = (rank for rank in self.computing if rank and rank not in self.reserved | linked | pending)
        rank = next(free, None)
        if rank is None and self.is_elastic:
            rank = max([self.processes - 1, *linked, *pending]) + 1
        return rank
