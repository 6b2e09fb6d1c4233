"""The state of a simulation: the scenario, the virtual clock, the event heap, the processes and the network.

`SimulationState` is what `Delivery`, `Rounds` and `FaultInjector` act on. `simulator.Simulation` derives from it and
adds the event loop.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from offbeat.cluster.cluster import Cluster
from offbeat.cluster.stragglers import RoundDelay, Speed
from offbeat.core.actions import Action, Budget, Finish
from offbeat.core.bandwidth import NetworkCard
from offbeat.core.events import Event
from offbeat.core.optimizers import Optimizer, Stepper
from offbeat.core.randomness import stream
from offbeat.core.strategy import Cadence, Node, NodeContext, Strategy
from offbeat.core.workload import Workload
from offbeat.engine.gradient_computer import GradientComputer
from offbeat.records.files import Writer
from offbeat.simulation.network import SimulatedNetwork
from offbeat.simulation.round_timing import Computation
from offbeat.strategies.compressed_node import build_node


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
    """If set, each worker steps its own copy of this optimizer, as a user's loop would, and nodes get `StepReady`."""
    notice_seconds: float = 0.0
    """The largest difference between the times at which two peers notice the same crash."""
    bytes_per_second: float | None = None
    """The bandwidth limit of each direction of each link; None: no limit."""


@dataclass(frozen=True, slots=True)
class PendingEvent:
    """An event for the node of a rank. It is created when it is handled; None if it is obsolete by then."""

    life: int
    """`Process.life` at the time of scheduling; the event is discarded if the process was restarted since."""
    event: Callable[[float], Event | None]


ScheduledEvent = PendingEvent | Callable[[], None]
"""An entry of the heap. None of them refers to itself, so that gradients are freed as soon as they are used."""


@dataclass
class Process:
    """One rank: its node and the simulator's bookkeeping for it."""

    node: Node
    worker: int | None
    """Its index among the ranks that compute; None for a rank that does not compute."""
    speed: Speed
    round_delays: Iterator[RoundDelay]
    """The delays of its rounds, in order."""
    natural_speed: Speed
    """Its speed without injected slow-down."""
    delay_random: np.random.Generator
    """Draws the random delay of messages sent to this rank."""
    alive: bool = True
    life: int = 0
    """How many times it was restarted."""
    finish: Finish | None = None
    finished_at: float = 0.0
    busy_until: float = 0.0
    asleep: bool = False
    """Whether it is paused or busy with an update: its actions and events wait until it wakes up."""
    deferred_actions: list[Action] = field(default_factory=list)
    deferred_events: deque[PendingEvent] = field(default_factory=deque)
    computation: Computation | None = None
    timers: dict[str, int] = field(default_factory=dict)
    """name → the sequence number of the valid firing"""
    free_since: float = 0.0
    send_seconds: float = 0.0
    stepper: tuple[Stepper, Tensor] | None = None
    position: int = 0
    """Its position in the recorded trace of its speed, in samples."""
    known: dict[int, int] = field(default_factory=dict)
    """peer → the incarnation announced to the node, to which its messages are addressed"""

    @property
    def active(self) -> bool:
        return self.alive and self.finish is None


class SimulationState(ABC):
    """Everything that a run consists of at one moment of virtual time.

    scenario: what is simulated.
    writer: receives the records.
    strict: overwrite the tensors of an event after it was handled, unless the node kept, copied or sent them.
    """

    def __init__(self, scenario: Scenario, writer: Writer, *, strict: bool) -> None:
        self.scenario = scenario
        self.writer = writer
        self.strict = strict
        self.now = 0.0
        self._heap: list[tuple[float, int, int, ScheduledEvent]] = []
        """time, sequence number, rank or −1, event"""
        self._sequence = 0
        strategy, workers = scenario.strategy, scenario.workers
        self.size = strategy.processes(workers)
        scenario.cluster.check(max(self.size, workers), workers)
        self.faults = [fault for fault in scenario.cluster.faults if max(fault.affected) < self.size]
        """The faults of ranks that exist; a strategy with fewer processes ignores those of the others."""
        self.gradient_computer = GradientComputer(scenario.workload, scenario.seed)
        self.initial = self.gradient_computer.flat.parameters.clone()
        self._initial_buffers = tuple(buffer.clone() for buffer in self.gradient_computer.flat.buffers)
        self.computing_ranks = [rank for rank in range(self.size) if strategy.computes(rank)]
        self.processes = [self._process(rank) for rank in range(self.size)]
        self.active = self.size
        """How many processes are alive and have not finished."""
        self.network = self._connect()

    def _process(self, rank: int) -> Process:
        seed, cluster = self.scenario.seed, self.scenario.cluster
        worker = self.computing_ranks.index(rank) if self.scenario.strategy.computes(rank) else None
        speed = cluster.speed(worker) if worker is not None else Speed(seconds_per_update=cluster.seconds_per_update)
        return Process(
            node=self.new_node(rank),
            worker=worker,
            speed=speed,
            round_delays=speed.straggle.draws(stream(seed, "speed", rank)),
            natural_speed=speed if worker is None else cluster.natural_speed(worker),
            delay_random=stream(seed, "delay", rank),
            position=_first_position(speed, stream(seed, "spread", rank)),
        )

    def new_node(self, rank: int, life: int = 0) -> Node:
        """A node of this rank as it is after `life` restarts."""
        context = NodeContext(
            rank=rank,
            members=tuple(range(self.size)),
            layout=self.gradient_computer.flat.layout,
            parameters=self.initial,
            buffers=self._initial_buffers,
            random=stream(self.scenario.seed, "node", rank, life),
            until=self.scenario.until,
            evaluate=self.scenario.evaluate,
        )
        return build_node(self.scenario.strategy, context)

    def _connect(self) -> SimulatedNetwork:
        cluster = self.scenario.cluster
        network = SimulatedNetwork({} if cluster.measured else self._cards(), self.scenario.bytes_per_second)
        for rank in range(self.size):
            for peer in self.scenario.strategy.peers(rank, self.size):
                link = cluster.link_between(self.processes[rank].worker, self.processes[peer].worker)
                # Bandwidths are measured while all links are busy: cards are not shared a second time.
                network.connect(rank, peer, link, shared=not cluster.measured)
        return network

    def _cards(self) -> dict[int, NetworkCard]:
        limits = {
            rank: self.scenario.cluster.link_of(process.worker).bytes_per_second
            for rank, process in enumerate(self.processes)
        }
        return {rank: NetworkCard(limit) for rank, limit in limits.items() if limit is not None}

    def schedule(self, time: float, rank: int, event: ScheduledEvent) -> int:
        """Put an event on the heap; returns its sequence number, by which ties are broken."""
        self._sequence += 1
        heapq.heappush(self._heap, (time, self._sequence, rank, event))
        return self._sequence

    def emit(self, time: float, rank: int, event: Callable[[float], Event | None]) -> int:
        """Let the node of a rank handle an event at `time`, or when it wakes up; `event` creates it then."""
        return self.schedule(time, rank, PendingEvent(self.processes[rank].life, event))

    def sleep(self, rank: int, until: float) -> None:
        """Suspend a rank until then: its actions are deferred, and so are its events."""
        process = self.processes[rank]
        life = process.life
        process.asleep = True
        process.busy_until = max(process.busy_until, until)

        def wake() -> None:
            if process.life == life and process.active and self.now >= process.busy_until:
                self._wake(rank)

        self.schedule(process.busy_until, rank, wake)

    @abstractmethod
    def _wake(self, rank: int) -> None:
        """Resume a rank: carry out its deferred actions, then handle its deferred events, in order."""


def _first_position(speed: Speed, rng: np.random.Generator) -> int:
    """A random first position in the recorded trace of a speed, so that workers are not slow at the same time."""
    trace = speed.speed_trace
    return 0 if trace is None else int(rng.integers(len(trace.factors))) * trace.samples
