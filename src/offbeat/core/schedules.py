"""Learning rates as functions of the number of samples applied in the whole run.

They do not depend on local step counts, so that runs with different batch sizes, speeds and strategies are comparable.
Wherever a schedule is expected, a number is accepted too.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from offbeat.core.configuration import Family
from offbeat.core.validation import require_field, require_not_negative, require_positive

REFERENCE_BATCH_SAMPLES = 256
"""The batch size of a base learning rate, by the usual linear scaling rule."""


class Schedule(Family):
    """A learning rate as a function of samples."""

    def __call__(self, samples: int) -> float:
        raise NotImplementedError


def rate_at(rate: float | Schedule, samples: int) -> float:
    """The learning rate of a schedule, or of a number, after `samples` samples."""
    return rate(samples) if isinstance(rate, Schedule) else float(rate)


@dataclass(frozen=True)
class Constant(Schedule, name="constant"):
    """A constant rate; equivalent to a number."""

    value: float
    """learning rate"""

    def __post_init__(self) -> None:
        require_not_negative(self, "value")

    def __call__(self, samples: int) -> float:
        return float(self.value)


@dataclass(frozen=True)
class Linear(Schedule, name="linear"):
    """Linear from `start` to `end`, then constant."""

    start: float
    """learning rate at the start"""
    end: float
    """learning rate at the end"""
    samples: int
    """samples from the start to the end"""

    def __post_init__(self) -> None:
        require_not_negative(self, "start", "end")
        require_positive(self, "samples")

    def __call__(self, samples: int) -> float:
        done = min(1.0, samples / self.samples)
        return self.start * (1.0 - done) + self.end * done


@dataclass(frozen=True)
class Cosine(Schedule, name="cosine"):
    """Half a period of the cosine from `start` to `end`, then constant: slow at both ends, without restarts."""

    start: float
    """learning rate at the start"""
    samples: int
    """samples from the start to the end"""
    end: float = 0.0
    """learning rate at the end"""

    def __post_init__(self) -> None:
        require_not_negative(self, "start", "end")
        require_positive(self, "samples")

    def __call__(self, samples: int) -> float:
        done = min(1.0, samples / self.samples)
        left = (1.0 + math.cos(math.pi * done)) / 2.0
        return self.start * left + self.end * (1.0 - left)


@dataclass(frozen=True)
class Exponential(Schedule, name="exponential"):
    """Exponential decay by `factor` per `samples` samples, continuous or in steps."""

    start: float
    """learning rate at the start"""
    factor: float
    """multiplier of the rate, above 0 and at most 1"""
    samples: int
    """samples per factor"""
    staircase: bool = False
    """in steps after every `samples` samples, instead of continuously"""

    def __post_init__(self) -> None:
        require_not_negative(self, "start")
        require_positive(self, "factor", "samples")
        require_field(self, "factor", self.factor <= 1, f"must be at most 1, but is {self.factor!r}")

    def __call__(self, samples: int) -> float:
        periods = samples // self.samples if self.staircase else samples / self.samples
        return float(self.start * self.factor**periods)


@dataclass(frozen=True)
class Milestones(Schedule, name="milestones"):
    """Step decay: multiplied by `factor` at each milestone."""

    start: float
    """learning rate at the start"""
    at: tuple[int, ...]
    """samples at which the rate changes, in rising order"""
    factor: float = 0.1
    """multiplier of the rate at each milestone"""

    def __post_init__(self) -> None:
        require_not_negative(self, "start")
        require_positive(self, "factor")
        rising = all(earlier < later for earlier, later in pairwise((0, *self.at)))
        require_field(self, "at", rising, f"must be numbers of samples in rising order, but is {self.at!r}")

    def __call__(self, samples: int) -> float:
        return float(self.start * self.factor ** bisect_right(self.at, samples))


@dataclass(frozen=True)
class WarmUp(Schedule, name="warmup"):
    """Another schedule times a scale that changes linearly over the first `samples` samples.

    For large batches: give the base rate for 256 samples, and let it rise to base · batch · workers / 256, as in

        WarmUp.for_batch(Milestones(0.1, at=(half, three_quarters)), samples=5 * epoch, batch=128, workers=16)

    For a warm-up from 0 to the base rate: `WarmUp(1e-3, samples=10_000, start_scale=0.0)`. The inner schedule counts
    samples from the start of the run, not from the end of the warm-up.
    """

    after: Schedule | float
    """base learning rate, or a schedule of it"""
    samples: int
    """samples over which the scale rises"""
    scale: float = 1.0
    """multiplier of the base rate after the warm-up, such as batch·workers/256"""
    start_scale: float = 1.0
    """multiplier of the base rate at the start"""

    def __post_init__(self) -> None:
        if not isinstance(self.after, Schedule):
            require_not_negative(self, "after")
        require_positive(self, "samples", "scale")
        require_not_negative(self, "start_scale")

    @classmethod
    def for_batch(cls, after: Schedule | float, *, samples: int, batch: int, workers: int) -> WarmUp:
        """Linear scaling for updates of `batch` samples from each of `workers` workers."""
        return cls(after, samples, scale=batch * workers / REFERENCE_BATCH_SAMPLES)

    def __call__(self, samples: int) -> float:
        done = min(1.0, samples / self.samples)
        return rate_at(self.after, samples) * (self.start_scale * (1.0 - done) + self.scale * done)
