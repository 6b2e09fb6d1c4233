"""The choices of gossip: with whom a peer averages, when, and whether averaging has momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offbeat.core.configuration import Family, option
from offbeat.errors import ConfigurationError


class Partner(Family):
    """With whom a peer averages."""


@dataclass(frozen=True)
class Random(Partner, name="random"):
    """With a neighbour drawn at random."""


@dataclass(frozen=True)
class FirstAvailable(Partner, name="first-available"):
    """Whoever is ready says so, and those who are ready are matched in the order in which they said it."""


@dataclass(frozen=True)
class Matchings(Partner, name="matchings"):
    """By a fixed cycle of perfect matchings, so that nothing is left to chance."""


class Clock(Family):
    """When a peer averages, in units of its own gradients."""


@dataclass(frozen=True)
class Poisson(Clock, name="poisson"):
    """At random, and independently of when it averaged last; what the theory assumes."""


@dataclass(frozen=True)
class Regular(Clock, name="regular"):
    """At equal intervals."""


class Momentum(Family):
    """What averaging remembers."""

    @classmethod
    def shorthand(cls, text: str) -> Any:
        if text not in cls.members and text[:1] in "0123456789.":
            raise ConfigurationError(
                f"momentum is that of averaging here (acid or none), but {text!r} was given; the optimizer's is "
                f"--optimizer.momentum {text}"
            )
        return super().shorthand(text)


@dataclass(frozen=True)
class Acid(Momentum, name="acid"):
    """A²CiD²: a second copy of the parameters that the first is drawn to, all the time, a little."""

    guard: bool = option(True, "mix more slowly where exchanges take long; without, that diverges")
