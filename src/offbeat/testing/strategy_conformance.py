"""Conformance checks for strategies: random simulated cases in which every invariant must hold."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from offbeat.core.actions import Action, Finish, Record
from offbeat.core.events import Event
from offbeat.core.randomness import stream
from offbeat.core.strategy import Strategy
from offbeat.core.workload import Workload
from offbeat.errors import OffbeatError, unknown
from offbeat.lab.simulated_runs import one_thread, record_bytes
from offbeat.records.schema import Update
from offbeat.simulation.simulator import Simulation
from offbeat.testing.fuzz import Case, draw_case
from offbeat.testing.invariants import Invariants, Violation, verify

EVENTS_MAX = 100_000
"""Far more than any case that ends takes."""

SWAP_PROBABILITIES = (0.05, 0.15, 0.4)
"""Per event; one is drawn for each case. Some states last a single event, others must survive many swaps."""


def check_strategy(
    strategy: Strategy, *, seeds: Iterable[int] = range(50), workload: Workload | None = None, faults: bool = True
) -> int:
    """Check a strategy on one random case per seed; returns how many were run.

    strategy: the strategy; its settings are varied, see `Strategy.random_settings`.
    seeds: one case each.
    workload: the workload of all cases; by default a small one is drawn for each.
    faults: whether ranks crash, pause, are partitioned and compute corrupt gradients.
    Raises `Violation` at the first case that fails, with the command that repeats it.
    """
    count = 0
    with one_thread():
        for seed in seeds:
            case = draw_case(strategy, seed, workload=workload, faults=faults)
            try:
                check_case(case)
            except Exception as error:
                name = strategy.name or type(strategy).__name__
                command = _repeat_command(strategy, seed, workload is None, faults)
                raise Violation(f"{name}, seed {seed}: {error}\nrepeat it with: {command}") from error
            count += 1
    return count


def _repeat_command(strategy: Strategy, seed: int, is_default_workload: bool, faults: bool) -> str:
    """What to type to repeat a case: a command if the strategy can be named in one, otherwise Python."""
    kind = type(strategy)
    if is_default_workload and kind.__module__.startswith("offbeat.") and _is_default(strategy):
        return f"offbeat replay {strategy.name} --seed {seed}{'' if faults else ' --no-faults'}"
    if is_default_workload and _is_default(strategy) and kind.__qualname__ == kind.__name__:
        source = f"{inspect.getsourcefile(kind)}:{kind.__name__}"
        return f"offbeat replay {source} --seed {seed}{'' if faults else ' --no-faults'}"
    workload = "" if is_default_workload else ", workload=..."
    return f"offbeat.testing.check_case(offbeat.testing.draw_case({strategy}, {seed}{workload}, faults={faults}))"


def _is_default(strategy: Strategy) -> bool:
    return all(getattr(strategy, item.name) == item.default for item in dataclasses.fields(strategy))


def check_case(case: Case, trace: Callable[[str], None] | None = None) -> None:
    """Run a case twice, the second time with nodes restored from their state and leases revoked.

    Raises `Violation` if an invariant is violated or the two runs write different records.
    case: the case.
    trace: receives a line for every event of the first run.
    """
    strategy = case.experiment.strategy
    invariants = Invariants(strategy) if trace is None else _Tracing(strategy, trace)
    records, finishes = _run(case, invariants, strict=False)
    swapped_records, swapped_finishes = _run(case, _Swapping(strategy, case.experiment.seed), strict=True)
    changed = "a node that went through state() and restore(), or had its leases revoked, behaved differently; "
    equal = record_bytes(records) == record_bytes(swapped_records)
    verify(equal, f"{changed}first at {_first_difference(records, swapped_records)}")
    for rank, finish in finishes.items():
        equal = torch.equal(finish.parameters, swapped_finishes[rank].parameters)
        verify(equal, f"{changed}rank {rank} ended with different parameters")


def _run(case: Case, invariants: Invariants, *, strict: bool) -> tuple[list[Record], dict[int, Finish]]:
    """Run a case and check its invariants; returns its records, and the `Finish` of each rank."""
    simulation = Simulation(
        case.experiment,
        invariants,
        observer=invariants,
        strict=strict,
        events_max=EVENTS_MAX,
        notice_seconds=case.notice_seconds,
    )
    outcome = simulation.run()
    invariants.check_end(simulation, outcome)
    has_begun = any(isinstance(record, Update) for record in invariants.records)
    may_fail = case.may_fail or (case.may_not_begin and not has_begun)
    verify(outcome.failure is None or may_fail, f"the run failed: {outcome.failure}")
    return invariants.records, outcome.finishes


def _first_difference(reference: list[Record], swapped: list[Record]) -> str:
    for left, right in zip(reference, swapped, strict=False):
        if record_bytes([left]) != record_bytes([right]):
            return f"{left} against {right}"
    return f"the end: {len(reference)} against {len(swapped)} records"


class _Swapping(Invariants):
    """Replaces nodes at random events by new ones restored from their state."""

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
            restored = plain_copy(node.state(), "")
            verify(is_equal(state, restored), f"rank {rank} was restored from {state} but its state is {restored}")
            simulation.processes[rank].node = node


class _Tracing(Invariants):
    """Calls `trace` with a line for every event."""

    def __init__(self, strategy: Strategy, trace: Callable[[str], None]) -> None:
        super().__init__(strategy)
        self._trace = trace

    def after(self, simulation: Simulation, rank: int, event: Event, actions: list[Action]) -> None:
        requested = ", ".join(_summary_line(action) for action in actions) or "nothing"
        self._trace(f"{simulation.now:10.4f}  rank {rank:3d}  {_summary_line(event)} → {requested}")
        super().after(simulation, rank, event, actions)


def _summary_line(item: Any) -> str:
    """An event or action in one line: names and numbers, no tensors."""
    message = getattr(item, "message", None)
    details = [type(message).__name__] if message is not None else []
    for name in ("source", "to", "peer", "version", "draws", "draw", "samples", "name", "seconds", "incarnation"):
        value = getattr(message if name in ("version", "draws") and message is not None else item, name, None)
        if value is not None:
            details.append(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}")
    if hasattr(item, "record"):
        details.append(type(item.record).__name__)
    return f"{type(item).__name__}({' '.join(details)})"


def plain_copy(value: Any, where: str) -> Any:
    """A deep copy of a state, as if written to disk and read again; raises `Violation` for other types."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        verify(all(isinstance(key, str) for key in value), f"{where} has keys that are not strings: {list(value)}")
        return {key: plain_copy(inner, f"{where}[{key!r}]") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_copy(inner, f"{where}[{i}]") for i, inner in enumerate(value)]
    verify(value is None or isinstance(value, bool | int | float | str), f"{where} is a {type(value).__name__}")
    return value


def is_equal(left: Any, right: Any) -> bool:
    """Whether two states are equal, bit for bit."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(is_equal(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(is_equal, left, right))
    return type(left) is type(right) and bool(left == right)


def replay(strategy: str, seed: int, trace: bool = False, faults: bool = True) -> None:
    """Repeat a random case of `check_strategy`.

    strategy: the registered name of the strategy.
    seed: the seed of the case.
    trace: whether to print every event.
    faults: as for `check_strategy`.
    Raises `Violation` if the case fails.
    """
    if strategy not in Strategy.members:
        raise unknown("strategy", strategy, Strategy.members)
    with one_thread():
        try:
            check_case(draw_case(Strategy.members[strategy](), seed, faults=faults), print if trace else None)
        except OffbeatError as error:
            raise Violation(f"{strategy}, seed {seed}: {error}") from error
