"""Simulated runs for tests: run a strategy, get its records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import offbeat as ob
from offbeat.core.actions import Budget, Record
from offbeat.core.strategy import Cadence
from offbeat.records.files import MemoryWriter
from offbeat.simulation.simulator import Simulation, SimulationResult
from offbeat.testing import Invariants

Kind = TypeVar("Kind", bound=Record)

NAMES = sorted(name for name, kind in ob.Strategy.members.items() if kind().processes(2) > 1)
"""Strategies of more than one process."""
HUB_NAMES = [name for name in NAMES if not ob.Strategy.members[name]().computes(0)]


@dataclass
class Scene:
    """A simulated run."""

    records: list[Record]
    outcome: SimulationResult
    simulation: Simulation

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [record for record in self.records if isinstance(record, kind)]


def play(
    strategy: ob.Strategy,
    workload: ob.Workload | None = None,
    *,
    cluster: ob.Cluster | None = None,
    workers: int = 3,
    until: Budget | None = None,
    seed: int = 0,
    evaluate: Cadence | None = None,
    user_optimizer: ob.nodes.Optimizer | None = None,
    checked: bool = True,
) -> Scene:
    """Simulate a run. `checked=False` is for runs that break the invariants on purpose."""
    workload = workload or quadratic()
    strategy = strategy.with_default_optimizer(workload.optimizer)
    experiment = ob.Experiment(
        workload,
        strategy,
        cluster=cluster or ob.Cluster(),
        workers=workers,
        until=until or ob.Samples(2000),
        seed=seed,
        evaluate=evaluate,
    )
    invariants = Invariants(strategy)
    writer = invariants if checked else MemoryWriter()
    simulation = Simulation(experiment, writer, observer=invariants if checked else None, user_optimizer=user_optimizer)
    outcome = simulation.run()
    if checked:
        invariants.check_end(simulation, outcome)
    return Scene(writer.records, outcome, simulation)


def quadratic() -> ob.Workload:
    return ob.workloads.Quadratic(dimension=8, examples=256).build()
