"""`calibrate`: measure how fast these machines are at a workload, as a cluster for `simulate`.

Each probe is an ordinary live run of about a second, so that hub, workers and links share the machines as in training,
and workers on other machines take part as in any run. Probes do not evaluate. Results are computed from records:

    compute   async-fmb with three round shapes in turn: one micro-batch, several, and several larger ones. The time
              from the start of a round to that of the next is  per_round + calls · per_call + samples · per_sample
    update    fmb: the wait of the worker that reported last, less the time of the links and of the end of its round;
              at least the time of an optimizer step and a copy of the parameters in this process, where the hub runs
    links     apam on a model without computation: half of the wait of a worker, less such a step, is the latency; the
              time to send a large gradient gives the bandwidth

The time of an evaluation is measured in this process, on a part of the test data.

The first probe shows how long a micro-batch takes and how long processes take to start; with that, the others are made
to fit into the time: slow workloads get fewer micro-batches per round, then fewer repetitions.

Where delay will be injected, sleeping workers leave processors to the others and wake up late. So rounds are also
measured with that delay, all costs are scaled to them, and the time by which sleeps exceeded the drawn delay is added
to the cost of a round.

Slow periods count: speeds are means, and the variation around them is kept as a trace, in order of time.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from offbeat.cluster.cluster import Cluster, Link, WorkerOverride
from offbeat.cluster.stragglers import Mixture, NoStragglers, StragglerModel, Trace
from offbeat.core.flat import FlatModule
from offbeat.core.randomness import stream
from offbeat.core.validation import require
from offbeat.core.workload import NamedWorkload, Workload
from offbeat.engine.experiment import Experiment, build_workload
from offbeat.errors import RunFailed
from offbeat.lab.calibration_probes import (
    DELAYED_SHARES,
    LARGE_MICROBATCH_FACTOR,
    WARM_UP_SECONDS,
    OnProbe,
    ProbeKinds,
    ProbeRunner,
    RoundShape,
)
from offbeat.lab.live_runs import DEFAULT_LIVE_WORKERS
from offbeat.lab.parallel_simulations import cores
from offbeat.lab.simulated_runs import one_thread
from offbeat.lab.workloads.synthetic import Quadratic
from offbeat.launch.run_monitor import RunObserver
from offbeat.live.session_options import LiveOptions
from offbeat.records.schema import Round, RunRecords
from offbeat.strategies.gossip.gossip_strategies import Gossip
from offbeat.strategies.hub.hub_strategies import AsyncAdaptive, FixedMinibatch, HubStrategy

SECONDS = 24.0
SECONDS_MIN = 12.0
"""Below this, probes would end before processes have warmed up."""
EXTRA_SECONDS = 8.0
"""How much longer a calibration takes than it was asked to, so that starts of processes do not use up that time."""
MICROBATCH = 16
EVALUATION_SHARE = 0.05
"""The part of the time in which evaluations are measured."""
OPTIMIZER_STEPS = 30
FACTORS_MAX = 200
SPEED_DIFFERENCE_MIN = 0.05
"""The least relative difference for which a worker gets its own speed, provided that it is significant."""
LINK_RATIO_MIN = 2.0
"""The least ratio of latencies or bandwidths for which a worker gets its own link."""
SINGLE = AsyncAdaptive(batch=1, microbatch=1)
"""The strategy of the link probes."""
SMALL_MODEL, LARGE_MODEL = Quadratic(dimension=16, examples=2), Quadratic(dimension=1_000_000, examples=2)
MESSAGE_SPACING = Mixture(((0.01, 0.005, 1.0),))
"""Delay between messages of the link probes, so that they do not queue."""

OnStart = Callable[[float], None]
"""Called when measuring begins, with the seconds that it will take, about."""


@dataclass(frozen=True)
class RoundCost:
    """The cost of a round in seconds: constant, per forward and backward call, and per sample."""

    per_round: float
    per_call: float
    per_sample: float

    def scaled(self, factor: float) -> RoundCost:
        return RoundCost(*(factor * value for value in dataclasses.astuple(self)))


@dataclass(frozen=True)
class MeasuredWorker:
    """One worker, counted from 0. `speed_factors` are its relative round times, 1 on average, in order of time."""

    worker: int
    cost: RoundCost
    link: Link
    speed_factors: tuple[float, ...] = field(repr=False)

    def with_oversleep(self, seconds: float) -> MeasuredWorker:
        """The same worker, whose rounds cost this much more."""
        cost = dataclasses.replace(self.cost, per_round=self.cost.per_round + seconds)
        return dataclasses.replace(self, cost=cost)


@dataclass(frozen=True)
class Calibration:
    """The measured workers, and the cluster that follows from them."""

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
    on_start: OnStart | None = None,
    on_probe: OnProbe | None = None,
) -> Calibration:
    """Measure how fast this machine, and others that join, are at a workload.

    Args:
        workload: what is trained.
        workers: how many workers compute.
        seconds: how long to measure; starting processes takes some seconds more.
        microbatch: samples per forward and backward call of the later training.
        straggle: the delay that the later training injects; it is measured with, and not part of the result.
        live: how processes are started and connected.
        watcher: observes the processes.
        on_start: called when measuring begins.
        on_probe: called when a probe begins.

    Raises `ConfigurationError` for wrong arguments, and `RunFailed` where a worker computes too little.
    """
    require(
        seconds >= SECONDS_MIN,
        f"calibration takes {SECONDS_MIN:g} seconds at least, but {seconds:g} were given; give more",
    )
    require(microbatch >= 1, f"microbatch must be 1 or more, but is {microbatch}")
    if on_start is not None:
        on_start(seconds + EXTRA_SECONDS)
    kinds = ProbeKinds(delayed=straggle != NoStragglers(), gossip=workers > 1 and live.local_workers != 0)
    probes = ProbeRunner(workers, seconds + EXTRA_SECONDS, kinds, live, watcher, on_probe)
    built = build_workload(workload)
    evaluation = seconds_per_evaluation(built, EVALUATION_SHARE * seconds)
    step, small_step = seconds_per_step(built, FixedMinibatch()), seconds_per_step(SMALL_MODEL, SINGLE)
    runs = _run_probes(probes, kinds, workload, microbatch, straggle)
    measured = _workers_of(straggle, runs, links_of(runs.small, runs.large, small_step))
    link, usual = _median_link(worker.link for worker in measured), runs.computed[runs.usual]
    update = max(step, seconds_per_update(runs.synchronous, usual, link))
    local = live.local_ranks(FixedMinibatch(), workers + 1)
    remote = [worker.worker for worker in measured if worker.worker + 1 not in local]
    cluster = with_evaluations(cluster_of(measured, update, link, runs.usual.samples), evaluation, cores(), remote)
    worker_update = seconds_per_worker_update(runs.decentralized, usual)
    cluster = dataclasses.replace(cluster, seconds_per_worker_update=worker_update)
    return Calibration(usual[0].header.workload, measured, update, cluster)


@dataclass
class _ProbeRuns:
    """The records of all probes."""

    usual: RoundShape
    """the shape whose variation is kept"""
    computed: dict[RoundShape, list[RunRecords]]
    """rounds of each shape"""
    synchronous: list[RunRecords] = field(default_factory=list)
    """rounds after which all workers wait for the update"""
    decentralized: list[RunRecords] = field(default_factory=list)
    """rounds of workers that make their own updates; none if there is one worker"""
    slept: list[RunRecords] = field(default_factory=list)
    """rounds with injected delay; none if there is no delay"""
    small: RunRecords = field(init=False)
    """rounds of a small model"""
    large: RunRecords = field(init=False)
    """rounds of a large model without computation"""


def _run_probes(
    probes: ProbeRunner,
    kinds: ProbeKinds,
    workload: NamedWorkload | Workload,
    microbatch: int,
    straggle: StragglerModel,
) -> _ProbeRuns:
    shape = RoundShape(microbatch, 1)
    first = probes.run(workload, shape.strategy, shape.text)
    usual = RoundShape(microbatch, probes.choose_calls(max(_means([round_periods(first)]).values())))
    large_calls = max(1, usual.calls // LARGE_MICROBATCH_FACTOR)
    shapes = (shape, usual, RoundShape(LARGE_MICROBATCH_FACTOR * microbatch, large_calls))
    runs = _ProbeRuns(usual, {shape: [first], **{shape: [] for shape in shapes[1:]}})
    synchronous = FixedMinibatch(batch=usual.samples, microbatch=microbatch)
    gossip = Gossip(batch=usual.samples, microbatch=microbatch)
    for repetition in range(probes.repetitions):
        for shape, records in runs.computed.items():
            if len(records) == repetition:
                records.append(probes.run(workload, shape.strategy, shape.text))
        runs.synchronous.append(probes.run(workload, synchronous, "updates"))
        if kinds.gossip:
            runs.decentralized.append(probes.run(workload, gossip, "updates by workers"))
        if kinds.delayed:
            disturbed = Cluster(straggle=straggle)
            runs.slept.append(probes.run(workload, usual.strategy, "disturbed rounds", disturbed, DELAYED_SHARES))
    runs.small = probes.run(SMALL_MODEL, SINGLE, "latency", Cluster(straggle=MESSAGE_SPACING))
    runs.large = probes.run(LARGE_MODEL, SINGLE, "bandwidth", Cluster(straggle=MESSAGE_SPACING))
    return runs


def _workers_of(straggle: StragglerModel, runs: _ProbeRuns, links: Mapping[int, Link]) -> tuple[MeasuredWorker, ...]:
    """The measured workers, from the records of all probes."""
    periods = {shape: [round_periods(run) for run in records] for shape, records in runs.computed.items()}
    oversleep = oversleep_seconds(runs.slept, straggle)
    workers = measured_workers(periods, runs.usual, links, [round_periods(run) for run in runs.slept])
    return tuple(worker.with_oversleep(oversleep) for worker in workers)


# From records to seconds


def warm_rounds(run: RunRecords) -> dict[int, list[Round]]:
    """The rounds of each worker, counted from 0, that began after its warm-up, in order; possibly none.

    Without a hub, rank 0 is a worker.
    """
    by_rank: dict[int, list[Round]] = defaultdict(list)
    for record in sorted((record for record in run.records if isinstance(record, Round)), key=lambda one: one.start):
        by_rank[record.rank].append(record)
    first = 0 if 0 in by_rank else 1
    # Ranks beyond those of the workers joined in addition and are not measured.
    ranks = enumerate(range(first, first + run.header.workers))
    return {
        worker: [one for one in by_rank[rank] if one.start >= by_rank[rank][0].start + WARM_UP_SECONDS]
        for worker, rank in ranks
    }


def _require_values(values: Iterable[float], worker: int) -> list[float]:
    """The measured values of a worker; raises `RunFailed` where there are none."""
    values = list(values)
    if not values:
        raise RunFailed(f"worker {worker} computed too little to be measured; calibrate for longer, say --seconds 120")
    return values


Periods = Mapping[int, Sequence[float]]
"""The seconds of each round, by worker, counted from 0."""


def round_periods(run: RunRecords) -> dict[int, list[float]]:
    """For each worker, the times from the start of a round to the start of the next, without injected delay."""
    return {
        worker: [one.seconds - one.induced_seconds + other.idle_seconds for one, other in itertools.pairwise(rounds)]
        for worker, rounds in warm_rounds(run).items()
    }


def oversleep_seconds(runs: Iterable[RunRecords], straggle: StragglerModel) -> float:
    """The mean time by which the sleeps of a round were longer than what was drawn for it, as a cost per round.

    Virtual time scales the cost of a round by the factor that was drawn, so the mean is one over all factors.
    """
    excess = factors = 0.0
    for run in runs:
        for worker, warm in warm_rounds(run).items():
            count = sum(isinstance(record, Round) and record.rank == worker + 1 for record in run.records)
            draws = straggle.draws(stream(run.header.seed, "speed", worker + 1))
            drawn = itertools.islice(draws, count - len(warm), count)
            for one, delay in zip(warm, drawn, strict=True):
                computed = one.seconds - one.induced_seconds
                slowdown = max(0.0, delay.factor - 1.0) * computed
                excess += one.induced_seconds - delay.delay_seconds - slowdown
                factors += delay.factor
    return max(0.0, excess / factors) if factors else 0.0


def fit_round_cost(seconds: Mapping[RoundShape, float]) -> RoundCost:
    """The non-negative costs that fit the mean seconds of each round shape best, by relative squared error."""
    rows = np.array([[1.0 / mean, shape.calls / mean, shape.samples / mean] for shape, mean in seconds.items()])
    best, least = np.zeros(3), math.inf
    for kept in itertools.chain.from_iterable(itertools.combinations(range(3), count) for count in (1, 2, 3)):
        cost = np.zeros(3)
        cost[list(kept)] = np.linalg.lstsq(rows[:, kept], np.ones(len(rows)))[0]
        error = float(np.square(rows @ cost - 1.0).sum())
        depends_on_work = cost[1] + cost[2] > 0
        if cost.min() >= 0 and depends_on_work and error < least:
            best, least = cost, error
    return RoundCost(*map(float, best))


def measured_workers(
    periods: Mapping[RoundShape, Sequence[Periods]],
    usual: RoundShape,
    links: Mapping[int, Link],
    slept: Sequence[Periods] = (),
) -> Iterable[MeasuredWorker]:
    """The workers; those whose speeds do not differ significantly share one cost.

    Args:
        periods: round times of each round shape and probe.
        usual: the shape whose variation is kept.
        links: the link of each worker.
        slept: round times of the usual shape with injected delay, less the delay; none where none is injected.
    """
    ratios = _ratios([*itertools.chain.from_iterable(periods.values()), *slept])
    pooled = {
        shape: statistics.fmean(mean / ratios[worker] for worker, mean in _means(runs).items())
        for shape, runs in periods.items()
    }
    final = slept or periods[usual]
    slowdown = statistics.fmean(_means(final).values()) / statistics.fmean(_means(periods[usual]).values())
    cost = fit_round_cost(pooled).scaled(slowdown)
    for worker, ratio in ratios.items():
        own = [period for run in final for period in run[worker]]
        mean = statistics.fmean(own)
        yield MeasuredWorker(worker, cost.scaled(ratio), links[worker], tuple(period / mean for period in own))


def _means(runs: Sequence[Periods]) -> dict[int, float]:
    """The mean period of each worker."""
    return {
        worker: statistics.fmean(_require_values(itertools.chain.from_iterable(run[worker] for run in runs), worker))
        for worker in sorted(runs[0])
    }


def _ratios(runs: Sequence[Periods]) -> dict[int, float]:
    """The round time of each worker relative to the mean of all; 1 where the difference is not significant."""
    complete = [{worker: statistics.fmean(own) for worker, own in run.items()} for run in runs if all(run.values())]
    ratios = {}
    for worker in sorted(runs[0]):
        samples = [means[worker] / statistics.fmean(means.values()) for means in complete]
        mean = statistics.fmean(samples) if samples else 1.0
        margin = 3 * statistics.stdev(samples) / math.sqrt(len(samples)) if len(samples) > 1 else math.inf
        ratios[worker] = mean if abs(mean - 1) > max(SPEED_DIFFERENCE_MIN, margin) else 1.0
    return ratios


def seconds_per_step(workload: NamedWorkload | Workload, strategy: HubStrategy) -> float:
    """The median time of an optimizer step and a copy of the parameters in this process."""
    resolved, built = Experiment(workload, strategy).resolved()
    assert isinstance(resolved.strategy, HubStrategy)
    assert resolved.strategy.optimizer is not None
    durations = []
    with one_thread():
        flat = FlatModule(built.initial_model(0))
        parameters, copied = flat.parameters.clone(), flat.parameters.clone()
        gradient = torch.zeros_like(parameters)
        stepper = resolved.strategy.optimizer.build(parameters, flat.layout)
        for _ in range(OPTIMIZER_STEPS):
            before = time.monotonic()
            stepper.step(gradient, 0)
            copied.copy_(parameters)
            durations.append(time.monotonic() - before)
    return statistics.median(durations)


def seconds_per_evaluation(workload: Workload, limit_seconds: float) -> float:
    """The processor time of an evaluation in this process.

    More and more of the test data are evaluated, until that takes too long; the rest is extrapolated.

    Args:
        workload: what is evaluated.
        limit_seconds: how long to measure, unless two examples take longer.
    """
    data = workload.evaluation_examples
    examples = len(data) + min(workload.recalibrate, len(workload.train))
    began = time.monotonic()
    with one_thread():
        model = workload.initial_model(0)
        count = 2
        while True:
            part = dataclasses.replace(workload, test=data.subset(np.arange(min(count, len(data)))), recalibrate=0)
            before = time.monotonic(), time.thread_time()
            part.evaluate(model)
            took, processor = time.monotonic() - before[0], time.thread_time() - before[1]
            # The next part takes twice as long as this one.
            if count >= len(data) or time.monotonic() - began + 2 * took > limit_seconds:
                return processor * examples / min(count, len(data))
            count *= 2


def links_of(small: RunRecords, large: RunRecords, step: float) -> dict[int, Link]:
    """The link of each worker: latency from round trips of a small model, bandwidth from gradients of a large one.

    `step` is the time of an update of the small model.
    """
    large_bytes = 4 * large.header.parameters
    large_rounds = warm_rounds(large)
    links = {}
    for worker, rounds in warm_rounds(small).items():
        waits = _require_values((one.idle_seconds for one in rounds), worker)
        sends = (one.send_seconds for one in large_rounds[worker] if one.send_seconds > 0)
        links[worker] = Link(
            latency_seconds=max(0.0, statistics.median(waits) - step) / 2,
            bytes_per_second=large_bytes / statistics.median(_require_values(sends, worker)),
        )
    return links


def seconds_per_update(synchronous: Sequence[RunRecords], asynchronous: Iterable[RunRecords], link: Link) -> float:
    """The time of an update: the wait of the worker that reports last in a synchronous round, less other waits.

    Args:
        synchronous: runs in which all workers wait for each update.
        asynchronous: runs whose waits are those between any two rounds; they are subtracted.
        link: the link whose round trip is subtracted.
    """
    waits: list[float] = []
    for run in synchronous:
        shortest: dict[int, float] = {}
        for record in itertools.chain.from_iterable(warm_rounds(run).values()):
            shortest[record.version] = min(shortest.get(record.version, math.inf), record.idle_seconds)
        waits += shortest.values()
    usual = [record.idle_seconds for run in asynchronous for rounds in warm_rounds(run).values() for record in rounds]
    round_trip = 2 * (link.latency_seconds + link.transmit_seconds(4 * synchronous[-1].header.parameters))
    return statistics.fmean(_require_values(waits, 0)) - statistics.fmean(_require_values(usual, 0)) - round_trip


def seconds_per_worker_update(decentralized: Sequence[RunRecords], asynchronous: Sequence[RunRecords]) -> float | None:
    """By how much longer rounds take where workers update their own parameters than where a hub does meanwhile.

    The time of the hub that shares cores with workers is a part of the cost of their rounds already.

    Args:
        decentralized: runs in which each worker makes its own updates; none: there is no result.
        asynchronous: runs with rounds of the same shape and a hub.
    """
    if not decentralized:
        return None
    own, usual = (
        statistics.fmean(_means([round_periods(run) for run in runs]).values())
        for runs in (decentralized, asynchronous)
    )
    return _rounded(max(0.0, own - usual))


# From seconds to a cluster


def cluster_of(workers: Sequence[MeasuredWorker], update: float, link: Link, samples: int) -> Cluster:
    """The cluster with the most common cost, and overrides for workers that differ.

    Args:
        workers: the measured workers.
        update: seconds per update.
        link: the usual link.
        samples: samples per factor of the speed trace.
    """
    usual = max(workers, key=lambda worker: sum(other.cost == worker.cost for other in workers))
    overrides = []
    for worker in workers:
        own_speed, own_link = worker.cost != usual.cost, _differs(worker.link, link)
        if own_speed or own_link:
            speed = _speed_fields([worker], samples) if own_speed else {}
            own = _rounded_link(worker.link) if own_link else None
            overrides.append(WorkerOverride((worker.worker,), **speed, link=own))
    return Cluster(
        **_speed_fields([worker for worker in workers if worker.cost == usual.cost], samples),
        seconds_per_update=_rounded(update),
        workers=tuple(overrides),
        link=_rounded_link(link),
        measured=True,
    )


def with_evaluations(cluster: Cluster, seconds: float, cores: int, remote: Sequence[int]) -> Cluster:
    """The same cluster, where evaluations take time.

    Args:
        cluster: speeds and links.
        seconds: seconds of one core per evaluation.
        cores: how many cores workers and evaluations share.
        remote: workers on other machines, counted from 0.
    """
    overrides = [WorkerOverride(tuple(remote), is_remote=True)] if remote else []
    return dataclasses.replace(
        cluster, seconds_per_evaluation=_rounded(seconds), cores=cores, workers=(*cluster.workers, *overrides)
    )


def _speed_fields(workers: Sequence[MeasuredWorker], samples: int) -> dict[str, Any]:
    """The fields of a cluster or an override for workers of one cost.

    The trace holds their last speed factors, one worker after the other, 1 on average.
    """
    count = max(1, FACTORS_MAX // len(workers))
    factors = [factor for worker in workers for factor in worker.speed_factors[-count:]]
    mean = statistics.fmean(factors)
    costs = {f"seconds_{name}": _rounded(value) for name, value in dataclasses.asdict(workers[0].cost).items()}
    return {**costs, "speed_trace": Trace(tuple(round(factor / mean, 3) for factor in factors), samples)}


def _median_link(links: Iterable[Link]) -> Link:
    known = list(links)
    limits = [link.bytes_per_second for link in known if link.bytes_per_second is not None]
    return Link(statistics.median(link.latency_seconds for link in known), statistics.median(limits))


def _differs(link: Link, usual: Link) -> bool:
    latencies = (link.latency_seconds, usual.latency_seconds)
    bandwidths = (link.bytes_per_second or math.inf, usual.bytes_per_second or math.inf)
    return any(max(pair) > LINK_RATIO_MIN * min(pair) for pair in (latencies, bandwidths))


def _rounded_link(link: Link) -> Link:
    limit = link.bytes_per_second
    return Link(_rounded(link.latency_seconds), None if limit is None else _rounded(limit))


def _rounded(value: float) -> float:
    """Rounded to four significant digits, the precision of the measurement."""
    return float(f"{value:.4g}")
