"""What learners and their hub say to each other, besides Stop and Stopped.

hub → learner   Begin      you have joined: where to begin, in your data and in the numbering of exchanges
learner → hub   Progress   what I have learned since the last time, in one fragment of the parameters; or, as a
                           Snapshot, the parameters themselves
hub → learner   Merged     the new values of a fragment, and how much of what you sent is in them

Exchanges are numbered from 0, by each learner one after the other. Exchange e carries fragment e mod (number of
fragments).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch
from torch import Tensor

from offbeat.core.actions import Action, Compute, Samples, Send
from offbeat.core.configuration import Family
from offbeat.core.events import GradientReady, MessageArrived, StepReady
from offbeat.core.flat import is_finite
from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Buffers, Message, packed, unpacked
from offbeat.core.optimizers import Optimizer, Stepper
from offbeat.core.sample_ledger import Range
from offbeat.core.strategy import NodeContext, State
from offbeat.errors import ConfigurationError
from offbeat.strategies.server_node import HUB
from offbeat.strategies.worker_node import WorkerNode

DrawRange = tuple[int, int, int]
"""Draws from first to stop, and the oldest version at which one of their gradients was taken."""


@dataclass(frozen=True)
class Begin(Message):
    """Begin with these parameters, or with your own where they are empty; `learners` is how many there are.

    Go on at `draw`, but pass over `done`, which has arrived already. Your next exchange has the number `exchange`.
    They may be compressed: a learner sends what it learned from wherever it began.
    """

    values: ClassVar[tuple[str, ...]] = ("parameters",)

    parameters: Tensor
    buffers: Buffers
    version: int
    exchange: int
    samples_total: int
    learners: int
    draw: int
    done: tuple[Range, ...]


@dataclass(frozen=True)
class LocalDelta(Message):
    """What was learned in `samples` samples since the fragment was last sent; `change` is empty where that is nothing.

    `complete` are the draws all of whose fragments have been sent with this message, `broken` those whose gradients
    were not finite and are in none. `score` is the mean training loss of late.
    """

    increments: ClassVar[tuple[str, ...]] = ("change",)
    residual_key_fields: ClassVar[tuple[str, ...]] = ("fragment",)

    change: Tensor
    buffers: Buffers
    exchange: int
    fragment: int
    samples: int
    complete: tuple[DrawRange, ...]
    broken: tuple[Range, ...]
    broken_in_a_row: int
    score: float


@dataclass(frozen=True)
class LocalParameters(LocalDelta):
    """As `LocalDelta`, but `change` holds the parameters themselves."""

    increments: ClassVar[tuple[str, ...]] = ()
    values: ClassVar[tuple[str, ...]] = ("change",)

    takeovers: int
    """How many times the sender has taken another's place since it began."""
    abandoned: tuple[Range, ...]
    """Draws that it had computed for what it was before."""


@dataclass(frozen=True)
class GlobalUpdate(Message):
    """New values of a fragment. Of the learner's own exchanges of it, those up to number `included` are in them.

    Where they are empty there is nothing new: go on, what you sent has arrived.
    """

    values: ClassVar[tuple[str, ...]] = ("parameters",)

    parameters: Tensor
    buffers: Buffers
    version: int
    fragment: int
    included: int
    samples_total: int
    learners: int


# A learner: trains a replica of its own with an optimizer of its own, and exchanges what it learned now and then.
#
#     every `every` steps, for each fragment of the parameters in turn:
#         send       what was learned in it since it was last sent, and remember the values (a mark)
#         Merged     x ← merged values + whatever was learned since the mark: at step `delay` after it was sent, or on
#                    arrival if that is later; without a delay on arrival
#
# With a delay the learner waits at that step for what has not arrived: 0 waits at once, so that everybody computes at
# the same values. Without one it never waits. What was merged without the newest exchanges of this learner (it says how
# many are in it) is laid under them, so that nothing is lost or counted twice.


SCORE_KEPT = 0.9
"""How much of the running training loss each further step keeps."""


class Content(Family):
    """What a learner sends of what it has learned."""


@dataclass(frozen=True)
class Gradients(Content, name="gradients"):
    """The sum of the mean gradients of its steps; the hub makes one step of the optimizer with their mean."""


@dataclass(frozen=True)
class Differences(Content, name="differences"):
    """How far the parameters have moved."""


@dataclass(frozen=True)
class Values(Content, name="values"):
    """The parameters themselves."""


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """How a learner works."""

    optimizer: Optimizer
    batch: int
    microbatch: int
    every: int
    delay: int | None
    content: Content
    fragments: int = 1
    in_flight_max: int = 2
    nonfinite_max: int = 5
    patience_seconds: float = 60.0


def pieces(numel: int, fragments: int) -> list[slice]:
    """A vector in fragments of about the same size, one after the other."""
    cuts = [numel * fragment // fragments for fragment in range(fragments + 1)]
    return [slice(first, stop) for first, stop in itertools.pairwise(cuts)]


def soonest(every: int, batch: int, context: NodeContext) -> int:
    """Steps between exchanges: as many as asked for, but no more than the samples of the whole run are enough for."""
    until = context.until
    samples = until.count if isinstance(until, Samples) else getattr(until, "samples_max", None)
    learners = max(1, len(context.members) - 1)
    return every if samples is None else min(every, -(-samples // (batch * learners)))


@dataclass
class _Fragment:
    """What a learner keeps of one fragment of the parameters."""

    place: slice
    anchor: Tensor
    """The last values that the hub has sent."""
    version: int = -1
    included: int = -1
    """The last exchange that is in them."""
    marks: list[tuple[int, int, Tensor]] = field(default_factory=list)
    """Exchanges that are not yet known to be merged: number, step, and the values when it was sent."""
    samples: int = 0
    """Learned since it was last sent."""
    sent_at_step: int = 0
    held: list[GlobalUpdate] = field(default_factory=list)
    """What has arrived before its step, the newest last."""

    @property
    def newest(self) -> tuple[int, int]:
        """What has arrived last: its version and the last exchange that is in it."""
        last = self.held[-1] if self.held else self
        return last.version, last.included

    @property
    def sent(self) -> Tensor:
        """The values up to which everything has been sent."""
        return self.marks[-1][2] if self.marks else self.anchor


class LocalStepsWorker(WorkerNode):
    def __init__(self, context: NodeContext, training: LocalTraining) -> None:
        super().__init__(context, training.patience_seconds)
        self._training = training
        self._parameters = context.parameters.clone()
        self._buffers = context.buffers
        self._stepper = self._fresh_stepper()
        self._mean = torch.empty_like(self._parameters)
        self._accumulated = torch.zeros_like(self._parameters) if isinstance(training.content, Gradients) else None
        self._copies = Pool()
        self._fragments = self._fresh_fragments()
        self._begun = False
        self._version = 0
        self._steps = 0
        self._turns = 0
        """How many times an exchange has been due."""
        self._exchange = 0
        self._unsent: list[tuple[int, int, int, int]] = []
        """Rounds not all of whose fragments have been sent: first and last draw, version, step."""
        self._broken: list[Range] = []
        self._broken_in_a_row = 0
        self._blown_up_in_a_row = 0
        """How many exchanges in a row had nothing finite to send."""
        self._samples_total = 0
        self._samples_since = 0
        self._learners = 1
        self._score = 0.0
        self._scored = 0

    def _fresh_fragments(self) -> list[_Fragment]:
        places = pieces(self._parameters.numel(), self._training.fragments)
        return [_Fragment(place, self._parameters[place].clone()) for place in places]

    def _fresh_stepper(self) -> Stepper:
        return self._training.optimizer.build(self._parameters, self._setup.layout)

    def replica(self) -> Tensor | None:
        return self._parameters if self._begun else None

    def _newest(self) -> tuple[Tensor, Buffers, int]:
        return self._parameters.clone(), self._buffers, self._version

    # The hub

    def _received(self, event: MessageArrived) -> Iterable[Action]:
        message = event.keep()
        return self._begin(message) if isinstance(message, Begin) else self._merged(cast(GlobalUpdate, message))

    def _begin(self, begin: Begin) -> Iterator[Action]:
        told = begin.parameters.numel() > 0
        self._parameters.copy_(begin.parameters if told else self._setup.parameters)
        self._buffers = begin.buffers if told else self._setup.buffers
        self._fragments = self._fresh_fragments()
        if self._accumulated is not None:
            self._accumulated.zero_()
        self._begun = True
        self._version = begin.version
        self._steps = self._turns = 0
        self._exchange = begin.exchange
        self._unsent, self._broken = [], []
        self._broken_in_a_row = self._blown_up_in_a_row = 0
        self._told_of(begin)
        yield from self._go_on_at(begin.draw, begin.done)
        yield from self._compute()

    def _told_of(self, message: Begin | GlobalUpdate) -> None:
        self._samples_total, self._learners = message.samples_total, message.learners
        self._samples_since = 0

    def _merged(self, merged: GlobalUpdate) -> Iterator[Action]:
        fragment = self._fragments[merged.fragment]
        if not self._begun or (merged.version, merged.included) <= fragment.newest:
            return  # overtaken on the way
        fragment.held.append(merged)
        self._apply_what_is_due()
        yield from self._compute()

    def _apply_what_is_due(self) -> None:
        for fragment in self._fragments:
            merged = self._due(fragment)
            if merged is not None:
                applied = (merged.version, merged.included)
                fragment.held = [held for held in fragment.held if (held.version, held.included) > applied]
                self._apply(merged)

    def _due(self, fragment: _Fragment) -> GlobalUpdate | None:
        """What is to be applied now: without a delay the newest; else the first that has all that is due in it."""
        delay = self._training.delay
        if delay is None or not fragment.marks:
            return fragment.held[-1] if fragment.held else None
        due = max((number for number, step, _ in fragment.marks if self._steps >= step + delay), default=None)
        if due is None:
            return None
        return next((held for held in fragment.held if held.included >= due), None)

    def _apply(self, merged: GlobalUpdate) -> None:
        """Lay the merged values under what was learned since the newest exchange that is in them."""
        fragment = self._fragments[merged.fragment]
        under = fragment.anchor
        while fragment.marks and fragment.marks[0][0] <= merged.included:
            _, _, under = fragment.marks.pop(0)
        self._told_of(merged)
        if not merged.parameters.numel():
            fragment.anchor, fragment.version, fragment.included = under, merged.version, merged.included
            return
        for values in (self._parameters[fragment.place], *(mark for _, _, mark in fragment.marks)):
            values.sub_(under).add_(merged.parameters)  # exactly the merged values where nothing was learned since
        fragment.anchor, fragment.version, fragment.included = merged.parameters, merged.version, merged.included
        self._version = max(self._version, merged.version)
        if merged.buffers:
            self._buffers = merged.buffers

    def _forget_hub(self) -> None:
        self._begun = False

    # Steps

    def _compute(self) -> Iterator[Action]:
        if self._computing or not self._begun or self._ending or self._waits():
            return
        self._computing = True
        budget = self._room_for(Samples(self._training.batch))
        yield Compute(self._parameters, self._buffers, self._version, self._draw, budget, self._training.microbatch)

    def _waits(self) -> bool:
        """Whether it has come to the step at which something should have been merged that is not."""
        delay = self._training.delay
        if delay is None:
            return False
        return any(self._steps >= step + delay for fragment in self._fragments for _, step, _ in fragment.marks)

    def _computed(self, event: GradientReady | StepReady) -> Iterator[Action]:
        self._steps += 1
        if event.finite:
            self._learn(event)
        else:
            self._leave_out(event.draws)
            self._broken_in_a_row += 1
        self._apply_what_is_due()
        yield from self._exchange_if_due()
        yield from self._compute()

    def _learn(self, event: GradientReady | StepReady) -> None:
        if event.samples == 0:
            return
        if isinstance(event, StepReady):
            if self._accumulated is not None:
                raise ConfigurationError(
                    "a strategy that sends gradients cannot use steps of your own optimizer; choose send=Differences()"
                )
            self._parameters.add_(event.delta)
        else:
            mean = torch.div(event.gradient, event.samples, out=self._mean)
            self._stepper.step(mean, self._samples_total + self._learners * self._samples_since)
            if self._accumulated is not None:
                self._accumulated.add_(mean)
        self._buffers = tuple(buffer.clone() for buffer in event.buffers)
        self._broken_in_a_row = 0
        self._samples_since += event.samples
        self._unsent.append((*event.draws, event.version, self._steps))
        for fragment in self._fragments:
            fragment.samples += event.samples
        if event.loss is not None:
            kept = SCORE_KEPT if self._scored else 0.0
            self._score = kept * self._score + (1.0 - kept) * event.loss / event.samples
            self._scored += 1

    # Exchanges

    def _exchange_if_due(self) -> Iterator[Action]:
        """Send the fragment whose turn it is. Where link or hub do not keep up and nobody waits, the turn is passed."""
        gives_up = self._broken_in_a_row == self._training.nonfinite_max
        due = -(-(self._turns + 1) * self._training.every // self._training.fragments)
        if self._steps < due and not gives_up:
            return
        self._turns += self._steps >= due
        unanswered = len(self._fragments[self._exchange % self._training.fragments].marks)
        if (
            self._training.delay is None
            and not gives_up
            and max(self._in_flight, unanswered) >= self._training.in_flight_max
        ):
            return
        self._in_flight += 1
        yield Send(HUB, self._progress())

    def _progress(self) -> LocalDelta:
        index = self._exchange % self._training.fragments
        fragment = self._fragments[index]
        change = self._change(fragment)
        samples = fragment.samples if change.numel() else 0
        in_a_row = max(self._broken_in_a_row, self._blown_up_in_a_row)
        fragment.samples, fragment.sent_at_step = 0, self._steps
        fragment.marks.append((self._exchange, self._steps, self._copies.copy(self._parameters[fragment.place])))
        message = LocalDelta(
            change=change,
            buffers=self._buffers if index == 0 and samples else (),
            exchange=self._exchange,
            fragment=index,
            samples=samples,
            complete=self._complete() if samples else (),  # what says nothing may be in no update
            broken=tuple(self._broken),
            broken_in_a_row=in_a_row,
            score=self._score if self._scored and not in_a_row else float("inf"),
        )
        self._broken = []
        self._exchange += 1
        return message

    def _change(self, fragment: _Fragment) -> Tensor:
        """What goes out; nothing where nothing was learned. Parameters that have blown up go back to what was sent."""
        values = self._parameters[fragment.place]
        if fragment.samples == 0:
            return values.new_empty(0)
        change = self._copies.like(values)
        if self._accumulated is not None:
            change.copy_(self._accumulated[fragment.place])
            self._accumulated[fragment.place].zero_()
        elif isinstance(self._training.content, Values):
            change.copy_(values)
        else:
            torch.sub(values, fragment.sent, out=change)
        if is_finite(change) and is_finite(values):
            self._blown_up_in_a_row = 0
            return change
        values.copy_(fragment.sent)
        self._stepper = self._fresh_stepper()
        for first, stop, _, _ in self._unsent:
            self._leave_out((first, stop))
        self._blown_up_in_a_row += 1
        self._unsent = []
        return values.new_empty(0)

    def _leave_out(self, draws: Range) -> None:
        """These are in nothing that will be sent."""
        if self._broken and self._broken[-1][1] == draws[0]:
            draws = (self._broken.pop()[0], draws[1])
        self._broken.append(draws)

    def _complete(self) -> tuple[DrawRange, ...]:
        """The draws whose effect on every fragment has been sent by now, each once."""
        step = min(fragment.sent_at_step for fragment in self._fragments)
        stretches: list[DrawRange] = []
        while self._unsent and self._unsent[0][3] <= step:
            first, stop, version, _ = self._unsent.pop(0)
            if stretches and stretches[-1][1] == first:
                begun, _, oldest = stretches.pop()
                stretches.append((begun, stop, min(oldest, version)))
            else:
                stretches.append((first, stop, version))
        return tuple(stretches)

    # State

    def state(self) -> State:
        return {
            **super().state(),
            "parameters": self._parameters.clone(),
            "buffers": [buffer.clone() for buffer in self._buffers],
            "optimizer": self._stepper.state(),
            "accumulated": None if self._accumulated is None else self._accumulated.clone(),
            "fragments": [_state_of(fragment) for fragment in self._fragments],
            "begun": self._begun,
            "version": self._version,
            "steps": self._steps,
            "turns": self._turns,
            "exchange": self._exchange,
            "unsent": [list(entry) for entry in self._unsent],
            "broken": [list(draws) for draws in self._broken],
            "broken_in_a_row": self._broken_in_a_row,
            "blown_up_in_a_row": self._blown_up_in_a_row,
            "samples_total": self._samples_total,
            "samples_since": self._samples_since,
            "learners": self._learners,
            "score": self._score,
            "scored": self._scored,
        }

    def restore(self, state: State) -> None:
        super().restore(state)
        self._parameters.copy_(state["parameters"])
        self._buffers = tuple(state["buffers"])
        self._stepper.restore(state["optimizer"])
        if self._accumulated is not None:
            self._accumulated.copy_(state["accumulated"])
        for fragment, saved in zip(self._fragments, state["fragments"], strict=True):
            fragment.anchor = saved["anchor"]
            fragment.version, fragment.included = saved["version"], saved["included"]
            fragment.marks = [(number, step, values) for number, step, values in saved["marks"]]
            fragment.samples, fragment.sent_at_step = saved["samples"], saved["sent_at_step"]
            fragment.held = [unpacked(GlobalUpdate, held) for held in saved["held"]]
        self._begun = state["begun"]
        self._version = state["version"]
        self._steps = state["steps"]
        self._turns = state["turns"]
        self._exchange = state["exchange"]
        self._unsent = [(first, stop, version, step) for first, stop, version, step in state["unsent"]]
        self._broken = [(first, stop) for first, stop in state["broken"]]
        self._broken_in_a_row = state["broken_in_a_row"]
        self._blown_up_in_a_row = state["blown_up_in_a_row"]
        self._samples_total = state["samples_total"]
        self._samples_since = state["samples_since"]
        self._learners = state["learners"]
        self._score = state["score"]
        self._scored = state["scored"]


def _state_of(fragment: _Fragment) -> State:
    return {
        "anchor": fragment.anchor.clone(),
        "version": fragment.version,
        "included": fragment.included,
        "marks": [[number, step, values.clone()] for number, step, values in fragment.marks],
        "samples": fragment.samples,
        "sent_at_step": fragment.sent_at_step,
        "held": [packed(merged) for merged in fragment.held],
    }
