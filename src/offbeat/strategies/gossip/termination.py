"""How peers come to one result: global averages that the lowest rank calls for, and the end of a run.

A round: the root sends Gather to all; sums go up a tree (`tree_reduce.py`), the mean comes down. At the start everybody
begins with it. At the end everybody says Have, the root says Stop, everybody says Stopped and finishes. Nobody finishes
before everybody holds the result, and whoever is called again hands out the one it holds: so all that are connected end
with the same parameters, whoever dies on the way.
"""

from __future__ import annotations

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
from offbeat.strategies.gossip.replica import Replica
from offbeat.strategies.gossip.tree_reduce import TreeReduce, children

GATHERING, TRAINING, ENDING, HOLDING = "gathering", "training", "ending", "holding"


class TerminationNode(Node):
    def __init__(self, config: GossipBase, context: NodeContext) -> None:
        self._config = config
        self._setup = context
        self._rank = context.rank
        self._expected = set(context.members) - {context.rank}
        size = max(context.members) + 1
        config.processes(size)  # refuses a size that the graph does not have
        self._replica = Replica(
            context.parameters,
            context.buffers,
            accelerated=config.momentum is not None,
            compression=config.compression,
        )
        self._view = MembershipView(context.rank, size, config.graph, config.rate)
        self._averaging = Averaging(config, self._view, self._replica, context.random)
        self._evaluations = Evaluations(context.rank, context.evaluate)
        self._version = 0
        self._draw = 0

        self._phase = GATHERING
        self._computing = False
        self._through = False
        """Its own loop is over; it stays for the others."""
        self._leaving = False
        self._root = context.rank
        self._round = int(context.random.integers(1 << 40))
        """The last round that this peer has called for, as root; none is called twice, not even in another life."""
        self._heard: tuple[int, int, int] = (-1, -1, -1)
        """root, its incarnation, and the last round that it called for"""
        self._reduce: TreeReduce | None = None
        self._early: list[tuple[int, PartialSum]] = []
        """Parts of a round that this peer has not been called to yet."""
        self._fresh = False
        """It has nothing to contribute: it came when all was over."""
        self._met_beginners = False
        """Whether others were about to begin as well: then it is a start, and not a return when all is over."""
        self._result: Average | None = None
        self._awaiting: set[int] = set()
        """For the root: who does not hold the result yet, as far as it knows."""
        self._owes_have = False
        self._stopping = False
        self._unstopped: set[int] = set()
        self._told_to_stop = False
        self._throughs: set[int] = set()
        self._to_meet: set[int] = set()
        """For a root that knows less than the others: whom it should be linked to before it calls for the end."""
        self._finished = False

    @abstractmethod
    def _begin(self, at: float, elapsed_seconds: float) -> Iterator[Action]:
        """Begin to train with the parameters that are there; the run has lasted for so long."""

    # Global averages

    def _start_reduce(self, at: float, final: bool) -> Iterator[Action]:
        """For the root: call for an average over all that are there; again, and directly, where one was under way."""
        self._round += 1
        members = (self._rank, *sorted(self._audience()))
        if self._rank >= COORDINATORS:
            text = (
                f"peer {self._rank} goes on by itself: none of the {COORDINATORS} lowest ranks is left to call for all"
            )
            yield Report(Notice(at=at, rank=self._rank, text=text))
        gather = ReduceStart(self._round, final, members, direct=self._reduce is not None)
        self._reduce = TreeReduce(self._rank, self._rank, gather)
        if final and self._phase == GATHERING:
            self._come_too_late()
        for rank in gather.members:
            if rank != self._rank:
                yield Send(rank, gather)
        yield from self._contribute(at)

    def _audience(self) -> set[int]:
        """Whom this peer, as root, calls: all, or nobody, where none is left of those that all are linked to."""
        return set(self._view.live) if self._rank < COORDINATORS else set()

    def _come_too_late(self) -> None:
        self._phase, self._fresh = ENDING, True

    def _gather(self, at: float, root: int, gather: ReduceStart) -> Iterator[Action]:
        call = (root, self._view.live.get(root, -1), gather.round)
        if root != self._root or (call[:2] == self._heard[:2] and gather.round <= self._heard[2]):
            return
        self._heard = call
        if not gather.final and self._phase != GATHERING:
            yield Send(root, Status(training=True) if self._phase == TRAINING else self._enough())
            return
        if gather.final and self._phase == GATHERING:
            self._come_too_late()
        elif self._phase == TRAINING:
            yield from self._freeze()
        self._met_beginners = True
        self._reduce = TreeReduce(self._rank, root, gather)
        early, self._early = self._early, []
        for source, part in early:
            if self._reduce.is_of(part):
                self._reduce.add(source, part)
        yield from self._contribute(at)

    def _contribute(self, at: float) -> Iterator[Action]:
        """Add this peer's own part, once nothing changes it any more."""
        tree_reduce = self._reduce
        if tree_reduce is None:
            return
        if not tree_reduce.contributed:
            if self._computing or self._averaging.outstanding is not None:
                return
            self._averaging.mix(at)
            if self._result is not None:
                held = self._result
                tree_reduce.contribute((held.parameters, held.buffers), held.version, result=True)
            elif self._fresh:
                tree_reduce.contribute(None, self._version)
            elif not self._replica.finite:
                text = f"the parameters of peer {self._rank} are not finite, so they have no part in the average"
                yield Report(Notice(at=at, rank=self._rank, text=text))
                tree_reduce.contribute(None, self._version)
            else:
                tree_reduce.contribute(self._replica.mean_point(), self._version)
        if not tree_reduce.complete:
            return
        if tree_reduce.parent is None:
            yield from self._complete(at, tree_reduce)
        elif tree_reduce.parent in self._view.live:
            yield Send(tree_reduce.parent, tree_reduce.part(self._replica.parameters, self._view.told_counts))
        else:
            yield Send(self._root, ReduceRetry(tree_reduce.gather.round))

    def _part(self, at: float, source: int, part: PartialSum) -> Iterator[Action]:
        if self._reduce is not None and self._reduce.is_of(part):
            if source in self._reduce.awaited:
                self._reduce.add(source, part)
                yield from self._contribute(at)
        else:
            self._early.append((source, part))

    def _retry(self, at: float, source: int, number: int) -> Iterator[Action]:
        if self._phase == HOLDING and self._view.leads:
            yield self._directly(source)
        elif self._phase == TRAINING:
            yield Send(source, Status(training=True))
        elif self._reduce is not None and self._view.leads and number == self._reduce.gather.round:
            yield from self._start_reduce(at, final=self._reduce.gather.final)

    def _complete(self, at: float, tree_reduce: TreeReduce) -> Iterator[Action]:
        """For the root: everybody's part is there."""
        parameters, buffers = tree_reduce.mean() or self._replica.mean_point()
        if not self._fresh and not tree_reduce.says_something and not self._replica.finite:
            yield from self._give_up("no peer has finite parameters; lower the learning rate, or clip the gradient")
            return
        gather = tree_reduce.gather
        average = Average(
            parameters=parameters,
            buffers=buffers,
            root=self._rank,
            round=gather.round,
            final=gather.final,
            members=gather.members,
            direct=gather.direct,
            version=tree_reduce.version if tree_reduce.result else tree_reduce.version + 1,
            counts=self._view.told_counts,
        )
        yield from self._take(at, average)

    def _average(self, at: float, average: Average) -> Iterator[Action]:
        if not average.final and self._phase != GATHERING:
            return
        if average.final and self._phase == TRAINING:
            yield from self._freeze()
        yield from self._take(at, average)

    def _take(self, at: float, average: Average) -> Iterator[Action]:
        if average.members:
            for rank in children(self._rank, average.members, average.direct):
                yield Send(rank, average)
        self._reduce = None
        if not average.final:
            self._replica.reset(average.parameters, average.buffers)
            yield from self._begin(at, 0.0)
            return
        self._result, self._phase = average, HOLDING
        if self._view.leads:
            self._awaiting = self._audience()
            if self._evaluations.has_new(average.version):
                values = average.parameters, average.buffers
                yield from self._evaluations.begin(at, average.version, self._view.samples, values)
            yield from self._stop_if_all_have(at)
        else:
            self._owes_have = True
            yield from self._settled(at)

    def _directly(self, rank: int) -> Send:
        """The result, to one alone, who hands it on to nobody."""
        assert self._result is not None
        held = self._result
        message = Average(
            parameters=held.parameters,
            buffers=held.buffers,
            root=self._rank,
            round=self._round,
            final=True,
            members=(),
            direct=True,
            version=held.version,
            counts=self._view.told_counts,
        )
        return Send(rank, message, supersedes="result")

    # The end

    def _end(self, at: float) -> Iterator[Action]:
        """Training is over, as far as this peer knows."""
        if self._phase != TRAINING or self._leaving:
            return
        yield from self._freeze()
        if self._view.leads:
            yield from self._start_reduce(at, final=True)
        else:
            yield Send(self._root, self._enough())

    def _freeze(self) -> Iterator[Action]:
        """From here on this replica does not change any more, but for an answer that is still owed to it."""
        self._phase = ENDING
        self._averaging.end()
        yield ClearTimer(TIMER)
        yield ClearTimer("until")
        if self._computing:
            yield Cancel()

    def _enough(self) -> GoalReached:
        return GoalReached(self._view.told_counts, self._view.all())

    def _told_enough(self, at: float, source: int, members: tuple[int, ...]) -> Iterator[Action]:
        if self._phase == TRAINING:
            yield from self._end(at)
        elif not self._view.leads:
            return
        elif self._phase == HOLDING and not self._to_meet:
            self._awaiting.add(source)
            yield self._directly(source)
        elif self._reduce is not None and self._reduce.gather.final:
            yield Send(source, self._reduce.gather)  # it did not know yet that this peer leads
        elif self._phase == GATHERING:
            self._to_meet |= {*members} - {self._rank}
            yield SetTimer("meet", self._config.patience_seconds / 10)
            yield from self._meet(at)

    def _meet(self, at: float) -> Iterator[Action]:
        """Call for the end, once those are there who are known to be."""
        if self._to_meet <= self._view.live.keys() and self._view.leads and self._phase != TRAINING:
            self._to_meet.clear()
            yield ClearTimer("meet")
            yield from self._start_reduce(at, final=True)

    def _say_through(self, at: float) -> Iterator[Action]:
        if self._view.leads:
            yield from self._told_through(at, self._rank)
        else:
            yield Send(self._root, LoopEnded(self._view.told_counts))

    def _told_through(self, at: float, rank: int) -> Iterator[Action]:
        self._throughs.add(rank)
        yield from self._end_if_all_through(at)

    def _end_if_all_through(self, at: float) -> Iterator[Action]:
        if self._view.leads and self._throughs >= set(self._view.all()):
            yield from self._end(at)

    def _settled(self, at: float) -> Iterator[Action]:
        """Nothing is being computed, or no answer is owed any more: what has waited for that goes on."""
        if self._computing or self._averaging.outstanding is not None:
            return
        if self._leaving:
            yield from self._finish(*self._replica.mean_point(), self._version, None)
            return
        if self._reduce is not None and not self._reduce.contributed:
            yield from self._contribute(at)
        if self._phase == HOLDING and self._owes_have and not self._view.leads:
            assert self._result is not None
            self._owes_have = False
            yield Send(self._root, AverageReceived(self._result.version))

    def _have(self, at: float, source: int, version: int) -> Iterator[Action]:
        if self._result is None or self._result.version != version or not self._view.leads:
            return
        self._awaiting.discard(source)
        if self._stopping:
            yield self._stop(source)
        yield from self._stop_if_all_have(at)

    def _stop_if_all_have(self, at: float) -> Iterator[Action]:
        if not self._awaiting and not self._stopping and self._view.leads:
            self._stopping = True
            for rank in sorted(self._audience()):
                yield self._stop(rank)
        yield from self._finish_if_done(at)

    def _stop(self, rank: int) -> Send:
        """Everybody holds the result; so it need not travel again."""
        assert self._result is not None
        self._unstopped.add(rank)
        return Send(rank, Stop(self._result.parameters.new_empty(0), (), self._result.version))

    def _told_stop(self, at: float, source: int, version: int) -> Iterator[Action]:
        if self._result is None or self._result.version != version:
            return
        self._told_to_stop = True
        yield Send(source, Stopped(draws_stop=self._draw, samples=self._view.counts[self._rank]))
        yield from self._finish_if_done(at)

    def _finish_if_done(self, at: float) -> Iterator[Action]:
        if self._finished or self._phase != HOLDING or self._unstopped:
            return
        alone = self._view.leads and self._stopping and not self._awaiting and not self._evaluations.under_way
        if self._told_to_stop or alone:
            assert self._result is not None
            yield from self._finish(self._result.parameters, self._result.buffers, self._result.version, None)

    def _give_up(self, sentence: str) -> Iterator[Action]:
        yield from self._finish(*self._replica.mean_point(), self._version, sentence)

    def _finish(self, parameters: Tensor, buffers: Buffers, version: int, failure: str | None) -> Iterator[Action]:
        self._finished = True
        yield Finish(parameters, buffers, version, failure)
