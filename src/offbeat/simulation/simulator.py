"""The virtual-time engine: all nodes in one process, real gradients, no waiting.

A queue of calls, ordered by time. The loop takes the next one, advances the clock to its time, lets a node handle an
event, and the node's actions schedule new calls. All randomness comes from streams derived from the seed, per rank and
purpose, and ties are broken by sequence number: same seed, same bytes.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offbeat.core.actions import Action, Finish
from offbeat.core.events import Event, PeerJoined, PeerLost, Started
from offbeat.core.optimizers import Optimizer
from offbeat.core.strategy import Node
from offbeat.engine.batched_gradients import BatchedGradients
from offbeat.engine.batching import Batching, choose_batching
from offbeat.engine.dispatcher import dispatch
from offbeat.engine.experiment import Experiment
from offbeat.engine.gradient_computer import GradientComputer
from offbeat.errors import ContractViolation
from offbeat.records.files import Writer
from offbeat.records.schema import Notice
from offbeat.simulation.delivery import Delivery
from offbeat.simulation.evaluation_timing import EvaluationTiming
from offbeat.simulation.event_queue import EventQueue
from offbeat.simulation.fault_injector import FaultInjector
from offbeat.simulation.leases import SentTensors, revoke_lease
from offbeat.simulation.link_control import LinkControl
from offbeat.simulation.network import build_network
from offbeat.simulation.process import Process
from offbeat.simulation.process_table import ProcessTable
from offbeat.simulation.round_groups import RoundGroups
from offbeat.simulation.rounds import Rounds
from offbeat.simulation.sample_orders import SampleOrders
from offbeat.simulation.simulated_backend import SimulatedBackend
from offbeat.simulation.simulation_records import SimulationRecords

LINK_EVENTS = (PeerJoined, PeerLost)


SPARED_PROCESSES_MIN = 100
"""A run of so many processes takes longer than collecting all garbage once, at its end."""


@contextmanager
def spared_by_garbage_collector(processes: int) -> Iterator[None]:
    """The garbage collector looks for cycles among new objects alone, and not among the nodes and links of the run.

    With 1,000 workers it would take a third of the time. What became garbage meanwhile is collected at the end. If
    objects are frozen already, nothing is done.
    """
    if processes < SPARED_PROCESSES_MIN or gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.collect()


class Observer(Protocol):
    """Called for each event that a node handles: `before` may replace the node, `after` gets its actions."""

    def before(self, simulation: Simulation, rank: int, event: Event) -> None: ...
    def after(self, simulation: Simulation, rank: int, event: Event, actions: list[Action]) -> None: ...


@dataclass(frozen=True, eq=False)
class SimulationResult:
    """How a simulation ended: virtual seconds, handled events, and the `Finish` of each rank that has finished."""

    seconds: float
    events: int
    finishes: dict[int, Finish]
    failure: str | None


class Simulation:
    """One run. Call `run()` once."""

    def __init__(
        self,
        experiment: Experiment,
        writer: Writer,
        *,
        observer: Observer | None = None,
        strict: bool = False,
        events_max: int | None = None,
        merge_microbatches: bool = True,
        user_optimizer: Optimizer | None = None,
        notice_seconds: float = 0.0,
    ) -> None:
        """Build all nodes and links; nothing runs yet.

        experiment: what is simulated; resolved.
        writer: receives the records.
        observer: is called before and after each event that a node handles.
        strict: overwrite the tensors of an event after it was handled, unless the node kept, copied or sent them.
        events_max: raise `ContractViolation` if the run has not ended after this many events.
        merge_microbatches: compute several micro-batches in one call where that changes results by rounding only.
        user_optimizer: each worker steps its own copy of it, as a user's loop would, and nodes get `StepReady`.
        notice_seconds: the largest difference between the times at which two peers notice the same crash.
        """
        workload = experiment.build_workload()
        strategy, cluster, seed = experiment.strategy, experiment.cluster, experiment.seed
        workers, limit = experiment.worker_count, experiment.bytes_per_second
        size = strategy.processes(workers)
        cluster.check(max(size, workers), workers)
        self.experiment = experiment
        self.events = 0
        self._observer, self._strict, self._events_max = observer, strict, events_max
        self.gradient_computer = computer = GradientComputer(workload, seed, merge_microbatches=merge_microbatches)
        self._queue = queue = EventQueue()
        self._table = table = ProcessTable(experiment, computer.flat, queue, self._handle)
        self.processes = processes = table.processes
        """The processes by rank."""
        peers = functools.partial(strategy.peers, processes=size)
        self.network = network = build_network(cluster, peers, [process.worker for process in processes], seed, limit)
        self._sent = sent = SentTensors()
        self._links = links = LinkControl(queue, processes, network, cluster.crash_seen_seconds)
        self.delivery = delivery = Delivery(queue, processes, network, links, sent, strict=strict)
        self._records = records = SimulationRecords(writer, processes, network, delivery.traffic, limit)
        orders = SampleOrders(workload, seed, len(table.computing_ranks))
        self.batching = Batching()
        """Which rounds are computed together."""
        if merge_microbatches:
            self.batching = choose_batching(workload, experiment.batched, len(table.computing_ranks))
        groups = None
        if self.batching.group_max:
            groups = RoundGroups(self.batching, BatchedGradients(workload, computer.flat), orders)
        evaluations = EvaluationTiming(experiment.cluster, processes, queue)
        rounds = Rounds(
            experiment, user_optimizer, queue, computer, evaluations, orders, groups, records, sent, table.initial
        )
        self._fault_injector = FaultInjector(experiment, notice_seconds, queue, table, network, links, rounds)
        for process in processes:
            peers_of = network.links(process.rank)
            backend = SimulatedBackend(process, peers_of, table, links, delivery, rounds, records)
            process.on_action = functools.partial(dispatch, backend=backend)

    @property
    def now(self) -> float:
        """The virtual time, in seconds since the run began."""
        return self._queue.now

    @property
    def size(self) -> int:
        """How many processes there are."""
        return len(self.processes)

    @property
    def computing_ranks(self) -> list[int]:
        return self._table.computing_ranks

    @property
    def initial(self) -> Tensor:
        """The initial parameters of all nodes."""
        return self._table.initial

    def new_node(self, rank: int, life: int = 0) -> Node:
        """A node of this rank as it is after `life` restarts."""
        return self._table.new_node(rank, life)

    def run(self) -> SimulationResult:
        """Run to the end; raises `ContractViolation` if a node breaks the contract."""
        if (notice := self.batching.notice()) is not None:
            self._records.write(Notice(at=0.0, rank=0, text=notice))
        for process in self.processes:
            process.emit(0.0, Started)
        self._links.announce_all()
        self._fault_injector.schedule_faults()
        with torch.random.fork_rng(devices=[]), spared_by_garbage_collector(len(self.processes)):
            self._queue.run_while(self._table, self._will_restart)
        return self._result()

    def _will_restart(self) -> bool:
        """Whether no process has finished and a crashed one will be restarted."""
        return self._fault_injector.restarts_pending > 0 and all(process.finish is None for process in self.processes)

    def _result(self) -> SimulationResult:
        """Write the last records. With a server, its finish decides; in a decentralized run one success is enough."""
        finishes = {process.rank: process.finish for process in self.processes if process.finish is not None}
        unfinished = [process.rank for process in self.processes if process.active]
        failures = {rank: finish.failure for rank, finish in finishes.items()}
        any_success_suffices = not self.experiment.strategy.is_required(0) and None in failures.values()
        failure = None if not failures or any_success_suffices else failures[min(failures)]
        if unfinished and failure is None:
            failure = f"nothing was left to happen at {self.now:g} s, but rank {unfinished[0]} had not finished"
        finish_times = [self.processes[rank].finished_at for rank, finish in finishes.items() if finish.failure is None]
        seconds = max(finish_times) if finish_times and failure is None else self.now
        self._records.write_end(seconds, failure)
        return SimulationResult(seconds, self.events, finishes, failure)

    def _handle(self, process: Process, event: Event) -> None:
        self.events += 1
        if self.events == self._events_max:
            raise ContractViolation(f"the run had not ended after {self.events:,} events, at {self.now:g} s")
        if self._observer is not None:
            self._observer.before(self, process.rank, event)
        if isinstance(event, LINK_EVENTS):
            process.note_link(event)
        actions = list(process.node.handle(event))
        if self._observer is not None:
            self._observer.after(self, process.rank, event, actions)
        process.carry_out(actions)
        if self._strict:
            revoke_lease(event, self._sent)
