"""Verdicts: how our interval of a number compares with the published range."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Literal

from offbeat.lab.reproduction.study import Claim
from offbeat.records.comparison import Interval, half_width_factor

HALF_WIDTH_MAX = 0.25
"""The half-width of an interval, as a share of its mean, up to which it can agree: a wide one meets any range."""
SEEDS_MAX = 1000
"""The largest number of seeds that is estimated."""


@dataclass(frozen=True)
class Verdict:
    """A verdict about one claim."""

    word: Literal["agrees", "differs", "cannot tell"]
    side: Literal["better", "worse"] | None = None
    """Where ours differs: whether it is better."""
    seeds_needed: int | None = None
    """Where the interval is too wide: about how many seeds would do, at most `SEEDS_MAX`."""

    def __str__(self) -> str:
        """For a table."""
        if self.side is not None:
            return f"{self.word} ({self.side})"
        return self.word if self.seeds_needed is None else f"{self.word} ({_seeds(self.seeds_needed)} needed)"

    @property
    def clause(self) -> str:
        """For a sentence."""
        if self.side is not None:
            return f"ours differs, and is {self.side}"
        if self.word == "agrees":
            return "ours agrees"
        reason = "one run or none has no interval"
        if self.seeds_needed is not None:
            reason = f"the interval is too wide, and {_seeds(self.seeds_needed)} would be needed"
        return f"cannot tell: {reason}"


def _seeds(count: int) -> str:
    return f"about {count} seeds" if count < SEEDS_MAX else f"{SEEDS_MAX:,} seeds or more"


def verdict_of(claim: Claim, ours: Interval | None) -> Verdict | None:
    """How our interval compares with the published range of a claim; None if there is no range.

    Agrees: its half-width is at most a quarter of its mean, and it meets the range. Differs: it does not meet the
    range, however wide it is. Cannot tell: it meets the range and is wider, or there is none, as with one seed.
    """
    if claim.low is None and claim.high is None:
        return None
    if ours is None or ours.low is None or ours.high is None:
        return Verdict("cannot tell")
    if claim.low is not None and ours.high < claim.low:
        return Verdict("differs", "worse" if claim.better == "higher" else "better")
    if claim.high is not None and ours.low > claim.high:
        return Verdict("differs", "better" if claim.better == "higher" else "worse")
    if ours.high - ours.mean <= HALF_WIDTH_MAX * abs(ours.mean):
        return Verdict("agrees")
    return Verdict("cannot tell", seeds_needed=seeds_needed(ours))


def seeds_needed(ours: Interval) -> int:
    """The smallest number of seeds whose half-width would be a quarter of the mean, for seeds that vary as ours do.

    At most `SEEDS_MAX`. Raises ValueError for an interval of one seed, which says nothing about variation.
    """
    if ours.high is None:
        raise ValueError("the number of seeds cannot be estimated from one seed; run two or more")
    deviation = (ours.high - ours.mean) / half_width_factor(ours.count)
    limit = HALF_WIDTH_MAX * abs(ours.mean)
    counts = range(2, SEEDS_MAX)
    index = bisect.bisect_left(counts, True, key=lambda count: half_width_factor(count) * deviation <= limit)
    return counts[index] if index < len(counts) else SEEDS_MAX
