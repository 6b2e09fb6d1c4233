"""The virtual-time engine: all nodes in one process, real gradients, no waiting.

One heap of (time, sequence, rank, happening). The next happening is taken, the clock jumps to it, the node of
that rank handles it, and its actions put new happenings on the heap. All randomness comes from streams derived
from the seed, per rank and purpose, and ties are broken by sequence: same seed, same bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from numpy.random import Generator

from offbeat.cluster import Cluster, Speed
from offbeat.core.actions import Action, Budget, Cancel, ClearTimer, Compute, Evaluate, Finish, Report, Send, SetTimer
from offbeat.core.bandwidth import NetworkCard
from offbeat.core.events import Event, PeerJoined, PeerLost, Started, TimerFired
from offbeat.core.optimizers import Optimizer
from offbeat.core.randomness import stream
from offbeat.core.strategy import Cadence, Node, NodeContext, Strategy
from offbeat.core.workload import Workload
from offbeat.errors import ContractViolation
from offbeat.records.files import Writer
from offbeat.records.schema import Ended, LinkUse, Update
from offbeat.simulation.delivery import Delivery
from offbeat.simulation.fault_injector import FaultInjector
from offbeat.simulation.gradients import Computing
from offbeat.simulation.network import Network
from offbeat.simulation.process import PendingEvent, Process, ScheduledEvent
from offbeat.simulation.rounds import Rounds
from offbeat.strategies.compressed_node import node_of


class Observer(Protocol):
    """Looks on. `before` may swap the node of that rank; `after` sees what it asked for."""

    def before(self, simulation: Simulation, rank: int, event: Event) -> None: ...
    def after(self, simulation: Simulation, rank: int, event: Event, actions: list[Action]) -> None: ...


@dataclass(frozen=True, eq=False)
class Scenario:
    """What is simulated."""

    strategy: Strategy
    workload: Workload
    cluster: Cluster
    workers: int
    until: Budget
    seed: int
    evaluate: Cadence | None = None
    user_optimizer: Optimizer | None = None
    """Where given, every worker steps this optimizer of its own, as a user's loop would, and nodes get StepReady."""
    notice_seconds: float = 0.0
    """So much later, at the most, some notice that a peer is lost than others do."""
    bytes_per_second: float | None = None
    """The bandwidth limit of each direction of each link; None: no limit."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """How it ended."""

    seconds: float
    events: int
    finishes: dict[int, Finish]
    failure: str | None


class Simulation:
    """One run. `run()` once."""

    def __init__(
        self,
        scenario: Scenario,
        writer: Writer,
        *,
        observer: Observer | None = None,
        strict: bool = False,
        events_max: int | None = None,
    ) -> None:
        """With `strict`, every lease is taken back: what a node did not keep, copy or send is overwritten.

        A run that has not ended after `events_max` events is a `ContractViolation`.
        """
        self.scenario = scenario
        self.now = 0.0
        self.events = 0
        self.writer = writer
        self._observer = observer
        self.strict = strict
        self._events_max = events_max
        self._heap: list[tuple[float, int, int, ScheduledEvent]] = []
        self._sequence = 0
        self.delivery = Delivery(self)
        self.rounds = Rounds(self)
        self.fault_injector = FaultInjector(self)
        self.active = 0
        """How many processes are alive and have not finished."""

        strategy, workers = scenario.strategy, scenario.workers
        self.size = strategy.processes(workers)
        scenario.cluster.check(max(self.size, workers), workers)
        self.faults = [fault for fault in scenario.cluster.faults if max(fault.affected) < self.size]
        """Those that can strike: where one trains alone, whatever befalls other workers is none of its business."""
        self.fault_injector.check()
        self.computing = Computing(scenario.workload, scenario.seed)
        self.initial = self.computing.flat.parameters.clone()
        self._initial_buffers = tuple(buffer.clone() for buffer in self.computing.flat.buffers)
        self.computing_ranks = [rank for rank in range(self.size) if strategy.computes(rank)]
        self.processes = [self._process(rank) for rank in range(self.size)]
        self.active = self.size
        self.network = self._connect()

    # Building

    def _process(self, rank: int) -> Process:
        seed, cluster = self.scenario.seed, self.scenario.cluster
        worker = self.computing_ranks.index(rank) if self.scenario.strategy.computes(rank) else None
        speed = cluster.speed(worker) if worker is not None else Speed(seconds_per_update=cluster.seconds_per_update)
        return Process(
            node=node_of(self.scenario.strategy, self._setup(rank, life=0)),
            worker=worker,
            speed=speed,
            round_delays=speed.straggle.draws(stream(seed, "speed", rank)),
            delay_random=stream(seed, "delay", rank),
            position=_first_position(speed, stream(seed, "spread", rank)),
        )

    def _setup(self, rank: int, life: int) -> NodeContext:
        return NodeContext(
            rank=rank,
            members=tuple(range(self.size)),
            layout=self.computing.flat.layout,
            parameters=self.initial,
            buffers=self._initial_buffers,
            random=stream(self.scenario.seed, "node", rank, life),
            until=self.scenario.until,
            evaluate=self.scenario.evaluate,
        )

    def _connect(self) -> Network:
        cluster = self.scenario.cluster
        network = Network({} if cluster.measured else self._cards(), self.scenario.bytes_per_second)
        for rank in range(self.size):
            for peer in self.scenario.strategy.peers(rank, self.size):
                link = cluster.link_between(self.processes[rank].worker, self.processes[peer].worker)
                # What was measured was so while all links were busy: nothing has to be shared once more.
                network.connect(rank, peer, link, shared=not cluster.measured)
        return network

    def _cards(self) -> dict[int, NetworkCard]:
        limits = {
            rank: self.scenario.cluster.link_of(process.worker).bytes_per_second
            for rank, process in enumerate(self.processes)
        }
        return {rank: NetworkCard(limit) for rank, limit in limits.items() if limit is not None}

    # Running

    def run(self) -> Outcome:
        """Run to the end."""
        for rank in range(self.size):
            self.deliver(0.0, rank, lambda at: Started(at))
        for (a, b), link in self.network:
            self.fault_injector.announce(a, b, link)
        for fault in self.faults:
            self.at(fault.at_seconds, -1, lambda fault=fault: self.fault_injector.strike(fault))  # type: ignore[misc]
        with torch.random.fork_rng(devices=[]):
            while self._heap and (self.active or self._will_begin_again()):
                self.now, _, rank, happening = heapq.heappop(self._heap)
                if isinstance(happening, PendingEvent):
                    self._delivered(rank, happening)
                else:
                    happening()
        return self._outcome()

    def _will_begin_again(self) -> bool:
        """Whether all are gone, nobody has come to an end, and somebody will be back."""
        return self.fault_injector.coming_back > 0 and all(process.finish is None for process in self.processes)

    def _outcome(self) -> Outcome:
        """The hub's finish decides, where there is one; others may wait for it in vain. Among peers one is enough."""
        finishes = {rank: process.finish for rank, process in enumerate(self.processes) if process.finish is not None}
        stuck = [rank for rank, process in enumerate(self.processes) if process.active]
        ends = {rank: finish.failure for rank, finish in finishes.items()}
        one_is_enough = not self.scenario.strategy.is_required(0) and None in ends.values()
        failure = None if not ends or one_is_enough else ends[min(ends)]
        if stuck and failure is None:
            failure = f"nothing was left to happen at {self.now:g} s, but rank {stuck[0]} had not finished"
        done = [self.processes[rank].finished_at for rank, finish in finishes.items() if finish.failure is None]
        seconds = max(done) if done and failure is None else self.now
        self.rounds.record_consensus(seconds, (process for process in self.processes if process.alive))
        self.record_traffic(seconds)
        self._record_link_use(seconds)
        sent = self.delivery.traffic
        self.writer.write(
            Ended(at=seconds, bytes_sent=sent.bytes_sent, messages_sent=sent.messages_sent, failure=failure)
        )
        return Outcome(seconds, self.events, finishes, failure)

    def _record_link_use(self, at: float) -> None:
        """Write down the bytes that each rank has sent under a bandwidth limit, where there is one."""
        limit = self.scenario.bytes_per_second
        if limit is not None:
            for rank in range(self.size):
                used = {str(peer): nbytes for peer, nbytes in self.network.limited_bytes(rank).items()}
                self.writer.write(LinkUse(at=at, rank=rank, bytes_per_second=limit, used=used))

    def record_traffic(self, at: float) -> None:
        """Write down what all ranks together have sent and received."""
        traffic = self.delivery.traffic.record(at)
        if traffic is not None:
            self.writer.write(traffic)

    def at(self, time: float, rank: int, happening: ScheduledEvent) -> int:
        self._sequence += 1
        heapq.heappush(self._heap, (time, self._sequence, rank, happening))
        return self._sequence

    def deliver(self, time: float, rank: int, event: Callable[[float], Event | None]) -> int:
        """Let the node of `rank` handle an event at `time`, or when it can; the event is made then."""
        return self.at(time, rank, PendingEvent(self.processes[rank].life, event))

    def _delivered(self, rank: int, delivery: PendingEvent) -> None:
        process = self.processes[rank]
        if not process.active or process.life != delivery.life:
            return
        if process.asleep:
            process.waiting.append(delivery)
            return
        event = delivery.event(self.now)
        if event is not None:
            self._handle(rank, event)

    def sleep(self, rank: int, until: float) -> None:
        """Let a rank do nothing until then: no action leaves it, and no event reaches it."""
        process = self.processes[rank]
        life = process.life
        process.asleep = True
        process.busy_until = max(process.busy_until, until)

        def wake() -> None:
            if process.life == life and process.active and self.now >= process.busy_until:
                self._wake(rank)

        self.at(process.busy_until, rank, wake)

    def _wake(self, rank: int) -> None:
        """First what was asked for before it fell asleep, then what has come in since, in order."""
        process = self.processes[rank]
        process.asleep = False
        actions, process.unfinished = process.unfinished, []
        self._carry_out(rank, actions)
        while process.waiting and not process.asleep and process.active:
            self._delivered(rank, process.waiting.popleft())

    def _handle(self, rank: int, event: Event) -> None:
        self.events += 1
        if self.events == self._events_max:
            raise ContractViolation(f"the run had not ended after {self.events:,} events, at {self.now:g} s")
        if isinstance(event, PeerJoined):
            self.processes[rank].known[event.peer] = event.incarnation
        elif isinstance(event, PeerLost):
            self.processes[rank].known.pop(event.peer, None)
        if self._observer is not None:
            self._observer.before(self, rank, event)
        actions = list(self.processes[rank].node.handle(event))
        if self._observer is not None:
            self._observer.after(self, rank, event, actions)
        self._carry_out(rank, actions)
        if self.strict:
            self.delivery.take_back(event)

    def _carry_out(self, rank: int, actions: Iterable[Action]) -> None:
        process = self.processes[rank]
        for action in actions:
            if isinstance(action, Report):
                self.writer.write(action.record)
                if isinstance(action.record, Update) and process.speed.seconds_per_update > 0:
                    self.sleep(rank, self.now + process.speed.seconds_per_update)
            elif process.asleep:
                process.unfinished.append(action)
            else:
                self._do(rank, action)

    def _do(self, rank: int, action: Action) -> None:
        match action:
            case Send():
                self.delivery.send(rank, action)
            case Compute():
                self.rounds.compute(rank, action)
            case Cancel():
                self.rounds.cancel(rank)
            case SetTimer(name=name, seconds=seconds):
                self._set_timer(rank, name, seconds)
            case ClearTimer(name=name):
                self.processes[rank].timers.pop(name, None)
            case Evaluate():
                self.rounds.evaluate(rank, action)
            case Finish():
                self._finish(rank, action)
            case _:
                raise ContractViolation(f"rank {rank} asked for {action!r}, which is not an action")

    def swap(self, rank: int, node: Node) -> None:
        """Put another node in the place of this one; `check_strategy` does it through state and restore."""
        self.processes[rank].node = node

    def fresh_node(self, rank: int) -> Node:
        """A new node of this rank, as after a restart."""
        return node_of(self.scenario.strategy, self._setup(rank, self.processes[rank].life))

    def _set_timer(self, rank: int, name: str, seconds: float) -> None:
        if not seconds >= 0:
            raise ContractViolation(f"rank {rank} set the timer {name!r} to {seconds} s")
        timers = self.processes[rank].timers

        def event(at: float) -> Event | None:
            if timers.get(name) != sequence:
                return None
            del timers[name]
            return TimerFired(at, name)

        sequence = self.deliver(self.now + seconds, rank, event)
        timers[name] = sequence

    def _finish(self, rank: int, action: Finish) -> None:
        process = self.processes[rank]
        self.active -= 1
        process.finish = action
        process.finished_at = self.now
        process.computation = None
        process.timers = {}
        for peer in self.network.peers(rank):
            self.delivery.close(rank, peer)


def _first_position(speed: Speed, rng: Generator) -> int:
    """Where in its recorded spread a worker begins: they should not be slow together because the record began so."""
    return 0 if speed.spread is None else int(rng.integers(len(speed.spread.factors))) * speed.spread.samples
