"""Faults in virtual time: crashes, restarts, pauses and partitions."""

from __future__ import annotations

import functools

from offbeat.cluster.faults import Corrupt, Crash, Fault, Hang, Partition, Pause
from offbeat.core.events import LossReason, Started
from offbeat.core.randomness import stream
from offbeat.core.validation import require
from offbeat.engine.experiment import Experiment
from offbeat.errors import RunFailed
from offbeat.simulation.event_queue import EventQueue
from offbeat.simulation.link_control import LinkControl
from offbeat.simulation.network import SimulatedNetwork
from offbeat.simulation.process import Process
from offbeat.simulation.process_table import ProcessTable
from offbeat.simulation.rounds import Rounds


class FaultInjector:
    """Makes the faults of an experiment happen."""

    def __init__(
        self,
        experiment: Experiment,
        notice_seconds: float,
        queue: EventQueue,
        table: ProcessTable,
        network: SimulatedNetwork,
        links: LinkControl,
        rounds: Rounds,
    ) -> None:
        """Check the faults; nothing is scheduled yet.

        experiment: its faults, and the times at which they are noticed.
        notice_seconds: the largest difference between the times at which two peers notice the same crash.
        queue: the clock.
        table: crashes and restarts processes.
        network: the links.
        links: cuts and restores them.
        rounds: extends the computation of a paused rank.
        """
        self._queue = queue
        self._table = table
        self._network = network
        self._links = links
        self._rounds = rounds
        self._seed = experiment.seed
        self._crash_seen_seconds = experiment.cluster.crash_seen_seconds
        self._silence_seconds = experiment.cluster.silence_seconds
        self._notice_seconds = notice_seconds
        size = len(table.processes)
        self._faults = [fault for fault in experiment.cluster.faults if max(fault.affected) < size]
        """The faults of ranks that exist; a strategy with fewer processes ignores those of the others."""
        self.restarts_pending = 0
        """How many crashed ranks will be restarted."""
        for fault in self._faults:
            returns = isinstance(fault, Crash) and fault.back_after_seconds is not None
            require(
                not returns or experiment.strategy.computes(fault.affected[0]),
                f"rank {fault.affected[0]} holds the parameters, which are lost when it crashes, so it cannot "
                "come back in a simulation; leave back_after_seconds out, or crash a rank that computes",
            )

    def schedule_faults(self) -> None:
        for fault in self._faults:
            self._queue.schedule(fault.at_seconds, functools.partial(self._inject, fault))

    def _inject(self, fault: Fault) -> None:
        match fault:
            case Crash():
                self._crash(fault)
            case Pause():
                self._pause(fault)
            case Hang():
                self._hang(fault)
            case Partition():
                self._partition(fault)
            case Corrupt():
                pass  # `Rounds` looks it up when a round ends
            case _:
                raise RunFailed(
                    f"internal error: {type(fault).__name__} has no case in simulation/fault_injector.py; add one there"
                )

    def _crash(self, fault: Crash) -> None:
        process, links = self._table.processes[fault.rank], self._network.links(fault.rank)
        if not process.active:
            return
        self._table.crash(process)
        life = process.life
        reason = f"crash of {fault.rank}, life {life}"
        for link in links.values():
            link.outboxes[fault.rank].clear()
        self._network.reset_card(fault.rank)

        def notice(peer: int) -> None:
            if process.life == life:  # otherwise the restart has already cut the link
                self._links.cut(fault.rank, peer, reason, notify=(peer,))

        earliest = self._queue.now + self._crash_seen_seconds
        for peer in links:
            time = earliest + self._notice_delay(peer, fault.rank)
            self._queue.schedule(time, functools.partial(notice, peer))
        if fault.back_after_seconds is not None:
            self.restarts_pending += 1
            time = self._queue.now + fault.back_after_seconds
            self._queue.schedule(time, lambda: self._restart(process, reason))

    def _notice_delay(self, rank: int, peer: int) -> float:
        """By how many seconds this rank notices the crash of a peer later than the earliest possible time."""
        if not self._notice_seconds:
            return 0.0
        return self._notice_seconds * float(stream(self._seed, "notice", rank, peer).random())

    def _restart(self, process: Process, reason: str) -> None:
        self.restarts_pending -= 1
        self._table.restart(process)
        self._network.reset_card(process.rank)
        process.emit(self._queue.now, Started)
        for peer in self._network.links(process.rank):
            self._links.cut(process.rank, peer, reason, notify=(peer,))
            self._links.restore(process.rank, peer, reason)

    def _pause(self, fault: Pause) -> None:
        process = self._table.processes[fault.rank]
        if not process.active:
            return
        if process.computation is not None:
            self._rounds.pause(process.computation, fault.seconds)
        process.sleep(fault.seconds)
        pairs = [(fault.rank, peer) for peer in self._network.links(fault.rank)]
        self._silence(pairs, fault.seconds, f"pause of {fault.rank} at {self._queue.now}")

    def _hang(self, fault: Hang) -> None:
        process = self._table.processes[fault.rank]
        if process.active and process.computation is not None:
            self._rounds.hang(process.computation, fault.seconds)

    def _partition(self, fault: Partition) -> None:
        until = self._queue.now + fault.seconds
        isolated = set(fault.ranks)
        pairs = [pair for pair in self._network if (pair[0] in isolated) != (pair[1] in isolated)]
        for a, b in pairs:
            link = self._network.link(a, b)
            link.held_until = max(link.held_until, until)
        self._silence(pairs, fault.seconds, f"partition at {self._queue.now}")

    def _silence(self, pairs: list[tuple[int, int]], seconds: float, reason: str) -> None:
        """Nothing is received on these links for some time: if that exceeds the silence limit, they are cut for it."""
        if seconds <= self._silence_seconds:
            return

        def cut() -> None:
            for a, b in pairs:
                self._links.cut(a, b, reason, notify=(a, b), loss=LossReason.SILENT)

        def restore() -> None:
            for a, b in pairs:
                self._links.restore(a, b, reason)

        self._queue.schedule(self._queue.now + self._silence_seconds, cut)
        self._queue.schedule(self._queue.now + seconds, restore)
