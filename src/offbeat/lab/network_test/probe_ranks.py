"""Who may sit where in a probe: rank 0 hands out the ranks that are not started on its own machine."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from offbeat.transports.rendezvous import Assignment, CallRequest

GUEST = "network "
"""What the name of a process begins with that came for a probe, and not to train."""


class RankAllocator:
    """Answers everybody who has shown the token. A process that comes again gets the rank that it had."""

    def __init__(self, ranks: int, started_here: Iterable[int]) -> None:
        self._ranks = ranks
        self._free = sorted(set(range(ranks)) - set(started_here))
        self._members: dict[str, int] = {}
        self._lock = threading.Lock()

    def __call__(self, request: CallRequest) -> Assignment | str:
        if request.rank is not None:
            return Assignment(request.rank, self._ranks, 0.0, None)
        if not request.member.startswith(GUEST):
            return (
                "what listens there is 'offbeat network', and trains nothing; join it with: offbeat network HOST:PORT"
            )
        with self._lock:
            if request.member not in self._members:
                if not self._free:
                    return f"all {self._ranks} ranks are taken; start 'offbeat network' with a larger -n"
                self._members[request.member] = self._free.pop(0)
            return Assignment(self._members[request.member], self._ranks, 0.0, None)
