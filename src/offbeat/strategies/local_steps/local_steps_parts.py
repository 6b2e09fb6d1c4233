"""The part of local-steps strategies that decides when the hub merges what workers have sent."""

from __future__ import annotations

import math
from dataclasses import dataclass

from offbeat.core.configuration import Family
from offbeat.core.validation import require_not_negative, require_positive


class Merge(Family):
    """When the hub merges."""


@dataclass(frozen=True)
class Everyone(Merge, name="everyone"):
    """An exchange is merged when every connected worker has sent it."""


@dataclass(frozen=True)
class Quorum(Merge, name="quorum"):
    """A fragment is merged when a number of workers have sent it, after a grace window for the others.

    The window is a share of the time in which the fastest worker sends all fragments once, so it ends before that
    worker sends the fragment again. Workers do not wait for the hub meanwhile, so it costs no goodput.
    """

    learners: int | None = None
    """workers that make a quorum; none: half of those that are connected"""
    grace: float = 0.5
    """grace window after the quorum, as a share of the fastest worker's cycle"""

    def __post_init__(self) -> None:
        require_positive(self, "learners")
        require_not_negative(self, "grace")

    def size(self, live: int) -> int:
        """How many of `live` connected workers make a quorum."""
        return min(live, self.learners or math.ceil(live / 2))
