"""Who is there: peers that join, are lost and come back, how they begin, and who is the root.

All begin with a global average of their parameters, once everybody who was expected has joined, or patience ends. Who
comes late, or again, copies one that is training instead.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import cast

from offbeat.core.actions import Action, ClearTimer, Report, Seconds, Send, SetTimer
from offbeat.core.events import MessageArrived, PeerJoined, PeerLost
from offbeat.core.messages import Stop, Stopped
from offbeat.core.strategy import NodeContext
from offbeat.records.schema import Membership, Notice
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
from offbeat.strategies.gossip.gossip_parts import GossipBase
from offbeat.strategies.gossip.membership_view import COORDINATORS
from offbeat.strategies.gossip.termination import ENDING, GATHERING, HOLDING, TRAINING, TerminationNode


class MembershipNode(TerminationNode):
    def __init__(self, config: GossipBase, context: NodeContext) -> None:
        super().__init__(config, context)
        self._began_at = 0.0
        self._patient = True
        self._source: int | None = None
        """The one that this peer is about to copy."""
        self._sources: set[int] = set()
        self._warned_of: list[int] = []

    @abstractmethod
    def _train(self, at: float) -> Iterator[Action]:
        """Compute, if nothing is being computed: training has begun, or goes on from a checkpoint."""

    def _message_to_all(self, event: MessageArrived) -> Iterable[Action]:
        """What concerns the start, the end, and who is there."""
        message, at, source = event.message, event.at, event.source
        match message:
            case ReduceStart():
                return self._gather(at, source, message)
            case PartialSum():
                return self._part(at, source, cast(PartialSum, event.keep()))
            case Average():
                return self._average(at, cast(Average, event.keep()))
            case AverageReceived(version=version):
                return self._have(at, source, version)
            case ReduceRetry(round=number):
                return self._retry(at, source, number)
            case Status(training=training):
                return self._status(source, training)
            case CopyRequest():
                return self._copy(at, source)
            case CopyReply():
                return self._copied(at, message)
            case GoalReached(members=members):
                return self._told_enough(at, source, members)
            case LoopEnded():
                return self._told_through(at, source)
            case MemberList(ranks=ranks):
                if source == self._root:
                    self._view.told(ranks)
                return ()
            case Stop(version=version):
                return self._told_stop(at, source, version)
            case Stopped():
                self._unstopped.discard(source)
                return self._finish_if_done(at)
            case _:
                return ()

    # Who is there

    def _start(self, at: float) -> Iterator[Action]:
        if self._phase == GATHERING and self._view.size == 1:
            yield from self._begin(at, 0.0)
        elif self._phase == GATHERING:
            self._forget_all()  # a checkpoint may know of some who have joined the process before
            yield SetTimer("gather", self._config.patience_seconds)
        else:
            yield from self._resume(at)

    def _resume(self, at: float) -> Iterator[Action]:
        """Go on from a checkpoint, in a process that knows nobody yet: whoever joins may copy."""
        self._forget_all()
        if self._phase == TRAINING:
            yield from self._set_until(at)
            yield from self._train(at)
            yield from self._averaging.beat(at)
        else:
            self._to_meet = set(self._expected)
            yield SetTimer("meet", self._config.patience_seconds)
            yield from self._meet(at)

    def _forget_all(self) -> None:
        self._view.forget_all()
        self._averaging.forget_all()
        self._evaluations.reset()
        self._root, self._computing = self._rank, False
        self._awaiting, self._unstopped, self._throughs = set(), set(), set()
        self._reduce, self._source, self._sources, self._early = None, None, set(), []

    def _joined(self, event: PeerJoined) -> Iterator[Action]:
        at, rank = event.at, event.peer
        yield self._seen(event, joined=True)
        self._view.joined(rank, event.incarnation)
        if self._phase != GATHERING:
            yield Send(rank, Status(training=True))
        if self._root != self._view.root:
            yield from self._new_root(at)
        elif self._to_meet:
            yield from self._meet(at)
        elif self._phase == GATHERING:
            yield from self._start_if_ready(at)
        elif self._view.leads and self._phase == ENDING:
            yield from self._start_reduce(at, final=True)
        elif rank in self._audience() and self._view.leads and self._phase == HOLDING:
            self._awaiting.add(rank)
            yield self._directly(rank)
        elif self._view.leads:
            yield from self._tell_roster()

    def _lost(self, event: PeerLost) -> Iterator[Action]:
        at, rank = event.at, event.peer
        if rank not in self._view.live:
            return
        yield self._seen(event, joined=False)
        self._view.lost(rank)
        yield from self._averaging.lost(at, rank)
        self._awaiting.discard(rank)
        self._unstopped.discard(rank)
        self._throughs.discard(rank)
        self._early = [(source, part) for source, part in self._early if source != rank]
        yield from self._source_lost(rank)
        if self._root != self._view.root:
            yield from self._new_root(at)
        else:
            yield from self._one_less(at, rank)
        yield from self._settled(at)
        yield from self._finish_if_done(at)

    def _one_less(self, at: float, rank: int) -> Iterator[Action]:
        """Somebody is gone who was not the root."""
        tree_reduce = self._reduce
        if not self._view.leads:
            if tree_reduce is not None and tree_reduce.concerns(rank):
                yield Send(self._root, ReduceRetry(tree_reduce.gather.round))
        elif self._phase == HOLDING:
            for missing in sorted(self._awaiting):  # whoever was to hand it on may be the one that is gone
                yield self._directly(missing)
            yield from self._stop_if_all_have(at)
        elif self._phase == GATHERING:
            self._reduce = None
            yield from self._start_if_ready(at)
        elif tree_reduce is not None:
            yield from self._start_reduce(at, final=True)
        elif self._phase == TRAINING:
            yield from self._tell_roster()
            yield from self._end_if_all_through(at)
        if self._phase == TRAINING:
            yield from self._warn_if_cut_off(at)

    def _new_root(self, at: float) -> Iterator[Action]:
        """Another rank is the lowest now, perhaps this one: whatever concerns all goes on there."""
        self._root = self._view.root
        leads = self._view.leads
        self._reduce = None
        self._awaiting.clear()
        self._to_meet.clear()
        self._stopping = False
        yield from self._averaging.root_changed(at)
        if self._phase == GATHERING:
            if leads:
                yield from self._start_if_ready(at)
            else:
                yield Send(self._root, Status(training=False))
        elif self._phase in (ENDING, HOLDING):
            if leads:
                yield from self._start_reduce(at, final=True)
            else:
                yield Send(self._root, self._enough())
        else:
            if self._through:
                yield from self._say_through(at)
            if leads:
                yield from self._tell_roster()
            else:
                yield Send(self._root, Status(training=True))
            yield from self._warn_if_cut_off(at)

    def _tell_roster(self) -> Iterator[Action]:
        """Where not everybody is linked to everybody, the root, which is, says who is there."""
        if self._view.size > COORDINATORS > self._rank:
            for rank in sorted(self._view.live):
                yield Send(rank, MemberList(self._view.all()), supersedes="roster")

    def _warn_if_cut_off(self, at: float) -> Iterator[Action]:
        """The root says it, for all."""
        cut_off = self._view.cut_off
        if cut_off and cut_off != self._warned_of and self._view.leads:
            here, there = (", ".join(map(str, ranks)) for ranks in (self._view.topology.members, cut_off))
            text = (
                f"without those who are lost, the graph is in pieces: peers {here} no longer average, not even through "
                f"others, with {there}; they meet again in the final average"
            )
            yield Report(Notice(at=at, rank=self._rank, text=text))
        self._warned_of = cut_off

    def _seen(self, event: PeerJoined | PeerLost, joined: bool) -> Report:
        return Report(
            Membership(at=event.at, rank=self._rank, peer=event.peer, incarnation=event.incarnation, joined=joined)
        )

    # The start

    def _start_if_ready(self, at: float) -> Iterator[Action]:
        if self._phase != GATHERING or not self._view.leads or self._source is not None:
            return
        complete = self._expected <= self._view.live.keys()
        if complete or (self._view.live and not self._patient):
            yield from self._start_reduce(at, final=False)

    def _patience_over(self, at: float) -> Iterator[Action]:
        if self._phase != GATHERING:
            return
        self._patient = False
        if self._view.live:
            yield SetTimer("gather", self._config.patience_seconds)
            if self._reduce is None:
                yield from self._start_if_ready(at)
            return
        if self._met_beginners:
            yield from self._start_reduce(at, final=False)
            return
        others = "none of the others" if len(self._expected) > 1 else "no other peer"
        yield from self._give_up(
            f"peer {self._rank} found {others} within {self._config.patience_seconds:g} s (patience_seconds); start "
            "them, or be more patient"
        )

    def _status(self, source: int, training: bool) -> Iterator[Action]:
        if not training:
            self._met_beginners = True
            if self._phase == TRAINING:
                yield Send(source, Status(training=True))
            elif self._reduce is not None and self._view.leads:
                yield Send(source, self._reduce.gather)  # it did not know yet that this peer leads
        elif self._phase == GATHERING:
            self._sources.add(source)
            yield from self._choose_source()

    def _choose_source(self) -> Iterator[Action]:
        if self._phase == GATHERING and self._source is None and self._sources:
            near = self._sources & set(self._view.neighbours)
            self._source = min(near or self._sources)
            yield Send(self._source, CopyRequest())

    def _source_lost(self, rank: int) -> Iterator[Action]:
        self._sources.discard(rank)
        if self._source == rank:
            self._source = None
            yield from self._choose_source()

    def _copy(self, at: float, source: int) -> Iterator[Action]:
        if self._phase == TRAINING and self._replica.finite:
            self._averaging.mix(at)
            values = self._replica.mean_point()
            yield Send(source, CopyReply(*values, self._view.told_counts, at - self._began_at))

    def _copied(self, at: float, message: CopyReply) -> Iterator[Action]:
        if self._phase == GATHERING:
            self._replica.reset(message.parameters, message.buffers)
            self._draw = self._view.counts[self._rank]  # what the others know of; the rest is repeated
            yield from self._begin(at, message.elapsed_seconds)
            for rank in sorted(self._view.live):  # somebody may have been called by this peer, and wait
                yield Send(rank, Status(training=True))

    def _begin(self, at: float, elapsed_seconds: float) -> Iterator[Action]:
        self._phase = TRAINING
        self._reduce, self._source, self._sources = None, None, set()
        self._began_at = at - elapsed_seconds
        yield ClearTimer("gather")
        yield from self._averaging.begin(at)
        yield from self._set_until(at)
        if self._view.leads:
            yield from self._tell_roster()
        yield from self._train(at)

    def _set_until(self, at: float) -> Iterator[Action]:
        if isinstance(self._setup.until, Seconds):
            yield SetTimer("until", max(0.0, self._began_at + self._setup.until.seconds - at))
