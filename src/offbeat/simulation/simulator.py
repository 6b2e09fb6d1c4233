"""The virtual-time engine: all nodes in one process, real gradients, no waiting.

A queue of calls, ordered by time. The loop takes the next one, advances the clock to its time, lets a node handle an
event, and the node's actions schedule new calls. All randomness comes from streams derived from the seed, per rank and
purpose, and ties are broken by sequence number: same seed, same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offbeat.core.actions import Action, Cancel, ClearTimer, Compute, Evaluate, Finish, Report, Send, SetTimer
from offbeat.core.events import Event, Started
from offbeat.core.strategy import Node
from offbeat.engine.gradient_computer import GradientComputer
from offbeat.errors import ContractViolation
from offbeat.records.files import Writer
from offbeat.records.schema import Update
from offbeat.simulation.delivery import Delivery
from offbeat.simulation.event_queue import EventQueue
from offbeat.simulation.fault_injector import FaultInjector
from offbeat.simulation.leases import SentTensors, revoke_lease
from offbeat.simulation.link_control import LinkControl
from offbeat.simulation.network import build_network
from offbeat.simulation.process import Process
from offbeat.simulation.process_table import ProcessTable
from offbeat.simulation.rounds import Rounds, SampleOrders
from offbeat.simulation.simulation_records import SimulationRecords
from offbeat.simulation.state import Scenario


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
        scenario: Scenario,
        writer: Writer,
        *,
        observer: Observer | None = None,
        strict: bool = False,
        events_max: int | None = None,
    ) -> None:
        """Build all nodes and links; nothing runs yet.

        scenario: what is simulated.
        writer: receives the records.
        observer: is called before and after each event that a node handles.
        strict: overwrite the tensors of an event after it was handled, unless the node kept, copied or sent them.
        events_max: raise `ContractViolation` if the run has not ended after this many events.
        """
        strategy, cluster, workers = scenario.strategy, scenario.cluster, scenario.workers
        size = strategy.processes(workers)
        cluster.check(max(size, workers), workers)
        self.scenario = scenario
        self.events = 0
        self._observer = observer
        self._strict = strict
        self._events_max = events_max
        self.gradient_computer = GradientComputer(scenario.workload, scenario.seed)
        self._queue = queue = EventQueue()
        flat = self.gradient_computer.flat
        self._table = table = ProcessTable(scenario, flat, queue, self._handle, self._execute)
        self.processes = processes = table.processes
        """The processes by rank."""
        peers = [strategy.peers(rank, size) for rank in range(size)]
        indices = [process.worker for process in processes]
        self.network = network = build_network(cluster, peers, indices, scenario.seed, scenario.bytes_per_second)
        self._sent = SentTensors()
        self._links = links = LinkControl(queue, processes, network, cluster.crash_seen_seconds)
        self.delivery = Delivery(queue, processes, network, links, self._sent, strict=strict)
        self._records = SimulationRecords(writer, processes, network, self.delivery.traffic, scenario.bytes_per_second)
        orders = SampleOrders(scenario.workload, scenario.seed, len(table.computing_ranks))
        self._rounds = Rounds(scenario, queue, self.gradient_computer, orders, self._records, self._sent, table.initial)
        self._fault_injector = FaultInjector(scenario, queue, table, network, links, self._rounds)

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
        for process in self.processes:
            process.emit(0.0, Started)
        self._links.announce_all()
        self._fault_injector.schedule_faults()
        with torch.random.fork_rng(devices=[]):
            self._queue.run_while(self._is_running)
        return self._result()

    def _is_running(self) -> bool:
        """Whether a process is active, or none has finished and a crashed one will be restarted."""
        return self._table.active > 0 or (
            self._fault_injector.restarts_pending > 0 and all(process.finish is None for process in self.processes)
        )

    def _result(self) -> SimulationResult:
        """Write the last records. With a server, its finish decides; in a decentralized run one success is enough."""
        finishes = {process.rank: process.finish for process in self.processes if process.finish is not None}
        unfinished = [process.rank for process in self.processes if process.active]
        failures = {rank: finish.failure for rank, finish in finishes.items()}
        any_success_suffices = not self.scenario.strategy.is_required(0) and None in failures.values()
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
        actions = process.handle(event)
        if self._observer is not None:
            self._observer.after(self, process.rank, event, actions)
        process.carry_out(actions)
        if self._strict:
            revoke_lease(event, self._sent)

    def _execute(self, process: Process, action: Action) -> None:
        match action:
            case Send():
                if action.to not in self.network.links(process.rank):
                    raise ContractViolation(
                        f"rank {process.rank} sent to {action.to}, which its strategy does not name as a peer"
                    )
                self.delivery.send(process, action)
            case Report(record=record):
                self._records.write(record)
                if isinstance(record, Update) and process.speed.seconds_per_update > 0:
                    process.sleep(self.now + process.speed.seconds_per_update)
            case Compute():
                if process.worker is None:
                    raise ContractViolation(
                        f"rank {process.rank} asked for Compute, but its strategy says that it does not compute"
                    )
                if process.computation is not None:
                    raise ContractViolation(f"rank {process.rank} asked for a second Compute while one was outstanding")
                self._rounds.compute(process, action)
            case Cancel():
                self._rounds.cancel(process)
            case SetTimer(name=name, seconds=seconds):
                if not seconds >= 0:
                    raise ContractViolation(f"rank {process.rank} set the timer {name!r} to {seconds} s")
                process.set_timer(name, seconds)
            case ClearTimer(name=name):
                process.clear_timer(name)
            case Evaluate():
                self._rounds.evaluate(process, action)
            case Finish():
                self._table.finish(process, action)
                self._links.close_all(process.rank)
            case _:
                raise ContractViolation(f"rank {process.rank} asked for {action!r}, which is not an action")
