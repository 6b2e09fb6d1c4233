"""Membership: peers that join, are lost and come back; the start of a run; and the choice of the root.

A run starts with a global average of the parameters, once all expected ranks have joined or `patience_seconds` have
passed. A rank that joins later, or again, copies the parameters of a rank that is training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from offbeat.core.actions import Action, ClearTimer, Report, Send, SetTimer
from offbeat.core.events import Event, LossReason, MessageArrived, PeerJoined, PeerLost, Started, TimerFired
from offbeat.records.schema import Membership, Notice
from offbeat.strategies.gossip.global_averages import GlobalAverages
from offbeat.strategies.gossip.gossip_messages import CopyRequest, MemberList, Status
from offbeat.strategies.gossip.membership_view import COORDINATORS, MembershipView
from offbeat.strategies.gossip.phases import Signal, Step, Trigger
from offbeat.strategies.gossip.termination import Termination
from offbeat.strategies.message_kinds import matched
from offbeat.strategies.node_state import Stateful


class PeerMembership(Stateful):
    """The membership of one peer.

    view: membership and sample counts, which this part updates.
    expected: the ranks that are waited for at the start.
    patience_seconds: how long they are waited for.
    rounds: the global averages, of which one may be under way.
    termination: the end of the run, for which a restarted root may wait for links.
    """

    root: int
    """The root as of the last change, to notice the next one."""
    is_waiting_for_all: bool = True
    """Whether the start still waits for all expected ranks; false once `patience_seconds` have passed."""
    others_are_starting: bool = False
    """Whether another rank was waiting for the start too: this is a start then, and not a restart after the end."""
    copy_source: int | None = None
    """The training rank from which parameters have been requested."""
    copy_candidates: set[int]
    """Ranks known to be training."""
    unreachable_reported: list[int]
    """Ranks of the last notice about a graph in pieces."""

    def __init__(
        self,
        view: MembershipView,
        expected: frozenset[int],
        patience_seconds: float,
        rounds: GlobalAverages,
        termination: Termination,
    ) -> None:
        self._view = view
        self._expected = expected
        self._patience_seconds = patience_seconds
        self._rounds = rounds
        self._termination = termination
        self.root = view.rank
        self.copy_candidates, self.unreachable_reported = set(), []

    # Members

    def clear_links(self, event: object) -> Iterable[Step]:
        """No link of a restarted process is up yet."""
        self._view.clear()
        self.root = self._view.rank
        self._stop_copying()
        return ()

    def joined(self, event: PeerJoined) -> Iterator[Step]:
        yield self._record(event, joined=True)
        self._view.add(event.peer, event.incarnation)
        yield self._after_join(event)

    def joined_later(self, event: PeerJoined) -> Iterator[Step]:
        """A rank has joined after the start."""
        yield self._record(event, joined=True)
        self._view.add(event.peer, event.incarnation)
        yield Send(event.peer, Status(training=True))
        yield self._after_join(event)

    def _after_join(self, event: PeerJoined) -> Signal:
        if self.root != self._view.root:
            return Signal(Trigger.ROOT_CHANGED, event.at)
        if self._termination.required_links:
            return Signal(Trigger.REQUIRED_LINK_UP, event.at, event.peer)
        return Signal(Trigger.RANK_ADDED, event.at, event.peer)

    def lost(self, event: PeerLost) -> Iterator[Step]:
        if event.peer in self._view.live:
            yield self._record(event, joined=False)
            self._view.remove(event.peer)
            yield Signal(Trigger.RANK_REMOVED, event.at, event.peer)

    def lost_at_end(self, event: PeerLost) -> Iterator[Step]:
        """A rank that closes its link when all hold the result has finished: its loss is not recorded."""
        if event.reason is not LossReason.CLOSED:
            yield from self.lost(event)
        elif event.peer in self._view.live:
            self._view.remove(event.peer)
            yield Signal(Trigger.RANK_REMOVED, event.at, event.peer)

    def after_loss(self, signal: Signal) -> Iterator[Step]:
        changed = self.root != self._view.root
        yield Signal(Trigger.ROOT_CHANGED if changed else Trigger.ROOT_KEPT, signal.at, signal.content)
        yield Signal(Trigger.LOSS_HANDLED, signal.at)

    def set_root(self, signal: Signal) -> Iterable[Step]:
        self.root = self._view.root
        return ()

    def on_member_list(self, event: MessageArrived) -> Iterable[Step]:
        if event.source == self._view.root:
            self._view.set_member_list(matched(event, MemberList).ranks)
        return ()

    def send_member_list(self, signal: Signal) -> Iterator[Action]:
        """On the root: send the live ranks to all, unless every rank is linked to every other."""
        if self._view.is_root and self._view.size > COORDINATORS > self._view.rank:
            for rank in sorted(self._view.live):
                yield Send(rank, MemberList(self._view.members), supersedes="member list")

    def report_unreachable(self, signal: Signal) -> Iterator[Action]:
        """Report a graph in pieces, once and on the root only."""
        unreachable = self._view.unreachable
        if unreachable and unreachable != self.unreachable_reported and self._view.is_root:
            here, there = (", ".join(map(str, ranks)) for ranks in (self._view.topology.members, unreachable))
            text = (
                f"without the lost peers the graph is in pieces: peers {here} no longer average with peers {there}, "
                "directly or through others, until the final average"
            )
            yield Report(Notice(at=signal.at, rank=self._view.rank, text=text))
        self.unreachable_reported = unreachable

    def _record(self, event: PeerJoined | PeerLost, joined: bool) -> Report:
        rank, incarnation = self._view.rank, event.incarnation
        return Report(Membership(at=event.at, rank=rank, peer=event.peer, incarnation=incarnation, joined=joined))

    # Start

    def gather(self, event: Started) -> Iterator[Step]:
        """Wait for the other ranks, if there are any."""
        if self._view.size == 1:
            yield Signal(Trigger.BEGIN, event.at, 0.0)
        else:
            yield SetTimer("gather", self._patience_seconds)

    def start_if_ready(self, occurrence: Event | Signal) -> Iterator[Step]:
        """On the root: start the first global average once all expected ranks are there, or the wait is over."""
        if not self._view.is_root or self.copy_source is not None:
            return
        complete = self._expected <= self._view.live.keys()
        if complete or (self._view.live and not self.is_waiting_for_all):
            yield Signal(Trigger.FIRST_DUE, occurrence.at)

    def gather_timeout(self, event: TimerFired) -> Iterator[Step]:
        self.is_waiting_for_all = False
        if self._view.live:
            yield SetTimer("gather", self._patience_seconds)
            if self._rounds.tree_reduce is None:
                yield from self.start_if_ready(event)
        elif self.others_are_starting:
            yield Signal(Trigger.FIRST_DUE, event.at)
        else:
            sentence = (
                f"no other peer has joined peer {self._view.rank} within {self._patience_seconds:g} s; start the "
                "others, or set a longer patience_seconds"
            )
            yield Signal(Trigger.FAILED, event.at, sentence)

    def greet_root(self, signal: Signal) -> Iterator[Step]:
        """Tell a new root that this rank waits for the start; as the root, start if all are there."""
        if self._view.is_root:
            yield from self.start_if_ready(signal)
        else:
            yield Send(self._view.root, Status(training=False))

    def note_start(self, occurrence: MessageArrived | Signal) -> Iterable[Step]:
        """Another rank waits for the start, too."""
        self.others_are_starting = True
        return ()

    def begin(self, signal: Signal) -> Iterator[Action]:
        """Training begins here."""
        self._stop_copying()
        yield ClearTimer("gather")

    # Status and copies

    def send_status(self, event: MessageArrived) -> Iterator[Action]:
        yield Send(event.source, Status(training=True))

    def tell_root(self, signal: Signal) -> Iterator[Action]:
        """Tell the root that this rank is training."""
        yield Send(self._view.root, Status(training=True))

    def update_root(self, signal: Signal) -> Iterator[Action]:
        """As the new root, send the member list; otherwise tell the new root that this rank is training."""
        yield from self.send_member_list(signal) if self._view.is_root else self.tell_root(signal)

    def add_copy_source(self, event: MessageArrived) -> Iterator[Action]:
        """Another rank is training: its parameters can be copied."""
        self.copy_candidates.add(event.source)
        yield from self._request_copy()

    def copy_source_lost(self, signal: Signal) -> Iterator[Action]:
        """Copy from another rank if the source is lost."""
        self.copy_candidates.discard(signal.content)
        if self.copy_source == signal.content:
            self.copy_source = None
            yield from self._request_copy()

    def _request_copy(self) -> Iterator[Action]:
        """Request the parameters of a training rank, a neighbour if there is one."""
        if self.copy_source is None and self.copy_candidates:
            neighbours = self.copy_candidates & set(self._view.neighbours)
            self.copy_source = min(neighbours or self.copy_candidates)
            yield Send(self.copy_source, CopyRequest())

    def _stop_copying(self) -> None:
        self.copy_source, self.copy_candidates = None, set()
