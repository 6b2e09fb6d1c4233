"""The same experiment in the simulator, and in the live engine on the loopback with a fake clock: the same run."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import offbeat as ob
from offbeat.core.actions import Compute, Send, SetTimer
from offbeat.core.events import Event, Started
from offbeat.core.messages import Message
from offbeat.core.strategy import Strategy
from offbeat.core.wire_size import wire_size
from offbeat.errors import ConfigurationError, ContractViolation
from offbeat.live import live_round
from offbeat.records.files import MemoryWriter
from offbeat.simulation import delivery
from offbeat.simulation.round_timing import RoundTiming
from offbeat.simulation.simulator import Simulation
from offbeat.testing import Violation, check_engines_agree, draw_case
from offbeat.testing.fake_clock_run import FakeClockRun

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


def low_precision(workload: ob.Workload) -> ob.Workload:
    """With a model and inputs in bfloat16."""
    make_model, (inputs, targets) = workload.model, workload.train.take(torch.arange(len(workload.train)))
    return dataclasses.replace(workload, model=lambda: make_model().bfloat16(), train=(inputs.bfloat16(), targets))


def dropout_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4))


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
    "dropout without statistics": lambda name: ob.Experiment(
        classifier(dropout_model), strategy(name), cluster=cluster(), evaluate=None
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
    "bfloat16": lambda name: ob.Experiment(
        low_precision(classifier(random_model)), strategy(name), cluster=cluster(), evaluate=ob.EveryUpdates(3)
    ),
    "bfloat16 and compression": lambda name: ob.Experiment(
        low_precision(classifier(plain_model)),
        strategy(name, compression=ob.compression.TopK(0.1)),
        cluster=cluster(),
        evaluate=None,
    ),
    "the end by time": lambda name: ob.Experiment(
        classifier(plain_model), strategy(name), cluster=cluster(), until=ob.Seconds(8.0), evaluate=None
    ),
}
VARIATIONS = {
    "different speeds and latencies",
    "dropout without statistics",
    "stragglers by a factor",
    "slow workers",
    "stragglers",
    "bfloat16 and compression",
    "the end by time",
}
"""Cases that differ little from another one."""
SLOW = pytest.mark.slow


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", [pytest.param(case, marks=SLOW if case in VARIATIONS else ()) for case in CASES])
def test_both_engines_give_the_same_run(name: str, case: str) -> None:
    experiment = CASES[case](name)
    experiment = dataclasses.replace(experiment, workers=4, seed=11, until=experiment.until or ob.Samples(900))
    comparison = check_engines_agree(experiment)
    assert sum(comparison.bytes_sent.values()) > 0 or experiment.strategy.processes(4) == 1
    assert comparison.records["update"] > 3
    assert comparison.records["round"] > 10


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SLOW) for seed in range(1, 10))])
def test_both_engines_give_the_same_run_with_random_settings(name: str, seed: int) -> None:
    case = draw_case(Strategy.members[name](), seed, faults=False).experiment
    settings = dataclasses.replace(case, cluster=cluster(case.worker_count), bytes_per_second=None)
    assert check_engines_agree(settings).records["round"] > 0


@pytest.mark.parametrize("name", ["fmb", "gossip"])
def test_dropout_is_drawn_alike_when_the_simulator_may_merge_micro_batches(name: str) -> None:
    """The simulator merges micro-batches to be faster, but not where that would change the random numbers."""
    settings = {"cluster": cluster(), "workers": 4, "until": ob.Samples(300), "evaluate": None}
    experiment = ob.Experiment(classifier(dropout_model), strategy(name), **settings).resolved()[0]
    merged, separate = (
        Simulation(experiment, MemoryWriter(), merge_microbatches=merge).run().finishes[0].parameters
        for merge in (True, False)
    )
    assert torch.equal(merged, separate)


# What the comparison finds


def test_an_experiment_with_faults_is_refused() -> None:
    faulty = cluster(faults=(ob.faults.Crash(rank=1, at_seconds=1.0),))
    with pytest.raises(Violation, match="faults are not injected on the loopback"):
        check_engines_agree(ob.Experiment(classifier(plain_model), strategy("fmb"), cluster=faulty, workers=4))


def test_a_difference_between_the_engines_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine is made to differ from the other in one respect, as they once did."""
    experiment = CASES["statistics and dropout"]("sync-amsgrad")
    experiment = dataclasses.replace(experiment, workers=4, until=ob.Samples(400))

    def cut_without_merging(done: int, microbatch: int, samples_max: int | None) -> int:
        return microbatch if samples_max is None else min(microbatch, samples_max - done)

    with monkeypatch.context() as patched:
        patched.setattr(live_round, "next_microbatch", cut_without_merging)
        with pytest.raises((Violation, ConfigurationError)):
            check_engines_agree(experiment)
    with monkeypatch.context() as patched:
        patched.setattr(RoundTiming, "induced_seconds", lambda self, samples, elapsed: 0.0)
        with pytest.raises(Violation, match="induced_seconds"):
            check_engines_agree(dataclasses.replace(experiment, cluster=cluster(factors=(2.0,))))
    with monkeypatch.context() as patched:
        patched.setattr(delivery, "wire_size", lambda message: wire_size(message)._replace(nbytes=64))
        with pytest.raises(Violation, match="messages sent differ"):
            check_engines_agree(experiment)
    check_engines_agree(experiment)


# Nodes that break the contract


@dataclass(frozen=True)
class Note(Message):
    """A message."""


@dataclass(frozen=True)
class Wrong(ob.Strategy):
    """One rank that computes; its node asks for what the contract forbids."""

    actions: Callable[[ob.nodes.NodeContext], list[Any]] = lambda context: []
    computing: bool = True

    def processes(self, workers: int) -> int:
        return 2

    def computes(self, rank: int) -> bool:
        return self.computing or rank == 1

    def peers(self, rank: int, processes: int) -> Iterable[int]:
        return (1 - rank,)

    def node(self, context: ob.nodes.NodeContext) -> ob.nodes.Node:
        return WrongNode(self, context)


class WrongNode(ob.nodes.Node):
    def __init__(self, config: Wrong, context: ob.nodes.NodeContext) -> None:
        self._config, self._context = config, context

    def handle(self, event: Event) -> Iterable[Any]:
        is_first = isinstance(event, Started) and self._context.rank == 0
        return self._config.actions(self._context) if is_first else ()

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


def compute(context: ob.nodes.NodeContext) -> Compute:
    return Compute(context.parameters, context.buffers, 0, 0, ob.Samples(8), 4)


FORBIDDEN: dict[str, Wrong] = {
    "rank 0 asked for 'finish', which is not an action": Wrong(actions=lambda context: ["finish"]),
    "rank 0 asked for a second Compute while one was outstanding": Wrong(
        actions=lambda context: [compute(context)] * 2
    ),
    "rank 0 asked for Compute, but by its strategy it does not compute": Wrong(
        actions=lambda context: [compute(context)], computing=False
    ),
    "rank 0 sent to 7, which its strategy does not name as a peer": Wrong(actions=lambda context: [Send(7, Note())]),
    "rank 0 sent to 0, which its strategy does not name as a peer": Wrong(actions=lambda context: [Send(0, Note())]),
    "rank 0 set the timer 'x' to -1.0 s, but a timer needs 0 s or more": Wrong(
        actions=lambda context: [SetTimer("x", -1.0)]
    ),
    "rank 0 set the timer 'x' to nan s, but a timer needs 0 s or more": Wrong(
        actions=lambda context: [SetTimer("x", float("nan"))]
    ),
}


@pytest.mark.parametrize("sentence", FORBIDDEN)
def test_both_engines_refuse_what_the_contract_forbids_with_the_same_sentence(sentence: str) -> None:
    settings = {"workers": 2, "until": ob.Samples(100), "evaluate": None}
    experiment, workload = ob.Experiment(classifier(plain_model), FORBIDDEN[sentence], **settings).resolved()
    with pytest.raises(ContractViolation, match=f"^{re.escape(sentence)}$"):
        Simulation(experiment, MemoryWriter()).run()
    live = FakeClockRun(experiment, workload)
    with pytest.raises(ContractViolation, match=f"^{re.escape(sentence)}$"):
        live.run()
