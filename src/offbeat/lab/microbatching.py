"""How long micro-batches take: time per sample against their size, on this machine and for this model.

    curve = offbeat.microbatch(offbeat.workloads.Digits(), batch=256)
    print(curve.knee, curve.recommendation)

A step differentiates one batch, in one call or in several. What a step takes is a part that every round has (values
are loaded, the sum of gradients is taken) and one call for each micro-batch. Small micro-batches waste calls, and
disturb batch norm; large ones need memory, and make the limits of anytime strategies coarse. The code that is timed is
the engines' own, in one thread.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from offbeat.core.examples import Order
from offbeat.core.validation import check_instance, require
from offbeat.core.workload import NamedWorkload, Workload
from offbeat.errors import ConfigurationError
from offbeat.lab.experiment import build_workload
from offbeat.lab.simulated_runs import one_thread
from offbeat.simulation.gradients import GradientComputer, GradientRequest

BATCH = 256
SECONDS = 20.0
TOLERANCE = 0.05
"""A size is as good as the best where its time per sample is at most this share longer."""
BATCH_NORM_MIN = 32
"""Below so many samples the statistics of batch norm are too poor to train with."""
REPEATS_MAX = 25
SLICE_SECONDS = 0.03
"""A measurement is of as many calls as take about so long, so that the clock's grain does not matter."""


@dataclass(frozen=True)
class MicrobatchRow:
    """What was found of one size. `spread` is the interquartile range over the median; None where measured once."""

    size: int
    seconds_per_call: float
    spread: float | None
    repeats: int

    @property
    def seconds_per_sample(self) -> float:
        return self.seconds_per_call / self.size


@dataclass(frozen=True)
class MicrobatchCurve:
    """Time per sample against the size of micro-batches, from the smallest to the largest that was measured."""

    workload: str
    parameters: int
    batch: int
    seconds_per_round: float
    """What a step takes besides its calls; the update is not in it."""
    rows: tuple[MicrobatchRow, ...]
    batch_norm: bool
    refused: tuple[int, ...]
    """Sizes that the model cannot take: one sample, where that has no batch statistics."""
    left_out: tuple[int, ...]
    """Sizes for which there was no time."""

    def row(self, size: int) -> MicrobatchRow:
        found = [row for row in self.rows if row.size == size]
        require(bool(found), f"the size {size} was not measured; those that were are {[r.size for r in self.rows]}")
        return found[0]

    @property
    def best(self) -> MicrobatchRow:
        """The one with the least time per sample."""
        return min(self.rows, key=lambda row: row.seconds_per_sample)

    @property
    def limit_seconds_per_sample(self) -> float:
        """The longest time per sample that counts as good as the best."""
        return (1.0 + TOLERANCE) * self.best.seconds_per_sample

    @property
    def knee(self) -> int:
        """The smallest size whose time per sample is within 5% of the best."""
        return next(row.size for row in self.rows if row.seconds_per_sample <= self.limit_seconds_per_sample)

    @property
    def recommendation(self) -> int:
        """The knee; with batch norm at least 32, or else the largest that was measured."""
        least = max(self.knee, BATCH_NORM_MIN) if self.batch_norm else self.knee
        return next((row.size for row in self.rows if row.size >= least), self.rows[-1].size)

    def seconds_per_step(self, size: int) -> float:
        """What the gradient of a batch takes, cut into micro-batches of this size."""
        return self.seconds_per_round + self.batch * self.row(size).seconds_per_sample


@dataclass(frozen=True)
class StepTime:
    """How long the gradient of a batch took in so many parts: the median, and every repeat."""

    splits: int
    microbatch: int
    seconds: float
    repeats: tuple[float, ...]

    @property
    def spread(self) -> float | None:
        return _relative_iqr(self.repeats)


def microbatch(
    workload: NamedWorkload | Workload,
    *,
    batch: int = BATCH,
    sizes: Sequence[int] | None = None,
    seconds: float = SECONDS,
    seed: int = 0,
) -> MicrobatchCurve:
    """Measure micro-batches of these sizes, by default of all powers of two up to the batch, for about so long.

    Repeats are interleaved, so that a slow spell of the machine meets all sizes alike. A size that takes more than its
    share of the time is measured once; one that would take more than is left is left out.
    """
    check_instance(workload, (NamedWorkload, Workload), "the workload", "offbeat.workloads.Digits()")
    require(batch >= 1, f"the batch must be 1 or more, but is {batch}")
    require(0 < seconds < math.inf, f"the time to measure must be more than 0 seconds, but is {seconds:g}")
    chosen = sorted(set(_default_sizes(batch) if sizes is None else sizes))
    require(bool(chosen), "there is no size to measure; give at least one, such as 16")
    require(chosen[0] >= 1, f"a micro-batch has 1 sample or more, but {chosen[0]} was given")
    require(chosen[-1] <= batch, f"a micro-batch of {chosen[-1]} is more than the batch of {batch}; raise the batch")
    workload = build_workload(workload)
    with _isolated():
        bench = _GradientTimer(workload, seed)
        found = _measure(bench, chosen, batch, seconds)
    if not found.timings:
        raise ConfigurationError(
            "the model has batch norm, which needs at least 2 samples at a time, and no other size was asked for; "
            "add a larger one"
        )
    overhead = statistics.median(found.overheads)
    return MicrobatchCurve(
        workload=workload.label,
        parameters=bench.computing.flat.layout.numel,
        batch=batch,
        seconds_per_round=overhead,
        rows=tuple(timing.row(overhead) for timing in found.timings),
        batch_norm=bench.computing.batch_norm,
        refused=tuple(found.refused),
        left_out=tuple(found.left_out),
    )


def time_per_step(
    workload: NamedWorkload | Workload, batch: int, splits: Sequence[int], repeats: int = 5, seed: int = 0
) -> list[StepTime]:
    """How long the gradient of a whole batch takes in one part, or cut into several; repeats are interleaved.

    Parts are equal but for the last. The update is not in it.
    """
    check_instance(workload, (NamedWorkload, Workload), "the workload", "offbeat.workloads.Digits()")
    require(repeats >= 1, f"there must be 1 repeat or more, but {repeats} were asked for")
    for count in splits:
        require(
            1 <= count <= batch, f"a batch of {batch} can be cut into 1 to {batch} parts, but {count} were asked for"
        )
    sizes = {count: math.ceil(batch / count) for count in splits}
    taken: dict[int, list[float]] = {count: [] for count in sizes}
    with _isolated():
        bench = _GradientTimer(build_workload(workload), seed)
        for size in sizes.values():
            bench.seconds(size, size)
        for _ in range(repeats):
            for count, size in sizes.items():
                taken[count].append(bench.seconds(batch, size))
    return [StepTime(count, sizes[count], statistics.median(values), tuple(values)) for count, values in taken.items()]


class _GradientTimer:
    """The workload's model and data, and how long the gradient of some samples takes."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self.computing = GradientComputer(workload, seed, merge_microbatches=False)
        flat, self._seed = self.computing.flat, seed
        # Two copies by turns: values that are loaded already would not be loaded again, as new ones are in training.
        self._values = itertools.cycle([flat.parameters.clone(), flat.parameters.clone()])
        self._buffers = tuple(buffer.clone() for buffer in flat.buffers)
        self._order = Order(workload.split.indices(workload.train.targets, 0, 1, seed), seed, rank=0)
        self._draw = 0

    def seconds(self, samples: int, size: int) -> float:
        """How long the gradient of so many samples takes in micro-batches of this size; of none, what is left."""
        batches = GradientRequest(self._order, self._draw, samples, size, (self._seed, 0))
        self._draw += samples
        values = next(self._values)
        began = time.perf_counter()
        self.computing.gradient(values, self._buffers, batches)
        return time.perf_counter() - began


@dataclass
class _SizeTimings:
    """What was measured of one size: `calls` of it at a time, `first` the first time, with which torch warms up."""

    size: int
    first: float
    calls: int
    once: bool
    seconds: list[float] = field(default_factory=list)

    def row(self, overhead: float) -> MicrobatchRow:
        taken = self.seconds or [self.first]
        calls = self.calls if self.seconds else 1
        each = [max(1e-9, (seconds - overhead) / calls) for seconds in taken]
        return MicrobatchRow(self.size, statistics.median(each), _relative_iqr(each), len(each))


@dataclass
class _Measurements:
    timings: list[_SizeTimings] = field(default_factory=list)
    overheads: list[float] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)


def _measure(bench: _GradientTimer, sizes: Sequence[int], batch: int, seconds: float) -> _Measurements:
    ends = time.perf_counter() + seconds
    found = _Measurements()
    bench.seconds(2, 2)  # torch loads a part of itself with the first gradient
    found.overheads.append(bench.seconds(0, 1))
    share = seconds / (2 * len(sizes))
    for size in sizes:
        last = found.timings[-1] if found.timings else None
        expected = 0.0 if last is None else last.first * size / last.size
        if len(found.timings) >= 2 and time.perf_counter() + expected > ends:
            found.left_out.append(size)
            continue
        try:
            first = bench.seconds(size, size)
        except ConfigurationError:
            if size > 1 or not bench.computing.batch_norm:
                raise
            found.refused.append(size)
            continue
        calls = max(1, min(batch // size, int(SLICE_SECONDS / first)))
        found.timings.append(_SizeTimings(size, first, calls, once=first > share))
    _repeat(bench, found, ends)
    return found


def _repeat(bench: _GradientTimer, found: _Measurements, ends: float) -> None:
    """Round after round over all sizes, while there is time."""
    repeated = [timing for timing in found.timings if not timing.once]
    for _ in range(REPEATS_MAX):
        for timing in repeated:
            if timing.seconds and time.perf_counter() + timing.seconds[-1] > ends:
                return
            timing.seconds.append(bench.seconds(timing.calls * timing.size, timing.size))
        found.overheads.append(bench.seconds(0, 1))


@contextmanager
def _isolated() -> Iterator[None]:
    """One thread, as engines have it; and whoever calls keeps its random numbers."""
    with one_thread(), torch.random.fork_rng(devices=[]):
        yield


def _default_sizes(batch: int) -> Iterable[int]:
    """The powers of two below the batch, and the batch itself."""
    return [*(2**power for power in range((batch - 1).bit_length())), batch]


def _relative_iqr(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return (upper - lower) / middle
