"""Exchanges of one peer: when, with whom, one outstanding at a time, and what it owes.

Nobody waits. The peer that begins offers its parameters and goes on; the other takes its share of the difference and
answers with it; the first takes its own share when that arrives, of whatever its parameters have become.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from offbeat.core import randomness
from offbeat.core.actions import Action, Report, Send, SetTimer
from offbeat.core.events import MessageArrived
from offbeat.core.strategy import State
from offbeat.records.schema import Exchange, Notice, Outcome
from offbeat.strategies.gossip.exchange_schedule import ExchangeSchedule, Matchmaker
from offbeat.strategies.gossip.gossip_messages import Answer, Declined, Offer, Paired, Ready
from offbeat.strategies.gossip.gossip_parts import Acid, FirstAvailable, GossipBase, Random
from offbeat.strategies.gossip.membership_view import MembershipView
from offbeat.strategies.gossip.replica import SHARE, Replica

TIMER = "exchange"
OWED_MAX = 32
"""Exchanges that a peer makes up for at the most, one after the other, when an answer is there."""
SMOOTHING = 0.1
"""What the latest has for a weight in a running mean."""
ROUND_TRIPS = 0.5
"""Averagings per round trip up to which mixing goes at full speed; beyond, momentum would overshoot."""


class Outstanding(NamedTuple):
    """An exchange that waits for its answer."""

    partner: int
    sequence: int
    began_at: float


class Averaging:
    def __init__(
        self, config: GossipBase, members: MembershipView, replica: Replica, random: np.random.Generator
    ) -> None:
        self._config = config
        self._view = members
        self._replica = replica
        self._random = random
        by_chance = isinstance(config.partner, Random)
        self._schedule = ExchangeSchedule(config.clock, config.rate / 2 if by_chance else config.rate, random)
        self.gradient_seconds: float | None = None
        self._round_trip: float | None = None
        self._mixed_at = 0.0
        self.active = False
        """Whether this peer averages at all: between the start and the end."""
        self.outstanding: Outstanding | None = None
        self._sequence = 0
        self._owed: deque[tuple[int | None, int]] = deque()
        """Exchanges to begin as soon as none is outstanding: with whom, or None, with any neighbour; its pairing."""
        self.ticks = 0
        """How often an exchange has become due."""
        self._warned = False
        self._wishes = 0
        self._asked = False
        """Whether the matchmaker knows that this peer is ready."""
        self._promised: tuple[int, int] | None = None
        """The one that the matchmaker has found, and that will make the offer, and the number of that pairing."""
        self._met: set[int] = set()
        """Pairings whose offer was here before this peer was told of them."""
        self._matchmaker = Matchmaker()

    # Time

    def begin(self, at: float) -> Iterator[Action]:
        self.active, self._mixed_at = True, at
        waiting, self._matchmaker.waiting = self._matchmaker.waiting, []
        for rank in waiting:  # who has said so before this peer could do anything about it
            yield from self.ready(at, rank)

    def end(self) -> None:
        """Begin nothing any more, and take nobody's offer."""
        self.active, self._promised, self._asked, self._wishes = False, None, False, 0
        self._owed.clear()

    def mix(self, at: float) -> None:
        """Bring parameters and momentum up to now."""
        elapsed, self._mixed_at = at - self._mixed_at, at
        if self._replica.acid_offset is not None and self.gradient_seconds and elapsed > 0:
            self._replica.mix(math.exp(-2.0 * self._eta() * elapsed / self.gradient_seconds))

    def _eta(self) -> float:
        assert self.gradient_seconds is not None
        eta = self._view.constants.eta
        guarded = isinstance(self._config.momentum, Acid) and self._config.momentum.guard
        if not guarded or not self._round_trip:
            return eta
        return eta * min(1.0, ROUND_TRIPS / (self._config.rate * self._round_trip / self.gradient_seconds))

    def _alpha_tilde(self) -> float:
        return SHARE if self._replica.acid_offset is None else self._view.constants.alpha_tilde

    def gradient(self, at: float, seconds: float) -> Iterator[Action]:
        """A gradient has been computed: the clock of exchanges goes on."""
        self.gradient_seconds = _smoothed(self.gradient_seconds, seconds)
        self._schedule.gradient(at)
        yield from self.beat(at)

    def beat(self, at: float) -> Iterator[Action]:
        """Begin what is due, and wait for what is next."""
        if not self.active or self.gradient_seconds is None:
            return
        while (seconds := self._schedule.seconds(at, self.gradient_seconds)) is not None and seconds <= 0.0:
            self._schedule.tick()
            self.ticks += 1
            yield from self._wish(at)
        yield from self.go_on(at)
        if seconds is not None:
            yield SetTimer(TIMER, seconds)

    # With whom

    def _wish(self, at: float) -> Iterator[Action]:
        partner = self._config.partner
        if isinstance(partner, FirstAvailable):
            self._wishes = min(OWED_MAX, self._wishes + 1)
        elif isinstance(partner, Random):
            yield from self._owe(at, None)
        else:
            other = self._matched()
            if other is not None:
                yield from self._owe(at, other)

    def _matched(self) -> int | None:
        """The partner of this turn, where it is this peer's turn to begin: theirs and ours, by turns."""
        matchings = self._config.matchings(self._view.size)
        turn, place = divmod(self.ticks - 1, len(matchings)) if matchings else (0, 0)
        other = matchings[place].get(self._view.rank) if matchings else None
        if other is None or (self._view.rank < other) != (turn % 2 == 0):
            return None
        return other

    def _owe(self, at: float, partner: int | None) -> Iterator[Action]:
        if len(self._owed) < OWED_MAX:
            self._owed.append((partner, 0))
        elif not self._warned and self._round_trip and self.gradient_seconds:
            self._warned = True
            length = self._round_trip / self.gradient_seconds
            text = (
                f"peer {self._view.rank} cannot keep up with rate {self._config.rate:g}: an exchange takes "
                f"{length:.3g} times as long as a gradient, so about {2 / length:.2g} per gradient are possible; "
                "lower the rate, or compute more samples per gradient (batch)"
            )
            yield Report(Notice(at=at, rank=self._view.rank, text=text))

    def go_on(self, at: float) -> Iterator[Action]:
        """Begin an exchange, if one is owed and none is outstanding."""
        while self.active and self.outstanding is None and self._owed:
            partner, pairing = self._owed.popleft()
            if partner is None:
                around = self._view.neighbours
                partner = around[int(self._random.integers(len(around)))] if around else None
            if partner in self._view.live:
                yield self._offer(at, partner, pairing)
        yield from self._ask(at)

    def _offer(self, at: float, partner: int, pairing: int) -> Send:
        self.mix(at)
        self._sequence += 1
        self.outstanding = Outstanding(partner, self._sequence, at)
        parameters, buffers = self._replica.snapshot()
        return Send(partner, Offer(parameters, buffers, self._sequence, pairing, self._view.told_counts))

    # The first that is available

    def _ask(self, at: float) -> Iterator[Action]:
        """Say that this peer is ready, if it is."""
        busy = self._asked or self.outstanding is not None or self._promised is not None
        if not self.active or not self._wishes or busy:
            return
        self._wishes -= 1
        self._asked = True
        if self._view.leads:
            yield from self.ready(at, self._view.rank)
        else:
            yield Send(self._view.root, Ready())

    def ready(self, at: float, rank: int) -> Iterator[Action]:
        """For the matchmaker: a peer is ready."""
        pair = self._matchmaker.ready(rank, self._view.may_meet if self.active else _not_yet)
        if pair is None:
            return
        told = {
            pair.begins: Paired(pair.number, pair.other, begins=True),
            pair.other: Paired(pair.number, pair.begins, begins=False),
        }
        for rank, message in told.items():
            if rank == self._view.rank:
                yield from self.paired(at, message)
            else:
                yield Send(rank, message)

    def paired(self, at: float, told: Paired) -> Iterator[Action]:
        self._asked = False
        if not self.active:
            return
        if told.begins:
            self._owed.append((told.partner, told.pairing))
        elif told.pairing in self._met:
            self._met.remove(told.pairing)
        elif told.partner in self._view.live:
            self._promised = told.partner, told.pairing
        yield from self.go_on(at)

    def root_changed(self, at: float) -> Iterator[Action]:
        """There is another matchmaker, who does not know yet who is ready."""
        if not self._view.leads:
            self._matchmaker = Matchmaker()
        self._met.clear()
        if self._asked:
            self._asked = False
            self._wishes += 1
        yield from self._ask(at)

    # Exchanges

    def offered(self, event: MessageArrived) -> Iterator[Action]:
        message = event.message
        assert isinstance(message, Offer)
        met = None
        if self.active:
            self.mix(event.at)
            alpha_tilde = self._alpha_tilde()
            met = self._replica.meet(message.parameters, message.buffers, alpha_tilde)
        counts = self._view.told_counts
        if met is None:
            yield Send(event.source, Declined(message.sequence, counts))
        else:
            answer = Answer(met.difference, met.buffers, message.sequence, counts, alpha_tilde, met.distance)
            yield Send(event.source, answer)
        if self._promised == (event.source, message.pairing):
            self._promised = None
            yield from self._ask(event.at)
        elif message.pairing:
            self._met.add(message.pairing)

    def answered(self, event: MessageArrived) -> Iterator[Action]:
        message, now = event.message, self.outstanding
        assert isinstance(message, Answer | Declined)
        if now is None or (now.partner, now.sequence) != (event.source, message.sequence):
            return
        if isinstance(message, Answer):
            self.mix(event.at)
            self._replica.settle(message.difference, message.buffers, message.alpha_tilde)
            self._round_trip = _smoothed(self._round_trip, event.at - now.began_at)
            yield self._over(event.at, "averaged", message.distance)
        else:
            yield self._over(event.at, "declined", None)
        yield from self.go_on(event.at)

    def _over(self, at: float, outcome: Outcome, distance: float | None) -> Report:
        assert self.outstanding is not None
        partner, _, began_at = self.outstanding
        self.outstanding = None
        rank = self._view.rank
        return Report(
            Exchange(at=at, rank=rank, peer=partner, seconds=at - began_at, distance=distance, outcome=outcome)
        )

    def lost(self, at: float, rank: int) -> Iterator[Action]:
        """A peer is gone: nothing of it will arrive any more."""
        self._matchmaker.forget(rank)
        if self._promised is not None and self._promised[0] == rank:
            self._promised = None
        if self.outstanding is not None and self.outstanding.partner == rank:
            yield self._over(at, "lost", None)
        yield from self.go_on(at)

    def forget_all(self) -> None:
        """A process that goes on from a checkpoint knows of nobody, and waits for nobody's answer."""
        self.outstanding, self._promised, self._asked = None, None, False
        self._matchmaker = Matchmaker()

    # State

    def state(self) -> State:
        return {
            "random": randomness.state_of(self._random),
            "gradients": self._schedule.gradients,
            "began_at": self._schedule.began_at,
            "next": self._schedule.next,
            "gradient_seconds": self.gradient_seconds,
            "round_trip": self._round_trip,
            "mixed_at": self._mixed_at,
            "active": self.active,
            "outstanding": None if self.outstanding is None else list(self.outstanding),
            "sequence": self._sequence,
            "owed": [list(owed) for owed in self._owed],
            "ticks": self.ticks,
            "warned": self._warned,
            "wishes": self._wishes,
            "asked": self._asked,
            "promised": None if self._promised is None else list(self._promised),
            "met": sorted(self._met),
            "waiting": list(self._matchmaker.waiting),
            "pairs": self._matchmaker.pairs,
        }

    def restore(self, state: State) -> None:
        randomness.restore(self._random, state["random"])
        self._schedule.gradients = state["gradients"]
        self._schedule.began_at = state["began_at"]
        self._schedule.next = state["next"]
        self.gradient_seconds = state["gradient_seconds"]
        self._round_trip = state["round_trip"]
        self._mixed_at = state["mixed_at"]
        self.active = state["active"]
        self.outstanding = None if state["outstanding"] is None else Outstanding(*state["outstanding"])
        self._sequence = state["sequence"]
        self._owed = deque((partner, pairing) for partner, pairing in state["owed"])
        self.ticks = state["ticks"]
        self._warned = state["warned"]
        self._wishes = state["wishes"]
        self._asked = state["asked"]
        promised = state["promised"]
        self._promised = None if promised is None else (promised[0], promised[1])
        self._met = set(state["met"])
        self._matchmaker.waiting = list(state["waiting"])
        self._matchmaker.pairs = state["pairs"]


def _not_yet(a: int, b: int) -> bool:
    return False


def _smoothed(before: float | None, latest: float) -> float:
    return latest if before is None else before + SMOOTHING * (latest - before)
