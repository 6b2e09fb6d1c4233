"""`calibrate`: how fast these machines are at a workload, as a cluster that `simulate` takes.

Every probe is an ordinary live run of a second or two, so that hub, workers and links share the machines as they will
when it counts, and workers on other machines take part as in any run. Everything is read from records:

    compute   async-fmb with three cuts of a round, in turn: one micro-batch, several, several larger ones. What a round
              takes until the next begins is  round + calls · call + samples · sample
    update    fmb: what the worker that reported last waits, less what the links and the end of its round take; but no
              less than a step of the optimizer and a copy of the parameters take here, where the hub is
    links     apam on a model that costs nothing: half of what a worker waits, less such a step, is the latency; how
              long a large gradient takes to leave gives the bandwidth

Where rounds will be disturbed on purpose, workers that sleep leave processors to the others, and are slow to wake up.
Then rounds are also measured with that disturbance, all pieces are scaled to them, and what sleeps took longer than was
drawn is added to what a round costs.

Slow spells count: speeds are means, and what varies around them is kept as a trace, in its order.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from offbeat.cluster.cluster import Cluster, Link, WorkerOverride
from offbeat.cluster.stragglers import Mixture, NoStragglers, StragglerModel, Trace
from offbeat.core.actions import Seconds
from offbeat.core.flat import FlatModule
from offbeat.core.randomness import stream
from offbeat.core.strategy import Strategy
from offbeat.core.validation import require
from offbeat.core.workload import NamedWorkload, Workload
from offbeat.errors import RunFailed
from offbeat.lab.experiment import Experiment
from offbeat.lab.live_runs import DEFAULT_LIVE_WORKERS, EVALUATE_LIVE, train_experiment
from offbeat.lab.simulated_runs import one_thread
from offbeat.lab.worker_main import LiveOptions
from offbeat.lab.workloads.synthetic import Quadratic
from offbeat.launch.supervisor import RunObserver
from offbeat.records.schema import Round, RunRecords
from offbeat.strategies.hub.hub_strategies import AsyncAdaptive, AsyncFixed, FixedMinibatch, HubStrategy

SECONDS = 24.0
SECONDS_MIN = 12.0
"""Below this, probes would be over before processes have warmed up."""
MICROBATCH = 16
CALLS_PER_ROUND = 16
"""Micro-batches in the rounds that tell how the speed varies: as many as in a round of fmb by default."""
LARGE_MICROBATCH_FACTOR = 4
"""How many times larger the micro-batches are that tell samples from calls."""
REPETITIONS = 3
DISTURBED_SHARES = 3
"""How many times longer rounds are measured that sleep most of the time."""
WARM_UP_SECONDS = 0.4
"""Memory is touched for the first time, and torch loads parts of itself: not what a run is like."""
ROUNDS_MIN = 3
ATTEMPTS_MAX = 6
"""A probe in which a worker had fewer rounds than that is made again, for twice as long, so many times in all."""
OPTIMIZER_STEPS = 30
FACTORS_MAX = 200
SPEED_DIFFERENCE_MIN = 0.05
"""By how much a worker must differ from the others to get a speed of its own, if that is more than chance."""
LINK_RATIO_MIN = 2.0
"""How many times another latency or bandwidth a worker's link must have to be described by itself."""
SMALL_MODEL, LARGE_MODEL = Quadratic(dimension=16, examples=2), Quadratic(dimension=1_000_000, examples=2)
MESSAGE_SPACING = Mixture(((0.01, 0.005, 1.0),))
"""Sleeps between messages of the link probes, so that they do not wait for each other."""

OnProbe = Callable[[int, int, str], None]
"""Is told which probe of how many begins, and what it measures."""


@dataclass(frozen=True)
class RoundShape:
    """How a round is cut: so many calls of so many samples."""

    microbatch: int
    calls: int

    @property
    def samples(self) -> int:
        return self.microbatch * self.calls


@dataclass(frozen=True)
class RoundCost:
    """What a round is made of, in seconds."""

    per_round: float
    per_call: float
    per_sample: float

    def scaled(self, factor: float) -> RoundCost:
        return RoundCost(*(factor * value for value in dataclasses.astuple(self)))


@dataclass(frozen=True)
class MeasuredWorker:
    """One worker, counted from 0. `speed_factors` are its factors, 1 on average, in the order of time."""

    worker: int
    cost: RoundCost
    link: Link
    speed_factors: tuple[float, ...] = field(repr=False)

    def with_oversleep(self, seconds: float) -> MeasuredWorker:
        """The same, whose rounds cost so much more."""
        cost = dataclasses.replace(self.cost, per_round=self.cost.per_round + seconds)
        return dataclasses.replace(self, cost=cost)


@dataclass(frozen=True)
class Calibration:
    """What was measured, and the cluster it makes."""

    workload: str
    workers: tuple[MeasuredWorker, ...]
    seconds_per_update: float
    cluster: Cluster


def calibrate(
    workload: NamedWorkload | Workload,
    *,
    workers: int = DEFAULT_LIVE_WORKERS,
    seconds: float = SECONDS,
    microbatch: int = MICROBATCH,
    straggle: StragglerModel = NoStragglers(),  # noqa: B008  (frozen)
    live: LiveOptions = LiveOptions(),  # noqa: B008  (frozen)
    watcher: RunObserver | None = None,
    on_probe: OnProbe | None = None,
) -> Calibration:
    """Measure a workload on `workers` workers for about `seconds`.

    `microbatch` is the one that you train with, and `straggle` what you will induce, which is not part of the result.
    """
    require(
        seconds >= SECONDS_MIN,
        f"calibration takes {SECONDS_MIN:g} seconds at least, but {seconds:g} were given; give more",
    )
    require(microbatch >= 1, f"microbatch must be 1 or more, but is {microbatch}")
    disturbed = straggle != NoStragglers()
    probing = _ProbeRunner(workers, seconds, disturbed, live, watcher, on_probe)
    cuts = (
        RoundShape(microbatch, 1),
        RoundShape(microbatch, CALLS_PER_ROUND),
        RoundShape(LARGE_MICROBATCH_FACTOR * microbatch, max(1, CALLS_PER_ROUND // LARGE_MICROBATCH_FACTOR)),
    )
    computed: dict[RoundShape, list[RunRecords]] = {cut: [] for cut in cuts}
    together, slept = [], []
    for _ in range(REPETITIONS):
        for cut in cuts:
            strategy = AsyncFixed(batch=cut.samples, microbatch=cut.microbatch)
            computed[cut].append(probing.run(workload, strategy, f"rounds of {cut.calls} × {cut.microbatch} samples"))
        together.append(probing.run(workload, FixedMinibatch(batch=cuts[1].samples, microbatch=microbatch), "updates"))
        if disturbed:
            strategy = AsyncFixed(batch=cuts[1].samples, microbatch=microbatch)
            slept.append(
                probing.run(workload, strategy, "disturbed rounds", Cluster(straggle=straggle), DISTURBED_SHARES)
            )
    impatient = AsyncAdaptive(batch=1, microbatch=1)
    small = probing.run(SMALL_MODEL, impatient, "latency", Cluster(straggle=MESSAGE_SPACING))
    large = probing.run(LARGE_MODEL, impatient, "bandwidth", Cluster(straggle=MESSAGE_SPACING))
    links = links_of(small, large, seconds_per_step(SMALL_MODEL, impatient))
    periods = {cut: [round_periods(run) for run in runs] for cut, runs in computed.items()}
    measured = tuple(measured_workers(periods, cuts[1], links, [round_periods(run) for run in slept]))
    measured = tuple(mine.with_oversleep(oversleep_seconds(slept, straggle)) for mine in measured)
    link = _median_link(links.values())
    step = seconds_per_step(workload, FixedMinibatch())
    update = max(step, seconds_per_update(together, computed[cuts[1]], link))
    label = together[0].header.workload
    return Calibration(label, measured, update, cluster_of(measured, update, link, cuts[1].samples))


@dataclass
class _ProbeRunner:
    """Runs one probe after the other."""

    workers: int
    seconds: float
    disturbed: bool
    live: LiveOptions
    watcher: RunObserver | None
    on_probe: OnProbe | None
    begun: int = 0

    def run(
        self,
        workload: NamedWorkload | Workload,
        strategy: Strategy,
        what: str,
        cluster: Cluster | None = None,
        shares: int = 1,
    ) -> RunRecords:
        """The records of one probe, which has so many equal shares of all the time, or more if it must."""
        self.begun += 1
        if self.on_probe is not None:
            self.on_probe(self.begun, (5 if self.disturbed else 4) * REPETITIONS + 2, what)
        seconds = self.seconds * shares / ((4 + DISTURBED_SHARES if self.disturbed else 4) * REPETITIONS + 2)
        live = dataclasses.replace(self.live, checkpoint_seconds=None)
        for longer in range(ATTEMPTS_MAX):
            until = Seconds(seconds * 2**longer)
            experiment = Experiment(workload, strategy, cluster or Cluster(), self.workers, until, 0, EVALUATE_LIVE)
            records = train_experiment(experiment, None, live, self.watcher).records
            if all(len(rounds) >= ROUNDS_MIN for rounds in warm_rounds(records).values()):
                break
        return records


# From records to seconds


def warm_rounds(run: RunRecords) -> dict[int, list[Round]]:
    """The rounds of each worker, counted from 0, that began when it had warmed up; there may be none."""
    found: dict[int, list[Round]] = {worker: [] for worker in range(run.header.workers)}
    rounds = sorted((record for record in run.records if isinstance(record, Round)), key=lambda record: record.start)
    for rank, mine in itertools.groupby(sorted(rounds, key=lambda record: record.rank), key=lambda record: record.rank):
        if rank - 1 not in found:  # one more than were asked for has joined
            continue
        listed = list(mine)
        began = listed[0].start
        found[rank - 1] = [record for record in listed if record.start >= began + WARM_UP_SECONDS]
    return found


def _require_values(found: Iterable[float], worker: int) -> list[float]:
    """What was measured of a worker, or a sentence where that is nothing."""
    values = list(found)
    if not values:
        raise RunFailed(f"worker {worker} computed too little to be measured; calibrate for longer, say --seconds 120")
    return values


Periods = Mapping[int, Sequence[float]]
"""worker, counted from 0 → how long its rounds took"""


def round_periods(run: RunRecords) -> dict[int, list[float]]:
    """For each worker, how long its rounds took, from their beginning to the beginning of the next, without sleeps."""
    return {
        worker: [one.seconds - one.induced_seconds + other.idle_seconds for one, other in itertools.pairwise(rounds)]
        for worker, rounds in warm_rounds(run).items()
    }


def oversleep_seconds(runs: Iterable[RunRecords], straggle: StragglerModel) -> float:
    """By how much the induced sleeps of a round were longer than what was drawn for it, on average."""
    longer: list[float] = []
    for run in runs:
        for worker, warm in warm_rounds(run).items():
            mine = sum(isinstance(record, Round) and record.rank == worker + 1 for record in run.records)
            drawn = itertools.islice(straggle.draws(stream(run.header.seed, "speed", worker + 1)), mine)
            meant = list(drawn)[mine - len(warm) :]
            longer += [one.induced_seconds - each.delay_seconds for one, each in zip(warm, meant, strict=True)]
    return max(0.0, statistics.fmean(longer)) if longer else 0.0


def fit_round_cost(seconds: Mapping[RoundShape, float]) -> RoundCost:
    """The pieces, none below 0, that explain best how long rounds took; every cut counts in proportion."""
    rows = np.array([[1.0 / mean, cut.calls / mean, cut.samples / mean] for cut, mean in seconds.items()])
    best, least = np.zeros(3), math.inf
    for kept in itertools.chain.from_iterable(itertools.combinations(range(3), count) for count in (1, 2, 3)):
        found = np.zeros(3)
        found[list(kept)] = np.linalg.lstsq(rows[:, kept], np.ones(len(rows)))[0]
        error = float(np.square(rows @ found - 1.0).sum())
        computes = found[1] + found[2] > 0  # a machine that takes as long for nothing as for something is not one
        if found.min() >= 0 and computes and error < least:
            best, least = found, error
    return RoundCost(*map(float, best))


def measured_workers(
    periods: Mapping[RoundShape, Sequence[Periods]],
    usual: RoundShape,
    links: Mapping[int, Link],
    slept: Sequence[Periods] = (),
) -> Iterable[MeasuredWorker]:
    """Every worker; those that differ by no more than chance share the pieces that fit all of them.

    `slept` are periods of the usual cut with the disturbance that will be induced, where there is one.
    """
    ratios = _ratios([*itertools.chain.from_iterable(periods.values()), *slept])
    pooled = {
        cut: statistics.fmean(mean / ratios[worker] for worker, mean in _means(runs).items())
        for cut, runs in periods.items()
    }
    told = slept or periods[usual]
    longer = statistics.fmean(_means(told).values()) / statistics.fmean(_means(periods[usual]).values())
    cost = fit_round_cost(pooled).scaled(longer)
    for worker, ratio in ratios.items():
        mine = [period for run in told for period in run[worker]]
        mean = statistics.fmean(mine)
        yield MeasuredWorker(worker, cost.scaled(ratio), links[worker], tuple(period / mean for period in mine))


def _means(runs: Sequence[Periods]) -> dict[int, float]:
    """The mean period of each worker."""
    return {
        worker: statistics.fmean(_require_values(itertools.chain.from_iterable(run[worker] for run in runs), worker))
        for worker in sorted(runs[0])
    }


def _ratios(runs: Sequence[Periods]) -> dict[int, float]:
    """How many times slower than the mean of all each worker is; 1 where that may be chance."""
    found = {}
    for worker in sorted(runs[0]):
        seen = []
        for run in filter(lambda run: all(run.values()), runs):
            everybody = statistics.fmean(statistics.fmean(mine) for mine in run.values())
            seen.append(statistics.fmean(run[worker]) / everybody)
        mean = statistics.fmean(seen) if seen else 1.0
        chance = 3 * statistics.stdev(seen) / math.sqrt(len(seen)) if len(seen) > 1 else math.inf
        found[worker] = mean if abs(mean - 1) > max(SPEED_DIFFERENCE_MIN, chance) else 1.0
    return found


def seconds_per_step(workload: NamedWorkload | Workload, strategy: HubStrategy) -> float:
    """How long a step of the optimizer and a copy of the parameters take in this process."""
    resolved, build_workload = Experiment(workload, strategy).resolved()
    assert isinstance(resolved.strategy, HubStrategy)
    assert resolved.strategy.optimizer is not None
    taken = []
    with one_thread():
        flat = FlatModule(build_workload.initial_model(0))
        parameters, copied = flat.parameters.clone(), flat.parameters.clone()
        gradient = torch.zeros_like(parameters)
        stepper = resolved.strategy.optimizer.build(parameters, flat.layout)
        for _ in range(OPTIMIZER_STEPS):
            before = time.monotonic()
            stepper.step(gradient, 0)
            copied.copy_(parameters)
            taken.append(time.monotonic() - before)
    return statistics.median(taken)


def links_of(small: RunRecords, large: RunRecords, step: float) -> dict[int, Link]:
    """Each worker's link: latency from round trips of next to nothing, bandwidth from large gradients that left.

    `step` is what an update of next to nothing takes.
    """
    nbytes = 4 * large.header.parameters
    leaving = {
        worker: statistics.median(_require_values((one.send_seconds for one in rounds if one.send_seconds > 0), worker))
        for worker, rounds in warm_rounds(large).items()
    }
    return {
        worker: Link(
            latency_seconds=max(
                0.0, statistics.median(_require_values((one.idle_seconds for one in rounds), worker)) - step
            )
            / 2,
            bytes_per_second=nbytes / leaving[worker],
        )
        for worker, rounds in warm_rounds(small).items()
    }


def seconds_per_update(together: Iterable[RunRecords], apart: Iterable[RunRecords], link: Link) -> float:
    """What the last to report waits where all wait, less what it would between rounds anyway, and less the links."""
    waits: list[float] = []
    nbytes = 0
    for run in together:
        by_version: dict[int, float] = {}
        for record in itertools.chain.from_iterable(warm_rounds(run).values()):
            shortest = by_version.get(record.version, math.inf)
            by_version[record.version] = min(shortest, record.idle_seconds)
        waits += by_version.values()
        nbytes = 4 * run.header.parameters
    anyway = [record.idle_seconds for run in apart for rounds in warm_rounds(run).values() for record in rounds]
    there_and_back = 2 * (link.latency_seconds + link.transmit_seconds(nbytes))
    return statistics.fmean(_require_values(waits, 0)) - statistics.fmean(_require_values(anyway, 0)) - there_and_back


# From seconds to a cluster


def cluster_of(workers: Sequence[MeasuredWorker], update: float, link: Link, samples: int) -> Cluster:
    """The cluster: what most workers have in common, and what is different about some."""
    usual = _most_common(workers)
    overrides = []
    for mine in workers:
        own_speed, own_link = mine.cost != usual.cost, _differs(mine.link, link)
        if own_speed or own_link:
            overrides.append(
                WorkerOverride(
                    (mine.worker,),
                    seconds_per_sample=_rounded(mine.cost.per_sample) if own_speed else None,
                    seconds_per_call=_rounded(mine.cost.per_call) if own_speed else None,
                    seconds_per_round=_rounded(mine.cost.per_round) if own_speed else None,
                    speed_trace=_trace([mine], samples) if own_speed else None,
                    link=_rounded_link(mine.link) if own_link else None,
                )
            )
    return Cluster(
        seconds_per_sample=_rounded(usual.cost.per_sample),
        seconds_per_call=_rounded(usual.cost.per_call),
        seconds_per_round=_rounded(usual.cost.per_round),
        seconds_per_update=_rounded(update),
        speed_trace=_trace([mine for mine in workers if mine.cost == usual.cost], samples),
        workers=tuple(overrides),
        link=_rounded_link(link),
        measured=True,
    )


def _most_common(workers: Sequence[MeasuredWorker]) -> MeasuredWorker:
    """One of those whose speed is the most common."""
    return max(workers, key=lambda mine: sum(other.cost == mine.cost for other in workers))


def _trace(workers: Sequence[MeasuredWorker], samples: int) -> Trace:
    """The last factors of these workers, one worker after the other, 1 on average."""
    each = max(1, FACTORS_MAX // len(workers))
    factors = [factor for mine in workers for factor in mine.speed_factors[-each:]]
    mean = statistics.fmean(factors)
    return Trace(tuple(round(factor / mean, 3) for factor in factors), samples)


def _median_link(links: Iterable[Link]) -> Link:
    known = list(links)
    limits = [link.bytes_per_second for link in known if link.bytes_per_second is not None]
    return Link(statistics.median(link.latency_seconds for link in known), statistics.median(limits))


def _differs(link: Link, usual: Link) -> bool:
    pairs = [
        (link.latency_seconds, usual.latency_seconds),
        (link.bytes_per_second or math.inf, usual.bytes_per_second or math.inf),
    ]
    return any(max(pair) > LINK_RATIO_MIN * min(pair) for pair in pairs)


def _rounded_link(link: Link) -> Link:
    limit = link.bytes_per_second
    return Link(_rounded(link.latency_seconds), None if limit is None else _rounded(limit))


def _rounded(value: float) -> float:
    """Four digits: more were not measured."""
    return float(f"{value:.4g}")
