"""The virtual-time engine: all nodes in one process, real gradients, no waiting.

A heap of (time, sequence number, rank, entry). The loop takes the next entry, advances the clock to its time, lets the
node of that rank handle its event, and the node's actions put new entries on the heap. All randomness comes from
streams derived from the seed, per rank and purpose, and ties are broken by sequence number: same seed, same bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from offbeat.core.actions import Action, Cancel, ClearTimer, Compute, Evaluate, Finish, Report, Send, SetTimer
from offbeat.core.events import Event, PeerJoined, PeerLost, Started, TimerFired
from offbeat.errors import ContractViolation
from offbeat.records.files import Writer
from offbeat.records.schema import Ended, LinkUse, Update
from offbeat.simulation.delivery import Delivery
from offbeat.simulation.fault_injector import FaultInjector
from offbeat.simulation.rounds import Rounds
from offbeat.simulation.state import PendingEvent, Scenario, SimulationState


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


class Simulation(SimulationState):
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
        super().__init__(scenario, writer, strict=strict)
        self.events = 0
        self._observer = observer
        self._events_max = events_max
        self.delivery = Delivery(self)
        self.rounds = Rounds(self, self.delivery)
        self.fault_injector = FaultInjector(self, self.delivery, self.rounds)

    def run(self) -> SimulationResult:
        """Run to the end; raises `ContractViolation` if a node breaks the contract."""
        for rank in range(self.size):
            self.emit(0.0, rank, Started)
        for a, b in self.network:
            self.delivery.announce(a, b)
        self.fault_injector.schedule_faults()
        with torch.random.fork_rng(devices=[]):
            while self._heap and (self.active or self._will_restart()):
                self.now, _, rank, entry = heapq.heappop(self._heap)
                if isinstance(entry, PendingEvent):
                    self._dispatch(rank, entry)
                else:
                    entry()
        return self._result()

    def _will_restart(self) -> bool:
        """Whether no rank has finished and a crashed one will be restarted."""
        return self.fault_injector.restarts_pending > 0 and all(process.finish is None for process in self.processes)

    def _result(self) -> SimulationResult:
        """Write the last records. With a server, its finish decides; in a decentralized run one success is enough."""
        finishes = {rank: process.finish for rank, process in enumerate(self.processes) if process.finish is not None}
        unfinished = [rank for rank, process in enumerate(self.processes) if process.active]
        failures = {rank: finish.failure for rank, finish in finishes.items()}
        any_success_suffices = not self.scenario.strategy.is_required(0) and None in failures.values()
        failure = None if not failures or any_success_suffices else failures[min(failures)]
        if unfinished and failure is None:
            failure = f"nothing was left to happen at {self.now:g} s, but rank {unfinished[0]} had not finished"
        finish_times = [self.processes[rank].finished_at for rank, finish in finishes.items() if finish.failure is None]
        seconds = max(finish_times) if finish_times and failure is None else self.now
        self.rounds.record_consensus(seconds, (process for process in self.processes if process.alive))
        self.delivery.record_traffic(seconds)
        self._record_link_use(seconds)
        traffic = self.delivery.traffic
        self.writer.write(
            Ended(at=seconds, bytes_sent=traffic.bytes_sent, messages_sent=traffic.messages_sent, failure=failure)
        )
        return SimulationResult(seconds, self.events, finishes, failure)

    def _record_link_use(self, at: float) -> None:
        """Record the bytes that each rank has sent under a rate limit, if there is one."""
        limit = self.scenario.bytes_per_second
        if limit is not None:
            for rank in range(self.size):
                used = {str(peer): nbytes for peer, nbytes in self.network.limited_bytes(rank).items()}
                self.writer.write(LinkUse(at=at, rank=rank, bytes_per_second=limit, used=used))

    def _dispatch(self, rank: int, pending: PendingEvent) -> None:
        process = self.processes[rank]
        if not process.active or process.life != pending.life:
            return
        if process.asleep:
            process.deferred_events.append(pending)
            return
        event = pending.event(self.now)
        if event is not None:
            self._handle(rank, event)

    def _wake(self, rank: int) -> None:
        """Resume a rank: carry out its deferred actions, then handle its deferred events, in order."""
        process = self.processes[rank]
        process.asleep = False
        actions, process.deferred_actions = process.deferred_actions, []
        self._carry_out(rank, actions)
        while process.deferred_events and not process.asleep and process.active:
            self._dispatch(rank, process.deferred_events.popleft())

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
            self.delivery.revoke_lease(event)

    def _carry_out(self, rank: int, actions: Iterable[Action]) -> None:
        process = self.processes[rank]
        for action in actions:
            if isinstance(action, Report):
                self.writer.write(action.record)
                if isinstance(action.record, Update) and process.speed.seconds_per_update > 0:
                    self.sleep(rank, self.now + process.speed.seconds_per_update)
            elif process.asleep:
                process.deferred_actions.append(action)
            else:
                self._execute(rank, action)

    def _execute(self, rank: int, action: Action) -> None:
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

    def _set_timer(self, rank: int, name: str, seconds: float) -> None:
        if not seconds >= 0:
            raise ContractViolation(f"rank {rank} set the timer {name!r} to {seconds} s")
        timers = self.processes[rank].timers

        def event(at: float) -> Event | None:
            if timers.get(name) != sequence:
                return None
            del timers[name]
            return TimerFired(at, name)

        sequence = self.emit(self.now + seconds, rank, event)
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
