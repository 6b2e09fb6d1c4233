"""Whom a member of a population learns from, and what it begins with."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offbeat.core.configuration import Family
from offbeat.core.flat import Layout


class Sources(Family, ABC):
    """Whose parameters a member averages its own with, given the scores of all; lower is better."""

    def of(self, rank: int, scores: Mapping[int, float]) -> list[int]:
        """The sources of a rank. One whose score is not finite never is a source, and nobody is its own."""
        others = {other: score for other, score in scores.items() if other != rank and math.isfinite(score)}
        return sorted(self.among(others, scores.get(rank, math.inf))) if others else []

    @abstractmethod
    def among(self, others: Mapping[int, float], score: float) -> list[int]:
        """Those of the others that are sources of one with this score."""


@dataclass(frozen=True)
class AllMembers(Sources, name="all"):
    """All others."""

    def among(self, others: Mapping[int, float], score: float) -> list[int]:
        return list(others)


@dataclass(frozen=True)
class Best(Sources, name="best"):
    """The one with the best score, unless the member itself is as good."""

    def among(self, others: Mapping[int, float], score: float) -> list[int]:
        best = min(others, key=lambda rank: (others[rank], rank))
        return [best] if others[best] < score or not math.isfinite(score) else []


@dataclass(frozen=True)
class Better(Sources, name="better"):
    """All whose score is strictly better: nobody is harmed by one that does badly."""

    def among(self, others: Mapping[int, float], score: float) -> list[int]:
        return [rank for rank, other in others.items() if other < score or not math.isfinite(score)]


Rates = tuple[float, ...]


def rate_factor(rates: Rates, rank: int) -> float:
    """The factor on the learning rate of a rank; worker 0 is rank 1."""
    return rates[rank - 1] if 1 <= rank <= len(rates) else 1.0


class Initial(Family, ABC):
    """What the members begin with."""

    @abstractmethod
    def parameters(self, given: Tensor, layout: Layout, random: np.random.Generator) -> Tensor:
        """The parameters of a member, in a tensor of its own."""


@dataclass(frozen=True)
class Shuffled(Initial, name="shuffled"):
    """Different ones: in every tensor the model's own initial values, in an order of the member's own.

    Initial values of one tensor are usually drawn independently from one distribution, so these are as good as fresh.
    """

    def parameters(self, given: Tensor, layout: Layout, random: np.random.Generator) -> Tensor:
        shuffled = given.clone()
        for slot in layout.parameters:
            order = torch.from_numpy(random.permutation(slot.stop - slot.start))
            shuffled[slot.start : slot.stop] = given[slot.start : slot.stop][order.to(given.device)]
        return shuffled


@dataclass(frozen=True)
class Same(Initial, name="same"):
    """The model's own, for all: for a model that has been trained before."""

    def parameters(self, given: Tensor, layout: Layout, random: np.random.Generator) -> Tensor:
        return given.clone()
