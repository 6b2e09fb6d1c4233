"""Faults in virtual time: ranks die, stand still, are cut off and come back, and links with them."""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING

from offbeat.cluster import Crash, Partition, Pause
from offbeat.core.events import PeerJoined, PeerLost, Started
from offbeat.core.randomness import stream
from offbeat.core.validation import require
from offbeat.simulation.network import LinkState

if TYPE_CHECKING:
    from offbeat.simulation.simulator import Simulation


class FaultInjector:
    """Makes faults happen, and tells nodes of peers that they have gained or lost."""

    def __init__(self, simulation: Simulation) -> None:
        self._sim = simulation
        self.coming_back = 0
        """How many of those who are gone will be back."""

    def check(self) -> None:
        for fault in self._sim.faults:
            returns = isinstance(fault, Crash) and fault.back_after_seconds is not None
            require(
                not returns or self._sim.scenario.strategy.computes(fault.affected[0]),
                f"rank {fault.affected[0]} holds the parameters and is gone with them when it crashes, so it cannot "
                "come back in a simulation; leave back_after_seconds out, or crash a rank that computes",
            )

    def announce(self, a: int, b: int, link: LinkState) -> None:
        incarnation = link.incarnation
        for rank, peer in ((a, b), (b, a)):
            self._tell(rank, PeerJoined, peer, incarnation)

    def _tell(self, rank: int, kind: type[PeerJoined] | type[PeerLost], peer: int, incarnation: int) -> None:
        self._sim.deliver(self._sim.now, rank, lambda at: kind(at, peer, incarnation))

    def _seen_later(self, rank: int, peer: int) -> float:
        """How much later than the quickest this rank notices that a peer has died."""
        spread = self._sim.scenario.notice_seconds
        return spread * float(stream(self._sim.scenario.seed, "notice", rank, peer).random()) if spread else 0.0

    def strike(self, fault: object) -> None:
        match fault:
            case Crash():
                self._crash(fault)
            case Pause():
                self._pause(fault)
            case Partition():
                self._partition(fault)

    def _crash(self, fault: Crash) -> None:
        process = self._sim.processes[fault.rank]
        if not process.active:
            return
        self._sim.active -= 1
        process.alive = False
        process.computation, process.stepper, process.timers, process.known = None, None, {}, {}
        life = process.life
        reason = f"crash of {fault.rank}, life {life}"
        for peer in self._sim.network.peers(fault.rank):
            self.link(fault.rank, peer).outboxes[fault.rank].clear()
        self._sim.network.reset_card(fault.rank)

        def seen(peer: int) -> None:
            if self._sim.processes[fault.rank].life == life:  # else it is back, and its coming back was the news
                self.cut(fault.rank, peer, self.link(fault.rank, peer), reason, told=(peer,))

        soonest = self._sim.now + self._sim.scenario.cluster.crash_seen_seconds
        for peer in self._sim.network.peers(fault.rank):
            later = self._seen_later(peer, fault.rank)
            self._sim.at(soonest + later, fault.rank, functools.partial(seen, peer))
        if fault.back_after_seconds is not None:
            self.coming_back += 1
            self._sim.at(
                self._sim.now + fault.back_after_seconds, fault.rank, lambda: self._come_back(fault.rank, reason)
            )

    def _come_back(self, rank: int, reason: str) -> None:
        process = self._sim.processes[rank]
        self.coming_back -= 1
        self._sim.active += 1
        process.alive, process.life = True, process.life + 1
        process.busy_until, process.free_since, process.asleep = self._sim.now, self._sim.now, False
        process.unfinished, process.waiting = [], deque()
        process.node = self._sim.fresh_node(rank)
        self._sim.network.reset_card(rank)
        self._sim.deliver(self._sim.now, rank, lambda at: Started(at))
        for peer in self._sim.network.peers(rank):
            link = self.link(rank, peer)
            self.cut(rank, peer, link, reason, told=(peer,))
            self._mend(rank, peer, link, reason)

    def _pause(self, fault: Pause) -> None:
        process = self._sim.processes[fault.rank]
        if not process.active:
            return
        until = self._sim.now + fault.seconds
        if process.computation is not None:
            self._sim.rounds.hold_up(process.computation, fault.seconds)
        self._sim.sleep(fault.rank, until)
        if fault.seconds > self._sim.scenario.cluster.silence_seconds:
            pairs = [(fault.rank, peer) for peer in self._sim.network.peers(fault.rank)]
            self._silence(pairs, until, f"pause of {fault.rank} at {self._sim.now}")

    def _partition(self, fault: Partition) -> None:
        until = self._sim.now + fault.seconds
        inside = set(fault.ranks)
        pairs = [pair for pair, _ in self._sim.network if (pair[0] in inside) != (pair[1] in inside)]
        for a, b in pairs:
            link = self.link(a, b)
            link.held_until = max(link.held_until, until)
        if fault.seconds > self._sim.scenario.cluster.silence_seconds:
            self._silence(pairs, until, f"partition at {self._sim.now}")

    def _silence(self, pairs: list[tuple[int, int]], until: float, reason: str) -> None:
        """These links are given up after the silence limit, and come back when the silence ends."""
        given_up = self._sim.now + self._sim.scenario.cluster.silence_seconds

        def cut() -> None:
            for a, b in pairs:
                self.cut(a, b, self.link(a, b), reason, told=(a, b))

        def mend() -> None:
            for a, b in pairs:
                self._mend(a, b, self.link(a, b), reason)

        self._sim.at(given_up, -1, cut)
        self._sim.at(until, -1, mend)

    def cut(self, a: int, b: int, link: LinkState, reason: str, told: tuple[int, ...]) -> None:
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
                    self._tell(rank, PeerLost, peer, incarnation)

    def _mend(self, a: int, b: int, link: LinkState, reason: str) -> None:
        link.cuts.discard(reason)
        if not link.cuts and not link.up and self._sim.processes[a].active and self._sim.processes[b].active:
            link.mend()
            self.announce(a, b, link)

    def link(self, a: int, b: int) -> LinkState:
        link = self._sim.network.link(a, b)
        assert link is not None
        return link
