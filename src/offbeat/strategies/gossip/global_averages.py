"""Global averages over all live ranks, at the start and at the end of a run; the root starts them.

A round: the root sends `ReduceStart` to all, partial sums go up a tree (`tree_reduce.py`), and the mean comes down. The
average of the start is what all begin to train with. A rank that holds the final average contributes it to any later
round; so all connected ranks end with the same parameters, whichever ranks are lost meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from offbeat.core.actions import Action, Report, Send
from offbeat.core.events import MessageArrived
from offbeat.records.schema import Notice
from offbeat.strategies.gossip.averaging import Averaging
from offbeat.strategies.gossip.gossip_messages import Average, PartialSum, ReduceRetry, ReduceStart
from offbeat.strategies.gossip.membership_view import COORDINATORS, MembershipView
from offbeat.strategies.gossip.peer_training import PeerTraining
from offbeat.strategies.gossip.phases import Signal, Step, Trigger
from offbeat.strategies.gossip.replica import Replica
from offbeat.strategies.gossip.tree_reduce import TreeReduce, children
from offbeat.strategies.message_kinds import kept, matched
from offbeat.strategies.node_state import Stateful

RECENT_ROUNDS = 1000
"""Rounds of a root that are over when a later one starts; another incarnation of it begins at a random number."""


class GlobalAverages(Stateful):
    """The global averages of one peer.

    view: membership and sample counts.
    replica: the parameters that are averaged.
    averaging: the exchanges, whose momentum is applied before.
    training: says whether the replica may still change.
    random: the generator that the number of the first round is drawn from.
    """

    reduce_round: int
    """The last round that this rank has started as root. The first is random, so that a restart repeats none."""
    last_reduce_start: tuple[int, int, int] = (-1, -1, -1)
    """Root, its incarnation, and round of the last `ReduceStart` that was accepted."""
    tree_reduce: TreeReduce | None = None
    """The round under way."""
    early_sums: list[tuple[int, PartialSum]]
    """Source and partial sum, of rounds whose `ReduceStart` has not arrived yet."""
    joined_too_late: bool = False
    """Whether training was over when this rank joined, so that it contributes no values."""
    result: Average | None = None
    """The final average."""

    def __init__(
        self,
        view: MembershipView,
        replica: Replica,
        averaging: Averaging,
        training: PeerTraining,
        random: np.random.Generator,
    ) -> None:
        self._view = view
        self._replica = replica
        self._averaging = averaging
        self._training = training
        self.early_sums = []
        self.reduce_round = int(random.integers(1 << 40))

    def _notice(self, at: float, text: str) -> Report:
        return Report(Notice(at=at, rank=self._view.rank, text=text))

    # Members

    def clear_links(self, event: object) -> Iterable[Step]:
        self.tree_reduce, self.early_sums = None, []
        return ()

    def rank_lost(self, signal: Signal) -> Iterable[Step]:
        self.early_sums = [(source, part) for source, part in self.early_sums if source != signal.content]
        return ()

    def abandon(self, signal: Signal) -> Iterable[Step]:
        """End the round under way: the root has changed, or training has begun."""
        self.tree_reduce = None
        return ()

    def abandon_as_root(self, signal: Signal) -> Iterable[Step]:
        """End the first round after a loss; another one starts when the members are complete."""
        if self._view.is_root:
            self.tree_reduce = None
        return ()

    def request_retry(self, signal: Signal) -> Iterator[Action]:
        """Ask the root to repeat a round that cannot complete without a lost rank."""
        if not self._view.is_root and self.tree_reduce is not None and self.tree_reduce.needs(signal.content):
            yield Send(self._view.root, ReduceRetry(self.tree_reduce.start.round))

    def repeat_as_root(self, signal: Signal) -> Iterator[Step]:
        """Repeat the final round without a lost rank."""
        if self._view.is_root and self.tree_reduce is not None:
            yield from self._start(signal.at, final=True)

    # Rounds

    def start_first(self, signal: Signal) -> Iterator[Step]:
        yield from self._start(signal.at, final=False)

    def start_final(self, signal: Signal) -> Iterator[Step]:
        yield from self._start(signal.at, final=True)

    def _start(self, at: float, final: bool) -> Iterator[Step]:
        """On the root: start a round over all live ranks; without tree if it replaces a round under way."""
        self.reduce_round += 1
        rank = self._view.rank
        if rank >= COORDINATORS:
            lost = f"all of the {COORDINATORS} lowest ranks, which link the others, are lost"
            yield self._notice(at, f"peer {rank} continues alone: {lost}")
        members = (rank, *sorted(self._view.linked_members))
        start = ReduceStart(self.reduce_round, final, members, direct=self.tree_reduce is not None)
        self.tree_reduce = TreeReduce.create(rank, rank, start)
        for other in members[1:]:
            yield Send(other, start)
        yield from self._contribute(at)

    def on_reduce_start(self, event: MessageArrived) -> Iterator[Step]:
        """Accept a round of the root that is newer than the last one."""
        root, start, last = event.source, matched(event, ReduceStart), self.last_reduce_start
        latest = (root, self._view.live.get(root, -1), start.round)
        if root != self._view.root or (latest[:2] == last[:2] and start.round <= last[2]):
            return
        self.last_reduce_start = latest
        yield Signal(Trigger.FINAL_ROUND if start.final else Trigger.FIRST_ROUND, event.at, (root, start))

    def mark_late(self, signal: Signal) -> Iterable[Step]:
        """The final average starts before this rank has trained."""
        self.joined_too_late = True
        return ()

    def join_round(self, signal: Signal) -> Iterator[Step]:
        self.tree_reduce = TreeReduce.create(self._view.rank, *signal.content)
        early, self.early_sums = self.early_sums, []
        for source, part in early:
            if self.tree_reduce.includes(part):
                self.tree_reduce.add(source, part)
        yield from self._contribute(signal.at)

    def resend_start(self, event: MessageArrived) -> Iterator[Action]:
        """On the root: the first `ReduceStart` came before the source knew this root."""
        if self._view.is_root and self.tree_reduce is not None:
            yield Send(event.source, self.tree_reduce.start)

    def repeat(self, event: MessageArrived) -> Iterator[Step]:
        """On the root: repeat the round under way, which a rank cannot complete."""
        reduce_round, tree_reduce = matched(event, ReduceRetry).round, self.tree_reduce
        if self._view.is_root and tree_reduce is not None and reduce_round == tree_reduce.start.round:
            yield from self._start(event.at, final=tree_reduce.start.final)

    # Sums

    def on_partial_sum(self, event: MessageArrived) -> Iterator[Step]:
        source, part = event.source, kept(event, PartialSum)
        if self.tree_reduce is not None and self.tree_reduce.includes(part):
            if source in self.tree_reduce.awaited:
                self.tree_reduce.add(source, part)
                yield from self._contribute(event.at)
        elif not self._is_over(part):
            self.early_sums.append((source, part))

    def _is_over(self, part: PartialSum) -> bool:
        """Whether a partial sum that is not of the round under way is of one that has ended here."""
        root, _, latest = self.last_reduce_start
        return part.root == self._view.rank or (part.root == root and 0 <= latest - part.round < RECENT_ROUNDS)

    def contribute_if_due(self, signal: Signal) -> Iterator[Step]:
        """Add this rank's values to a round that waits for them."""
        if self.tree_reduce is not None and not self.tree_reduce.contributed:
            yield from self._contribute(signal.at)

    def _contribute(self, at: float) -> Iterator[Step]:
        """Add this rank's values once nothing can change them, and pass the sum on when it is complete."""
        tree_reduce = self.tree_reduce
        assert tree_reduce is not None
        if not tree_reduce.contributed:
            if not self._training.is_idle:
                return
            yield from self._add_own_values(at, tree_reduce)
        if not tree_reduce.complete:
            return
        if tree_reduce.parent is None:
            yield from self._average(at, tree_reduce)
        elif tree_reduce.parent in self._view.live:
            yield Send(tree_reduce.parent, tree_reduce.partial_sum(self._replica.storage, self._view.sample_counts))
        else:
            yield Send(self._view.root, ReduceRetry(tree_reduce.start.round))

    def _add_own_values(self, at: float, tree_reduce: TreeReduce) -> Iterator[Action]:
        self._averaging.mix(at)
        version = self._training.version
        if self.result is not None:
            values = self.result.parameters, self.result.buffers
            tree_reduce.contribute(values, self.result.version, is_result=True)
        elif self.joined_too_late:
            tree_reduce.contribute(None, version)
        elif not self._replica.is_finite:
            yield self._notice(at, f"the parameters of peer {self._view.rank} are not finite and are not averaged")
            tree_reduce.contribute(None, version)
        else:
            tree_reduce.contribute(self._replica.mean_of_copies(), version)

    # Averages

    def _average(self, at: float, tree_reduce: TreeReduce) -> Iterator[Step]:
        """On the root: all partial sums have arrived."""
        mean = tree_reduce.mean()
        if mean is None and not self.joined_too_late and not self._replica.is_finite:
            sentence = "no peer has finite parameters; lower the learning rate, or clip the gradient"
            yield Signal(Trigger.FAILED, at, sentence)
            return
        parameters, buffers = mean or self._replica.mean_of_copies()
        start = tree_reduce.start
        average = Average(
            parameters=parameters,
            buffers=buffers,
            root=self._view.rank,
            round=start.round,
            final=start.final,
            members=start.members,
            direct=start.direct,
            version=tree_reduce.version if tree_reduce.is_earlier_result else tree_reduce.version + 1,
            counts=self._view.sample_counts,
        )
        yield from self._apply(at, average)

    def apply(self, event: MessageArrived) -> Iterator[Step]:
        yield from self._apply(event.at, kept(event, Average))

    def _apply(self, at: float, average: Average) -> Iterator[Step]:
        """Forward a global average to the children; start to train with it, or hold it as the result."""
        if average.members:
            for rank in children(self._view.rank, average.members, average.direct):
                yield Send(rank, average)
        self.tree_reduce = None
        if average.final:
            self.result = average
            yield Signal(Trigger.RESULT, at)
        else:
            self._replica.reset(average.parameters, average.buffers)
            yield Signal(Trigger.BEGIN, at, 0.0)
