"""The parts of the simulator on their own: the event queue, a process, and links that go down and up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import torch

import offbeat as ob
from offbeat.cluster.stragglers import Speed
from offbeat.core.actions import Action, Cancel, ClearTimer, Finish, Report
from offbeat.core.events import Event, LossReason, PeerJoined, PeerLost, Started, TimerFired
from offbeat.core.strategy import Node
from offbeat.records.schema import Ended
from offbeat.simulation.event_queue import EventQueue
from offbeat.simulation.link_control import LinkControl
from offbeat.simulation.network import build_network
from offbeat.simulation.process import Process, RankSpeed


@dataclass
class CountsDown:
    """As many active processes as the function says."""

    left: Callable[[], int]

    @property
    def active(self) -> int:
        return self.left()


class Pair:
    """Two processes on one clock whose events and actions are collected."""

    def __init__(self) -> None:
        self.queue = EventQueue()
        self.events: list[tuple[int, Event]] = []
        self.actions: list[tuple[float, Action]] = []
        self.processes = [self._process(rank) for rank in (0, 1)]

    def _process(self, rank: int) -> Process:
        speed = RankSpeed(Speed(), Speed(), seed=0, rank=rank)
        process = Process(rank, rank, cast(Node, None), speed, self.queue, self._on_event)
        process.on_action = self._on_action
        return process

    def _on_event(self, process: Process, event: Event) -> None:
        self.events.append((process.rank, event))

    def _on_action(self, action: Action) -> None:
        self.actions.append((self.queue.now, action))

    def run(self) -> list[tuple[int, Event]]:
        self.queue.run_while(CountsDown(lambda: 1), bool)
        return self.events


def test_calls_are_made_in_the_order_of_time_then_of_scheduling() -> None:
    queue, made = EventQueue(), list[str]()

    def call(name: str, later: Iterable[tuple[float, str]] = ()) -> Callable[[], None]:
        def make() -> None:
            made.append(f"{name} at {queue.now:g}")
            for time, following in later:
                queue.schedule(time, call(following))

        return make

    queue.schedule(2.0, call("c"))
    queue.schedule(1.0, call("a", later=[(2.0, "d"), (1.0, "b")]))
    queue.schedule(3.0, call("not reached"))
    queue.run_while(CountsDown(lambda: 4 - len(made)), bool)
    assert made == ["a at 1", "b at 1", "c at 2", "d at 2"]


def test_a_sleeping_process_defers_events_and_actions_but_not_records() -> None:
    pair = Pair()
    process, record = pair.processes[0], Report(Ended(0.0, 0, 0, failure=None))
    process.emit(0.5, Started)
    process.sleep(1.0)
    process.carry_out([Cancel(), record, ClearTimer("x")])
    assert pair.actions == [(0.0, record)]
    assert pair.run() == [(0, Started(1.0))], "an event has the time at which it is handled"
    assert pair.actions[1:] == [(1.0, Cancel()), (1.0, ClearTimer("x"))]


def test_the_longest_of_several_sleeps_counts() -> None:
    pair = Pair()
    pair.processes[0].sleep(3.0)
    pair.processes[0].sleep(1.0)
    pair.processes[0].emit(0.0, Started)
    assert pair.run() == [(0, Started(3.0))]


def test_what_was_scheduled_before_a_restart_does_not_happen_after_it() -> None:
    pair = Pair()
    process = pair.processes[0]
    process.emit(2.0, Started)
    process.set_timer("old", 2.0)
    process.sleep(5.0)
    process.crash()
    process.restart(process.node)
    process.set_timer("new", 1.0)
    assert pair.run() == [(0, TimerFired(1.0, "new"))]
    assert process.life == 1


def test_nothing_happens_to_a_finished_process() -> None:
    pair = Pair()
    process = pair.processes[0]
    process.set_timer("late", 1.0)
    process.end(Finish(torch.zeros(1), (), 0))
    assert not process.active
    assert pair.run() == []


def test_a_link_stays_down_until_every_reason_is_removed_and_returns_as_the_next_incarnation() -> None:
    pair = Pair()
    network = build_network(ob.Cluster(), lambda rank: (1 - rank,), [0, 1], seed=0, bytes_per_second=None)
    links = LinkControl(pair.queue, pair.processes, network, crash_seen_seconds=0.0)
    links.announce_all()
    links.cut(0, 1, "pause", notify=(0, 1))
    links.cut(0, 1, "partition", notify=(0, 1))
    links.restore(0, 1, "pause")
    assert not network.link(0, 1).up
    links.restore(0, 1, "partition")
    ends = [PeerJoined(0.0, 1, 0), PeerLost(0.0, 1, 0, LossReason.BROKEN, "pause"), PeerJoined(0.0, 1, 1)]
    assert [event for rank, event in pair.run() if rank == 0] == ends


def test_the_links_of_a_finished_process_are_taken_down_and_its_peer_notices() -> None:
    pair = Pair()
    network = build_network(ob.Cluster(), lambda rank: (1 - rank,), [0, 1], seed=0, bytes_per_second=None)
    links = LinkControl(pair.queue, pair.processes, network, crash_seen_seconds=0.5)
    pair.processes[0].end(Finish(torch.zeros(1), (), 0))
    links.close_all(0)
    assert pair.run() == [(1, PeerLost(0.5, 0, 0, LossReason.CLOSED, "end of 0"))]
