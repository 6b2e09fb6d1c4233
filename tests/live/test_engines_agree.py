"""The same experiment in the simulator, and in the live engine on the loopback with a fake clock: the same run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import offbeat as ob
from offbeat.core.strategy import Strategy
from offbeat.testing import check_engines_agree, draw_case

UNIT = 2.0**-16
"""Durations are whole multiples of it, so that sums of times are exact in both engines."""

SPEEDS = (1_031, 1_361, 1_753, 2_203, 2_707)
"""Units per sample of each worker: primes, so that no two rounds end at one moment."""

LATENCIES = (3_001, 4_007, 5_003, 6_011, 7_001)


def cluster(workers: int = 4, **settings: Any) -> ob.Cluster:
    overrides = tuple(
        ob.stragglers.WorkerOverride(
            (worker,),
            seconds_per_sample=SPEEDS[worker] * UNIT,
            link=ob.Link(latency_seconds=LATENCIES[worker] * UNIT),
        )
        for worker in range(workers)
    )
    return ob.Cluster(seconds_per_sample=1_024 * UNIT, seconds_per_call=512 * UNIT, workers=overrides, **settings)


def classifier(make_model: Callable[[], nn.Module]) -> ob.Workload:
    random = torch.Generator().manual_seed(3)
    targets = torch.randint(0, 4, (512,), generator=random)
    inputs = torch.randn(512, 6, generator=random) + torch.nn.functional.one_hot(targets, 6) * 2.0
    return ob.Workload(
        model=make_model,
        loss=torch.nn.CrossEntropyLoss(reduction="none"),
        train=(inputs, targets),
        optimizer=ob.SGD(lr=0.05, momentum=0.9),
    )


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def random_model() -> nn.Module:
    """With statistics and dropout, so that micro-batches and seeds matter."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4))


NAMES = sorted(Strategy.members)

DELAYS = ob.stragglers.Mixture(((0.0, 0.0, 0.5), (0.5, 0.1, 0.3), (2.0, 0.3, 0.2)))

SLOWDOWNS = ob.stragglers.ShiftedExponential(0.5)

SMALL: dict[str, Any] = {
    "batch": 17,  # four micro-batches and a single sample
    "microbatch": 4,
    "every": 3,
    "fragments": 3,
    "seconds": 40_009 * UNIT,
    "worker_seconds": 40_009 * UNIT,
    "hub_seconds": 70_001 * UNIT,
    "samples_max": 33,
    "k": 3,
    "messages": 3,
    "delay": 2,
}
"""Settings of those strategies that have such a field."""


def strategy(name: str, **settings: Any) -> Strategy:
    kind = Strategy.members[name]
    fields = {item.name for item in dataclasses.fields(kind)}
    return kind(**{field: value for field, value in {**SMALL, **settings}.items() if field in fields})


CASES: dict[str, Callable[[str], ob.Experiment]] = {
    "different speeds and latencies": lambda name: ob.Experiment(
        classifier(plain_model), strategy(name), cluster=cluster(), evaluate=ob.EveryUpdates(3)
    ),
    "statistics and dropout": lambda name: ob.Experiment(
        classifier(random_model), strategy(name), cluster=cluster(), evaluate=ob.EverySeconds(1.0)
    ),
    "stragglers": lambda name: ob.Experiment(
        classifier(random_model), strategy(name), cluster=cluster(straggle=DELAYS), evaluate=None
    ),
    "stragglers by a factor": lambda name: ob.Experiment(
        classifier(random_model),
        strategy(name),
        cluster=cluster(straggle=ob.stragglers.ShiftedExponential(0.5)),
        evaluate=None,
    ),
    "slow workers": lambda name: ob.Experiment(
        classifier(plain_model), strategy(name), cluster=cluster(factors=(1.0, 2.5, 1.0, 4.0)), evaluate=None
    ),
    "a rate limit": lambda name: ob.Experiment(
        classifier(plain_model), strategy(name), cluster=cluster(), bytes_per_second=16_384.0, evaluate=None
    ),
    "compression": lambda name: ob.Experiment(
        classifier(plain_model), strategy(name, compression=ob.compression.Int8()), cluster=cluster(), evaluate=None
    ),
    "the end by time": lambda name: ob.Experiment(
        classifier(plain_model), strategy(name), cluster=cluster(), until=ob.Seconds(8.0), evaluate=None
    ),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_both_engines_give_the_same_run(name: str, case: str) -> None:
    experiment = CASES[case](name)
    experiment = dataclasses.replace(experiment, workers=4, seed=11, until=experiment.until or ob.Samples(900))
    agreement = check_engines_agree(experiment)
    assert agreement.records["update"] > 3
    assert agreement.records["round"] > 10


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(6))
def test_both_engines_give_the_same_run_with_random_settings(name: str, seed: int) -> None:
    case = draw_case(Strategy.members[name](), seed, faults=False).experiment
    settings = dataclasses.replace(case, cluster=cluster(case.worker_count), bytes_per_second=None)
    assert check_engines_agree(settings).records["round"] > 0
