"""The time per sample as a function of the micro-batch size, for a model on this machine.

    curve = offbeat.microbatch(offbeat.workloads.Digits(), batch=256)
    print(curve.knee, curve.recommendation)

A step computes the gradient of one batch in one or several calls. Its time is a constant (loading the parameters,
summing gradients) plus the time of one call per micro-batch. Small micro-batches cost calls and degrade batch norm;
large ones cost memory and make the time limits of anytime strategies coarse. The code that is timed is that of the
simulator, in one thread.
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
from offbeat.engine.experiment import build_workload
from offbeat.engine.gradient_computer import GradientComputer, GradientRequest
from offbeat.errors import ConfigurationError
from offbeat.lab.simulated_runs import one_thread

BATCH = 256
SECONDS = 20.0
TOLERANCE = 0.05
"""A size counts as good as the best where its time per sample is at most this share longer."""
BATCH_NORM_MIN = 32
"""With fewer samples the statistics of batch norm are too noisy to train with."""
REPEATS_MAX = 25
SLICE_SECONDS = 0.03
"""A measurement repeats calls for about this long, so that the resolution of the clock does not matter."""


@dataclass(frozen=True)
class MicrobatchRow:
    """The result for one size. `spread` is the interquartile range over the median; None where measured once."""

    size: int
    seconds_per_call: float
    spread: float | None
    repeats: int

    @property
    def seconds_per_sample(self) -> float:
        return self.seconds_per_call / self.size


@dataclass(frozen=True)
class MicrobatchCurve:
    """The time per sample of each measured micro-batch size, in ascending order."""

    workload: str
    parameters: int
    batch: int
    seconds_per_round: float
    """The time of a step besides its calls, without the update."""
    rows: tuple[MicrobatchRow, ...]
    batch_norm: bool
    refused: tuple[int, ...]
    """Sizes that the model cannot process: a single sample has no batch statistics."""
    left_out: tuple[int, ...]
    """Sizes that were not measured, for lack of time."""

    def row(self, size: int) -> MicrobatchRow:
        rows = {row.size: row for row in self.rows}
        require(size in rows, f"the size {size} was not measured; those that were are {list(rows)}")
        return rows[size]

    @property
    def best(self) -> MicrobatchRow:
        """The row with the least time per sample."""
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
        """The time of the gradient of a batch that is divided into micro-batches of this size."""
        return self.seconds_per_round + self.batch * self.row(size).seconds_per_sample


@dataclass(frozen=True)
class StepTime:
    """The time of the gradient of a batch that is divided into `splits` parts: the median, and every repeat."""

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
    """Measure the time per sample of several micro-batch sizes.

    Args:
        workload: the model and its data.
        batch: samples per update of the later training.
        sizes: the sizes to measure; none: all powers of two below the batch, and the batch.
        seconds: how long to measure, about.
        seed: of the model and of the order of the data.

    Repeats are interleaved, so that a slow period of the machine affects all sizes alike. A size that takes more than
    its share of the time is measured once, and one that would take more than the time left is not measured. Raises
    `ConfigurationError` for wrong arguments.
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
        measurements = _measure(bench, chosen, batch, seconds)
    if not measurements.timings:
        raise ConfigurationError(
            "the model has batch norm, which needs at least 2 samples at a time, and no other size was asked for; "
            "add a larger one"
        )
    overhead = statistics.median(measurements.overheads)
    return MicrobatchCurve(
        workload=workload.label,
        parameters=bench.computing.flat.layout.numel,
        batch=batch,
        seconds_per_round=overhead,
        rows=tuple(timing.row(overhead) for timing in measurements.timings),
        batch_norm=bench.computing.batch_norm,
        refused=tuple(measurements.refused),
        left_out=tuple(measurements.left_out),
    )


def time_per_step(
    workload: NamedWorkload | Workload, batch: int, splits: Sequence[int], repeats: int = 5, seed: int = 0
) -> list[StepTime]:
    """Measure the time of the gradient of a batch for several divisions into micro-batches, without the update.

    Args:
        workload: the model and its data.
        batch: samples of the batch.
        splits: the numbers of parts; parts are equal except for the last.
        repeats: measurements of each, interleaved.
        seed: of the model and of the order of the data.
    """
    check_instance(workload, (NamedWorkload, Workload), "the workload", "offbeat.workloads.Digits()")
    require(repeats >= 1, f"there must be 1 repeat or more, but {repeats} were asked for")
    for count in splits:
        require(
            1 <= count <= batch, f"a batch of {batch} can be cut into 1 to {batch} parts, but {count} were asked for"
        )
    sizes = {count: math.ceil(batch / count) for count in splits}
    seconds: dict[int, list[float]] = {count: [] for count in sizes}
    with _isolated():
        bench = _GradientTimer(build_workload(workload), seed)
        for size in sizes.values():
            bench.seconds(size, size)
        for _ in range(repeats):
            for count, size in sizes.items():
                seconds[count].append(bench.seconds(batch, size))
    return [
        StepTime(count, sizes[count], statistics.median(values), tuple(values)) for count, values in seconds.items()
    ]


class _GradientTimer:
    """Times gradients of a workload."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self.computing = GradientComputer(workload, seed, merge_microbatches=False)
        flat, self._seed = self.computing.flat, seed
        # Two copies in turn, since parameters that are loaded already would not be loaded again, unlike in training.
        self._values = itertools.cycle([flat.parameters.clone(), flat.parameters.clone()])
        self._buffers = tuple(buffer.clone() for buffer in flat.buffers)
        self._order = Order(workload.split.indices(workload.train.targets, 0, 1, seed), seed, rank=0)
        self._draw = 0

    def seconds(self, samples: int, size: int) -> float:
        """The time of the gradient of `samples` samples in micro-batches of this size; 0 samples give the constant."""
        batches = GradientRequest(self._order, self._draw, samples, size, (self._seed, 0))
        self._draw += samples
        values = next(self._values)
        began = time.perf_counter()
        self.computing.gradient(values, self._buffers, batches)
        return time.perf_counter() - began


@dataclass
class _SizeTimings:
    """The measurements of one size: `calls` calls each; `first` is the first call, in which torch warms up."""

    size: int
    first: float
    calls: int
    once: bool
    seconds: list[float] = field(default_factory=list)

    def row(self, overhead: float) -> MicrobatchRow:
        measured, calls = (self.seconds, self.calls) if self.seconds else ([self.first], 1)
        each = [max(1e-9, (seconds - overhead) / calls) for seconds in measured]
        return MicrobatchRow(self.size, statistics.median(each), _relative_iqr(each), len(each))


@dataclass
class _Measurements:
    timings: list[_SizeTimings] = field(default_factory=list)
    overheads: list[float] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)


def _measure(bench: _GradientTimer, sizes: Sequence[int], batch: int, seconds: float) -> _Measurements:
    deadline = time.perf_counter() + seconds
    measurements = _Measurements()
    bench.seconds(2, 2)  # the first gradient is slower, since torch loads parts of itself
    measurements.overheads.append(bench.seconds(0, 1))
    share = seconds / (2 * len(sizes))
    for size in sizes:
        last = measurements.timings[-1] if measurements.timings else None
        expected = 0.0 if last is None else last.first * size / last.size
        if len(measurements.timings) >= 2 and time.perf_counter() + expected > deadline:
            measurements.left_out.append(size)
            continue
        try:
            first = bench.seconds(size, size)
        except ConfigurationError:
            if size > 1 or not bench.computing.batch_norm:
                raise
            measurements.refused.append(size)
            continue
        calls = max(1, min(batch // size, int(SLICE_SECONDS / first)))
        measurements.timings.append(_SizeTimings(size, first, calls, once=first > share))
    _repeat(bench, measurements, deadline)
    return measurements


def _repeat(bench: _GradientTimer, measurements: _Measurements, deadline: float) -> None:
    """Measure all sizes in turn until the deadline."""
    repeated = [timing for timing in measurements.timings if not timing.once]
    for _ in range(REPEATS_MAX):
        for timing in repeated:
            if timing.seconds and time.perf_counter() + timing.seconds[-1] > deadline:
                return
            timing.seconds.append(bench.seconds(timing.calls * timing.size, timing.size))
        measurements.overheads.append(bench.seconds(0, 1))


@contextmanager
def _isolated() -> Iterator[None]:
    """One thread, as in the simulator; torch's random state is restored at the end."""
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
