"""Run a strategy through random cases and verify that every invariant holds."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offbeat.core.actions import Action, Record
from offbeat.core.events import Event
from offbeat.core.randomness import stream
from offbeat.core.strategy import Strategy
from offbeat.core.workload import Workload
from offbeat.errors import OffbeatError, unknown
from offbeat.lab.simulated_runs import one_thread, record_bytes
from offbeat.simulation.simulator import Simulation, SimulationResult
from offbeat.testing.fuzz import Case, draw_case
from offbeat.testing.invariants import Invariants, Violation, verify

EVENTS_MAX = 100_000
"""Many times what any case takes that ends."""

SWAP_PROBABILITIES = (0.05, 0.15, 0.4)
"""Per event; one of them is drawn for a case. Some states last for a single event, others must survive many swaps."""


def check_strategy(
    strategy: Strategy, *, seeds: Iterable[int] = range(50), workload: Workload | None = None, faults: bool = True
) -> int:
    """Check a strategy on the random case of every seed; returns how many were run.

    Raises `Violation` at the first that fails. With `faults=False` nothing goes wrong on the cluster but slowness.
    """
    count = 0
    with one_thread():
        for seed in seeds:
            case = draw_case(strategy, seed, workload=workload, faults=faults)
            try:
                check_case(case)
            except Exception as error:
                name = strategy.name or type(strategy).__name__
                repeat = _repeat_line(strategy, seed, workload is None, faults)
                raise Violation(f"{name}, seed {seed}: {error}\nrepeat it with: {repeat}") from error
            count += 1
    return count


def _repeat_line(strategy: Strategy, seed: int, usual_workload: bool, faults: bool) -> str:
    """What to type to see a case again: a command where the strategy can be named in one, else Python."""
    kind = type(strategy)
    if usual_workload and kind.__module__.startswith("offbeat.") and _is_default(strategy):
        return f"offbeat replay {strategy.name} --seed {seed}{'' if faults else ' --no-faults'}"
    if usual_workload and _is_default(strategy) and kind.__qualname__ == kind.__name__:
        source = f"{inspect.getsourcefile(kind)}:{kind.__name__}"
        return f"offbeat replay {source} --seed {seed}{'' if faults else ' --no-faults'}"
    workload = "" if usual_workload else ", workload=..."
    return f"offbeat.testing.check_case(offbeat.testing.draw_case({strategy}, {seed}{workload}, faults={faults}))"


def _is_default(strategy: Strategy) -> bool:
    return all(getattr(strategy, item.name) == item.default for item in dataclasses.fields(strategy))


def check_case(case: Case, trace: Callable[[str], None] | None = None) -> None:
    """Run one case plainly, and again with nodes swapped and leases taken back; both must write the same."""
    strategy = case.scenario.strategy
    plain = _run(case, Invariants(strategy), strict=False, trace=trace)
    swapped = _run(case, _Swapping(strategy, case.scenario.seed), strict=True)
    changed = "a node that went through state() and restore(), or had its leases taken back, behaved differently; "
    equal = record_bytes(plain.records) == record_bytes(swapped.records)
    verify(equal, f"{changed}first at {_first_difference(plain.records, swapped.records)}")
    for rank, finish in plain.outcome.finishes.items():
        equal = torch.equal(finish.parameters, swapped.outcome.finishes[rank].parameters)
        verify(equal, f"{changed}rank {rank} ended with other parameters")


class _Ran(NamedTuple):
    records: list[Record]
    outcome: SimulationResult


def _run(case: Case, invariants: Invariants, *, strict: bool, trace: Callable[[str], None] | None = None) -> _Ran:
    observer = invariants if trace is None else _Tracing(invariants, trace)
    simulation = Simulation(case.scenario, invariants, observer=observer, strict=strict, events_max=EVENTS_MAX)
    outcome = simulation.run()
    invariants.ended(simulation, outcome)
    verify(outcome.failure is None or case.may_fail, f"the run failed: {outcome.failure}")
    return _Ran(invariants.records, outcome)


def _first_difference(plain: list[Record], swapped: list[Record]) -> str:
    for left, right in zip(plain, swapped, strict=False):
        if record_bytes([left]) != record_bytes([right]):
            return f"{left} against {right}"
    return f"the end: {len(plain)} against {len(swapped)} records"


class _Swapping(Invariants):
    """Replaces nodes by new ones that were restored from their state, at random events."""

    def __init__(self, strategy: Strategy, seed: int) -> None:
        super().__init__(strategy)
        self._random = stream(seed, "swap")
        self._probability = float(self._random.choice(SWAP_PROBABILITIES))

    def before(self, simulation: Simulation, rank: int, event: Event) -> None:
        super().before(simulation, rank, event)
        if self._random.random() < self._probability:
            node = simulation.new_node(rank, simulation.processes[rank].life)
            state = plain_copy(simulation.processes[rank].node.state(), f"state of rank {rank}")
            node.restore(plain_copy(state, ""))
            again = plain_copy(node.state(), "")
            verify(same(state, again), f"rank {rank} was restored from {state} but says that it is {again}")
            simulation.processes[rank].node = node


class _Tracing:
    """Prints what happens, event by event."""

    def __init__(self, invariants: Invariants, trace: Callable[[str], None]) -> None:
        self._invariants = invariants
        self._trace = trace

    def before(self, simulation: Simulation, rank: int, event: Event) -> None:
        self._invariants.before(simulation, rank, event)

    def after(self, simulation: Simulation, rank: int, event: Event, actions: list[Action]) -> None:
        asked = ", ".join(_short(action) for action in actions) or "nothing"
        self._trace(f"{simulation.now:10.4f}  rank {rank:3d}  {_short(event)} → {asked}")
        self._invariants.after(simulation, rank, event, actions)


def _short(thing: Any) -> str:
    """A line for a trace: names and numbers, no tensors."""
    message = getattr(thing, "message", None)
    details = [type(message).__name__] if message is not None else []
    for name in ("source", "to", "peer", "version", "draws", "draw", "samples", "name", "seconds", "incarnation"):
        value = getattr(message if name in ("version", "draws") and message is not None else thing, name, None)
        if value is not None:
            details.append(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}")
    if hasattr(thing, "record"):
        details.append(type(thing.record).__name__)
    return f"{type(thing).__name__}({' '.join(details)})"


def plain_copy(value: Any, where: str) -> Any:
    """A deep copy of a state, as if it had been written to disk and read again; refuses what could not be."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        verify(all(isinstance(key, str) for key in value), f"{where} has keys that are not strings: {list(value)}")
        return {key: plain_copy(inner, f"{where}[{key!r}]") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_copy(inner, f"{where}[{i}]") for i, inner in enumerate(value)]
    verify(value is None or isinstance(value, bool | int | float | str), f"{where} is a {type(value).__name__}")
    return value


def same(left: Any, right: Any) -> bool:
    """Whether two states are equal, bit for bit."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


def replay(strategy: str, seed: int, trace: bool = False, faults: bool = True) -> None:
    """Run the fuzz case of a strategy, by its name, and a seed again; raises `Violation` as it did then."""
    if strategy not in Strategy.members:
        raise unknown("strategy", strategy, Strategy.members)
    with one_thread():
        try:
            check_case(draw_case(Strategy.members[strategy](), seed, faults=faults), print if trace else None)
        except OffbeatError as error:
            raise Violation(f"{strategy}, seed {seed}: {error}") from error
