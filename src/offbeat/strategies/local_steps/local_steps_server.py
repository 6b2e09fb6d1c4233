"""The hub of local-steps strategies: it merges what workers send, fragment by fragment, and sends the new values.

    LocalDelta arrives → put in order, accounted for and collected → a merge, if one is due:
        change = Σ samples_i · change_i / Σ samples_i, times the share of workers that it is of
        step of the outer optimizer with −change as the gradient (or with the sent gradients themselves)
    → GlobalUpdate to all connected workers

The exchanges of each worker are collected in the order of their numbers, so that one number, `included`, tells a worker
which of them an update includes. How workers join and how the run ends is in `server_node.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from offbeat.core.actions import Action, ClearTimer, Send, SetTimer
from offbeat.core.buffer_merge import BufferMerge
from offbeat.core.events import MessageArrived, TimerFired
from offbeat.core.flat import Layout, TensorSlice, is_finite
from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Buffers, Message
from offbeat.core.optimizers import Optimizer, Stepper
from offbeat.core.strategy import NodeContext
from offbeat.records.schema import Contribution
from offbeat.strategies.local_steps.local_steps_parts import Everyone, Merge, Quorum
from offbeat.strategies.local_training import (
    EXCHANGES_AHEAD_MAX,
    Begin,
    GlobalUpdate,
    Gradients,
    LocalDelta,
    LocalParameters,
    LocalTraining,
    check_local,
    fragment_slices,
)
from offbeat.strategies.member_checks import MemberCheck
from offbeat.strategies.message_kinds import kept, unexpected
from offbeat.strategies.server_node import HUB, ServerNode, nonfinite_failure

CYCLE_DECAY = 0.5
"""Weight of the earlier cycles in the moving average of a worker's cycle time."""


@dataclass
class PendingDelta:
    """What one incarnation of a worker has sent since the last merge: the sum of its changes."""

    change: Tensor
    samples: int
    buffers: Buffers
    exchange: int
    messages: int = 1


@dataclass
class PendingDeltas:
    """What has arrived for the next merge, weighted by samples.

    A worker that has joined again began anew, from the values of the hub: its changes are a separate entry, beside
    those that it sent before.
    """

    entries: dict[tuple[int, int], PendingDelta] = field(default_factory=dict)
    """(rank, incarnation) → the sum of what it has sent"""
    contributions: list[Contribution] = field(default_factory=list)

    def add(self, rank: int, incarnation: int, message: LocalDelta, version: int, merge: BufferMerge) -> None:
        """Collect a message whose tensors may be kept, at this version of the hub."""
        self.contributions += [Contribution(rank, first, stop, version - at) for first, stop, at in message.complete]
        entry = self.entries.get((rank, incarnation))
        if entry is None:
            entry = PendingDelta(message.change, message.samples, message.buffers, message.exchange)
            self.entries[rank, incarnation] = entry
            return
        if entry.samples and message.samples:
            entry.change = entry.change + message.change
        elif message.samples:
            entry.change = message.change
        entry.samples += message.samples
        if message.buffers:
            entry.buffers = merge.chain(entry.buffers, message.buffers) if entry.buffers else message.buffers
        entry.exchange = message.exchange
        entry.messages += 1

    def retire_incarnations(self) -> None:
        """Give all entries incarnations that no worker has: after a restart of the hub they are counted from 0."""
        entries = enumerate(self.entries.items(), start=1)
        self.entries = {(rank, -number): entry for number, ((rank, _), entry) in entries}

    def add_staleness(self) -> None:
        """Count an update of another fragment."""
        self.contributions = [Contribution(c.rank, c.first, c.stop, c.staleness + 1) for c in self.contributions]

    @property
    def workers(self) -> set[int]:
        """Ranks whose changes are included."""
        return {rank for (rank, _), entry in self.entries.items() if entry.samples}

    @property
    def samples(self) -> int:
        """The sum of the weights."""
        return sum(entry.samples for entry in self.entries.values())

    @property
    def messages(self) -> int:
        return sum(entry.messages for entry in self.entries.values())

    def mean(self) -> Tensor:
        """The mean change by samples, summed in the order of ranks, so that it does not depend on arrival."""
        total: Tensor | None = None
        for _, entry in sorted(self.entries.items()):
            if entry.samples:
                share = entry.samples / self.samples
                total = torch.mul(entry.change, share) if total is None else total.add_(entry.change, alpha=share)
        assert total is not None
        return total

    def buffers(self) -> list[tuple[Buffers, int]]:
        return [(entry.buffers, entry.samples) for _, entry in sorted(self.entries.items())]


class LocalStepsServer(ServerNode):
    caches = ("_copies", "_snapshot")

    _parameters: Tensor
    _buffers: Buffers
    _optimizers: list[Stepper]
    """One for each fragment."""
    _open: dict[int, PendingDeltas]
    """What is not merged yet: with `Everyone` by the number of the exchange, otherwise by fragment."""
    _exchange: int = 0
    """With `Everyone`: the exchange that is merged next."""
    _next: dict[int, int]
    """rank → the number of its next exchange"""
    _early: dict[int, dict[int, LocalDelta]]
    """rank → number → exchanges that have overtaken earlier ones"""
    _included: dict[int, dict[int, int]]
    """rank → fragment → its last exchange that is merged"""
    _arrived_at: dict[int, dict[int, float]]
    """rank → fragment → time of its last message"""
    _cycles: dict[int, float]
    """rank → seconds from one message of a fragment to the next, a moving average"""
    _in_grace: set[int]
    """Fragments whose grace window is open."""

    def __init__(self, context: NodeContext, training: LocalTraining, merge: Merge, optimizer: Optimizer) -> None:
        """`optimizer` is the outer one, which steps here; that of the workers is in `training`."""
        super().__init__(context, training.patience_seconds, training.hang_detector())
        self.timers = tuple(_timer(fragment) for fragment in range(training.fragments))  # type: ignore[misc]
        self._training = training
        self._merge = merge
        self._parameters = context.parameters.clone()
        self._buffers = context.buffers
        self._buffer_merge = BufferMerge(context.layout.statistics)
        self._copies = Pool()
        self._snapshot: Tensor | None = None
        """The copy of the newest parameters, once there is one."""
        self._places = fragment_slices(self._parameters.numel(), training.fragments)
        self._optimizers = [self._new_optimizer(optimizer, place) for place in self._places]
        self._open, self._next, self._early, self._included = {}, {}, {}, {}
        self._arrived_at, self._cycles, self._in_grace = {}, {}, set()

    def _new_optimizer(self, optimizer: Optimizer, place: slice) -> Stepper:
        layout = self._context.layout
        if self._training.fragments > 1:
            numel = place.stop - place.start
            layout = Layout(layout.dtype, (TensorSlice("fragment", (numel,), (1,), 0, numel),))
        return optimizer.build(self._parameters[place], layout)

    # Members

    def _result(self) -> tuple[Tensor, Buffers]:
        if self._snapshot is None:
            self._snapshot = self._copies.copy(self._parameters)
        return self._snapshot, self._buffers

    def _welcome(self, rank: int) -> Message:
        self._next[rank] = self._exchange
        self._included[rank] = {}
        progress = self._exchange, self._samples, len(self._live)
        return Begin(*self._result(), self._version, *progress, **self._position(rank))

    def _set_timers(self, at: float) -> Iterable[Action]:
        """Adjust a restored state: timers are gone, and incarnations are counted from 0."""
        self._in_grace = set()
        for collected in self._open.values():
            collected.retire_incarnations()
        return ()

    def _worker_lost(self, rank: int) -> None:
        self._early.pop(rank, None)
        self._arrived_at.pop(rank, None)
        self._cycles.pop(rank, None)

    def _continue_without(self, at: float) -> Iterator[Action]:
        for key in sorted(self._open):
            yield from self._merge_if_ready(at, key)

    def _merge_rest(self, at: float) -> Iterator[Action]:
        for key in sorted(self._open):
            if not self._is_stopping:
                self._exchange = max(self._exchange, key + 1) if self._waits_for_all else self._exchange
                yield from self._merge_now(at, key)

    def _take_unused(self) -> list[Contribution]:
        unused = [part for _, collected in sorted(self._open.items()) for part in collected.contributions]
        self._open = {}
        return unused

    # Collect

    def _message_arrived(self, event: MessageArrived) -> Iterable[Action]:
        match event.message:
            case LocalParameters():
                raise unexpected(event, HUB)
            case LocalDelta():
                self._check(event, event.message)
                return self._delta_arrived(event.at, event.source, kept(event, LocalDelta))
            case _:
                raise unexpected(event, HUB)

    def _check(self, event: MessageArrived, message: LocalDelta) -> None:
        rank = event.source
        check = MemberCheck(event, HUB)
        check.require(self._started and rank in self._ledgers, "no work to do")
        check.require(0 <= message.fragment < len(self._places), f"fragment {message.fragment}")
        place = self._places[message.fragment]
        check_local(check, message, place.stop - place.start, self._parameters, self._stop_max(event.at, rank))
        check.buffers(message.buffers, self._buffers)
        expected = self._next[rank]
        check.require(
            expected <= message.exchange < expected + EXCHANGES_AHEAD_MAX
            and message.exchange not in self._early.get(rank, {}),
            f"exchange {message.exchange}, where {expected} is the next",
        )
        check.version(max((version for _, _, version in message.complete), default=0), self._version)
        self._check_draws(check, event, message.all_draws)

    def _delta_arrived(self, at: float, rank: int, message: LocalDelta) -> Iterator[Action]:
        if self._is_stopping:
            yield from self._drop_after_stop(at, rank, message.all_draws)
            return
        early = self._early.setdefault(rank, {})
        early[message.exchange] = message
        while not self._is_stopping and self._next[rank] in early:
            message = early.pop(self._next[rank])
            self._next[rank] += 1
            yield from self._collect(at, rank, message)

    def _collect(self, at: float, rank: int, message: LocalDelta) -> Iterator[Action]:
        if message.samples and not is_finite(message.change):  # workers do not send that; guards the parameters
            nothing = message.change.new_empty(0)
            draws_of_change = tuple((first, stop) for first, stop, _ in message.complete)
            nonfinite = (*message.nonfinite, *draws_of_change)
            message = replace(message, change=nothing, samples=0, complete=(), nonfinite=nonfinite)
        for draws in message.nonfinite:
            yield from self._drop(at, rank, draws, "nonfinite")
        for first, stop, _ in message.complete:
            self._ledgers[rank].add(first, stop)
        self._measure_cycle(at, rank, message.fragment)
        key = message.exchange if self._waits_for_all else message.fragment
        self._open.setdefault(key, PendingDeltas()).add(
            rank, self._live[rank], message, self._version, self._buffer_merge
        )
        if message.nonfinite_in_a_row >= self._training.nonfinite_max:
            self._failure = nonfinite_failure(rank, self._training.nonfinite_max)
            yield from self._stop(at)
        else:
            yield from self._merge_if_ready(at, key)

    @property
    def _waits_for_all(self) -> bool:
        return isinstance(self._merge, Everyone)

    def _measure_cycle(self, at: float, rank: int, fragment: int) -> None:
        arrived_at = self._arrived_at.setdefault(rank, {})
        if fragment in arrived_at:
            cycle = at - arrived_at[fragment]
            before = self._cycles.get(rank, cycle)
            self._cycles[rank] = CYCLE_DECAY * before + (1.0 - CYCLE_DECAY) * cycle
        arrived_at[fragment] = at

    # Merge

    def _merge_if_ready(self, at: float, key: int) -> Iterator[Action]:
        if self._is_stopping or key not in self._open:
            return
        if not self._waits_for_all:
            yield from self._merge_with_quorum(at, key)
            return
        while self._exchange in self._open and self._live.items() <= self._open[self._exchange].entries.keys():
            self._exchange += 1
            yield from self._merge_now(at, self._exchange - 1)
            if self._is_stopping:
                return

    def _merge_with_quorum(self, at: float, fragment: int) -> Iterator[Action]:
        """Merge a quorum: at once if no worker is missing or one has sent twice, else after the grace window.

        The window is a share of the fastest cycle; before the first cycle has ended there is none.
        """
        quorum = cast(Quorum, self._merge)
        entries = self._open[fragment].entries
        senders = self._live.items() & entries.keys()
        if len(senders) < quorum.size(len(self._live)) or not self._live:
            return
        has_sent_twice = any(entries[sender].messages > 1 for sender in senders)
        cycles = [self._cycles[rank] for rank in self._live if rank in self._cycles]
        grace = quorum.grace * min(cycles, default=0.0)
        if len(senders) == len(self._live) or has_sent_twice or grace == 0:
            yield from self._merge_now(at, fragment)
        elif fragment not in self._in_grace:
            self._in_grace.add(fragment)
            yield SetTimer(_timer(fragment), grace)

    def _timer_fired(self, event: TimerFired) -> Iterator[Action]:
        """Merge at the end of a grace window."""
        fragment = int(event.name.removeprefix(_GRACE))
        self._in_grace.discard(fragment)
        if not self._is_stopping and fragment in self._open:
            yield from self._merge_now(event.at, fragment)

    def _merge_now(self, at: float, key: int) -> Iterator[Action]:
        collected = self._open.pop(key)
        index = key % self._training.fragments
        if index in self._in_grace:
            self._in_grace.discard(index)
            yield ClearTimer(_timer(index))
        for (rank, incarnation), entry in collected.entries.items():
            if self._live.get(rank) == incarnation:
                self._included[rank][index] = entry.exchange
        if collected.samples:
            yield from self._update(at, index, collected)
            self._check_parameters(self._parameters[self._places[index]])
        if self._has_enough() or self._failure is not None:
            yield from self._stop(at)
        else:
            yield from self._send_update(index)

    def _update(self, at: float, index: int, collected: PendingDeltas) -> Iterator[Action]:
        mean = collected.mean()
        if not self._waits_for_all:  # the rest of the step is made when the others send: two halves make one step
            mean.mul_(len(collected.workers) / len(collected.workers | self._live.keys()))
        gradient = mean if isinstance(self._training.content, Gradients) else mean.neg_()
        rate = self._optimizers[index].step(gradient, self._samples)
        self._snapshot = None
        self._buffers = self._buffer_merge.merge(self._buffers, collected.buffers())
        for others in self._open.values():
            others.add_staleness()
        contributions = sorted(collected.contributions, key=lambda part: (part.rank, part.first))
        yield from self._updated(at, collected.messages, rate, contributions)

    def _send_update(self, index: int) -> Iterable[Action]:
        values = self._copies.copy(self._parameters[self._places[index]])
        buffers = self._buffers if index == 0 else ()
        key = "parameters" if len(self._places) == 1 else f"fragment {index}"
        for rank in sorted(self._live):
            included = self._included[rank].get(index, -1)
            progress = self._samples, len(self._live)
            yield Send(rank, GlobalUpdate(values, buffers, self._version, index, included, *progress), supersedes=key)


_GRACE = "grace "


def _timer(fragment: int) -> str:
    return f"{_GRACE}{fragment}"
