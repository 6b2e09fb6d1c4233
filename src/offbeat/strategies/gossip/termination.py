"""The end of a run: every rank confirms the final average with `AverageReceived`, the root sends `Stop`, and every rank
replies `Stopped` and finishes. No rank finishes before all hold the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from offbeat.core.actions import Action, ClearTimer, Finish, Send, SetTimer
from offbeat.core.events import Event, MessageArrived, Started, TimerFired
from offbeat.core.messages import Stop, Stopped
from offbeat.strategies.evaluations import Evaluations
from offbeat.strategies.gossip.global_averages import GlobalAverages
from offbeat.strategies.gossip.gossip_messages import Average, AverageReceived, GoalReached, LoopEnded
from offbeat.strategies.gossip.membership_view import MembershipView
from offbeat.strategies.gossip.peer_training import PeerTraining
from offbeat.strategies.gossip.phases import Signal, Step, Trigger
from offbeat.strategies.message_kinds import matched
from offbeat.strategies.node_state import Stateful


class Termination(Stateful):
    """The end of a run on one peer.

    view: membership and sample counts.
    expected: all ranks of the run but this one.
    patience_seconds: how long a restarted root waits for the links of all others.
    training: the data position for `Stopped`, and whether the replica may still change.
    rounds: the global averages, with the result.
    evaluations: the evaluations of this rank; the root evaluates the result.
    """

    loops_ended: set[int]
    """On the root: ranks whose training loop has ended."""
    required_links: set[int]
    """On a root that has just restarted: ranks that must be linked before it starts the final average."""
    awaiting_receipt: set[int]
    """On the root: ranks that have not confirmed the final average."""
    awaiting_stopped: set[int]
    """On the root: ranks that have not answered `Stop`."""
    receipt_due: bool = False
    """Whether `AverageReceived` is still to be sent."""
    stop_sent: bool = False
    stop_received: bool = False

    def __init__(
        self,
        view: MembershipView,
        expected: frozenset[int],
        patience_seconds: float,
        training: PeerTraining,
        rounds: GlobalAverages,
        evaluations: Evaluations,
    ) -> None:
        self._view = view
        self._expected = expected
        self._patience_seconds = patience_seconds
        self._training = training
        self._rounds = rounds
        self._evaluations = evaluations
        self.loops_ended, self.required_links = set(), set()
        self.awaiting_receipt, self.awaiting_stopped = set(), set()

    @property
    def _result(self) -> Average:
        assert self._rounds.result is not None, "set before the phase is complete"
        return self._rounds.result

    # Members

    def clear_links(self, event: object) -> Iterable[Step]:
        self.awaiting_receipt, self.awaiting_stopped, self.loops_ended = set(), set(), set()
        return ()

    def rank_lost(self, signal: Signal) -> Iterable[Step]:
        """Expect nothing of a lost rank any more."""
        for ranks in (self.awaiting_receipt, self.awaiting_stopped, self.loops_ended):
            ranks.discard(signal.content)
        return ()

    def root_changed(self, signal: Signal) -> Iterable[Step]:
        self.awaiting_receipt.clear()
        self.required_links.clear()
        self.stop_sent = False
        return ()

    # The goal

    def finalize(self, signal: Signal) -> Iterator[Step]:
        """Start the final average, or ask the root for it."""
        if self._view.is_root:
            yield Signal(Trigger.FINAL_DUE, signal.at)
        else:
            yield from self.ask_root(signal)

    def ask_root(self, signal: Signal) -> Iterator[Action]:
        yield Send(self._view.root, GoalReached(self._view.sample_counts, self._view.members))

    def repeat_final(self, signal: Signal) -> Iterator[Step]:
        """On the root: start the final average again, with a rank that has joined."""
        if self._view.is_root:
            yield Signal(Trigger.FINAL_DUE, signal.at)

    def announce_loop_end(self, signal: Signal) -> Iterator[Step]:
        if self._view.is_root:
            self.loops_ended.add(self._view.rank)
            yield from self.end_if_all_loops_ended(signal)
        else:
            yield Send(self._view.root, LoopEnded(self._view.sample_counts))

    def on_loop_ended(self, event: MessageArrived) -> Iterator[Step]:
        self.loops_ended.add(event.source)
        yield from self.end_if_all_loops_ended(event)

    def end_if_all_loops_ended(self, occurrence: Event | Signal) -> Iterator[Step]:
        if self._view.is_root and self.loops_ended >= set(self._view.members):
            yield Signal(Trigger.GOAL, occurrence.at)

    # A root that has restarted

    def await_links(self, event: Started) -> Iterator[Step]:
        """After a restart from a checkpoint of the end: repeat the final average once all links are up."""
        self.required_links = set(self._expected)
        yield SetTimer("links", self._patience_seconds)
        yield from self.start_if_linked(event)

    def require_links(self, event: MessageArrived) -> Iterator[Step]:
        """On the root, which waits for the start while the source has trained to the end."""
        if self._view.is_root:
            self.required_links |= {*matched(event, GoalReached).members} - {self._view.rank}
            yield SetTimer("links", self._patience_seconds / 10)
            yield from self.start_if_linked(event)

    def start_if_linked(self, occurrence: Event | Signal) -> Iterator[Step]:
        """On the root: start the final average once the required links are up."""
        if self.required_links <= self._view.live.keys() and self._view.is_root:
            self.required_links.clear()
            yield ClearTimer("links")
            yield Signal(Trigger.FINAL_DUE, occurrence.at)

    def links_timeout(self, event: TimerFired) -> Iterator[Step]:
        self.required_links.clear()
        yield from self.start_if_linked(event)

    def forget_links(self, event: TimerFired) -> Iterable[Step]:
        """Training has begun while links were awaited."""
        self.required_links.clear()
        return ()

    # The result

    def hold(self, signal: Signal) -> Iterator[Step]:
        """The result is here: confirm it, or as the root wait until all others have."""
        if not self._view.is_root:
            self.receipt_due = True
            yield from self._training.check_idle(signal)
            return
        self.awaiting_receipt = self._view.linked_members
        result = self._result
        if self._evaluations.has_new(result.version):
            values = result.parameters, result.buffers
            yield from self._evaluations.begin(signal.at, result.version, self._view.samples, values)
        yield from self._stop_if_all_received(signal)

    def send_receipt(self, signal: Signal) -> Iterator[Action]:
        if self.receipt_due and not self._view.is_root:
            self.receipt_due = False
            yield Send(self._view.root, AverageReceived(self._result.version))

    def _send_result(self, rank: int) -> Send:
        """The result for one rank, which forwards it to no other."""
        message = dataclasses.replace(
            self._result,
            root=self._view.rank,
            round=self._rounds.reduce_round,
            members=(),
            direct=True,
            counts=self._view.sample_counts,
        )
        return Send(rank, message, supersedes="result")

    def repeat_result(self, event: MessageArrived) -> Iterator[Action]:
        """On the root: the source could not complete its round."""
        if self._view.is_root:
            yield self._send_result(event.source)

    def on_goal_reached(self, event: MessageArrived) -> Iterator[Action]:
        """On the root: the source has no result yet."""
        if not self._view.is_root:
            return
        if self.required_links:
            yield from self._rounds.resend_start(event)
        else:
            self.awaiting_receipt.add(event.source)
            yield self._send_result(event.source)

    def rank_added(self, signal: Signal) -> Iterator[Action]:
        """On the root: send the result to a rank that has joined."""
        if self._view.is_root and signal.content in self._view.linked_members:
            self.awaiting_receipt.add(signal.content)
            yield self._send_result(signal.content)

    def resend_results(self, signal: Signal) -> Iterator[Step]:
        """On the root: a lost rank may not have forwarded the result."""
        if self._view.is_root:
            for rank in sorted(self.awaiting_receipt):
                yield self._send_result(rank)
            yield from self._stop_if_all_received(signal)

    # Stop

    def on_received(self, event: MessageArrived) -> Iterator[Step]:
        """On the root: the source holds the result."""
        if self._result.version != matched(event, AverageReceived).version or not self._view.is_root:
            return
        self.awaiting_receipt.discard(event.source)
        if self.stop_sent:
            yield self._send_stop(event.source)
        yield from self._stop_if_all_received(event)

    def _stop_if_all_received(self, occurrence: Event | Signal) -> Iterator[Step]:
        if not self.awaiting_receipt and not self.stop_sent and self._view.is_root:
            self.stop_sent = True
            for rank in sorted(self._view.linked_members):
                yield self._send_stop(rank)
        yield from self.finish_if_done(occurrence)

    def _send_stop(self, rank: int) -> Send:
        """`Stop` without parameters, since every rank holds the result."""
        self.awaiting_stopped.add(rank)
        return Send(rank, Stop(self._result.parameters.new_empty(0), (), self._result.version))

    def on_stop(self, event: MessageArrived) -> Iterator[Step]:
        if self._result.version != matched(event, Stop).version:
            return
        self.stop_received = True
        samples = self._view.counts[self._view.rank]
        yield Send(event.source, Stopped(draws_stop=self._training.draw, samples=samples))
        yield from self.finish_if_done(event)

    def on_stopped(self, event: MessageArrived) -> Iterator[Step]:
        self.awaiting_stopped.discard(event.source)
        yield from self.finish_if_done(event)

    def finish_if_done(self, occurrence: Event | Signal) -> Iterator[Step]:
        if self.awaiting_stopped:
            return
        all_received = self._view.is_root and self.stop_sent and not self.awaiting_receipt
        if self.stop_received or (all_received and not self._evaluations.under_way):
            yield Signal(Trigger.DONE, occurrence.at)

    def finish(self, signal: Signal) -> Iterator[Action]:
        yield Finish(self._result.parameters, self._result.buffers, self._result.version)
