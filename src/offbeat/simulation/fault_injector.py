"""Faults in virtual time: crashes, restarts, pauses and partitions."""

from __future__ import annotations

import functools
from collections import deque

from offbeat.cluster.faults import Crash, Fault, Partition, Pause
from offbeat.core.events import LossReason, Started
from offbeat.core.randomness import stream
from offbeat.core.validation import require
from offbeat.simulation.delivery import Delivery
from offbeat.simulation.rounds import Rounds
from offbeat.simulation.state import SimulationState


class FaultInjector:
    """Makes the faults of a scenario happen.

    state: the simulation.
    delivery: cuts and restores the links.
    rounds: extends the computation of a paused rank.
    """

    def __init__(self, state: SimulationState, delivery: Delivery, rounds: Rounds) -> None:
        self._state = state
        self._delivery = delivery
        self._rounds = rounds
        self.restarts_pending = 0
        """How many crashed ranks will be restarted."""
        for fault in state.faults:
            returns = isinstance(fault, Crash) and fault.back_after_seconds is not None
            require(
                not returns or state.scenario.strategy.computes(fault.affected[0]),
                f"rank {fault.affected[0]} holds the parameters, which are lost when it crashes, so it cannot "
                "come back in a simulation; leave back_after_seconds out, or crash a rank that computes",
            )

    def schedule_faults(self) -> None:
        for fault in self._state.faults:
            self._state.schedule(fault.at_seconds, -1, functools.partial(self._inject, fault))

    def _inject(self, fault: Fault) -> None:
        match fault:
            case Crash():
                self._crash(fault)
            case Pause():
                self._pause(fault)
            case Partition():
                self._partition(fault)
            # `Corrupt` is looked up by `Rounds`.

    def _crash(self, fault: Crash) -> None:
        process = self._state.processes[fault.rank]
        if not process.active:
            return
        self._state.active -= 1
        process.alive = False
        process.computation, process.stepper, process.timers, process.known = None, None, {}, {}
        life = process.life
        reason = f"crash of {fault.rank}, life {life}"
        for peer in self._state.network.peers(fault.rank):
            self._delivery.link(fault.rank, peer).outboxes[fault.rank].clear()
        self._state.network.reset_card(fault.rank)

        def notice(peer: int) -> None:
            if process.life == life:  # otherwise the restart has already cut the link
                self._delivery.cut(fault.rank, peer, reason, notify=(peer,))

        earliest = self._state.now + self._state.scenario.cluster.crash_seen_seconds
        for peer in self._state.network.peers(fault.rank):
            time = earliest + self._notice_delay(peer, fault.rank)
            self._state.schedule(time, fault.rank, functools.partial(notice, peer))
        if fault.back_after_seconds is not None:
            self.restarts_pending += 1
            time = self._state.now + fault.back_after_seconds
            self._state.schedule(time, fault.rank, lambda: self._restart(fault.rank, reason))

    def _notice_delay(self, rank: int, peer: int) -> float:
        """By how many seconds this rank notices the crash of a peer later than the earliest possible time."""
        seconds_max = self._state.scenario.notice_seconds
        if not seconds_max:
            return 0.0
        return seconds_max * float(stream(self._state.scenario.seed, "notice", rank, peer).random())

    def _restart(self, rank: int, reason: str) -> None:
        process = self._state.processes[rank]
        self.restarts_pending -= 1
        self._state.active += 1
        process.alive, process.life = True, process.life + 1
        process.busy_until, process.free_since, process.asleep = self._state.now, self._state.now, False
        process.deferred_actions, process.deferred_events = [], deque()
        process.node = self._state.new_node(rank, process.life)
        self._state.network.reset_card(rank)
        self._state.emit(self._state.now, rank, Started)
        for peer in self._state.network.peers(rank):
            self._delivery.cut(rank, peer, reason, notify=(peer,))
            self._delivery.restore(rank, peer, reason)

    def _pause(self, fault: Pause) -> None:
        process = self._state.processes[fault.rank]
        if not process.active:
            return
        until = self._state.now + fault.seconds
        if process.computation is not None:
            self._rounds.pause(process.computation, fault.seconds)
        self._state.sleep(fault.rank, until)
        if fault.seconds > self._state.scenario.cluster.silence_seconds:
            pairs = [(fault.rank, peer) for peer in self._state.network.peers(fault.rank)]
            self._silence(pairs, until, f"pause of {fault.rank} at {self._state.now}")

    def _partition(self, fault: Partition) -> None:
        until = self._state.now + fault.seconds
        isolated = set(fault.ranks)
        pairs = [pair for pair in self._state.network if (pair[0] in isolated) != (pair[1] in isolated)]
        for a, b in pairs:
            link = self._delivery.link(a, b)
            link.held_until = max(link.held_until, until)
        if fault.seconds > self._state.scenario.cluster.silence_seconds:
            self._silence(pairs, until, f"partition at {self._state.now}")

    def _silence(self, pairs: list[tuple[int, int]], until: float, reason: str) -> None:
        """Cut these links after the silence limit, and restore them at `until`."""
        cut_at = self._state.now + self._state.scenario.cluster.silence_seconds

        def cut() -> None:
            for a, b in pairs:
                self._delivery.cut(a, b, reason, notify=(a, b), loss=LossReason.SILENT)

        def restore() -> None:
            for a, b in pairs:
                self._delivery.restore(a, b, reason)

        self._state.schedule(cut_at, -1, cut)
        self._state.schedule(until, -1, restore)
