"""Pairwise exchanges of one peer: when, with which partner, and one pending at a time.

No peer waits. The initiator sends its parameters and goes on computing; the responder applies its share of the
difference and replies with that difference; the initiator applies its own share when the reply arrives, to whatever its
parameters have become.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np

from offbeat.core.actions import Action, Report, Send, SetTimer
from offbeat.core.events import MessageArrived, TimerFired
from offbeat.records.schema import Exchange, Notice, Outcome
from offbeat.strategies.gossip.exchange_schedule import ExchangeSchedule, Matchmaker
from offbeat.strategies.gossip.gossip_messages import Answer, Declined, Offer, Paired, Ready
from offbeat.strategies.gossip.gossip_parts import Acid, FirstAvailable, GossipBase, Random
from offbeat.strategies.gossip.membership_view import MembershipView
from offbeat.strategies.gossip.phases import Signal
from offbeat.strategies.gossip.replica import ALPHA, Replica
from offbeat.strategies.message_kinds import matched
from offbeat.strategies.node_state import Stateful

TIMER = "exchange"
QUEUED_MAX = 32
"""Due exchanges that are kept while one is pending; further ones are skipped."""
SMOOTHING = 0.1
"""Weight of the latest value in a running mean."""
FULL_SPEED_EXCHANGES = 0.5
"""Exchanges per round trip up to which A²CiD² mixes at full speed; above, momentum would overshoot."""


@dataclass(frozen=True)
class PendingExchange:
    """An exchange that this peer has started and that has no reply yet."""

    partner: int
    sequence: int
    began_at: float


class Averaging(Stateful):
    """The exchanges of one peer; it returns actions and changes the replica."""

    active: bool = False
    """Whether this peer takes part in exchanges: from the start of training to its end."""
    gradient_seconds: float | None = None
    """Running mean of the seconds per gradient; None before the first one."""
    round_trip_seconds: float | None = None
    """Running mean of the seconds from offer to answer; None before the first one."""
    mixed_at: float = 0.0
    """Time up to which A²CiD² mixing has been applied."""
    pending: PendingExchange | None = None
    sequence: int = 0
    """Number of the latest offer."""
    queue: list[tuple[int | None, int]]
    """Exchanges to start once none is pending: partner (None: a random neighbour), and number of the pairing or 0."""
    exchanges_due: int = 0
    """Exchanges that have become due so far."""
    rate_warning_sent: bool = False
    requests_due: int = 0
    """With a matchmaker: exchanges for which `Ready` has not been sent yet."""
    is_waiting_for_pairing: bool = False
    """Whether `Ready` has been sent and `Paired` has not arrived."""
    expected_offer: tuple[int, int] | None = None
    """Partner and pairing of an offer that the matchmaker has announced."""
    early_pairings: set[int]
    """Pairings whose `Offer` arrived before their `Paired`."""
    matchmaker: Matchmaker
    _schedule: ExchangeSchedule
    _random: np.random.Generator

    def __init__(self, config: GossipBase, view: MembershipView, replica: Replica, random: np.random.Generator) -> None:
        self.queue, self.early_pairings, self.matchmaker = [], set(), Matchmaker()
        self._config = config
        self._view = view
        self._replica = replica
        self._random = random
        # Half of the exchanges with random partners are started by the partner.
        rate = config.rate / 2 if isinstance(config.partner, Random) else config.rate
        self._schedule = ExchangeSchedule(config.clock, rate, random)

    def begin(self, signal: Signal) -> Iterator[Action]:
        """Begin to take part in exchanges."""
        self.active, self.mixed_at = True, signal.at
        early, self.matchmaker.waiting = self.matchmaker.waiting, []
        for rank in early:  # they could not be paired before this rank was training
            yield from self._pair(signal.at, rank)

    def stop(self) -> None:
        """Start no exchange any more, and decline offers."""
        self.active, self.expected_offer, self.is_waiting_for_pairing, self.requests_due = False, None, False, 0
        self.queue.clear()
        self.early_pairings.clear()

    # Momentum

    def mix(self, at: float) -> None:
        """Apply the A²CiD² mixing of the time since the last call."""
        elapsed, self.mixed_at = at - self.mixed_at, at
        if self._replica.is_accelerated and self.gradient_seconds and elapsed > 0:
            self._replica.mix(math.exp(-2.0 * self._eta() * elapsed / self.gradient_seconds))

    def _eta(self) -> float:
        assert self.gradient_seconds is not None
        eta = self._view.constants.eta
        guarded = isinstance(self._config.momentum, Acid) and self._config.momentum.guard
        if not guarded or not self.round_trip_seconds:
            return eta
        exchanges_per_round_trip = self._config.rate * self.round_trip_seconds / self.gradient_seconds
        return eta * min(1.0, FULL_SPEED_EXCHANGES / exchanges_per_round_trip)

    # Schedule

    def gradient_done(self, at: float, seconds: float) -> Iterator[Action]:
        """Advance the schedule by a gradient that took `seconds`."""
        self.gradient_seconds = _running_mean(self.gradient_seconds, seconds)
        self._schedule.gradient_done(at)
        yield from self.start_due(at)

    def on_timer(self, event: TimerFired) -> Iterator[Action]:
        yield from self.start_due(event.at)

    def start_due(self, at: float) -> Iterator[Action]:
        """Start the exchanges that are due, and set the timer for the next."""
        if not self.active or self.gradient_seconds is None:
            return
        while (seconds := self._schedule.seconds_to_next(at, self.gradient_seconds)) is not None and seconds <= 0.0:
            self._schedule.advance()
            self.exchanges_due += 1
            yield from self._queue_due(at)
        yield from self._start_next(at)
        if seconds is not None:
            yield SetTimer(TIMER, seconds)

    def _queue_due(self, at: float) -> Iterator[Action]:
        partner = self._config.partner
        if isinstance(partner, FirstAvailable):
            self.requests_due = min(QUEUED_MAX, self.requests_due + 1)
        elif isinstance(partner, Random):
            yield from self._enqueue(at, None)
        else:
            matched = self._matched_partner()
            if matched is not None:
                yield from self._enqueue(at, matched)

    def _matched_partner(self) -> int | None:
        """The partner in the current matching; None if there is none, or if it is the partner's turn to start."""
        matchings = self._config.matchings(self._view.size)
        turn, place = divmod(self.exchanges_due - 1, len(matchings)) if matchings else (0, 0)
        other = matchings[place].get(self._view.rank) if matchings else None
        if other is None or (self._view.rank < other) != (turn % 2 == 0):
            return None
        return other

    def _enqueue(self, at: float, partner: int | None) -> Iterator[Action]:
        if len(self.queue) < QUEUED_MAX:
            self.queue.append((partner, 0))
        elif not self.rate_warning_sent and self.round_trip_seconds and self.gradient_seconds:
            self.rate_warning_sent = True
            length = self.round_trip_seconds / self.gradient_seconds
            text = (
                f"peer {self._view.rank} cannot keep up with rate {self._config.rate:g}: an exchange takes "
                f"{length:.3g} times as long as a gradient, so about {2 / length:.2g} per gradient are possible; "
                "lower the rate, or compute more samples per gradient (batch)"
            )
            yield Report(Notice(at=at, rank=self._view.rank, text=text))

    def _start_next(self, at: float) -> Iterator[Action]:
        """Send the next offer, unless an exchange is pending."""
        while self.active and self.pending is None and self.queue:
            partner, pairing = self.queue.pop(0)
            if partner is None:
                neighbours = self._view.neighbours
                partner = neighbours[int(self._random.integers(len(neighbours)))] if neighbours else None
            if partner in self._view.live:
                yield self._offer(at, partner, pairing)
        yield from self._request_partner(at)

    def _offer(self, at: float, partner: int, pairing: int) -> Send:
        self.mix(at)
        self.sequence += 1
        self.pending = PendingExchange(partner, self.sequence, at)
        parameters, buffers = self._replica.snapshot()
        return Send(partner, Offer(parameters, buffers, self.sequence, pairing, self._view.sample_counts))

    # Matchmaker

    def _request_partner(self, at: float) -> Iterator[Action]:
        """Send `Ready` if an exchange is due and this peer is not occupied."""
        occupied = self.is_waiting_for_pairing or self.pending is not None or self.expected_offer is not None
        if not self.active or not self.requests_due or occupied:
            return
        self.requests_due -= 1
        self.is_waiting_for_pairing = True
        if self._view.is_root:
            yield from self._pair(at, self._view.rank)
        else:
            yield Send(self._view.root, Ready())

    def on_ready(self, event: MessageArrived) -> Iterator[Action]:
        yield from self._pair(event.at, event.source)

    def _pair(self, at: float, rank: int) -> Iterator[Action]:
        """On the root: pair a ready rank, or let it wait."""
        pairing = self.matchmaker.add(rank, lambda a, b: self.active and self._view.may_average(a, b))
        if pairing is None:
            return
        number, initiator, responder = pairing
        for receiver, partner in ((initiator, responder), (responder, initiator)):
            message = Paired(number, partner, begins=receiver == initiator)
            if receiver == self._view.rank:
                yield from self._paired(at, message)
            else:
                yield Send(receiver, message)

    def on_paired(self, event: MessageArrived) -> Iterator[Action]:
        yield from self._paired(event.at, matched(event, Paired))

    def _paired(self, at: float, message: Paired) -> Iterator[Action]:
        self.is_waiting_for_pairing = False
        if not self.active:
            return
        if message.begins:
            self.queue.append((message.partner, message.pairing))
        elif message.pairing in self.early_pairings:
            self.early_pairings.remove(message.pairing)
        elif message.partner in self._view.live:
            self.expected_offer = message.partner, message.pairing
        yield from self._start_next(at)

    def root_changed(self, signal: Signal) -> Iterator[Action]:
        """Repeat a request that was sent to the former root."""
        if not self._view.is_root:
            self.matchmaker = Matchmaker()
        self.early_pairings.clear()
        if self.is_waiting_for_pairing:
            self.is_waiting_for_pairing = False
            self.requests_due += 1
        yield from self._request_partner(signal.at)

    # Exchanges

    def on_offer(self, event: MessageArrived) -> Iterator[Action]:
        message, result = matched(event, Offer), None
        if self.active:
            self.mix(event.at)
            alpha_tilde = self._view.constants.alpha_tilde if self._replica.is_accelerated else ALPHA
            result = self._replica.respond(message.parameters, message.buffers, alpha_tilde)
        counts = self._view.sample_counts
        if result is None:
            yield Send(event.source, Declined(message.sequence, counts))
        else:
            answer = Answer(result.difference, result.buffers, message.sequence, counts, alpha_tilde, result.distance)
            yield Send(event.source, answer)
        if self.expected_offer == (event.source, message.pairing):
            self.expected_offer = None
            yield from self._request_partner(event.at)
        elif message.pairing and self.active:  # otherwise the announcement is not waited for
            self.early_pairings.add(message.pairing)

    def on_reply(self, event: MessageArrived) -> Iterator[Action]:
        message, pending = cast(Answer | Declined, event.message), self.pending
        if pending is None or (pending.partner, pending.sequence) != (event.source, message.sequence):
            return
        if isinstance(message, Answer):
            self.mix(event.at)
            self._replica.complete(message.difference, message.buffers, message.alpha_tilde)
            self.round_trip_seconds = _running_mean(self.round_trip_seconds, event.at - pending.began_at)
            yield self._close_pending(event.at, "averaged", message.distance)
        else:
            yield self._close_pending(event.at, "declined", None)
        yield from self._start_next(event.at)

    def _close_pending(self, at: float, outcome: Outcome, distance: float | None) -> Report:
        assert self.pending is not None
        partner, seconds = self.pending.partner, at - self.pending.began_at
        self.pending = None
        rank = self._view.rank
        return Report(Exchange(at=at, rank=rank, peer=partner, seconds=seconds, distance=distance, outcome=outcome))

    def rank_lost(self, signal: Signal) -> Iterator[Action]:
        """Expect nothing of a lost rank any more."""
        rank: int = signal.content
        self.matchmaker.remove(rank)
        if self.expected_offer is not None and self.expected_offer[0] == rank:
            self.expected_offer = None
        if self.pending is not None and self.pending.partner == rank:
            yield self._close_pending(signal.at, "lost", None)
        yield from self._start_next(signal.at)

    def clear_links(self, event: object) -> Iterable[Action]:
        """Expect no message of any rank: no link of a restarted process is up yet."""
        self.pending, self.expected_offer, self.is_waiting_for_pairing = None, None, False
        self.matchmaker = Matchmaker()
        return ()


def _running_mean(mean: float | None, latest: float) -> float:
    return latest if mean is None else mean + SMOOTHING * (latest - mean)
