"""The computing time of a worker: its base speed, and straggler models.

A `StragglerModel` is sampled once per round. It may delay the round (`delay_seconds`, a sleep before the first
micro-batch) or slow it down (`factor`, on the time of every micro-batch). `Trace` replays recorded factors.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from numpy.random import Generator

from offbeat.core.configuration import Configuration, Family
from offbeat.core.validation import require, require_not_negative, require_positive

SECONDS_PER_SAMPLE = 5.65 / 256
"""The base speed that published straggler studies measured, so that figures can be compared with theirs."""


class RoundDelay(NamedTuple):
    """The delay of one round: seconds of sleep before it, and the factor by which it takes longer."""

    delay_seconds: float
    factor: float


class StragglerModel(Family, ABC):
    """Random delays of the rounds of a worker, one sample per round. Shorthand: `niagara`, `cedar`, `lognormal:0.5`."""

    @abstractmethod
    def draw(self, rng: Generator) -> RoundDelay:
        """The delay of one round."""

    def draws(self, rng: Generator) -> Iterator[RoundDelay]:
        """The delays of successive rounds of one worker."""
        while True:
            yield self.draw(rng)


@dataclass(frozen=True)
class NoStragglers(StragglerModel, name="none"):
    """No delays."""

    def draw(self, rng: Generator) -> RoundDelay:
        return RoundDelay(0.0, 1.0)


@dataclass(frozen=True)
class Slowdown(StragglerModel, name="factor"):
    """Every round takes longer by the same factor."""

    factor: float = 2.0
    """factor on the duration of a round"""

    def __post_init__(self) -> None:
        require_positive(self, "factor")

    def draw(self, rng: Generator) -> RoundDelay:
        return RoundDelay(0.0, self.factor)


@dataclass(frozen=True)
class ShiftedExponential(StragglerModel, name="shifted-exponential"):
    """A round takes 1 + Exp(mean) times as long: the usual model in the theory of stragglers."""

    mean: float = 0.5
    """mean of the exponential part, as a fraction of the undisturbed time"""

    def __post_init__(self) -> None:
        require_not_negative(self, "mean")

    def draw(self, rng: Generator) -> RoundDelay:
        return RoundDelay(0.0, 1.0 + float(rng.exponential(self.mean)))


@dataclass(frozen=True)
class Lognormal(StragglerModel, name="lognormal"):
    """A round takes exp(N(0, σ)) times as long, with a median of 1."""

    sigma: float = 0.5
    """standard deviation of the logarithm of the factor"""

    def __post_init__(self) -> None:
        require_not_negative(self, "sigma")

    def draw(self, rng: Generator) -> RoundDelay:
        return RoundDelay(0.0, float(rng.lognormal(0.0, self.sigma)))


@dataclass(frozen=True)
class Pareto(StragglerModel, name="pareto"):
    """A heavy-tailed factor: at least 1, and above f with probability f^(-shape)."""

    shape: float = 2.5
    """tail exponent; smaller is heavier, at 1 and below the mean is infinite"""

    def __post_init__(self) -> None:
        require_positive(self, "shape")

    def draw(self, rng: Generator) -> RoundDelay:
        return RoundDelay(0.0, 1.0 + float(rng.pareto(self.shape)))


@dataclass(frozen=True)
class Mixture(StragglerModel, name="mixture"):
    """Sleeps of a normal mixture: a component by its weight, then min(cap, |N(μ, σ)|) seconds; cap = max(μ + 5σ)."""

    components: tuple[tuple[float, float, float], ...]
    """mean in seconds, standard deviation in seconds and weight of each component"""

    def __post_init__(self) -> None:
        require(len(self.components) > 0, "Mixture.components needs at least one (mean, deviation, weight)")
        require(
            all(deviation >= 0 and weight >= 0 for _, deviation, weight in self.components),
            f"Mixture.components must have deviations and weights of 0 or more, but are {self.components!r}",
        )
        require(sum(weight for *_, weight in self.components) > 0, "Mixture.components has no weight above 0")

    @property
    def cap_seconds(self) -> float:
        return max(mean + 5 * deviation for mean, deviation, _ in self.components)

    def draw(self, rng: Generator) -> RoundDelay:
        # Always two random numbers per round, so that two mixtures with the same seed remain comparable.
        chosen, normal = float(rng.random()), float(rng.standard_normal())
        mean, deviation = self._component(chosen)
        return RoundDelay(min(self.cap_seconds, abs(mean + deviation * normal)), 1.0)

    def _component(self, chosen: float) -> tuple[float, float]:
        remainder = chosen * sum(weight for *_, weight in self.components)
        for mean, deviation, weight in self.components:
            remainder -= weight
            if remainder < 0:
                return mean, deviation
        # Rounding can leave a remainder of 1e-17, which belongs to the last component with a weight.
        return next((mean, deviation) for mean, deviation, weight in reversed(self.components) if weight > 0)


@dataclass(frozen=True)
class Trace(StragglerModel, name="trace"):
    """Recorded factors, replayed cyclically from a start position that is random per worker.

    Each was measured over `samples` samples. As a `straggle`, every round takes the next factor. As the `speed_trace`
    of a cluster, each factor lasts for its samples, however they are divided into rounds, so that slow periods keep
    their length.
    """

    factors: tuple[float, ...]
    """successive factors on the usual duration"""
    samples: int = 256
    """duration of each factor in samples"""

    def __post_init__(self) -> None:
        require_positive(self, "samples")
        require(
            len(self.factors) > 0 and all(factor > 0 for factor in self.factors),
            "Trace.factors needs at least one factor, and all of them above 0",
        )

    def draw(self, rng: Generator) -> RoundDelay:
        return RoundDelay(0.0, self.factors[int(rng.integers(len(self.factors)))])

    def draws(self, rng: Generator) -> Iterator[RoundDelay]:
        first = int(rng.integers(len(self.factors)))
        for index in itertools.count(first):
            yield RoundDelay(0.0, self.factors[index % len(self.factors)])

    def factor_at(self, position: int) -> float:
        """The factor after `position` samples."""
        return self.factors[position // self.samples % len(self.factors)]


NIAGARA = Mixture(((0.0, 0.0, 0.4), (0.0, 0.4, 0.3), (2.0, 0.3, 0.2), (5.0, 0.3, 0.1)))
"""Sleeps of 0.996 s on average and 4.02 s for the slowest of ten: a shared machine."""

CEDAR = Mixture(((0.0, 0.0, 0.4), (0.05, 0.04, 0.3), (0.15, 0.03, 0.2), (0.25, 0.03, 0.1)))
"""Sleeps of 0.071 s on average and 0.224 s for the slowest of ten: a faster machine with the same shape."""

StragglerModel.constants |= {"niagara": NIAGARA, "cedar": CEDAR}


@dataclass(frozen=True)
class Speed(Configuration):
    """The speed of one worker, with all overrides applied."""

    seconds_per_sample: float = SECONDS_PER_SAMPLE
    """seconds per sample of a gradient"""
    seconds_per_call: float = 0.0
    """additional seconds per micro-batch"""
    seconds_per_update: float = 0.0
    """seconds per update of the parameters"""
    straggle: StragglerModel = NoStragglers()
    """straggler model of the rounds"""
    seconds_per_round: float = 0.0
    """additional seconds per round"""
    speed_trace: Trace | None = None
    """recorded variation of the speed over time"""

    def __post_init__(self) -> None:
        require_not_negative(self, "seconds_per_sample", "seconds_per_call", "seconds_per_update", "seconds_per_round")

    def microbatch_seconds(self, samples: int, factor: float = 1.0) -> float:
        """The duration of a micro-batch in a round that is slower by `factor`."""
        return (self.seconds_per_call + samples * self.seconds_per_sample) * factor
