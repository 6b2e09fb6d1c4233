"""Random cases: a strategy with random settings on a random cluster with faults.

A case is a pure function of strategy and seed, so that a seed repeats it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from numpy.random import Generator
from torch import Tensor, nn

from offbeat.cluster.cluster import Cluster, Link
from offbeat.cluster.faults import Corrupt, Crash, Fault, Hang, Partition, Pause
from offbeat.cluster.stragglers import Lognormal, Mixture, NoStragglers, Pareto, StragglerModel
from offbeat.core.actions import Budget, Samples, Seconds
from offbeat.core.optimizers import SGD
from offbeat.core.random_settings import maybe, shared_settings
from offbeat.core.randomness import stream
from offbeat.core.strategy import EverySeconds, EveryUpdates, Strategy
from offbeat.core.workload import Workload
from offbeat.engine.experiment import Experiment
from offbeat.lab.workloads.synthetic import Quadratic


@dataclass(frozen=True, eq=False)
class Case:
    """One random case.

    may_fail: whether its faults are so severe that the run is allowed to fail.
    may_not_begin: whether all ranks but one crash for good, so that the run is allowed to fail before its first update.
    """

    experiment: Experiment
    notice_seconds: float
    """The largest difference between the times at which two peers notice the same crash."""
    may_fail: bool
    may_not_begin: bool


def draw_case(strategy: Strategy, seed: int, *, workload: Workload | None = None, faults: bool = True) -> Case:
    """The random case of a seed.

    strategy: the strategy, whose settings are varied too, see `Strategy.random_settings`.
    seed: selects the case.
    workload: the workload; by default a small one is drawn.
    faults: whether ranks crash, pause, are partitioned and compute corrupt gradients.
    """
    random = stream(seed, "fuzz")
    workers = int(random.integers(1, 6))
    samples = int(random.integers(60, 360))
    varied = _vary(strategy, seed, random, workers)
    case_workload = workload or _workload(random)
    cluster = _cluster(random, varied, workers, samples, faults)
    if faults:
        hangs = tuple(_hangs(stream(seed, "fuzz hangs"), varied, workers))
        cluster = dataclasses.replace(cluster, faults=(*cluster.faults, *hangs))
    experiment = Experiment(
        case_workload,
        varied.with_default_optimizer(SGD(lr=0.02)),
        cluster=cluster,
        workers=workers,
        until=_until(random, samples, cluster.seconds_per_sample / workers),
        seed=seed,
        evaluate=[None, EveryUpdates(3), EverySeconds(0.5)][int(random.integers(3))],
    )
    notice_seconds = float(stream(seed, "fuzz notice").choice([0.0, 0.1, 1.0]))
    return Case(experiment, notice_seconds, _may_fail(experiment), _may_not_begin(experiment))


def _may_fail(experiment: Experiment) -> bool:
    """Whether gradients are corrupt, or all ranks crash, one of them permanently, so that the parameters are lost."""
    crashed = {fault.rank for fault in _crashes(experiment)}
    all_gone = crashed.issuperset(_ranks(experiment)) and bool(_gone_for_good(experiment))
    return all_gone or any(isinstance(fault, Corrupt) for fault in experiment.cluster.faults)


def _may_not_begin(experiment: Experiment) -> bool:
    left = set(_ranks(experiment)) - _gone_for_good(experiment)
    return len(left) == 1 < len(_ranks(experiment))


def _ranks(experiment: Experiment) -> range:
    return range(experiment.strategy.processes(experiment.worker_count))


def _crashes(experiment: Experiment) -> list[Crash]:
    return [fault for fault in experiment.cluster.faults if isinstance(fault, Crash)]


def _gone_for_good(experiment: Experiment) -> set[int]:
    return {crash.rank for crash in _crashes(experiment) if crash.back_after_seconds is None}


def _vary(strategy: Strategy, seed: int, random: Generator, workers: int) -> Strategy:
    settings = shared_settings(random, workers) | strategy.random_settings(seed, workers)
    names = {item.name for item in dataclasses.fields(strategy)}
    settings |= _hang_settings(stream(seed, "fuzz hang limits"))
    return dataclasses.replace(strategy, **{name: value for name, value in settings.items() if name in names})


def _hang_settings(random: Generator) -> dict[str, float]:
    """Limits that some rounds exceed, also without a hang."""
    return {"hang_factor": float(random.choice([0.0, 1.0, 4.0])), "hang_seconds": float(random.uniform(0.1, 2.0))}


def _until(random: Generator, samples: int, seconds_per_sample: float) -> Budget:
    return Seconds(samples * seconds_per_sample + 0.3) if random.random() < 0.2 else Samples(samples)


def _workload(random: Generator) -> Workload:
    return _workload_with_buffers() if random.random() < 0.25 else Quadratic(dimension=6, examples=64).build()


class _ModelWithBuffers(nn.Module):
    """A linear model with two buffers: a running mean and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.mean: Tensor
        self.calls: Tensor
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(inputs.mean(0), 0.1)
                self.calls.add_(1)
        outputs: Tensor = self.linear(inputs - self.mean)
        return outputs.squeeze(1)


def _workload_with_buffers() -> Workload:
    """A workload whose buffers have to be sent with its parameters."""
    values = torch.linspace(-1.0, 1.0, 64 * 3).reshape(64, 3)
    return Workload(_ModelWithBuffers, _squared_error, (values, values.sum(1)), label="buffers")


def _squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square()


def _cluster(random: Generator, strategy: Strategy, workers: int, samples: int, faults: bool) -> Cluster:
    seconds_per_sample = float(10 ** random.uniform(-3, -2))
    horizon = 1.5 * samples * seconds_per_sample / workers + 0.5
    silence = float(random.uniform(0.5, 2.0))
    faults_drawn = (
        [_fault(random, strategy, workers, horizon, silence) for _ in range(int(random.integers(0, 5)))]
        if faults
        else []
    )
    return Cluster(
        seconds_per_sample=seconds_per_sample,
        seconds_per_call=float(random.choice([0.0, 0.01])),
        seconds_per_update=float(random.choice([0.0, 0.0, 0.03])),
        straggle=_straggle(random),
        factors=tuple(float(random.uniform(0.5, 4.0)) for _ in range(int(random.integers(0, workers + 1)))),
        link=_link(random),
        faults=tuple(faults_drawn),
        crash_seen_seconds=float(random.uniform(0.0, 0.5)),
        silence_seconds=silence,
    )


def _straggle(random: Generator) -> StragglerModel:
    kinds: list[StragglerModel] = [
        NoStragglers(),
        Lognormal(0.7),
        Pareto(1.5),
        Mixture(((0.0, 0.0, 0.6), (0.1, 0.1, 0.3), (1.0, 0.2, 0.1))),
    ]
    return kinds[int(random.integers(len(kinds)))]


def _link(random: Generator) -> Link:
    return Link(
        latency_seconds=float(random.choice([0.0, 0.01, 0.3])),
        bytes_per_second=maybe(random, float(10 ** random.uniform(3.5, 5.5))),
        delay_std_seconds=float(random.choice([0.0, 0.0, 0.2])),
    )


def _hangs(random: Generator, strategy: Strategy, workers: int) -> Iterator[Hang]:
    computing = [rank for rank in range(strategy.processes(workers)) if strategy.computes(rank)]
    for _ in range(int(random.integers(0, 3))):
        yield Hang(int(random.choice(computing)), float(random.uniform(0.0, 3.0)), float(random.uniform(0.5, 10.0)))


def _fault(random: Generator, strategy: Strategy, workers: int, horizon: float, silence: float) -> Fault:
    size = strategy.processes(workers)
    computing = [rank for rank in range(size) if strategy.computes(rank)]
    at = float(random.uniform(0.0, horizon))
    seconds = float(random.uniform(0.1, 3.0)) * silence
    kind = int(random.integers(5))
    if kind <= 1:
        rank = int(random.choice(computing))
        is_permanent = rank != computing[0] and random.random() < 0.3  # one worker is left to finish
        return Crash(rank, at, None if is_permanent else seconds)
    if kind == 2:
        return Pause(int(random.integers(size)), at, seconds)
    if kind == 3:
        count = int(random.integers(1, size)) if size > 1 else 1
        return Partition(tuple(int(rank) for rank in random.choice(size, count, replace=False)), at, seconds)
    return Corrupt(int(random.choice(computing)), at, min(seconds, 0.5))
