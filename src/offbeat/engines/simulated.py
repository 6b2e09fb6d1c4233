"""The virtual-time engine: all nodes in one process, real gradients, no waiting.

One heap of (time, sequence, rank, happening). The next happening is taken, the clock jumps to it, the node of
that rank handles it, and its actions put new happenings on the heap. All randomness comes from streams derived
from the seed, per rank and purpose, and ties are broken by sequence: same seed, same bytes.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from offbeat.actions import (
    Action,
    Budget,
    Cancel,
    ClearTimer,
    Compute,
    Evaluate,
    Finish,
    Report,
    Seconds,
    Send,
    SetTimer,
)
from offbeat.cluster import Cluster, Corrupt, Crash, Link, Partition, Pause, Speed
from offbeat.configuration import require
from offbeat.engines.computing import Batches, Computing
from offbeat.engines.network import LinkState, Network
from offbeat.engines.pace import Pace
from offbeat.engines.sent_tensors import SentTensors
from offbeat.errors import ContractViolation
from offbeat.events import (
    Evaluated,
    Event,
    GradientReady,
    MessageArrived,
    PeerJoined,
    PeerLost,
    Sent,
    Started,
    StepReady,
    TimerFired,
)
from offbeat.messages import Message
from offbeat.optimizers import Optimizer, Stepper
from offbeat.randomness import stream
from offbeat.records.files import Writer
from offbeat.records.schema import Ended, Round, Update
from offbeat.strategies.strategy import Cadence, Node, Setup, Strategy
from offbeat.workloads.examples import Order
from offbeat.workloads.workload import Workload


class Observer(Protocol):
    """Looks on. `before` may swap the node of that rank; `after` sees what it asked for."""

    def before(self, simulation: Simulation, rank: int, event: Event) -> None: ...
    def after(self, simulation: Simulation, rank: int, event: Event, actions: list[Action]) -> None: ...


@dataclass
class Computation:
    """The outstanding computation of a rank."""

    action: Compute
    pace: Pace
    samples: int
    start: float
    ends: float
    parameters_version: int
    """torch's count of in-place changes, to notice a node that changes what it should not"""
    paused: float = 0.0
    """Seconds of the round that the process stood still."""


@dataclass
class Process:
    """One rank: its node and what the engine keeps for it."""

    node: Node
    worker: int | None
    speed: Speed
    speed_random: np.random.Generator
    delay_random: np.random.Generator
    alive: bool = True
    life: int = 0
    """How many times it has been started anew."""
    finish: Finish | None = None
    finished_at: float = 0.0
    busy_until: float = 0.0
    asleep: bool = False
    """Whether it is paused or busy with an update: its actions and events wait until it wakes up."""
    unfinished: list[Action] = field(default_factory=list)
    waiting: deque[Delivery] = field(default_factory=deque)
    computation: Computation | None = None
    timers: dict[str, int] = field(default_factory=dict)
    """name → the sequence number of the firing that counts"""
    free_since: float = 0.0
    send_seconds: float = 0.0
    stepper: tuple[Stepper, Tensor] | None = None
    known: dict[int, int] = field(default_factory=dict)
    """peer → the incarnation that the node has been told of, to which it means to send"""

    @property
    def active(self) -> bool:
        return self.alive and self.finish is None


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


@dataclass(frozen=True, eq=False)
class Outcome:
    """How it ended."""

    seconds: float
    events: int
    finishes: dict[int, Finish]
    failure: str | None


class _Lease:
    """`keep` of a message whose buffers will be taken back."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.kept = False

    def __call__(self) -> Message:
        self.kept = True
        return self.message


@dataclass(frozen=True, slots=True)
class Delivery:
    """An event for the node of a rank, made when it is handled; None where it has lost its point by then."""

    life: int
    event: Callable[[float], Event | None]


Happening = Delivery | Callable[[], None]
"""What the heap holds. None of them refers to itself: gradients must go when they are used, not when memory is low."""


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
        self.bytes_sent = 0
        self.messages_sent = 0
        self._writer = writer
        self._observer = observer
        self._strict = strict
        self._events_max = events_max
        self._heap: list[tuple[float, int, int, Happening]] = []
        self._sequence = 0
        self._sent = SentTensors()
        self._active = 0
        """How many processes are alive and have not finished."""

        strategy, workers = scenario.strategy, scenario.workers
        self.size = strategy.processes(workers)
        scenario.cluster.check(self.size, workers)
        self._check_faults()
        self.computing = Computing(scenario.workload, scenario.seed)
        self._initial = self.computing.flat.parameters.clone()
        self._initial_buffers = tuple(buffer.clone() for buffer in self.computing.flat.buffers)
        self._computing_ranks = [rank for rank in range(self.size) if strategy.computes(rank)]
        self._orders: dict[int, Order] = {}
        self.processes = [self._process(rank) for rank in range(self.size)]
        self._active = self.size
        self.network = self._connect()

    # Building

    def _check_faults(self) -> None:
        for fault in self.scenario.cluster.faults:
            returns = isinstance(fault, Crash) and fault.back_after_seconds is not None
            require(
                not returns or self.scenario.strategy.computes(fault.affected[0]),
                f"rank {fault.affected[0]} holds the parameters and is gone with them when it crashes, so it cannot "
                "come back in a simulation; leave back_after_seconds out, or crash a rank that computes",
            )

    def _process(self, rank: int) -> Process:
        seed, cluster = self.scenario.seed, self.scenario.cluster
        worker = self._computing_ranks.index(rank) if self.scenario.strategy.computes(rank) else None
        speed = cluster.speed(worker) if worker is not None else Speed(seconds_per_update=cluster.seconds_per_update)
        return Process(
            node=self.scenario.strategy.node(self._setup(rank, life=0)),
            worker=worker,
            speed=speed,
            speed_random=stream(seed, "speed", rank),
            delay_random=stream(seed, "delay", rank),
        )

    def _setup(self, rank: int, life: int) -> Setup:
        return Setup(
            rank=rank,
            members=tuple(range(self.size)),
            layout=self.computing.flat.layout,
            parameters=self._initial,
            buffers=self._initial_buffers,
            random=stream(self.scenario.seed, "node", rank, life),
            until=self.scenario.until,
            evaluate=self.scenario.evaluate,
        )

    def _connect(self) -> Network:
        network = Network()
        for rank in range(self.size):
            for peer in self.scenario.strategy.peers(rank, self.size):
                network.connect(rank, peer, self._link_between(rank, peer))
        return network

    def _link_between(self, a: int, b: int) -> Link:
        """The connection of the worker; between two workers, the worse of theirs in every respect."""
        cluster = self.scenario.cluster
        ends = [cluster.link_of(p.worker) for p in (self.processes[a], self.processes[b]) if p.worker is not None]
        limits = [end.bytes_per_second for end in ends if end.bytes_per_second is not None]
        return Link(
            latency_seconds=max(end.latency_seconds for end in ends),
            bytes_per_second=min(limits) if limits else None,
            delay_std_seconds=max(end.delay_std_seconds for end in ends),
        )

    def _order(self, rank: int) -> Order:
        if rank not in self._orders:
            workload, seed = self.scenario.workload, self.scenario.seed
            worker = self._computing_ranks.index(rank)
            indices = workload.split.indices(workload.train.targets, worker, len(self._computing_ranks), seed)
            self._orders[rank] = Order(indices, seed, rank)
        return self._orders[rank]

    # Running

    def run(self) -> Outcome:
        """Run to the end."""
        for rank in range(self.size):
            self._deliver(0.0, rank, lambda at: Started(at))
        for (a, b), link in self.network:
            self._announce(a, b, link)
        for fault in self.scenario.cluster.faults:
            self._at(fault.at_seconds, -1, lambda fault=fault: self._strike(fault))  # type: ignore[misc]
        with torch.random.fork_rng(devices=[]):
            while self._heap and self._active:
                self.now, _, rank, happening = heapq.heappop(self._heap)
                if isinstance(happening, Delivery):
                    self._delivered(rank, happening)
                else:
                    happening()
        return self._outcome()

    def _outcome(self) -> Outcome:
        """The finish of the lowest rank decides: the hub's, where there is one. Others may wait for it in vain."""
        finishes = {rank: process.finish for rank, process in enumerate(self.processes) if process.finish is not None}
        stuck = [rank for rank, process in enumerate(self.processes) if process.active]
        failure = finishes[min(finishes)].failure if finishes else None
        if stuck and failure is None:
            failure = f"nothing was left to happen at {self.now:g} s, but rank {stuck[0]} had not finished"
        done = [self.processes[rank].finished_at for rank, finish in finishes.items() if finish.failure is None]
        seconds = max(done) if done and failure is None else self.now
        self._writer.write(
            Ended(at=seconds, bytes_sent=self.bytes_sent, messages_sent=self.messages_sent, failure=failure)
        )
        return Outcome(seconds, self.events, finishes, failure)

    def _at(self, time: float, rank: int, happening: Happening) -> int:
        self._sequence += 1
        heapq.heappush(self._heap, (time, self._sequence, rank, happening))
        return self._sequence

    def _deliver(self, time: float, rank: int, event: Callable[[float], Event | None]) -> int:
        """Let the node of `rank` handle an event at `time`, or when it can; the event is made then."""
        return self._at(time, rank, Delivery(self.processes[rank].life, event))

    def _delivered(self, rank: int, delivery: Delivery) -> None:
        process = self.processes[rank]
        if not process.active or process.life != delivery.life:
            return
        if process.asleep:
            process.waiting.append(delivery)
            return
        event = delivery.event(self.now)
        if event is not None:
            self._handle(rank, event)

    def _sleep(self, rank: int, until: float) -> None:
        """Let a rank do nothing until then: no action leaves it, and no event reaches it."""
        process = self.processes[rank]
        life = process.life
        process.asleep = True
        process.busy_until = max(process.busy_until, until)

        def wake() -> None:
            if process.life == life and process.active and self.now >= process.busy_until:
                self._wake(rank)

        self._at(process.busy_until, rank, wake)

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
        if self._strict:
            self._take_back(event)

    def _take_back(self, event: Event) -> None:
        """Overwrite what was lent with an event, unless it was kept or sent."""
        lent: list[Tensor] = []
        if isinstance(event, GradientReady):
            lent = [event.gradient, *event.buffers]
        elif isinstance(event, StepReady):
            lent = [event.delta, *event.buffers]
        elif isinstance(event, MessageArrived) and isinstance(event.keep, _Lease) and not event.keep.kept:
            lent = list(event.message.tensors())
        for tensor in lent:
            if tensor not in self._sent:
                tensor.fill_(float("nan") if tensor.is_floating_point() else -1)

    def _carry_out(self, rank: int, actions: Iterable[Action]) -> None:
        process = self.processes[rank]
        for action in actions:
            if isinstance(action, Report):
                self._writer.write(action.record)
                if isinstance(action.record, Update) and process.speed.seconds_per_update > 0:
                    self._sleep(rank, self.now + process.speed.seconds_per_update)
            elif process.asleep:
                process.unfinished.append(action)
            else:
                self._do(rank, action)

    def _do(self, rank: int, action: Action) -> None:
        match action:
            case Send():
                self._send(rank, action)
            case Compute():
                self._compute(rank, action)
            case Cancel():
                self._cancel(rank)
            case SetTimer(name=name, seconds=seconds):
                self._set_timer(rank, name, seconds)
            case ClearTimer(name=name):
                self.processes[rank].timers.pop(name, None)
            case Evaluate():
                self._evaluate(rank, action)
            case Finish():
                self._finish(rank, action)
            case _:
                raise ContractViolation(f"rank {rank} asked for {action!r}, which is not an action")

    def swap(self, rank: int, node: Node) -> None:
        """Put another node in the place of this one; `check_strategy` does it through state and restore."""
        self.processes[rank].node = node

    def fresh_node(self, rank: int) -> Node:
        """A new node of this rank, as after a restart."""
        return self.scenario.strategy.node(self._setup(rank, self.processes[rank].life))

    # Computing

    def _compute(self, rank: int, action: Compute) -> None:
        process = self.processes[rank]
        if process.worker is None:
            raise ContractViolation(f"rank {rank} asked for Compute, but its strategy says that it does not compute")
        if process.computation is not None:
            raise ContractViolation(f"rank {rank} asked for a second Compute while one was outstanding")
        pace = Pace(process.speed, process.speed.straggle.draw(process.speed_random), action.microbatch)
        samples = pace.samples(action.budget)
        ends = self.now + pace.seconds(samples)
        snapshot = self._snapshot(action)
        computation = Computation(snapshot, pace, samples, self.now, ends, snapshot.parameters._version)
        process.computation = computation
        self._compute_ends(rank, computation)

    def _snapshot(self, action: Compute) -> Compute:
        """The values as they are now. A tensor that has been sent is immutable by contract and need not be copied."""
        if action.parameters in self._sent or action.parameters is self._initial:
            return action
        return Compute(
            action.parameters.clone(),
            tuple(buffer.clone() for buffer in action.buffers),
            action.version,
            action.draw,
            action.budget,
            action.microbatch,
        )

    def _compute_ends(self, rank: int, computation: Computation) -> None:
        def event(at: float) -> Event | None:
            if self.processes[rank].computation is not computation:
                return None
            if computation.ends > at:  # it was paused
                self._compute_ends(rank, computation)
                return None
            return self._computed(rank, computation)

        self._deliver(computation.ends, rank, event)

    def _cancel(self, rank: int) -> None:
        process, computation = self.processes[rank], self.processes[rank].computation
        if computation is None:
            return
        computed = self.now - computation.start - computation.paused
        samples = computation.pace.samples_when_cancelled(computed, computation.samples)
        if samples >= computation.samples:
            return
        ends = computation.start + computation.paused + computation.pace.seconds(samples) if samples else self.now
        process.computation = dataclasses.replace(computation, samples=samples, ends=max(self.now, ends))
        self._compute_ends(rank, process.computation)

    def _computed(self, rank: int, computation: Computation) -> GradientReady | StepReady:
        process, action = self.processes[rank], computation.action
        if action.parameters._version != computation.parameters_version:
            raise ContractViolation(f"rank {rank} changed a tensor that it had sent, while it was differentiated at")
        process.computation = None
        batches = Batches(
            self._order(rank), action.draw, computation.samples, action.microbatch, (self.scenario.seed, rank)
        )
        result = self.computing.gradient(action.parameters, action.buffers, batches)
        gradient, finite = result.gradient, result.finite
        if self._is_corrupt(rank):
            gradient, finite = gradient.fill_(float("nan")), False
        draws = (action.draw, action.draw + computation.samples)
        induced = min(computation.pace.disturbance.delay_seconds, self.now - computation.start)
        self._writer.write(
            Round(
                at=self.now,
                rank=rank,
                start=computation.start,
                seconds=self.now - computation.start,
                induced_seconds=induced,
                samples=computation.samples,
                loss=result.loss,
                version=action.version,
                draws=draws,
                idle_seconds=computation.start - process.free_since,
                send_seconds=process.send_seconds,
                finite=finite,
            )
        )
        process.free_since = self.now
        if self.scenario.user_optimizer is not None:
            kind, value = StepReady, self._user_step(process, action.parameters, gradient, computation.samples)
        else:
            kind, value = GradientReady, gradient  # type: ignore[assignment]
        return kind(
            self.now,
            value,
            computation.samples,
            result.loss,
            result.buffers,
            action.version,
            draws,
            self.now - computation.start,
            induced,
            finite,
        )

    def _user_step(self, process: Process, parameters: Tensor, gradient: Tensor, samples: int) -> Tensor:
        """The change that the worker's own optimizer makes of this gradient."""
        assert self.scenario.user_optimizer is not None
        if process.stepper is None:
            own = parameters.clone()
            process.stepper = self.scenario.user_optimizer.build(own, self.computing.flat.layout), own
        stepper, own = process.stepper
        own.copy_(parameters)
        stepper.step(gradient / max(1, samples), samples)
        return own - parameters

    def _is_corrupt(self, rank: int) -> bool:
        faults = (f for f in self.scenario.cluster.faults if isinstance(f, Corrupt) and f.rank == rank)
        return any(fault.at_seconds <= self.now < fault.at_seconds + fault.seconds for fault in faults)

    def _evaluate(self, rank: int, action: Evaluate) -> None:
        loss, accuracy = self.computing.evaluate(action.parameters, action.buffers)
        self._deliver(self.now, rank, lambda at: Evaluated(at, action.version, loss, accuracy))

    # Timers and the end

    def _set_timer(self, rank: int, name: str, seconds: float) -> None:
        if not seconds >= 0:
            raise ContractViolation(f"rank {rank} set the timer {name!r} to {seconds} s")
        timers = self.processes[rank].timers

        def event(at: float) -> Event | None:
            if timers.get(name) != sequence:
                return None
            del timers[name]
            return TimerFired(at, name)

        sequence = self._deliver(self.now + seconds, rank, event)
        timers[name] = sequence

    def _finish(self, rank: int, action: Finish) -> None:
        process = self.processes[rank]
        self._active -= 1
        process.finish = action
        process.finished_at = self.now
        process.computation = None
        process.timers = {}
        for peer in self.network.peers(rank):
            self._close(rank, peer)

    def _close(self, rank: int, peer: int) -> None:
        """A process that has finished is gone once its last message has arrived; who is left gets to know."""
        link = self._link(rank, peer)
        outbox = link.outboxes[rank]
        if not link.up or outbox.leaving is not None or outbox.queue or not self.processes[peer].active:
            return
        gone = max(self.now + self.scenario.cluster.crash_seen_seconds, outbox.last_arrival, link.held_until)
        self._at(gone, peer, lambda: self._cut(rank, peer, link, f"end of {rank}", told=(peer,)))

    # Messages

    def _send(self, rank: int, send: Send) -> None:
        link = self.network.link(rank, send.to)
        if link is None:
            raise ContractViolation(f"rank {rank} sent to {send.to}, which its strategy does not name as a peer")
        for tensor in send.message.tensors():
            self._sent.add(tensor)
        if link.up and self.processes[rank].known.get(send.to) == link.incarnation:
            link.outboxes[rank].put(send)
            self._transmit(rank, link)

    def _transmit(self, rank: int, link: LinkState) -> None:
        outbox, incarnation = link.outboxes[rank], link.incarnation
        send = outbox.next()
        if send is None:
            return
        nbytes = send.message.nbytes
        self.bytes_sent += nbytes
        self.messages_sent += 1
        seconds = outbox.config.transmit_seconds(nbytes)

        def left() -> None:
            if link.incarnation != incarnation or outbox.leaving is not send:
                return
            outbox.leaving = None
            self.processes[rank].send_seconds = seconds
            self._deliver(self.now, rank, lambda at: Sent(at, send.to, send.supersedes))
            self._travel(rank, send, link)
            self._transmit(rank, link)
            if self.processes[rank].finish is not None:
                self._close(rank, send.to)

        if seconds > 0:
            self._at(self.now + seconds, rank, left)
        else:
            left()

    def _travel(self, source: int, send: Send, link: LinkState) -> None:
        config = link.outboxes[source].config
        delay = config.latency_seconds
        if config.delay_std_seconds > 0:
            delay += config.draw_delay(self.processes[send.to].delay_random)

        arrival = Arrival(self, source, send, link, link.incarnation)
        outbox = link.outboxes[source]
        outbox.last_arrival = max(outbox.last_arrival, self.now + delay)
        self._deliver(self.now + delay, send.to, arrival)

    def hold(self, until: float, rank: int, arrival: Arrival) -> None:
        """Let a message arrive later."""
        self._deliver(until, rank, arrival)

    def arrived(self, at: float, source: int, message: Message) -> MessageArrived:
        for tensor in message.tensors():
            if self._sent.changed(tensor):
                raise ContractViolation(f"rank {source} changed a tensor of {type(message).__name__} after sending it")
        if self._strict:
            lease = _Lease(message.copy())
            return MessageArrived(at, source, lease.message, lease)
        return MessageArrived(at, source, message, lambda: message)

    # Faults

    def _announce(self, a: int, b: int, link: LinkState) -> None:
        incarnation = link.incarnation
        for rank, peer in ((a, b), (b, a)):
            self._deliver(self.now, rank, lambda at, peer=peer: PeerJoined(at, peer, incarnation))  # type: ignore[misc]

    def _strike(self, fault: object) -> None:
        match fault:
            case Crash():
                self._crash(fault)
            case Pause():
                self._pause(fault)
            case Partition():
                self._partition(fault)

    def _crash(self, fault: Crash) -> None:
        process = self.processes[fault.rank]
        if not process.active:
            return
        self._active -= 1
        process.alive = False
        process.computation, process.stepper, process.timers, process.known = None, None, {}, {}
        life = process.life
        reason = f"crash of {fault.rank}, life {life}"
        for peer in self.network.peers(fault.rank):
            self._link(fault.rank, peer).outboxes[fault.rank].clear()

        def seen() -> None:
            if self.processes[fault.rank].life == life:  # else it is back, and its coming back was the news
                for peer in self.network.peers(fault.rank):
                    self._cut(fault.rank, peer, self._link(fault.rank, peer), reason, told=(peer,))

        self._at(self.now + self.scenario.cluster.crash_seen_seconds, fault.rank, seen)
        if fault.back_after_seconds is not None:
            self._at(self.now + fault.back_after_seconds, fault.rank, lambda: self._come_back(fault.rank, reason))

    def _come_back(self, rank: int, reason: str) -> None:
        process = self.processes[rank]
        self._active += 1
        process.alive, process.life = True, process.life + 1
        process.busy_until, process.free_since, process.asleep = self.now, self.now, False
        process.unfinished, process.waiting = [], deque()
        process.node = self.fresh_node(rank)
        self._deliver(self.now, rank, lambda at: Started(at))
        for peer in self.network.peers(rank):
            link = self._link(rank, peer)
            self._cut(rank, peer, link, reason, told=(peer,))
            self._mend(rank, peer, link, reason)

    def _pause(self, fault: Pause) -> None:
        process = self.processes[fault.rank]
        if not process.active:
            return
        until = self.now + fault.seconds
        if process.computation is not None:
            self._hold_up(process.computation, fault.seconds)
        self._sleep(fault.rank, until)
        if fault.seconds > self.scenario.cluster.silence_seconds:
            pairs = [(fault.rank, peer) for peer in self.network.peers(fault.rank)]
            self._silence(pairs, until, f"pause of {fault.rank} at {self.now}")

    def _hold_up(self, computation: Computation, seconds: float) -> None:
        """A pause adds to the round. The clock of a time limit runs on meanwhile, so what is left of it shrinks."""
        budget, done = computation.action.budget, self.now - computation.start - computation.paused
        computation.paused += seconds
        if isinstance(budget, Seconds):
            left = max(budget.seconds - computation.paused, done, 1e-9)
            samples = computation.pace.samples(Seconds(left, samples_max=budget.samples_max))
            computation.samples = min(computation.samples, samples)
        computation.ends = computation.start + computation.paused + computation.pace.seconds(computation.samples)

    def _partition(self, fault: Partition) -> None:
        until = self.now + fault.seconds
        inside = set(fault.ranks)
        pairs = [pair for pair, _ in self.network if (pair[0] in inside) != (pair[1] in inside)]
        for a, b in pairs:
            link = self._link(a, b)
            link.held_until = max(link.held_until, until)
        if fault.seconds > self.scenario.cluster.silence_seconds:
            self._silence(pairs, until, f"partition at {self.now}")

    def _silence(self, pairs: list[tuple[int, int]], until: float, reason: str) -> None:
        """These links are given up after the silence limit, and come back when the silence ends."""
        given_up = self.now + self.scenario.cluster.silence_seconds

        def cut() -> None:
            for a, b in pairs:
                self._cut(a, b, self._link(a, b), reason, told=(a, b))

        def mend() -> None:
            for a, b in pairs:
                self._mend(a, b, self._link(a, b), reason)

        self._at(given_up, -1, cut)
        self._at(until, -1, mend)

    def _cut(self, a: int, b: int, link: LinkState, reason: str, told: tuple[int, ...]) -> None:
        """Take a link down for a reason. `told` are the ends that live to notice."""
        if reason in link.cuts:
            return
        was_up = link.up
        link.cuts.add(reason)
        link.cut()
        if was_up:
            incarnation = link.incarnation
            for rank, peer in ((a, b), (b, a)):
                if rank in told:
                    self._deliver(self.now, rank, lambda at, peer=peer: PeerLost(at, peer, incarnation))  # type: ignore[misc]

    def _mend(self, a: int, b: int, link: LinkState, reason: str) -> None:
        link.cuts.discard(reason)
        if not link.cuts and not link.up and self.processes[a].active and self.processes[b].active:
            link.mend()
            self._announce(a, b, link)

    def _link(self, a: int, b: int) -> LinkState:
        link = self.network.link(a, b)
        assert link is not None
        return link


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message under way. It arrives unless the link it left by is gone; a partition may hold it up."""

    simulation: Simulation
    source: int
    send: Send
    link: LinkState
    incarnation: int

    def __call__(self, at: float) -> Event | None:
        if not self.link.up or self.link.incarnation != self.incarnation:
            return None
        if self.link.held_until > at:
            self.simulation.hold(self.link.held_until, self.send.to, self)
            return None
        return self.simulation.arrived(at, self.source, self.send.message)
