"""When the hub merges what learners have sent."""

from __future__ import annotations

import math
from dataclasses import dataclass

from offbeat.core.configuration import Family
from offbeat.core.validation import require_not_negative, require_positive


class Merge(Family):
    """Whom the hub waits for."""


@dataclass(frozen=True)
class Everyone(Merge, name="everyone"):
    """An exchange is merged when every learner that is there has sent it."""


@dataclass(frozen=True)
class Quorum(Merge, name="quorum"):
    """A fragment is merged when so many learners have sent it, and a grace window has passed for the others.

    The window is a share of the time in which the fastest learner goes once through all fragments: it ends before
    anybody sends the fragment again. Nobody waits for the hub meanwhile, so it costs no goodput.
    """

    learners: int | None = None
    """learners that make a quorum; none: half of those that are there"""
    grace: float = 0.5
    """grace window after the quorum, as a share of the fastest learner's cycle"""

    def __post_init__(self) -> None:
        require_positive(self, "learners")
        require_not_negative(self, "grace")

    def size(self, live: int) -> int:
        """How many of those that are there make a quorum."""
        return min(live, self.learners or math.ceil(live / 2))
