"""The messages of a population besides those of `local_training.py`, and the node of a member.

hub → member   SnapshotRequest   send a snapshot: another member has a far worse score, and is to be replaced by a copy
member → hub   Snapshot          parameters, optimizer state, and the rank whose settings they were trained with
hub → member   Replace           continue with this snapshot of another member

and where gradients are exchanged

member → hub   GradientReport    parameters, for the score and the result, and the gradients since the last report
hub → member   SourceGradients   the mean of the gradients that its sources have last reported

A member is a worker that sends its parameters, and can be replaced by a copy of another member.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from offbeat.core.actions import Action, Cancel, Send
from offbeat.core.events import GradientReady, MessageArrived, StepReady
from offbeat.core.flat import is_finite
from offbeat.core.messages import Buffers, Message
from offbeat.core.optimizers import Stepper
from offbeat.core.sample_ledger import Range
from offbeat.core.strategy import NodeContext, State
from offbeat.errors import ConfigurationError
from offbeat.strategies.local_steps_worker import LocalStepsWorker
from offbeat.strategies.local_training import Begin, GlobalUpdate, LocalDelta, LocalParameters, LocalTraining
from offbeat.strategies.message_kinds import kept, matched
from offbeat.strategies.population.population_parts import Rates, rate_factor
from offbeat.strategies.server_node import HUB


@dataclass(frozen=True)
class SnapshotRequest(Message):
    """Sent to the best member, which continues to train."""


@dataclass(frozen=True)
class Snapshot(Message):
    """A copy of a member. `state` and `structure` are the optimizer's state as `flatten_state` returns it."""

    parameters: Tensor
    buffers: Buffers
    state: Buffers
    structure: str
    settings: int


@dataclass(frozen=True)
class Replace(Snapshot):
    """As `Snapshot`. The receiver sends `replacements` in its messages from now on."""

    replacements: int
    version: int


@dataclass(frozen=True)
class GradientReport(LocalParameters):
    """As `LocalParameters`, with the sum of the mean gradients of the steps since the last report; empty if none."""

    increments: ClassVar[tuple[str, ...]] = ("gradient",)

    gradient: Tensor


@dataclass(frozen=True)
class SourceGradients(Message):
    """The answer to the exchange `included`: the receiver makes one step of its optimizer with this gradient."""

    increments: ClassVar[tuple[str, ...]] = ("gradient",)

    gradient: Tensor
    version: int
    included: int
    samples_total: int
    workers: int


_INDEX = "tensor index"


def flatten_state(state: State) -> tuple[Buffers, str]:
    """The tensors of a nested state, and the rest of it as JSON with the index of each tensor in its place."""
    tensors: list[Tensor] = []

    def index_of(tensor: Tensor) -> dict[str, int]:
        tensors.append(tensor)
        return {_INDEX: len(tensors) - 1}

    structure = json.dumps(state, default=index_of)
    return tuple(tensors), structure


def unflatten_state(tensors: Sequence[Tensor], structure: str) -> State:
    """The inverse of `flatten_state`."""

    def tensor_of(table: dict[str, Any]) -> Any:
        return tensors[table[_INDEX]] if _INDEX in table else table

    return cast(State, json.loads(structure, object_hook=tensor_of))


class PopulationMember(LocalStepsWorker):
    _settings: int
    """The rank whose settings it trains with: its own, until it is replaced."""
    _replacements: int = 0
    _replaced_at_exchange: int = 0
    """The first exchange since the last replacement."""
    _abandoned: list[Range]
    """Draws that were computed before a replacement, and of which the hub does not know."""
    _round_is_abandoned: bool = False
    """Whether the round under way was started before a replacement."""
    _gradients: Tensor | None
    """The sum of mean gradients since the last report, where gradients are sent."""

    def __init__(self, context: NodeContext, training: LocalTraining, rates: Rates, sends_gradients: bool) -> None:
        self._rates = rates
        self._gradients = torch.zeros_like(context.parameters) if sends_gradients else None
        self._settings = context.rank
        self._abandoned = []
        super().__init__(context, training)

    def _new_optimizer(self) -> Stepper:
        optimizer = super()._new_optimizer()
        optimizer.rate_factor = rate_factor(self._rates, self._settings)
        return optimizer

    def _message_arrived(self, event: MessageArrived) -> Iterable[Action]:
        match event.message:
            case SnapshotRequest():
                return [self._snapshot()] if self._begun else ()
            case Replace():
                return self._replace(kept(event, Replace))
            case SourceGradients():
                return self._gradients_arrived(matched(event, SourceGradients))
            case _:
                return super()._message_arrived(event)

    def _snapshot(self) -> Send:
        """Send a copy of this member; if it has diverged since its last report, the reported values without a state."""
        self._in_flight += 1
        if not is_finite(self._parameters):
            parameters, buffers = self._fragments[0].last_sent.clone(), self._buffers.last_sent
            return Send(HUB, Snapshot(parameters, buffers, (), "", self._settings))
        state, structure = flatten_state(self._optimizer.state())
        return Send(HUB, Snapshot(self._parameters.clone(), self._buffers.current, state, structure, self._settings))

    def _gradients_arrived(self, answer: SourceGradients) -> Iterator[Action]:
        """Make a step with the gradients of the sources. Steps of its own since the report stay as they are."""
        if not self._begun or answer.included < self._replaced_at_exchange:
            return
        self._optimizer.step(answer.gradient, answer.samples_total)
        progress = answer.version, 0, answer.included, answer.samples_total, answer.workers
        yield from self._update_arrived(GlobalUpdate(answer.gradient.new_empty(0), (), *progress))

    def _learn(self, event: GradientReady | StepReady) -> None:
        super()._learn(event)
        if self._gradients is None or event.samples == 0:
            return
        if isinstance(event, StepReady):
            raise ConfigurationError(
                "a population that sends gradients cannot use steps of your own optimizer; choose send=Values()"
            )
        self._gradients.add_(self._mean)

    def _begin(self, begin: Begin) -> Iterator[Action]:
        self._take_gradients()
        self._replacements = self._replaced_at_exchange = 0
        self._round_is_abandoned, self._abandoned = False, []
        yield from super()._begin(begin)

    def _replace(self, given: Replace) -> Iterator[Action]:
        """Continue with the snapshot of another member. The gradient of a round under way is not used."""
        if not self._begun or given.replacements <= self._replacements:
            return
        self._replacements, self._replaced_at_exchange = given.replacements, self._exchange
        self._settings = given.settings
        self._take_gradients()
        self._parameters.copy_(given.parameters)
        self._buffers.reset(given.buffers)
        self._optimizer = self._new_optimizer()
        if given.structure:
            self._optimizer.restore(unflatten_state(given.state, given.structure))
        self._abandoned += [(first, stop) for first, stop, _, _ in self._unsent]
        self._unsent = []
        self._fragments = self._new_fragments()
        self._version = max(self._version, given.version)
        self._nonfinite_in_a_row = self._diverged_in_a_row = self._scored_steps = 0
        if self._computing and not self._discard:
            self._round_is_abandoned = True
            yield Cancel()
        yield from self._compute()

    def _update_arrived(self, update: GlobalUpdate) -> Iterator[Action]:
        if update.included >= self._replaced_at_exchange:  # an earlier one is of the member before its replacement
            yield from super()._update_arrived(update)

    def _computed(self, event: GradientReady | StepReady) -> Iterator[Action]:
        if self._round_is_abandoned:
            self._round_is_abandoned = False
            if event.samples:
                self._abandoned.append(event.draws)
            yield from self._compute()
        else:
            yield from super()._computed(event)

    def _delta(self) -> LocalDelta:
        delta = super()._delta()
        fields = {item.name: getattr(delta, item.name) for item in dataclasses.fields(delta)}
        abandoned, self._abandoned = tuple(self._abandoned), []
        common = {**fields, "replacements": self._replacements, "abandoned": abandoned}
        if self._gradients is None:
            return LocalParameters(**common)
        gradient = self._take_gradients()
        return GradientReport(**common, gradient=gradient if delta.samples else gradient.new_empty(0))

    def _take_gradients(self) -> Tensor:
        """What has been added up since the last report, in a new tensor; the sum begins anew."""
        if self._gradients is None:
            return self._parameters.new_empty(0)
        taken = self._gradients.clone()
        self._gradients.zero_()
        return taken
