"""The part of a population that chooses with which models a member is averaged, and factors on learning rates."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from offbeat.core.configuration import Family


class Sources(Family, ABC):
    """The members whose parameters a member is averaged with, given the scores of all; lower is better."""

    def of(self, rank: int, scores: Mapping[int, float]) -> list[int]:
        """The sources of a rank: never itself, and never a member whose score is not finite."""
        others = {other: score for other, score in scores.items() if other != rank and math.isfinite(score)}
        return sorted(self.among(others, scores.get(rank, math.inf))) if others else []

    @abstractmethod
    def among(self, others: Mapping[int, float], score: float) -> list[int]:
        """Which of the others are sources of a member with this score."""


@dataclass(frozen=True)
class AllMembers(Sources, name="all"):
    """All other members."""

    def among(self, others: Mapping[int, float], score: float) -> list[int]:
        return list(others)


@dataclass(frozen=True)
class Best(Sources, name="best"):
    """The member with the best score, unless the member itself is as good."""

    def among(self, others: Mapping[int, float], score: float) -> list[int]:
        best = min(others, key=lambda rank: (others[rank], rank))
        return [best] if others[best] < score or not math.isfinite(score) else []


@dataclass(frozen=True)
class Better(Sources, name="better"):
    """All members with a strictly better score, so that a bad model is averaged into none."""

    def among(self, others: Mapping[int, float], score: float) -> list[int]:
        return [rank for rank, other in others.items() if other < score or not math.isfinite(score)]


Rates = tuple[float, ...]


def rate_factor(rates: Rates, rank: int) -> float:
    """The factor on the learning rate of a rank; worker 0 is rank 1."""
    return rates[rank - 1] if 1 <= rank <= len(rates) else 1.0
