"""Random cases: a strategy with random settings, on a random cluster where things go wrong.

A case is a pure function of (strategy, seed), so a seed is all that is needed to see it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from numpy.random import Generator
from torch import Tensor, nn

from offbeat.cluster import (
    Cluster,
    Corrupt,
    Crash,
    Fault,
    Link,
    Lognormal,
    Mixture,
    NoStragglers,
    Pareto,
    Partition,
    Pause,
    StragglerModel,
)
from offbeat.core.actions import Budget, Samples, Seconds
from offbeat.core.optimizers import SGD, Adam, Optimizer
from offbeat.core.randomness import stream
from offbeat.core.schedules import Linear
from offbeat.core.strategy import EverySeconds, EveryUpdates, Strategy
from offbeat.core.workload import Workload
from offbeat.lab.workloads import Quadratic
from offbeat.simulation.state import Scenario
from offbeat.strategies.gossip import (
    Acid,
    FirstAvailable,
    Gossip,
    Matchings,
    Partner,
    Poisson,
    Random,
    Regular,
)
from offbeat.strategies.hub import RestartFromCheckpoint
from offbeat.strategies.local_steps.local_steps_strategies import LocalStepsStrategy
from offbeat.strategies.local_training import Differences, Gradients
from offbeat.strategies.population import AllMembers, Best, Better, Population
from offbeat.strategies.serial import ArtificialDelay
from offbeat.topology import Complete, Cycle, ExponentialGraph, Graph, Star

PARAMETERS_MIN = 4
"""What the smallest model here has."""

PATIENCE_SECONDS = 60.0
"""Longer than any outage drawn here, so that nobody gives up who should not."""

FIELDS: dict[str, Callable[[Generator, int], Any]] = {
    "batch": lambda rng, workers: int(rng.integers(8, 49)),
    "microbatch": lambda rng, workers: int(rng.integers(1, 17)),
    "seconds": lambda rng, workers: _maybe(rng, float(rng.uniform(0.05, 0.6))),
    "samples_max": lambda rng, workers: _maybe(rng, int(rng.integers(16, 65))),
    "worker_seconds": lambda rng, workers: float(rng.uniform(0.05, 0.6)),
    "hub_seconds": lambda rng, workers: float(rng.uniform(0.05, 0.6)),
    "messages": lambda rng, workers: _maybe(rng, int(rng.integers(1, 6))),
    "k": lambda rng, workers: _maybe(rng, int(rng.integers(1, workers + 1))),
    "staleness_max": lambda rng, workers: _maybe(rng, int(rng.integers(1, 6))),
    "damping": lambda rng, workers: float(rng.choice([0.0, 0.5, 1.0])),
    "in_flight_max": lambda rng, workers: int(rng.integers(1, 4)),
    "optimizer": lambda rng, workers: _optimizer(rng),
    "patience_seconds": lambda rng, workers: PATIENCE_SECONDS,
}
"""How to draw a setting, given the number of workers, for every strategy that has a field of this name."""


@dataclass(frozen=True, eq=False)
class Case:
    """One random case. `may_fail` where gradients are broken so often that the run is allowed to give up."""

    scenario: Scenario
    may_fail: bool


def draw_case(strategy: Strategy, seed: int, *, workload: Workload | None = None, faults: bool = True) -> Case:
    """The case of this seed. A strategy's own settings are varied too, where their names are known here."""
    rng = stream(seed, "fuzz")
    workers = int(rng.integers(1, 6))
    samples = int(rng.integers(60, 360))
    varied = _vary(strategy, rng, workers)
    if isinstance(varied, Gossip):
        varied = _gossip(varied, seed, workers)
    if isinstance(varied, LocalStepsStrategy):
        varied = _local_steps(varied, seed, workers)
    if isinstance(varied, Population):
        varied = _population(varied, seed, workers)
    if isinstance(varied, RestartFromCheckpoint):
        varied = _restart(varied, seed)
    if isinstance(varied, ArtificialDelay):
        varied = dataclasses.replace(varied, delay=int(stream(seed, "fuzz delay").choice([1, 2, 5, 20])))
    chosen = workload or _workload(rng)
    cluster = _cluster(rng, varied, workers, samples, faults)
    scenario = Scenario(
        strategy=varied.with_default_optimizer(SGD(lr=0.02)),
        workload=chosen,
        cluster=cluster,
        workers=workers,
        until=_until(rng, samples, cluster.seconds_per_sample / workers),
        seed=seed,
        evaluate=[None, EveryUpdates(3), EverySeconds(0.5)][int(rng.integers(3))],
        notice_seconds=float(stream(seed, "fuzz notice").choice([0.0, 0.1, 1.0])),
    )
    return Case(scenario, may_fail=_may_fail(scenario))


def _may_fail(scenario: Scenario) -> bool:
    """Where gradients are broken, and where all that there was has died with those who held it, and some for good."""
    faults = scenario.cluster.faults
    crashes = [fault for fault in faults if isinstance(fault, Crash)]
    struck = {fault.rank for fault in crashes}
    ranks = range(scenario.strategy.processes(scenario.workers))
    all_gone = struck.issuperset(ranks) and any(fault.back_after_seconds is None for fault in crashes)
    return all_gone or any(isinstance(fault, Corrupt) for fault in faults)


def _vary(strategy: Strategy, rng: Generator, workers: int) -> Strategy:
    drawn = {name: draw(rng, workers) for name, draw in FIELDS.items()}
    names = {item.name for item in dataclasses.fields(strategy)}
    return dataclasses.replace(strategy, **{name: value for name, value in drawn.items() if name in names})


def _gossip(strategy: Gossip, seed: int, workers: int) -> Gossip:
    """A gossip strategy with choices that go together, from a stream of its own."""
    rng = stream(seed, "fuzz gossip")
    graphs: list[Graph] = [Cycle(), Complete(), Star()]
    if workers & (workers - 1) == 0:
        graphs.append(ExponentialGraph())
    graph = graphs[int(rng.integers(len(graphs)))]
    matched = workers % 2 == 0 and not (isinstance(graph, Star) and workers > 2)
    partners: list[Partner] = [Random(), FirstAvailable(), Matchings() if matched else Random()]
    accelerated = rng.random() < 0.6 and not isinstance(graph, Complete)
    return dataclasses.replace(
        strategy,
        graph=graph,
        rate=float(10 ** rng.uniform(-1, 0.7)),
        partner=partners[int(rng.integers(3))],
        clock=[Poisson(), Regular()][int(rng.integers(2))],
        momentum=Acid() if accelerated else None,
    )


def _local_steps(strategy: LocalStepsStrategy, seed: int, workers: int) -> Strategy:
    """A strategy of local steps with choices that go together, from a stream of its own."""
    rng = stream(seed, "fuzz local steps")
    every = int(rng.integers(1, 6))
    drawn: dict[str, Any] = {
        "every": every,
        "delay": int(rng.integers(0, 8)),
        "send": [Gradients(), Differences()][int(rng.integers(2))],
        "fragments": min(int(rng.integers(1, every + 1)), PARAMETERS_MIN),
        "quorum": _maybe(rng, int(rng.integers(1, workers + 1))),
        "grace": float(rng.choice([0.0, 0.5, 1.0])),
        "inner": _optimizer(rng),
        "outer": [SGD(lr=1.0), SGD(lr=0.7, momentum=0.5, nesterov=True)][int(rng.integers(2))],
    }
    names = {item.name for item in dataclasses.fields(strategy)}
    return dataclasses.replace(strategy, **{name: value for name, value in drawn.items() if name in names})


def _population(strategy: Population, seed: int, workers: int) -> Population:
    """A population with choices that go together, from a stream of its own."""
    rng = stream(seed, "fuzz population")
    return dataclasses.replace(
        strategy,
        every=int(rng.integers(1, 6)),
        sources=[AllMembers(), Best(), Better()][int(rng.integers(3))],
        preempt_above=_maybe(rng, float(rng.choice([1.0, 1.25]))),
        rates=tuple(float(10 ** rng.uniform(-1, 3)) for _ in range(int(rng.integers(0, workers + 1)))),
    )


def _restart(strategy: RestartFromCheckpoint, seed: int) -> Strategy:
    """One that checkpoints after every update, or hardly ever."""
    seconds = float(10 ** stream(seed, "fuzz restart").uniform(-3, 1))
    return dataclasses.replace(strategy, checkpoint_interval_seconds=seconds)


def _optimizer(rng: Generator) -> Optimizer | None:
    decaying = SGD(lr=Linear(start=0.05, end=0.0, samples=500), weight_decay=0.01, clip_norm=10.0)
    return [None, SGD(lr=0.02, momentum=0.9), Adam(lr=0.01), decaying][int(rng.integers(4))]


def _until(rng: Generator, samples: int, seconds_per_sample: float) -> Budget:
    return Seconds(samples * seconds_per_sample + 0.3) if rng.random() < 0.2 else Samples(samples)


def _workload(rng: Generator) -> Workload:
    return _with_buffers() if rng.random() < 0.25 else Quadratic(dimension=6, examples=64).build()


class _Counting(nn.Module):
    """A linear model with buffers: statistics that move in training, and a counter."""

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


def _with_buffers() -> Workload:
    """A small model whose buffers have to travel with its parameters."""
    values = torch.linspace(-1.0, 1.0, 64 * 3).reshape(64, 3)
    return Workload(_Counting, _squared, (values, values.sum(1)), label="buffers")


def _squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square()


def _cluster(rng: Generator, strategy: Strategy, workers: int, samples: int, faults: bool) -> Cluster:
    seconds_per_sample = float(10 ** rng.uniform(-3, -2))
    horizon = 1.5 * samples * seconds_per_sample / workers + 0.5
    silence = float(rng.uniform(0.5, 2.0))
    drawn = [_fault(rng, strategy, workers, horizon, silence) for _ in range(int(rng.integers(0, 5)))] if faults else []
    return Cluster(
        seconds_per_sample=seconds_per_sample,
        seconds_per_call=float(rng.choice([0.0, 0.01])),
        seconds_per_update=float(rng.choice([0.0, 0.0, 0.03])),
        straggle=_straggle(rng),
        factors=tuple(float(rng.uniform(0.5, 4.0)) for _ in range(int(rng.integers(0, workers + 1)))),
        link=_link(rng),
        faults=tuple(drawn),
        crash_seen_seconds=float(rng.uniform(0.0, 0.5)),
        silence_seconds=silence,
    )


def _straggle(rng: Generator) -> StragglerModel:
    kinds: list[StragglerModel] = [
        NoStragglers(),
        Lognormal(0.7),
        Pareto(1.5),
        Mixture(((0.0, 0.0, 0.6), (0.1, 0.1, 0.3), (1.0, 0.2, 0.1))),
    ]
    return kinds[int(rng.integers(len(kinds)))]


def _link(rng: Generator) -> Link:
    return Link(
        latency_seconds=float(rng.choice([0.0, 0.01, 0.3])),
        bytes_per_second=_maybe(rng, float(10 ** rng.uniform(2.5, 4.5))),
        delay_std_seconds=float(rng.choice([0.0, 0.0, 0.2])),
    )


def _fault(rng: Generator, strategy: Strategy, workers: int, horizon: float, silence: float) -> Fault:
    size = strategy.processes(workers)
    computing = [rank for rank in range(size) if strategy.computes(rank)]
    at = float(rng.uniform(0.0, horizon))
    seconds = float(rng.uniform(0.1, 3.0)) * silence
    kind = int(rng.integers(5))
    if kind <= 1:
        rank = int(rng.choice(computing))
        for_good = rank != computing[0] and rng.random() < 0.3  # somebody is left to finish
        return Crash(rank, at, None if for_good else seconds)
    if kind == 2:
        return Pause(int(rng.integers(size)), at, seconds)
    if kind == 3:
        count = int(rng.integers(1, size)) if size > 1 else 1
        return Partition(tuple(int(rank) for rank in rng.choice(size, count, replace=False)), at, seconds)
    return Corrupt(int(rng.choice(computing)), at, min(seconds, 0.5))


def _maybe(rng: Generator, value: Any) -> Any:
    return value if rng.random() < 0.5 else None
