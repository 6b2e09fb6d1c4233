"""Global averages, which the root starts, and the end of a run.

A round: the root sends `ReduceStart` to all, partial sums go up a tree (`tree_reduce.py`), and the mean comes down. The
average of the start is what all begin to train with. At the end every rank confirms with `AverageReceived`, the root
sends `Stop`, and every rank replies `Stopped` and finishes. No rank finishes before all hold the result, and a rank
that holds the result contributes it to any later round; so all connected ranks end with the same parameters, whichever
ranks are lost meanwhile.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Iterator

from torch import Tensor

from offbeat.core.actions import Action, Cancel, ClearTimer, Finish, Report, Send, SetTimer
from offbeat.core.messages import Buffers, Stop, Stopped
from offbeat.core.strategy import Node, NodeContext
from offbeat.records.schema import Notice
from offbeat.strategies.evaluations import Evaluations
from offbeat.strategies.gossip.averaging import TIMER, Averaging
from offbeat.strategies.gossip.gossip_messages import (
    Average,
    AverageReceived,
    GoalReached,
    LoopEnded,
    PartialSum,
    ReduceRetry,
    ReduceStart,
    Status,
)
from offbeat.strategies.gossip.gossip_parts import GossipBase
from offbeat.strategies.gossip.membership_view import COORDINATORS, MembershipView
from offbeat.strategies.gossip.peer_state import COMPLETE, ENDING, GATHERING, TRAINING, PeerState
from offbeat.strategies.gossip.replica import Replica
from offbeat.strategies.gossip.tree_reduce import TreeReduce, children


class TerminationNode(PeerState, Node):
    """The part of a peer that computes global averages and ends the run."""

    _replica: Replica
    _view: MembershipView
    _averaging: Averaging
    _evaluations: Evaluations

    def __init__(self, config: GossipBase, context: NodeContext) -> None:
        super().__init__(root=context.rank)
        self._config = config
        self._context = context
        self._rank = context.rank
        self._expected_ranks = set(context.members) - {context.rank}
        size = max(context.members) + 1
        config.processes(size)  # raises if the graph does not exist at this size
        accelerated = config.momentum is not None
        self._replica = Replica(
            context.parameters, context.buffers, accelerated=accelerated, compression=config.compression
        )
        self._view = MembershipView(context.rank, size, config.graph, config.rate)
        self._averaging = Averaging(config, self._view, self._replica, context.random)
        self._evaluations = Evaluations(context.rank, context.evaluate)
        self.reduce_round = int(context.random.integers(1 << 40))

    @abstractmethod
    def _begin(self, at: float, elapsed_seconds: float) -> Iterator[Action]:
        """Start to train with the current parameters, `elapsed_seconds` after the start of the run."""

    def _notice(self, at: float, text: str) -> Report:
        return Report(Notice(at=at, rank=self._rank, text=text))

    # Global averages

    def _start_reduce(self, at: float, final: bool) -> Iterator[Action]:
        """On the root: start a round over all live ranks; without tree if it replaces a round under way."""
        self.reduce_round += 1
        if self._rank >= COORDINATORS:
            lost = f"all of the {COORDINATORS} lowest ranks, which link the others, are lost"
            yield self._notice(at, f"peer {self._rank} continues alone: {lost}")
        members = (self._rank, *sorted(self._linked_members()))
        start = ReduceStart(self.reduce_round, final, members, direct=self.tree_reduce is not None)
        self.tree_reduce = TreeReduce.create(self._rank, self._rank, start)
        if final and self.phase == GATHERING:
            self.phase, self.joined_too_late = ENDING, True
        for rank in members[1:]:
            yield Send(rank, start)
        yield from self._contribute(at)

    def _linked_members(self) -> set[int]:
        """The ranks of a round besides the root: none if the root is not a coordinator, to which all are linked."""
        return set(self._view.live) if self._rank < COORDINATORS else set()

    def _on_reduce_start(self, at: float, root: int, start: ReduceStart) -> Iterator[Action]:
        latest, last = (root, self._view.live.get(root, -1), start.round), self.last_reduce_start
        if root != self.root or (latest[:2] == last[:2] and start.round <= last[2]):
            return
        self.last_reduce_start = latest
        if not start.final and self.phase != GATHERING:
            yield Send(root, Status(training=True) if self.phase == TRAINING else self._goal_message())
            return
        if start.final and self.phase == GATHERING:
            self.phase, self.joined_too_late = ENDING, True
        elif self.phase == TRAINING:
            yield from self._stop_training()
        self.others_are_starting = True
        self.tree_reduce = TreeReduce.create(self._rank, root, start)
        early, self.early_sums = self.early_sums, []
        for source, part in early:
            if self.tree_reduce.includes(part):
                self.tree_reduce.add(source, part)
        yield from self._contribute(at)

    def _contribute(self, at: float) -> Iterator[Action]:
        """Add this rank's values once nothing can change them, and pass the sum on when it is complete."""
        tree_reduce = self.tree_reduce
        if tree_reduce is None:
            return
        if not tree_reduce.contributed:
            if self.computing or self._averaging.pending is not None:
                return
            self._averaging.mix(at)
            if self.result is not None:
                values = self.result.parameters, self.result.buffers
                tree_reduce.contribute(values, self.result.version, is_result=True)
            elif self.joined_too_late:
                tree_reduce.contribute(None, self.version)
            elif not self._replica.is_finite:
                yield self._notice(at, f"the parameters of peer {self._rank} are not finite and are not averaged")
                tree_reduce.contribute(None, self.version)
            else:
                tree_reduce.contribute(self._replica.mean_of_copies(), self.version)
        if not tree_reduce.complete:
            return
        if tree_reduce.parent is None:
            yield from self._send_average(at, tree_reduce)
        elif tree_reduce.parent in self._view.live:
            yield Send(tree_reduce.parent, tree_reduce.partial_sum(self._replica.parameters, self._view.sample_counts))
        else:
            yield Send(self.root, ReduceRetry(tree_reduce.start.round))

    def _on_partial_sum(self, at: float, source: int, part: PartialSum) -> Iterator[Action]:
        if self.tree_reduce is None or not self.tree_reduce.includes(part):
            self.early_sums.append((source, part))
        elif source in self.tree_reduce.awaited:
            self.tree_reduce.add(source, part)
            yield from self._contribute(at)

    def _on_reduce_retry(self, at: float, source: int, reduce_round: int) -> Iterator[Action]:
        if self.phase == COMPLETE and self._view.is_root:
            yield self._send_result(source)
        elif self.phase == TRAINING:
            yield Send(source, Status(training=True))
        elif self.tree_reduce is not None and self._view.is_root and reduce_round == self.tree_reduce.start.round:
            yield from self._start_reduce(at, final=self.tree_reduce.start.final)

    def _send_average(self, at: float, tree_reduce: TreeReduce) -> Iterator[Action]:
        """On the root: all partial sums have arrived."""
        mean = tree_reduce.mean()
        if mean is None and not self.joined_too_late and not self._replica.is_finite:
            yield self._fail("no peer has finite parameters; lower the learning rate, or clip the gradient")
            return
        parameters, buffers = mean or self._replica.mean_of_copies()
        start = tree_reduce.start
        average = Average(
            parameters=parameters,
            buffers=buffers,
            root=self._rank,
            round=start.round,
            final=start.final,
            members=start.members,
            direct=start.direct,
            version=tree_reduce.version if tree_reduce.is_earlier_result else tree_reduce.version + 1,
            counts=self._view.sample_counts,
        )
        yield from self._apply_average(at, average)

    def _on_average(self, at: float, average: Average) -> Iterator[Action]:
        if not average.final and self.phase != GATHERING:
            return
        if average.final and self.phase == TRAINING:
            yield from self._stop_training()
        yield from self._apply_average(at, average)

    def _apply_average(self, at: float, average: Average) -> Iterator[Action]:
        """Forward a global average to the children; start to train with it, or hold it as the result."""
        if average.members:
            for rank in children(self._rank, average.members, average.direct):
                yield Send(rank, average)
        self.tree_reduce = None
        if not average.final:
            self._replica.reset(average.parameters, average.buffers)
            yield from self._begin(at, 0.0)
            return
        self.result, self.phase = average, COMPLETE
        if self._view.is_root:
            self.awaiting_receipt = self._linked_members()
            if self._evaluations.has_new(average.version):
                values = average.parameters, average.buffers
                yield from self._evaluations.begin(at, average.version, self._view.samples, values)
            yield from self._stop_if_all_received()
        else:
            self.receipt_due = True
            yield from self._continue_when_idle(at)

    def _send_result(self, rank: int) -> Send:
        """The result for one rank, which forwards it to no other."""
        assert self.result is not None
        message = dataclasses.replace(
            self.result,
            root=self._rank,
            round=self.reduce_round,
            members=(),
            direct=True,
            counts=self._view.sample_counts,
        )
        return Send(rank, message, supersedes="result")

    # The end

    def _end(self, at: float) -> Iterator[Action]:
        """Stop to train, and start the final average or ask the root for it."""
        if self.phase != TRAINING or self.leaving:
            return
        yield from self._stop_training()
        if self._view.is_root:
            yield from self._start_reduce(at, final=True)
        else:
            yield Send(self.root, self._goal_message())

    def _stop_training(self) -> Iterator[Action]:
        """From here on only the reply to a pending exchange changes the replica."""
        self.phase = ENDING
        self._averaging.stop()
        yield ClearTimer(TIMER)
        yield ClearTimer("until")
        if self.computing:
            yield Cancel()

    def _goal_message(self) -> GoalReached:
        return GoalReached(self._view.sample_counts, self._view.members)

    def _on_goal_reached(self, at: float, source: int, members: tuple[int, ...]) -> Iterator[Action]:
        if self.phase == TRAINING:
            yield from self._end(at)
        elif not self._view.is_root:
            return
        elif self.phase == COMPLETE and not self.required_links:
            self.awaiting_receipt.add(source)
            yield self._send_result(source)
        elif self.tree_reduce is not None and self.tree_reduce.start.final:
            yield Send(source, self.tree_reduce.start)  # the first one came before the source knew this root
        elif self.phase == GATHERING:
            self.required_links |= {*members} - {self._rank}
            yield SetTimer("links", self._config.patience_seconds / 10)
            yield from self._start_final_if_linked(at)

    def _start_final_if_linked(self, at: float) -> Iterator[Action]:
        """On a root that has restarted: start the final average once the required links are up."""
        if self.required_links <= self._view.live.keys() and self._view.is_root and self.phase != TRAINING:
            self.required_links.clear()
            yield ClearTimer("links")
            yield from self._start_reduce(at, final=True)

    def _on_links_timeout(self, at: float) -> Iterator[Action]:
        self.required_links.clear()
        yield from self._start_final_if_linked(at)

    def _announce_loop_end(self, at: float) -> Iterator[Action]:
        if self._view.is_root:
            yield from self._on_loop_ended(at, self._rank)
        else:
            yield Send(self.root, LoopEnded(self._view.sample_counts))

    def _on_loop_ended(self, at: float, rank: int) -> Iterator[Action]:
        self.loops_ended.add(rank)
        yield from self._end_if_all_loops_ended(at)

    def _end_if_all_loops_ended(self, at: float) -> Iterator[Action]:
        if self._view.is_root and self.loops_ended >= set(self._view.members):
            yield from self._end(at)

    def _continue_when_idle(self, at: float) -> Iterator[Action]:
        """Do what had to wait until no computation is outstanding and no exchange is pending."""
        if self.computing or self._averaging.pending is not None:
            return
        if self.leaving:
            yield self._finish(*self._replica.mean_of_copies(), self.version)
            return
        if self.tree_reduce is not None and not self.tree_reduce.contributed:
            yield from self._contribute(at)
        if self.phase == COMPLETE and self.receipt_due and not self._view.is_root:
            assert self.result is not None
            self.receipt_due = False
            yield Send(self.root, AverageReceived(self.result.version))

    def _on_average_received(self, source: int, version: int) -> Iterator[Action]:
        if self.result is None or self.result.version != version or not self._view.is_root:
            return
        self.awaiting_receipt.discard(source)
        if self.stop_sent:
            yield self._send_stop(source)
        yield from self._stop_if_all_received()

    def _stop_if_all_received(self) -> Iterator[Action]:
        if not self.awaiting_receipt and not self.stop_sent and self._view.is_root:
            self.stop_sent = True
            for rank in sorted(self._linked_members()):
                yield self._send_stop(rank)
        yield from self._finish_if_done()

    def _send_stop(self, rank: int) -> Send:
        """`Stop` without parameters, since every rank holds the result."""
        assert self.result is not None
        self.awaiting_stopped.add(rank)
        return Send(rank, Stop(self.result.parameters.new_empty(0), (), self.result.version))

    def _on_stop(self, source: int, version: int) -> Iterator[Action]:
        if self.result is None or self.result.version != version:
            return
        self.stop_received = True
        yield Send(source, Stopped(draws_stop=self.draw, samples=self._view.counts[self._rank]))
        yield from self._finish_if_done()

    def _finish_if_done(self) -> Iterator[Action]:
        if self.finished or self.phase != COMPLETE or self.awaiting_stopped:
            return
        all_received = self._view.is_root and self.stop_sent and not self.awaiting_receipt
        if self.stop_received or (all_received and not self._evaluations.under_way):
            assert self.result is not None
            yield self._finish(self.result.parameters, self.result.buffers, self.result.version)

    def _fail(self, sentence: str) -> Finish:
        return self._finish(*self._replica.mean_of_copies(), self.version, sentence)

    def _finish(self, parameters: Tensor, buffers: Buffers, version: int, failure: str | None = None) -> Finish:
        self.finished = True
        return Finish(parameters, buffers, version, failure)
