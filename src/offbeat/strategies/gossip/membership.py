"""Membership: peers that join, are lost and come back; the start of a run; and the choice of the root.

A run starts with a global average of the parameters, once all expected ranks have joined or `patience_seconds` have
passed. A rank that joins later, or again, copies the parameters of a rank that is training.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import cast

from offbeat.core.actions import Action, ClearTimer, Report, Seconds, Send, SetTimer
from offbeat.core.events import MessageArrived, PeerJoined, PeerLost
from offbeat.core.messages import Stop, Stopped
from offbeat.records.schema import Membership
from offbeat.strategies.gossip.gossip_messages import (
    Average,
    AverageReceived,
    CopyReply,
    CopyRequest,
    GoalReached,
    LoopEnded,
    MemberList,
    PartialSum,
    ReduceRetry,
    ReduceStart,
    Status,
)
from offbeat.strategies.gossip.membership_view import COORDINATORS
from offbeat.strategies.gossip.peer_state import COMPLETE, ENDING, GATHERING, TRAINING
from offbeat.strategies.gossip.termination import TerminationNode


class MembershipNode(TerminationNode):
    """The part of a peer that tracks membership and starts training."""

    @abstractmethod
    def _train(self, at: float) -> Iterator[Action]:
        """Start to compute, at the start of training or after a restart from a checkpoint."""

    def _on_group_message(self, event: MessageArrived) -> Iterable[Action]:
        """Handle the messages about start, end and membership."""
        message, at, source = event.message, event.at, event.source
        match message:
            case ReduceStart():
                return self._on_reduce_start(at, source, message)
            case PartialSum():
                return self._on_partial_sum(at, source, cast(PartialSum, event.keep()))
            case Average():
                return self._on_average(at, cast(Average, event.keep()))
            case AverageReceived(version=version):
                return self._on_average_received(source, version)
            case ReduceRetry(round=reduce_round):
                return self._on_reduce_retry(at, source, reduce_round)
            case Status(training=training):
                return self._on_status(source, training)
            case CopyRequest():
                return self._on_copy_request(at, source)
            case CopyReply():
                return self._on_copy_reply(at, message)
            case GoalReached(members=members):
                return self._on_goal_reached(at, source, members)
            case LoopEnded():
                return self._on_loop_ended(at, source)
            case MemberList(ranks=ranks) if source == self.root:
                self._view.set_member_list(ranks)
            case Stop(version=version):
                return self._on_stop(source, version)
            case Stopped():
                self.awaiting_stopped.discard(source)
                return self._finish_if_done()
        return ()

    # Membership

    def _start(self, at: float) -> Iterator[Action]:
        if self.phase == GATHERING and self._view.size == 1:
            yield from self._begin(at, 0.0)
            return
        self._clear_links()  # a checkpoint may hold the links of an earlier process
        if self.phase == GATHERING:
            yield SetTimer("gather", self._config.patience_seconds)
        elif self.phase == TRAINING:
            yield from self._set_until(at)
            yield from self._train(at)
            yield from self._averaging.start_due(at)
        else:
            self.required_links = set(self._expected_ranks)
            yield SetTimer("links", self._config.patience_seconds)
            yield from self._start_final_if_linked(at)

    def _clear_links(self) -> None:
        self._view.clear()
        self._averaging.clear_links()
        self._evaluations.reset()
        self.root, self.computing = self._rank, False
        self.awaiting_receipt, self.awaiting_stopped, self.loops_ended = set(), set(), set()
        self.tree_reduce, self.copy_source, self.copy_candidates, self.early_sums = None, None, set(), []

    def _on_peer_joined(self, event: PeerJoined) -> Iterator[Action]:
        at, rank = event.at, event.peer
        yield self._membership_record(event, joined=True)
        self._view.add(rank, event.incarnation)
        if self.phase != GATHERING:
            yield Send(rank, Status(training=True))
        if self.root != self._view.root:
            yield from self._root_changed(at)
        elif self.required_links:
            yield from self._start_final_if_linked(at)
        elif self.phase == GATHERING:
            yield from self._start_if_ready(at)
        elif self._view.is_root and self.phase == ENDING:
            yield from self._start_reduce(at, final=True)
        elif rank in self._linked_members() and self._view.is_root and self.phase == COMPLETE:
            self.awaiting_receipt.add(rank)
            yield self._send_result(rank)
        elif self._view.is_root:
            yield from self._send_member_list()

    def _on_peer_lost(self, event: PeerLost) -> Iterator[Action]:
        at, rank = event.at, event.peer
        if rank not in self._view.live:
            return
        yield self._membership_record(event, joined=False)
        self._view.remove(rank)
        yield from self._averaging.peer_lost(at, rank)
        for ranks in (self.awaiting_receipt, self.awaiting_stopped, self.loops_ended, self.copy_candidates):
            ranks.discard(rank)
        self.early_sums = [(source, part) for source, part in self.early_sums if source != rank]
        if self.copy_source == rank:
            self.copy_source = None
            yield from self._request_copy()
        if self.root != self._view.root:
            yield from self._root_changed(at)
        else:
            yield from self._continue_without(at, rank)
        yield from self._continue_when_idle(at)
        yield from self._finish_if_done()

    def _continue_without(self, at: float, rank: int) -> Iterator[Action]:
        """A rank other than the root is lost."""
        if not self._view.is_root:
            if self.tree_reduce is not None and self.tree_reduce.needs(rank):
                yield Send(self.root, ReduceRetry(self.tree_reduce.start.round))
        elif self.phase == COMPLETE:
            for missing in sorted(self.awaiting_receipt):  # the lost rank may not have forwarded the result to them
                yield self._send_result(missing)
            yield from self._stop_if_all_received()
        elif self.phase == GATHERING:
            self.tree_reduce = None
            yield from self._start_if_ready(at)
        elif self.tree_reduce is not None:
            yield from self._start_reduce(at, final=True)
        elif self.phase == TRAINING:
            yield from self._send_member_list()
            yield from self._end_if_all_loops_ended(at)
        if self.phase == TRAINING:
            yield from self._report_unreachable(at)

    def _root_changed(self, at: float) -> Iterator[Action]:
        """Another rank is the root, possibly this one, and must be given what only the former root knew."""
        self.root = self._view.root
        is_root = self._view.is_root
        self.tree_reduce = None
        self.awaiting_receipt.clear()
        self.required_links.clear()
        self.stop_sent = False
        yield from self._averaging.root_changed(at)
        if self.phase == GATHERING:
            if is_root:
                yield from self._start_if_ready(at)
            else:
                yield Send(self.root, Status(training=False))
        elif self.phase in (ENDING, COMPLETE):
            if is_root:
                yield from self._start_reduce(at, final=True)
            else:
                yield Send(self.root, self._goal_message())
        else:
            if self.loop_ended:
                yield from self._announce_loop_end(at)
            if is_root:
                yield from self._send_member_list()
            else:
                yield Send(self.root, Status(training=True))
            yield from self._report_unreachable(at)

    def _send_member_list(self) -> Iterator[Action]:
        """On the root: send the live ranks to all, unless every rank is linked to every other."""
        if self._view.size > COORDINATORS > self._rank:
            for rank in sorted(self._view.live):
                yield Send(rank, MemberList(self._view.members), supersedes="member list")

    def _report_unreachable(self, at: float) -> Iterator[Action]:
        """Report a graph in pieces, once and on the root only."""
        unreachable = self._view.unreachable
        if unreachable and unreachable != self.unreachable_reported and self._view.is_root:
            here, there = (", ".join(map(str, ranks)) for ranks in (self._view.topology.members, unreachable))
            text = (
                f"without the lost peers the graph is in pieces: peers {here} no longer average with peers {there}, "
                "directly or through others, until the final average"
            )
            yield self._notice(at, text)
        self.unreachable_reported = unreachable

    def _membership_record(self, event: PeerJoined | PeerLost, joined: bool) -> Report:
        return Report(
            Membership(at=event.at, rank=self._rank, peer=event.peer, incarnation=event.incarnation, joined=joined)
        )

    # The start

    def _start_if_ready(self, at: float) -> Iterator[Action]:
        """On the root: start the first global average once all expected ranks are there, or the wait is over."""
        if self.phase != GATHERING or not self._view.is_root or self.copy_source is not None:
            return
        complete = self._expected_ranks <= self._view.live.keys()
        if complete or (self._view.live and not self.is_waiting_for_all):
            yield from self._start_reduce(at, final=False)

    def _on_gather_timeout(self, at: float) -> Iterator[Action]:
        if self.phase != GATHERING:
            return
        self.is_waiting_for_all = False
        if self._view.live:
            yield SetTimer("gather", self._config.patience_seconds)
            if self.tree_reduce is None:
                yield from self._start_if_ready(at)
        elif self.others_are_starting:
            yield from self._start_reduce(at, final=False)
        else:
            yield self._fail(
                f"no other peer has joined peer {self._rank} within {self._config.patience_seconds:g} s; start the "
                "others, or set a longer patience_seconds"
            )

    def _on_status(self, source: int, training: bool) -> Iterator[Action]:
        if not training:
            self.others_are_starting = True
            if self.phase == TRAINING:
                yield Send(source, Status(training=True))
            elif self.tree_reduce is not None and self._view.is_root:
                yield Send(source, self.tree_reduce.start)  # the first one came before the source knew this root
        elif self.phase == GATHERING:
            self.copy_candidates.add(source)
            yield from self._request_copy()

    def _request_copy(self) -> Iterator[Action]:
        """Request the parameters of a training rank, a neighbour if there is one."""
        if self.phase == GATHERING and self.copy_source is None and self.copy_candidates:
            neighbours = self.copy_candidates & set(self._view.neighbours)
            self.copy_source = min(neighbours or self.copy_candidates)
            yield Send(self.copy_source, CopyRequest())

    def _on_copy_request(self, at: float, source: int) -> Iterator[Action]:
        if self.phase == TRAINING and self._replica.is_finite:
            self._averaging.mix(at)
            values = self._replica.mean_of_copies()
            yield Send(source, CopyReply(*values, self._view.sample_counts, at - self.began_at))

    def _on_copy_reply(self, at: float, message: CopyReply) -> Iterator[Action]:
        if self.phase == GATHERING:
            self._replica.reset(message.parameters, message.buffers)
            self.draw = self._view.counts[self._rank]  # samples unknown to the others are computed again
            yield from self._begin(at, message.elapsed_seconds)
            for rank in sorted(self._view.live):  # a rank may wait for a round that this one had started
                yield Send(rank, Status(training=True))

    def _begin(self, at: float, elapsed_seconds: float) -> Iterator[Action]:
        self.phase = TRAINING
        self.tree_reduce, self.copy_source, self.copy_candidates = None, None, set()
        self.began_at = at - elapsed_seconds
        yield ClearTimer("gather")
        yield from self._averaging.start(at)
        yield from self._set_until(at)
        if self._view.is_root:
            yield from self._send_member_list()
        yield from self._train(at)

    def _set_until(self, at: float) -> Iterator[Action]:
        if isinstance(self._context.until, Seconds):
            yield SetTimer("until", max(0.0, self.began_at + self._context.until.seconds - at))
