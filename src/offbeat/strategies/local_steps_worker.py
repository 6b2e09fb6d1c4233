"""A worker that trains a replica with an optimizer of its own, and exchanges with the hub every few steps.

    every `every` steps, for each fragment of the parameters in turn:
        send           what was learned in it since it was last sent; the values at that time are kept as a reference
        GlobalUpdate   x ← x + new values − reference: at `delay` steps after it was sent, or on arrival if that is
                       later; without a delay, on arrival

With a delay, the worker waits at that step for an update that has not arrived; with delay 0 it waits at once, so that
all workers compute at the same values. Without a delay (None) it never waits. An update says which exchanges of this
worker it includes; what was learned after those is added to it, so that nothing is lost or counted twice.

A worker that began with parameters of its own keeps what they differ by from the hub's: it adds that to all new values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from offbeat.core.actions import Action, Compute, Samples, Send
from offbeat.core.events import GradientReady, MessageArrived, StepReady
from offbeat.core.flat import is_finite
from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Buffers
from offbeat.core.optimizers import Stepper
from offbeat.core.sample_ledger import Range
from offbeat.core.strategy import NodeContext
from offbeat.errors import ConfigurationError
from offbeat.strategies.local_buffers import LocalBuffers
from offbeat.strategies.local_training import (
    Begin,
    DrawRange,
    GlobalUpdate,
    Gradients,
    LocalDelta,
    LocalTraining,
    Values,
    fragment_slices,
)
from offbeat.strategies.message_kinds import kept, unexpected
from offbeat.strategies.node_state import Stateful
from offbeat.strategies.server_node import HUB
from offbeat.strategies.worker_node import WorkerNode

SCORE_DECAY = 0.9
"""Weight of the earlier steps in the moving average of the training loss."""


class Fragment(Stateful):
    """One fragment of a worker's parameters."""

    anchor: Tensor
    """The last values from the hub."""
    version: int = -1
    included: int = -1
    """The last exchange that is included in them."""
    unmerged: list[tuple[int, int, Tensor]]
    """Exchanges that no applied update includes: number, step, and the values when it was sent."""
    samples: int = 0
    """Samples learned since it was last sent."""
    sent_at_step: int = 0
    pending: list[GlobalUpdate]
    """Updates that have arrived and are not applied yet, the newest last."""

    def __init__(self, place: slice, values: Tensor) -> None:
        self.place = place
        self.anchor = values
        self.unmerged, self.pending = [], []

    @property
    def newest(self) -> tuple[int, int]:
        """Version and last included exchange of the newest update that has arrived."""
        last = self.pending[-1] if self.pending else self
        return last.version, last.included

    @property
    def last_sent(self) -> Tensor:
        """The values when the last exchange was sent."""
        return self.unmerged[-1][2] if self.unmerged else self.anchor


class LocalStepsWorker(WorkerNode):
    caches = ("_copies", "_mean")

    _parameters: Tensor
    _buffers: LocalBuffers
    _optimizer: Stepper
    _accumulated: Tensor | None
    """The sum of mean gradients that has not been sent, where gradients are sent."""
    _fragments: list[Fragment]
    _begun: bool = False
    _version: int = 0
    _steps: int = 0
    _exchanges_due: int = 0
    """How many exchanges have been due, including those that were skipped."""
    _exchange: int = 0
    """The number of the next exchange."""
    _unsent: list[tuple[int, int, int, int]]
    """Rounds not all of whose fragments have been sent: first draw, one past the last, version, step."""
    _nonfinite: list[Range]
    _nonfinite_in_a_row: int = 0
    _diverged_in_a_row: int = 0
    """Exchanges in a row at which the parameters were not finite."""
    _samples_total: int = 0
    """Samples of all workers at the last update from the hub."""
    _samples_since: int = 0
    _workers: int = 1
    _score: float = 0.0
    _scored_steps: int = 0

    def __init__(self, context: NodeContext, training: LocalTraining, offset: Tensor | None = None) -> None:
        """`offset` is what this replica differs from the hub's parameters by, in the whole run; None: nothing."""
        super().__init__(context, training.patience_seconds)
        self._training = training
        self._offset = offset
        self._parameters = context.parameters.clone()
        self._buffers = LocalBuffers(context.layout, context.buffers)
        self._optimizer = self._new_optimizer()
        self._mean = torch.empty_like(self._parameters)
        self._accumulated = torch.zeros_like(self._parameters) if isinstance(training.content, Gradients) else None
        self._copies = Pool()
        self._fragments = self._new_fragments()
        self._unsent, self._nonfinite = [], []

    def _new_fragments(self) -> list[Fragment]:
        places = fragment_slices(self._parameters.numel(), self._training.fragments)
        return [Fragment(place, self._parameters[place].clone()) for place in places]

    def _new_optimizer(self) -> Stepper:
        return self._training.optimizer.build(self._parameters, self._context.layout)

    def replica(self) -> Tensor | None:
        return self._parameters if self._begun else None

    def _newest(self) -> tuple[Tensor, Buffers, int]:
        return self._parameters.clone(), self._buffers.current, self._version

    # Messages of the hub

    def _message_arrived(self, event: MessageArrived) -> Iterable[Action]:
        match event.message:
            case Begin():
                return self._begin(kept(event, Begin))
            case GlobalUpdate():
                return self._update_arrived(kept(event, GlobalUpdate))
            case _:
                raise unexpected(event, self._context.rank)

    def _begin(self, begin: Begin) -> Iterator[Action]:
        is_given = begin.parameters.numel() > 0
        self._parameters.copy_(begin.parameters if is_given else self._context.parameters)
        self._buffers.reset(begin.buffers if is_given else self._context.buffers)
        if self._offset is not None:
            self._parameters.add_(self._offset)
        self._fragments = self._new_fragments()
        if self._accumulated is not None:
            self._accumulated.zero_()
        self._begun = True
        self._version = begin.version
        self._steps = self._exchanges_due = 0
        self._exchange = begin.exchange
        self._unsent, self._nonfinite = [], []
        self._nonfinite_in_a_row = self._diverged_in_a_row = 0
        self._set_progress(begin)
        yield from self._set_position(begin.draw, begin.done, begin)
        yield from self._compute()

    def _set_progress(self, message: Begin | GlobalUpdate) -> None:
        self._samples_total, self._workers = message.samples_total, message.workers
        self._samples_since = 0

    def _update_arrived(self, update: GlobalUpdate) -> Iterator[Action]:
        fragment = self._fragments[update.fragment]
        if not self._begun or (update.version, update.included) <= fragment.newest:
            return  # overtaken by a later one
        fragment.pending.append(update)
        self._apply_due_updates()
        yield from self._compute()

    def _apply_due_updates(self) -> None:
        for fragment in self._fragments:
            update = self._due(fragment)
            if update is not None:
                applied = (update.version, update.included)
                fragment.pending = [later for later in fragment.pending if (later.version, later.included) > applied]
                self._apply(update)

    def _due(self, fragment: Fragment) -> GlobalUpdate | None:
        """The update to apply now: without a delay the newest, else the first that includes all due exchanges."""
        delay = self._training.delay
        if delay is None or not fragment.unmerged:
            return fragment.pending[-1] if fragment.pending else None
        due = max((number for number, step, _ in fragment.unmerged if self._steps >= step + delay), default=None)
        if due is None:
            return None
        return next((update for update in fragment.pending if update.included >= due), None)

    def _apply(self, update: GlobalUpdate) -> None:
        """Replace the values of the newest exchange that the update includes, and keep what was learned since."""
        fragment = self._fragments[update.fragment]
        reference = fragment.anchor
        while fragment.unmerged and fragment.unmerged[0][0] <= update.included:
            _, _, reference = fragment.unmerged.pop(0)
        if update.fragment == 0:
            self._buffers.apply(update.buffers, update.included)
        self._set_progress(update)
        fragment.version, fragment.included = update.version, update.included
        if not update.parameters.numel():
            fragment.anchor = reference
            return
        merged = update.parameters
        if self._offset is not None:
            merged = merged + self._offset[fragment.place]
        for values in (self._parameters[fragment.place], *(sent for _, _, sent in fragment.unmerged)):
            values.sub_(reference).add_(merged)  # exactly the new values if nothing was learned since
        fragment.anchor = merged
        self._version = max(self._version, update.version)

    def _reset_hub(self) -> None:
        self._begun = False

    # Steps

    def _compute(self) -> Iterator[Action]:
        if self._computing or not self._begun or self._ending or self._waits():
            return
        self._computing = True
        budget = self._next_budget(Samples(self._training.batch))
        self._buffers.begin_round()
        buffers, microbatch = self._buffers.current, self._training.microbatch
        yield Compute(self._parameters, buffers, self._version, self._draw, budget, microbatch, self._loader)

    def _waits(self) -> bool:
        """Whether an update is due at this step that has not arrived."""
        delay = self._training.delay
        if delay is None:
            return False
        return any(self._steps >= step + delay for fragment in self._fragments for _, step, _ in fragment.unmerged)

    def _computed(self, event: GradientReady | StepReady) -> Iterator[Action]:
        self._steps += 1
        if event.finite:
            self._learn(event)
        else:
            self._leave_out(event.draws)
            self._nonfinite_in_a_row += 1
        self._apply_due_updates()
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
            mean = torch.div(event.gradient, event.divisor, out=self._mean)
            self._optimizer.step(mean, self._samples_total + self._workers * self._samples_since)
            if self._accumulated is not None:
                self._accumulated.add_(mean)
        self._buffers.learn(event.buffers)
        self._nonfinite_in_a_row = 0
        self._samples_since += event.samples
        self._unsent.append((*event.draws, event.version, self._steps))
        for fragment in self._fragments:
            fragment.samples += event.samples
        if event.loss is not None:
            decay = SCORE_DECAY if self._scored_steps else 0.0
            self._score = decay * self._score + (1.0 - decay) * event.loss / event.samples
            self._scored_steps += 1

    # Exchanges

    def _exchange_if_due(self) -> Iterator[Action]:
        """Send the next fragment. Without a delay an exchange is skipped while the link or the hub does not keep up."""
        training = self._training
        fails = self._nonfinite_in_a_row == training.nonfinite_max
        due_at_step = -(-(self._exchanges_due + 1) * training.every // training.fragments)
        if self._steps < due_at_step and not fails:
            return
        self._exchanges_due += self._steps >= due_at_step
        unanswered = len(self._fragments[self._exchange % training.fragments].unmerged)
        is_behind = max(self._in_flight, unanswered) >= training.in_flight_max
        if training.delay is None and is_behind and not fails:
            return
        self._in_flight += 1
        yield Send(HUB, self._delta())

    def _send_rest(self) -> Iterator[Action]:
        while self._begun and (self._nonfinite or any(fragment.samples for fragment in self._fragments)):
            yield Send(HUB, self._delta())

    def _delta(self) -> LocalDelta:
        """The message of the next exchange."""
        index = self._exchange % self._training.fragments
        fragment = self._fragments[index]
        change = self._change(fragment)
        samples = fragment.samples if change.numel() else 0
        in_a_row = max(self._nonfinite_in_a_row, self._diverged_in_a_row)
        fragment.samples, fragment.sent_at_step = 0, self._steps
        fragment.unmerged.append((self._exchange, self._steps, self._copies.copy(self._parameters[fragment.place])))
        message = LocalDelta(
            change=change,
            buffers=self._buffers_to_send(samples) if index == 0 else (),
            exchange=self._exchange,
            fragment=index,
            samples=samples,
            complete=self._complete() if samples else (),  # an empty change may be in no update
            nonfinite=tuple(self._nonfinite),
            nonfinite_in_a_row=in_a_row,
            score=self._score if self._scored_steps and not in_a_row else float("inf"),
            **self._take_loader(),
        )
        self._nonfinite = []
        self._exchange += 1
        return message

    def _buffers_to_send(self, samples: int) -> Buffers:
        """What was learned in the buffers, or the buffers themselves, as of the parameters; empty without samples."""
        learned = self._buffers.send(self._exchange)
        if not samples:
            return ()
        return self._buffers.current if isinstance(self._training.content, Values) else learned

    def _change(self, fragment: Fragment) -> Tensor:
        """What to send of a fragment; empty if nothing was learned. Parameters that have diverged are reset."""
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
            torch.sub(values, fragment.last_sent, out=change)
        if is_finite(change) and is_finite(values):
            self._diverged_in_a_row = 0
            return change
        values.copy_(fragment.last_sent)
        self._buffers.revert()
        self._optimizer = self._new_optimizer()
        for first, stop, _, _ in self._unsent:
            self._leave_out((first, stop))
        self._diverged_in_a_row += 1
        self._unsent = []
        return values.new_empty(0)

    def _leave_out(self, draws: Range) -> None:
        """Count draws as not finite: no message contains what was learned from them."""
        if self._nonfinite and self._nonfinite[-1][1] == draws[0]:
            draws = (self._nonfinite.pop()[0], draws[1])
        self._nonfinite.append(draws)

    def _complete(self) -> tuple[DrawRange, ...]:
        """The draws whose effect on every fragment has been sent by now, each once."""
        step = min(fragment.sent_at_step for fragment in self._fragments)
        ranges: list[DrawRange] = []
        while self._unsent and self._unsent[0][3] <= step:
            first, stop, version, _ = self._unsent.pop(0)
            if ranges and ranges[-1][1] == first:
                first, _, oldest = ranges.pop()
                version = min(oldest, version)
            ranges.append((first, stop, version))
        return tuple(ranges)
