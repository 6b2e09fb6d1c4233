"""Shared network cards and bandwidth limits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from scenes import NAMES, play
from torch import Tensor

import offbeat as ob
from offbeat.core.actions import Action, Finish, Send, SetTimer
from offbeat.core.events import Event, MessageArrived, PeerJoined, Sent, TimerFired
from offbeat.core.messages import Message
from offbeat.core.wire_size import wire_size
from offbeat.lab.simulated_runs import record_bytes
from offbeat.records.files import MemoryWriter
from offbeat.records.schema import LinkUse
from offbeat.simulation.simulator import Simulation

LARGE = 44_000_000
"""The bytes of the parameters of a ResNet-18."""
LATENCY = 1e-3
GIGABYTE = ob.Link(latency_seconds=LATENCY, bytes_per_second=1e9)
LEAVES = LARGE / 1e9
VALUES = torch.zeros(LARGE, dtype=torch.uint8)


@dataclass(frozen=True)
class Box(Message):
    values: Tensor
    text: str = ""


def box(nbytes: int = LARGE, text: str = "") -> Box:
    """A message of so many bytes, header included."""
    return Box(VALUES[: nbytes - wire_size(Box(VALUES[:0])).nbytes], text)


@dataclass(frozen=True)
class Stage(ob.Strategy):
    """Ranks that run the script of a test until a given time; rank 0 computes only if `hub` is false."""

    act: Callable[[Actor, Event], Iterable[Action]] = lambda actor, event: ()
    hub: bool = True
    ends: float = 10.0
    log: list[tuple[int, Event]] = field(default_factory=list)

    def processes(self, workers: int) -> int:
        return workers + self.hub

    def computes(self, rank: int) -> bool:
        return rank > 0 or not self.hub

    def peers(self, rank: int, processes: int) -> Iterable[int]:
        if self.hub:
            return range(1, processes) if rank == 0 else (0,)
        return (peer for peer in range(processes) if peer != rank)

    def node(self, context: ob.nodes.NodeContext) -> ob.nodes.Node:
        return Actor(self, context)


class Actor(ob.nodes.Node):
    def __init__(self, stage: Stage, context: ob.nodes.NodeContext) -> None:
        self.stage, self.context, self.rank = stage, context, context.rank

    def handle(self, event: Event) -> Iterable[Action]:
        self.stage.log.append((self.rank, event))
        if isinstance(event, ob.nodes.Started):
            yield SetTimer("end", self.stage.ends - event.at)
        if isinstance(event, TimerFired) and event.name == "end":
            yield Finish(self.context.parameters, self.context.buffers, 0)
        else:
            yield from self.stage.act(self, event)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


def staged(stage: Stage, cluster: ob.Cluster, workers: int, budget: float | None = None) -> Stage:
    workload = ob.workloads.Quadratic(dimension=2, examples=8).build()
    experiment = ob.Experiment(
        workload, stage, cluster=cluster, workers=workers, until=ob.Samples(1), evaluate=None, bytes_per_second=budget
    )
    Simulation(experiment, MemoryWriter()).run()
    return stage


def arrivals(stage: Stage, *ranks: int) -> list[tuple[int, float]]:
    """The ranks that received a message, and when."""
    events = [(rank, event.at) for rank, event in stage.log if isinstance(event, MessageArrived)]
    return [(rank, at) for rank, at in events if not ranks or rank in ranks]


def departures(stage: Stage, rank: int) -> list[tuple[int, float]]:
    """The destinations of the messages that have left this rank, and when."""
    return [(event.to, event.at) for of, event in stage.log if of == rank and isinstance(event, Sent)]


def close_to(expected: list[tuple[int, float]]) -> list[Any]:
    return [pytest.approx(pair, abs=1e-9) for pair in expected]


def to_hub(actor: Actor, event: Event) -> Iterable[Action]:
    if isinstance(event, PeerJoined) and actor.rank > 0:
        yield Send(0, box())


def to_all(actor: Actor, event: Event) -> Iterable[Action]:
    if isinstance(event, PeerJoined) and actor.rank == 0:
        yield Send(event.peer, box())


# Cards


def test_two_messages_into_one_hub_arrive_one_after_the_other() -> None:
    stage = staged(Stage(to_hub), ob.Cluster(link=GIGABYTE), 2)
    assert arrivals(stage) == close_to([(0, LEAVES + LATENCY), (0, 2 * LEAVES + LATENCY)])
    assert departures(stage, 1) == departures(stage, 2) == close_to([(0, LEAVES)])


def test_messages_of_a_hub_to_eight_workers_leave_one_after_the_other() -> None:
    stage = staged(Stage(to_all), ob.Cluster(link=GIGABYTE), 8)
    assert arrivals(stage) == close_to([(rank, rank * LEAVES + LATENCY) for rank in range(1, 9)])
    assert departures(stage, 0) == close_to([(rank, rank * LEAVES) for rank in range(1, 9)])


def test_a_fast_hub_is_limited_by_slow_workers() -> None:
    slow = (ob.stragglers.WorkerOverride(tuple(range(8)), link=GIGABYTE),)
    cluster = ob.Cluster(link=ob.Link(bytes_per_second=1e10), workers=slow)
    out = staged(Stage(to_all), cluster, 8)
    assert arrivals(out) == close_to([(rank, (rank - 1) * LEAVES / 10 + LEAVES + LATENCY) for rank in range(1, 9)])
    into = staged(Stage(to_hub), cluster, 8)
    assert arrivals(into) == close_to([(0, LEAVES + LATENCY)] * 8)


def test_a_slow_hub_limits_fast_workers() -> None:
    fast = (ob.stragglers.WorkerOverride((0, 1), link=ob.Link(latency_seconds=LATENCY)),)
    cluster = ob.Cluster(link=ob.Link(bytes_per_second=1e9), workers=fast)
    assert arrivals(staged(Stage(to_hub), cluster, 2)) == close_to([(0, LEAVES + LATENCY), (0, 2 * LEAVES + LATENCY)])


def test_cards_are_full_duplex() -> None:
    def act(actor: Actor, event: Event) -> Iterable[Action]:
        yield from to_hub(actor, event)
        yield from to_all(actor, event)

    stage = staged(Stage(act), ob.Cluster(link=GIGABYTE), 2)
    assert arrivals(stage, 0) == close_to([(0, LEAVES + LATENCY), (0, 2 * LEAVES + LATENCY)])
    assert arrivals(stage, 1, 2) == close_to([(1, LEAVES + LATENCY), (2, 2 * LEAVES + LATENCY)])


def test_links_of_one_card_take_turns() -> None:
    def act(actor: Actor, event: Event) -> Iterable[Action]:
        if isinstance(event, PeerJoined) and actor.rank == 0:
            yield Send(event.peer, box(text="first"))
            yield Send(event.peer, box(text="second"))

    stage = staged(Stage(act), ob.Cluster(link=GIGABYTE), 3)
    assert [rank for rank, _ in arrivals(stage)] == [1, 2, 3, 1, 2, 3]


def test_a_message_that_waits_for_the_card_is_superseded() -> None:
    def act(actor: Actor, event: Event) -> Iterable[Action]:
        if isinstance(event, PeerJoined) and actor.rank == 0:
            yield Send(event.peer, box(text="old"), supersedes="newest")
            yield SetTimer("newer", LEAVES / 2)
        if isinstance(event, TimerFired) and event.name == "newer":
            for rank in (1, 2):
                yield Send(rank, box(text="new"), supersedes="newest")

    stage = staged(Stage(act), ob.Cluster(link=GIGABYTE), 2)
    texts = [(rank, event.message.text) for rank, event in stage.log if isinstance(event, MessageArrived)]  # type: ignore[attr-defined]
    assert texts == [(1, "old"), (2, "new"), (1, "new")]


def test_a_busy_receiver_throttles_its_senders() -> None:
    """Otherwise a worker could send gradients without limit, and they would arrive hours later."""

    def act(actor: Actor, event: Event) -> Iterable[Action]:
        if actor.rank > 0 and isinstance(event, PeerJoined | Sent):
            yield Send(0, box())

    stage = staged(Stage(act, ends=4.0), ob.Cluster(link=GIGABYTE), 4)
    left = sum(len(departures(stage, rank)) for rank in range(1, 5))
    arrived = len(arrivals(stage, 0))
    assert arrived == pytest.approx(4.0 / LEAVES, abs=2), "all of the hub's card is used"
    assert left - arrived <= 4 + 1
    by_worker = [len(departures(stage, rank)) for rank in range(1, 5)]
    assert max(by_worker) - min(by_worker) <= 1


def test_a_rank_that_crashes_frees_its_card() -> None:
    crash = ob.faults.Crash(1, LEAVES / 2, back_after_seconds=LEAVES / 4)
    stage = staged(Stage(to_hub), ob.Cluster(link=GIGABYTE, faults=(crash,)), 1)
    assert arrivals(stage) == close_to([(0, LEAVES * 3 / 4 + LEAVES + LATENCY)])


def test_a_link_that_is_cut_does_not_block_the_card() -> None:
    cut = ob.faults.Partition((1,), LEAVES / 4, 20.0)
    cluster = ob.Cluster(link=GIGABYTE, faults=(cut,), silence_seconds=LEAVES / 4)
    stage = staged(Stage(to_all), cluster, 3)
    assert arrivals(stage) == close_to([(2, 2 * LEAVES + LATENCY), (3, 3 * LEAVES + LATENCY)])


def test_measured_links_do_not_share_cards() -> None:
    stage = staged(Stage(to_hub), ob.Cluster(link=GIGABYTE, measured=True), 2)
    assert arrivals(stage) == close_to([(0, LEAVES + LATENCY)] * 2)


def test_without_a_limit_there_are_neither_cards_nor_further_events() -> None:
    def events(link: ob.Link) -> list[float]:
        return [event.at for _, event in staged(Stage(to_hub), ob.Cluster(link=link), 4).log]

    assert events(ob.Link()) == events(ob.Link(bytes_per_second=float("inf")))
    scene = play(ob.AsyncFixed(), workers=4, until=ob.Samples(500))
    assert scene.simulation.network.cards == {}


# Cards and bandwidth limits under random traffic


RATE = 1e5
ROUNDING = 1 + 1e-9


def chatter(seed: int) -> Callable[[Actor, Event], Iterable[Action]]:
    """All ranks send messages of random sizes to each other at random times; the key of each is its size."""
    random = np.random.default_rng(seed)
    numbers = iter(range(10**6))

    def act(actor: Actor, event: Event) -> Iterable[Action]:
        if isinstance(event, PeerJoined | TimerFired):
            peer = int(random.choice([rank for rank in range(4) if rank != actor.rank]))
            for _ in range(int(random.integers(1, 4))):
                nbytes = int(random.integers(1_100, 30_000))
                yield Send(peer, box(nbytes), supersedes=f"{next(numbers)} {nbytes}")
            yield SetTimer(f"next {peer}", float(random.exponential(0.1)))

    return act


def by_link(stage: Stage) -> dict[tuple[int, int], list[tuple[float, int]]]:
    """link and direction → departure times and bytes"""
    events: dict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)
    for rank, event in stage.log:
        if isinstance(event, Sent):
            assert event.key is not None
            events[rank, event.to].append((event.at, int(event.key.split()[1])))
    return events


def check_rate(moved: Iterable[tuple[float, int]], rate: float) -> float:
    """Check that no prefix of the run exceeds the rate; returns the share that was used."""
    total, last = 0, 0.0
    for at, nbytes in sorted(moved):
        total, last = total + nbytes, at
        assert total <= rate * at * ROUNDING
    return total / (rate * last)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("budget", [None, 3e4, 2e3])
def test_no_card_and_no_bandwidth_limit_is_ever_exceeded(seed: int, budget: float | None) -> None:
    link = ob.Link(latency_seconds=0.01, bytes_per_second=RATE, delay_std_seconds=0.005)
    stage = staged(Stage(chatter(seed), hub=False, ends=30.0), ob.Cluster(link=link), 4, budget)
    links = by_link(stage)
    assert len(links) == 12
    for rank in range(4):
        check_rate([pair for (source, _), moved in links.items() if source == rank for pair in moved], RATE)
        received = [
            (event.at, event.nbytes) for of, event in stage.log if of == rank and isinstance(event, MessageArrived)
        ]
        check_rate(received, RATE)
    if budget is not None:
        used = [check_rate(moved, budget) for moved in links.values()]
        assert max(used) > 0.95, "a rank with much more to send uses all of the limit"
        assert min(used) > 0.5


def test_a_low_bandwidth_limit_passes_whole_messages_one_by_one() -> None:
    stage = staged(Stage(to_all), ob.Cluster(), 2, budget=1e8)
    assert arrivals(stage) == close_to([(1, 0.44), (2, 0.44)])
    assert departures(stage, 0) == close_to([(1, 0.44), (2, 0.44)])


def test_a_rate_limited_message_is_superseded_and_dropped_when_its_link_is_cut() -> None:
    def act(actor: Actor, event: Event) -> Iterable[Action]:
        if isinstance(event, PeerJoined) and actor.rank == 0:
            for text in ("old", "new"):
                yield Send(event.peer, box(text=text), supersedes="newest")

    cut = ob.faults.Partition((2,), 1.0, 12.0)
    cluster = ob.Cluster(faults=(cut,), silence_seconds=2.0)
    stage = staged(Stage(act, ends=20.0), cluster, 2, budget=1e7)
    events = [(rank, event.message.text, event.at) for rank, event in stage.log if isinstance(event, MessageArrived)]  # type: ignore[attr-defined]
    # The link to rank 2 was cut at 3.0; when it is restored, at 13.0, the bucket holds one second's worth.
    assert events == [(1, "new", pytest.approx(4.4)), (2, "new", pytest.approx(13.0 + 3.4))]


# Strategies under a bandwidth limit


def on_budget(strategy: ob.Strategy, budget: float | None, **settings: Any) -> ob.Run:
    arguments: dict[str, Any] = {"until": ob.Seconds(20.0), "workers": 3, "evaluate": None, **settings}
    cluster = ob.Cluster(seconds_per_sample=1e-3)
    return ob.simulate(ob.workloads.Quadratic(dimension=500), strategy, cluster, bytes_per_second=budget, **arguments)


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_keeps_to_a_bandwidth_limit_and_finishes(name: str) -> None:
    budget = 2e4
    run = on_budget(ob.Strategy.members[name](), budget, until=ob.Seconds(12.0))
    assert run.summary.failure is None
    uses = [record for record in run.records.records if isinstance(record, LinkUse)]
    assert uses
    for use in uses:
        assert all(nbytes <= budget * use.at * ROUNDING for nbytes in use.used.values())
    assert run.summary.bytes_sent == sum(nbytes for use in uses for nbytes in use.used.values())
    assert run.summary.budget_used is not None
    assert 0 < run.summary.budget_used <= ROUNDING


@pytest.mark.slow
def test_a_bandwidth_limit_far_below_the_demand_is_used_and_reported() -> None:
    strategy = ob.AsyncFixed(batch=4, microbatch=4, messages=1)
    until = ob.Seconds(3.0)
    free, thrifty = on_budget(strategy, None, until=until), on_budget(strategy, 2e4, until=until)
    assert free.summary.bytes_per_second is not None
    assert free.summary.bytes_per_second / 6 > 5 * 2e4, "six directions in all"
    assert thrifty.summary.budget_used is not None
    assert 0.9 < thrifty.summary.budget_used <= ROUNDING
    assert "of the bandwidth limit used on the busiest link" in str(thrifty.summary)
    assert (free.summary.budget_used, free.summary.budget_used_mean) == (None, None)
    assert "budget" not in str(free.summary)
    assert not any(isinstance(record, LinkUse) for record in free.records.records)


@pytest.mark.slow
def test_a_bandwidth_limit_that_is_never_reached_only_delays_the_first_messages() -> None:
    """The token bucket starts empty, so the first messages wait; there is no other difference."""
    strategy = ob.FixedMinibatch(batch=64, microbatch=64)
    free, ample = on_budget(strategy, None), on_budget(strategy, 1e12)
    assert free.summary.updates == ample.summary.updates
    assert free.summary.seconds == pytest.approx(ample.summary.seconds, abs=1e-6)


def test_the_same_seed_under_a_bandwidth_limit_writes_the_same_bytes() -> None:
    first, again = (on_budget(ob.AsyncFixed(), 2e4, until=ob.Seconds(5.0)) for _ in range(2))
    assert record_bytes(first.records.records) == record_bytes(again.records.records)
