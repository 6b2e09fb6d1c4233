"""Attributes of a node that it does not declare as state do not change: a forgotten one is found by itself."""

from __future__ import annotations

import dataclasses
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import offbeat as ob
from offbeat.core import randomness
from offbeat.core.actions import Action
from offbeat.core.events import Event
from offbeat.core.strategy import Node
from offbeat.lab.simulated_runs import one_thread
from offbeat.records.files import MemoryWriter
from offbeat.simulation.simulator import Simulation
from offbeat.strategies.hub.hub_server import HubServer
from offbeat.strategies.node_state import Stateful, declared_attributes

NAMES = sorted(name for name, cls in ob.Strategy.members.items() if cls.__module__.startswith("offbeat."))
WORKERS = 4
FAULTS = (
    ob.faults.Crash(rank=3, at_seconds=6.0, back_after_seconds=4.0),
    ob.faults.Pause(rank=2, at_seconds=3.0, seconds=5.0),
)


def parts(node: Any) -> dict[str, Any]:
    """The node and the parts that it declares, by their path; a part that is not Stateful saves itself."""
    found = {type(node).__name__: node}
    for name in declared_attributes(type(node)):
        value = getattr(node, name, None)
        for index, item in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(item, Stateful):
                inner = parts(item)
                found |= {f"{type(node).__name__}.{name}[{index}].{path}": part for path, part in inner.items()}
    return found


def declared_objects(node: Any) -> Iterator[object]:
    """Mutable objects that are saved: a second reference to one of them is no state of its own."""
    for part in parts(node).values():
        yield part
        for value in (getattr(part, name, None) for name in declared_attributes(type(part))):
            if isinstance(value, Tensor | np.random.Generator | list | dict | set | deque) or hasattr(value, "restore"):
                yield value


def undeclared_changes(node: Any, fresh: Any) -> list[str]:
    """Attributes that differ from those of a node as it was constructed, and that are neither declared nor caches."""
    saved = {id(value) for value in declared_objects(node)}
    changed = []
    originals = parts(fresh)
    for path, part in parts(node).items():
        if path not in originals or type(originals[path]) is not type(part):
            continue  # it has replaced another part, or has been made since
        exempt = {*declared_attributes(type(part)), *part.caches}
        for name in sorted((vars(part).keys() | vars(originals[path]).keys()) - exempt):
            before, after = vars(originals[path]).get(name, "missing"), vars(part).get(name, "missing")
            if not unchanged(before, after, saved):
                changed.append(f"{path}.{name}")
    return changed


def unchanged(before: Any, after: Any, saved: set[int]) -> bool:
    """Whether two values are equal, all the way down, or refer to an object that is saved elsewhere."""
    if id(after) in saved:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(after, Tensor):
        return torch.equal(before, after)
    if isinstance(after, np.random.Generator):
        return randomness.state_of(before) == randomness.state_of(after)
    if isinstance(after, dict):
        return before.keys() == after.keys() and all(unchanged(before[key], after[key], saved) for key in after)
    if isinstance(after, list | tuple | deque):
        return len(before) == len(after) and all(map(unchanged, before, after, [saved] * len(after)))
    if isinstance(after, types.MethodType | types.FunctionType | type):
        return True
    if dataclasses.is_dataclass(after):
        names = [item.name for item in dataclasses.fields(after)]
        return all(unchanged(getattr(before, name), getattr(after, name), saved) for name in names)
    if hasattr(after, "__dict__"):
        return unchanged(vars(before), vars(after), saved)
    return bool(before == after)


class ChecksDeclaredState:
    """Observer that compares a node with a new one of the same rank and life, after every event."""

    def __init__(self, every: int = 7) -> None:
        self._every = every
        self._events = 0
        self.checked: set[int] = set()
        self.changes: set[str] = set()

    def before(self, simulation: Simulation, rank: int, event: Event) -> None:
        pass

    def after(self, simulation: Simulation, rank: int, event: Event, actions: list[Action]) -> None:
        self._events += 1
        process = simulation.processes[rank]
        if self._events % self._every == 0 or any(isinstance(action, ob.nodes.Finish) for action in actions):
            self.checked.add(rank)
            self.changes.update(undeclared_changes(process.node, simulation.new_node(rank, process.life)))


def run(strategy: ob.Strategy, faults: tuple[ob.faults.Crash | ob.faults.Pause, ...] = ()) -> ChecksDeclaredState:
    experiment = ob.Experiment(
        strategy=strategy.with_default_optimizer(ob.SGD(lr=0.05, momentum=0.9)).with_default_timing(0.01),
        workload=ob.workloads.Quadratic(dimension=6).build(),
        cluster=ob.Cluster(seconds_per_sample=0.01, link=ob.Link(latency_seconds=0.02), faults=faults),
        workers=WORKERS,
        until=ob.Samples(4000),
        seed=0,
        evaluate=ob.EveryUpdates(5),
    )
    observer = ChecksDeclaredState()
    with one_thread():
        Simulation(experiment, MemoryWriter(), observer=observer, events_max=50_000).run()
    assert observer.checked == set(range(strategy.processes(WORKERS)))
    return observer


@pytest.mark.parametrize("faults", [(), FAULTS], ids=["without faults", "with faults"])
@pytest.mark.parametrize("name", NAMES)
def test_what_a_node_does_not_declare_does_not_change(name: str, faults: tuple[Any, ...]) -> None:
    assert run(ob.Strategy.members[name](), faults).changes == set()


@pytest.mark.parametrize(
    "strategy",
    [
        ob.AsyncFixed(compression=ob.compression.TopK(0.2)),
        ob.Gossip(partner=ob.parts.FirstAvailable(), compression=ob.compression.Int8()),
        ob.Population(compression=ob.compression.BFloat16()),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_the_same_holds_for_compressed_messages(strategy: ob.Strategy) -> None:
    assert run(strategy, FAULTS).changes == set()


# A wrong node


class Counter(Stateful):
    total: int = 0

    def __init__(self) -> None:
        self._forgotten = 0
        self._history: list[Tensor] = []


class WrongNode(Stateful, Node):
    """It counts events where no checkpoint holds the number."""

    caches: ClassVar[tuple[str, ...]] = ("_memory",)

    _declared_count: int = 0
    _counter: Counter
    _random: np.random.Generator

    def __init__(self) -> None:
        self._count = 0
        self._memory = 0
        self._limit = 3
        self._counter = Counter()
        self._same_counter = self._counter
        self._random = randomness.stream(0, "test")
        self._other_random = randomness.stream(1, "test")

    def handle(self, event: Event) -> Iterable[Action]:
        return ()


def test_an_undeclared_attribute_that_changes_is_found() -> None:
    node = WrongNode()
    node._declared_count += 1
    node._memory += 1
    node._counter.total += 1
    node._random.random()
    assert undeclared_changes(node, WrongNode()) == []
    node._count += 1
    assert undeclared_changes(node, WrongNode()) == ["WrongNode._count"]


def test_it_is_found_in_parts_generators_containers_and_new_attributes_too() -> None:
    node = WrongNode()
    node._counter._forgotten += 1
    node._counter._history.append(torch.ones(1))
    node._other_random.random()
    node.__dict__["_late"] = 1
    assert set(undeclared_changes(node, WrongNode())) == {
        "WrongNode._counter[0].Counter._forgotten",
        "WrongNode._counter[0].Counter._history",
        "WrongNode._late",
        "WrongNode._other_random",
    }


def test_a_forgotten_attribute_of_a_real_node_is_found_by_running_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = HubServer.handle

    def counting(self: HubServer, event: Event) -> Iterable[Action]:
        vars(self)["_events_seen"] = vars(self).get("_events_seen", 0) + 1
        return sound(self, event)

    monkeypatch.setattr(HubServer, "handle", counting)
    assert run(ob.AsyncFixed()).changes == {"HubServer._events_seen"}
