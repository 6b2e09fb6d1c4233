"""What has arrived for the next merge: one entry for each life of a learner, weighted by the samples it processed.

What a learner sends one after the other adds up. One that was lost and has come back began anew, from the hub's values:
what it learns then stands beside what it had sent before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from offbeat.core.actions import Action, ClearTimer, Report, Send, SetTimer
from offbeat.core.events import MessageArrived, TimerFired
from offbeat.core.flat import Layout, TensorSlice, is_finite, renewed_buffers
from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Buffers, Message, packed, unpacked
from offbeat.core.optimizers import Optimizer, Stepper
from offbeat.core.strategy import NodeContext, State
from offbeat.records.schema import Contribution, Update
from offbeat.strategies.local_steps.local_steps_parts import Everyone, Merge, Quorum
from offbeat.strategies.local_training import Begin, GlobalUpdate, Gradients, LocalDelta, LocalTraining, pieces
from offbeat.strategies.server_node import HUB, ServerNode


@dataclass
class PendingDelta:
    """All that one learner has sent since the last merge."""

    change: Tensor
    samples: int
    buffers: Buffers
    exchange: int
    messages: int = 1


class PendingDeltas:
    def __init__(self) -> None:
        self.entries: dict[tuple[int, int], PendingDelta] = {}
        """(rank, incarnation) → what it sent"""
        self.contributions: list[Contribution] = []

    def add(self, rank: int, incarnation: int, message: LocalDelta, version: int) -> None:
        """Collect a message that may be held on to."""
        self.contributions += [Contribution(rank, first, stop, version - at) for first, stop, at in message.complete]
        learner = (rank, incarnation)
        entry = self.entries.get(learner)
        if entry is None:
            self.entries[learner] = PendingDelta(message.change, message.samples, message.buffers, message.exchange)
            return
        if entry.samples and message.samples:
            entry.change = entry.change + message.change
        elif message.samples:
            entry.change = message.change
        entry.samples += message.samples
        entry.buffers = message.buffers or entry.buffers
        entry.exchange = message.exchange
        entry.messages += 1

    def retire(self) -> None:
        """All of it was sent in former lives, whatever those are called that come now."""
        entries = enumerate(self.entries.items(), start=1)
        self.entries = {(rank, -number): entry for number, ((rank, _), entry) in entries}

    def older(self, versions: int) -> None:
        """So many versions have been made since, of other fragments."""
        self.contributions = [Contribution(c.rank, c.first, c.stop, c.staleness + versions) for c in self.contributions]

    @property
    def learners(self) -> set[int]:
        """Whose changes are in it."""
        return {rank for (rank, _), entry in self.entries.items() if entry.samples}

    @property
    def samples(self) -> int:
        """The weight of it all."""
        return sum(entry.samples for entry in self.entries.values())

    @property
    def messages(self) -> int:
        return sum(entry.messages for entry in self.entries.values())

    def mean(self) -> Tensor:
        """The mean change by samples, in the order of ranks, so that it does not depend on who was first."""
        total: Tensor | None = None
        for _, entry in sorted(self.entries.items()):
            if entry.samples:
                share = entry.samples / self.samples
                total = torch.mul(entry.change, share) if total is None else total.add_(entry.change, alpha=share)
        assert total is not None
        return total

    def buffers(self) -> list[tuple[Buffers, int]]:
        return [(entry.buffers, entry.samples) for _, entry in sorted(self.entries.items())]

    def state(self) -> dict[str, Any]:
        return {
            "entries": [
                {
                    "learner": list(learner),
                    "change": entry.change.clone(),
                    "samples": entry.samples,
                    "buffers": [buffer.clone() for buffer in entry.buffers],
                    "exchange": entry.exchange,
                    "messages": entry.messages,
                }
                for learner, entry in self.entries.items()
            ],
            "contributions": [[c.rank, c.first, c.stop, c.staleness] for c in self.contributions],
        }

    @classmethod
    def restored(cls, state: dict[str, Any]) -> PendingDeltas:
        collected = cls()
        for saved in state["entries"]:
            rank, incarnation = saved["learner"]
            values = {name: value for name, value in saved.items() if name != "learner"}
            collected.entries[rank, incarnation] = PendingDelta(**{**values, "buffers": tuple(saved["buffers"])})
        collected.contributions = [Contribution(*entry) for entry in state["contributions"]]
        return collected


# The hub of learners: merges what they send, fragment by fragment, and hands out the new values.
#
#     Progress arrives → it is put in order, counted and collected → perhaps a merge:
#         change = Σ samples_i · change_i / Σ samples_i, times the share of learners that it is of
#         outer step on −change (or on +change, where it is a gradient)
#     → Merged to all who are there
#
# Each learner's exchanges are taken in the order of their numbers, so that `included` says all. How the hub gathers its
# learners and ends the run stands in `centre.py`.


CYCLE_KEPT = 0.5
"""How much of its running mean each further cycle of a learner keeps."""


class LocalStepsServer(ServerNode):
    def __init__(self, context: NodeContext, training: LocalTraining, merge: Merge, optimizer: Optimizer) -> None:
        """`optimizer` steps here, with what the workers send; theirs is in `training`."""
        super().__init__(context, training.patience_seconds)
        self.timers = tuple(_timer(fragment) for fragment in range(training.fragments))  # type: ignore[misc]
        self._training = training
        self._merge = merge
        self._optimizer = optimizer
        self._parameters = context.parameters.clone()
        self._buffers = context.buffers
        self._copies = Pool()
        self._whole: tuple[int, Tensor] = (0, self._parameters.clone())
        """The last copy of all parameters, and its version."""
        self._places = pieces(self._parameters.numel(), training.fragments)
        self._steppers = [self._stepper(context.layout, place) for place in self._places]
        self._open: dict[int, PendingDeltas] = {}
        """What waits to be merged: by the number of the exchange where all are waited for, otherwise by fragment."""
        self._exchange = 0
        """Where all are waited for: the exchange that is merged next."""
        self._next: dict[int, int] = {}
        """rank → the number of its next exchange"""
        self._early: dict[int, dict[int, LocalDelta]] = {}
        """rank → exchanges that have overtaken others"""
        self._included: dict[int, dict[int, int]] = {}
        """rank → fragment → its last exchange that is merged"""
        self._heard_at: dict[int, dict[int, float]] = {}
        """rank → fragment → when it came last"""
        self._cycles: dict[int, float] = {}
        """rank → seconds from one message of a fragment to the next, a running mean"""
        self._in_grace: set[int] = set()

    def _stepper(self, layout: Layout, place: slice) -> Stepper:
        if self._training.fragments > 1:
            numel = place.stop - place.start
            layout = Layout(layout.dtype, (TensorSlice("fragment", (numel,), (1,), 0, numel),))
        return self._optimizer.build(self._parameters[place], layout)

    # Members

    def _result(self) -> tuple[Tensor, Buffers]:
        if self._whole[0] != self._version:
            self._whole = (self._version, self._copies.copy(self._parameters))
        return self._whole[1], self._buffers

    def _welcome(self, rank: int) -> Message:
        self._next[rank] = self._exchange
        self._included[rank] = {}
        draw, done = self._position(rank)
        learners = len(self._live)
        return Begin(*self._result(), self._version, self._exchange, self._samples, learners, draw, done)

    def _set_timers(self, at: float) -> Iterable[Action]:
        """A process that goes on from a checkpoint has no timers, and counts incarnations anew."""
        self._in_grace = set()
        for collected in self._open.values():
            collected.retire()
        return ()

    def _forget(self, rank: int) -> None:
        self._early.pop(rank, None)
        self._heard_at.pop(rank, None)
        self._cycles.pop(rank, None)

    def _went(self, at: float) -> Iterator[Action]:
        for key in sorted(self._open):
            yield from self._merge_if_ready(at, key)

    def _discard(self) -> list[Contribution]:
        unused = [
            contribution for _, collected in sorted(self._open.items()) for contribution in collected.contributions
        ]
        self._open = {}
        return unused

    # Collect

    def _received(self, event: MessageArrived) -> Iterator[Action]:
        rank, message = event.source, cast(LocalDelta, event.keep())
        if self._awaited is not None:
            for first, stop, _ in message.complete:
                yield from self._too_late(event.at, rank, (first, stop))
            for draws in message.broken:
                yield from self._too_late(event.at, rank, draws)
            return
        early = self._early.setdefault(rank, {})
        early[message.exchange] = message
        while self._awaited is None and self._next[rank] in early:
            message = early.pop(self._next[rank])
            self._next[rank] += 1
            yield from self._collect(event.at, rank, message)

    def _collect(self, at: float, rank: int, message: LocalDelta) -> Iterator[Action]:
        if message.samples and not is_finite(message.change):  # no learner of ours sends that
            lost = tuple((first, stop) for first, stop, _ in message.complete)
            nothing = message.change.new_empty(0)
            message = replace(message, change=nothing, samples=0, complete=(), broken=(*message.broken, *lost))
        for draws in message.broken:
            yield from self._drop(at, rank, draws, "nonfinite")
        for first, stop, _ in message.complete:
            self._draws[rank].add(first, stop)
        self._time(at, rank, message.fragment)
        key = message.exchange if self._waits_for_all else message.fragment
        self._open.setdefault(key, PendingDeltas()).add(rank, self._live[rank], message, self._version)
        if message.broken_in_a_row >= self._training.nonfinite_max:
            self._failure = (
                f"worker {rank} reported {self._training.nonfinite_max} gradients in a row that were not finite; "
                "lower the learning rate, clip the gradient (clip_norm), or look at that worker's data"
            )
            yield from self._stop(at)
        else:
            yield from self._merge_if_ready(at, key)

    @property
    def _waits_for_all(self) -> bool:
        return isinstance(self._merge, Everyone)

    def _time(self, at: float, rank: int, fragment: int) -> None:
        heard_at = self._heard_at.setdefault(rank, {})
        if fragment in heard_at:
            cycle = at - heard_at[fragment]
            before = self._cycles.get(rank, cycle)
            self._cycles[rank] = CYCLE_KEPT * before + (1.0 - CYCLE_KEPT) * cycle
        heard_at[fragment] = at

    # Merge

    def _merge_if_ready(self, at: float, key: int) -> Iterator[Action]:
        if self._awaited is not None or key not in self._open:
            return
        if self._waits_for_all:
            while self._exchange in self._open and self._live.items() <= self._open[self._exchange].entries.keys():
                self._exchange += 1
                yield from self._merge_now(at, self._exchange - 1)
                if self._awaited is not None:
                    return
        else:
            yield from self._merge_a_quorum(at, key)

    def _merge_a_quorum(self, at: float, fragment: int) -> Iterator[Action]:
        """Merge at once where nobody is missing or somebody has come round again, otherwise after the grace window.

        How long that is depends on the fastest cycle; before the first is over there is none.
        """
        quorum = cast(Quorum, self._merge)
        entries = self._open[fragment].entries
        there = self._live.items() & entries.keys()
        if len(there) < quorum.size(len(self._live)) or not self._live:
            return
        round_again = any(entries[learner].messages > 1 for learner in there)
        cycles = [self._cycles[rank] for rank in self._live if rank in self._cycles]
        grace = quorum.grace * min(cycles, default=0.0)
        if len(there) == len(self._live) or round_again or grace == 0:
            yield from self._merge_now(at, fragment)
        elif fragment not in self._in_grace:
            self._in_grace.add(fragment)
            yield SetTimer(_timer(fragment), grace)

    def _fired(self, event: TimerFired) -> Iterator[Action]:
        """A grace window has ended."""
        fragment = int(event.name.removeprefix(_GRACE))
        self._in_grace.discard(fragment)
        if self._awaited is None and fragment in self._open:
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
        if self._has_enough():
            yield from self._stop(at)
        else:
            yield from self._hand_out(index)

    def _update(self, at: float, index: int, collected: PendingDeltas) -> Iterator[Action]:
        mean = collected.mean()
        if not self._waits_for_all:  # the others' part of the step is left for when they come: two halves make one step
            mean.mul_(min(1.0, len(collected.learners) / len(self._live)))
        gradient = mean if isinstance(self._training.content, Gradients) else mean.neg_()
        rate = self._steppers[index].step(gradient, self._samples)
        self._buffers = renewed_buffers(self._buffers, collected.buffers())
        self._version += 1
        for others in self._open.values():
            others.older(1)
        samples = sum(found.stop - found.first for found in collected.contributions)
        self._samples += samples
        yield Report(
            Update(
                at=at,
                rank=HUB,
                version=self._version,
                messages=collected.messages,
                samples=samples,
                samples_total=self._samples,
                learning_rate=rate,
                contributions=tuple(sorted(collected.contributions, key=lambda found: (found.rank, found.first))),
            )
        )
        if self._evaluations.due(at, self._version):
            yield from self._evaluate(at)

    def _hand_out(self, index: int) -> Iterable[Action]:
        values = self._copies.copy(self._parameters[self._places[index]])
        buffers = self._buffers if index == 0 else ()
        for rank in sorted(self._live):
            included = self._included[rank].get(index, -1)
            learners = len(self._live)
            merged = GlobalUpdate(values, buffers, self._version, index, included, self._samples, learners)
            yield Send(rank, merged, supersedes="parameters" if len(self._places) == 1 else f"fragment {index}")

    # State

    def state(self) -> State:
        return {
            **super().state(),
            "parameters": self._parameters.clone(),
            "buffers": [buffer.clone() for buffer in self._buffers],
            "optimizers": [stepper.state() for stepper in self._steppers],
            "open": {str(key): collected.state() for key, collected in self._open.items()},
            "exchange": self._exchange,
            "next": {str(rank): number for rank, number in self._next.items()},
            "early": {str(rank): [packed(message) for message in held.values()] for rank, held in self._early.items()},
            "included": {
                str(rank): {str(fragment): number for fragment, number in numbers.items()}
                for rank, numbers in self._included.items()
            },
            "heard_at": {
                str(rank): {str(fragment): at for fragment, at in heard.items()}
                for rank, heard in self._heard_at.items()
            },
            "cycles": {str(rank): seconds for rank, seconds in self._cycles.items()},
            "in_grace": sorted(self._in_grace),
        }

    def restore(self, state: State) -> None:
        super().restore(state)
        self._parameters.copy_(state["parameters"])
        self._whole = (self._version, self._parameters.clone())
        self._buffers = tuple(state["buffers"])
        for stepper, saved in zip(self._steppers, state["optimizers"], strict=True):
            stepper.restore(saved)
        self._open = {int(key): PendingDeltas.restored(saved) for key, saved in state["open"].items()}
        self._exchange = state["exchange"]
        self._next = {int(rank): number for rank, number in state["next"].items()}
        self._early = {
            int(rank): {message.exchange: message for message in (unpacked(LocalDelta, early) for early in held)}
            for rank, held in state["early"].items()
        }
        self._included = {
            int(rank): {int(fragment): number for fragment, number in numbers.items()}
            for rank, numbers in state["included"].items()
        }
        self._heard_at = {
            int(rank): {int(fragment): at for fragment, at in heard.items()}
            for rank, heard in state["heard_at"].items()
        }
        self._cycles = {int(rank): seconds for rank, seconds in state["cycles"].items()}
        self._in_grace = set(state["in_grace"])


_GRACE = "grace "


def _timer(fragment: int) -> str:
    return f"{_GRACE}{fragment}"
