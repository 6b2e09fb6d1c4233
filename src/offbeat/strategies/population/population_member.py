"""What a population says besides what all learners say (`strategies/progress.py`).

hub → member   Lend       send me all that you are made of: somebody does so badly that it should take your place
member → hub   Lent       parameters, optimizer state, and whose settings they were made with
hub → member   Takeover   go on as that one
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from offbeat.core.actions import Action, Cancel, Send
from offbeat.core.events import GradientReady, MessageArrived, StepReady
from offbeat.core.flat import is_finite
from offbeat.core.messages import Buffers, Message
from offbeat.core.optimizers import Stepper
from offbeat.core.sample_ledger import Range
from offbeat.core.strategy import NodeContext, State
from offbeat.strategies.local_training import (
    Begin,
    GlobalUpdate,
    LocalDelta,
    LocalParameters,
    LocalStepsWorker,
    LocalTraining,
)
from offbeat.strategies.population.population_parts import Rates, rate_factor
from offbeat.strategies.server_node import HUB


@dataclass(frozen=True)
class SnapshotRequest(Message):
    """Asked of the best. It goes on as it was."""


@dataclass(frozen=True)
class Snapshot(Message):
    """`state` are the tensors of the optimizer's state, and `shape` all else of it, as JSON with places for them."""

    parameters: Tensor
    buffers: Buffers
    state: Buffers
    shape: str
    settings: int


@dataclass(frozen=True)
class Replace(Message):
    """As `Snapshot`. What the receiver sends from now on says that it has taken over so many times."""

    parameters: Tensor
    buffers: Buffers
    state: Buffers
    shape: str
    settings: int
    takeovers: int
    version: int


_PLACE = "tensor"


def flattened(state: Any) -> tuple[Buffers, str]:
    """A nested state of tensors and plain data as tensors and a text that says where they belong."""
    tensors: list[Tensor] = []

    def walk(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return {_PLACE: len(tensors) - 1}
        if isinstance(value, dict):
            return {"dict": [[key, walk(inner)] for key, inner in value.items()]}
        if isinstance(value, list | tuple):
            return {"list": [walk(inner) for inner in value]}
        return value

    shape = json.dumps(walk(state))
    return tuple(tensors), shape


def nested(tensors: Sequence[Tensor], shape: str) -> Any:
    """What `flattened` took apart."""

    def walk(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if _PLACE in value:
            return tensors[value[_PLACE]]
        if "dict" in value:
            return {key: walk(inner) for key, inner in value["dict"]}
        return [walk(inner) for inner in value["list"]]

    return walk(json.loads(shape))


# A member of a population: a learner that sends its parameters, and can take another's place.


class PopulationMember(LocalStepsWorker):
    def __init__(self, context: NodeContext, training: LocalTraining, rates: Rates) -> None:
        self._rates = rates
        self._settings = context.rank
        """The rank whose settings these are: its own, until it takes another's place."""
        self._takeovers = 0
        self._taken_at = 0
        """The first exchange since it took another's place."""
        self._abandoned: list[Range] = []
        """Draws that were for what it was before, and of which the hub does not know."""
        self._in_vain = False
        """Whether the round that is under way belongs to what it was before."""
        super().__init__(context, training)

    def _fresh_stepper(self) -> Stepper:
        stepper = super()._fresh_stepper()
        stepper.rate_factor = rate_factor(self._rates, self._settings)
        return stepper

    def _received(self, event: MessageArrived) -> Iterable[Action]:
        if isinstance(event.message, SnapshotRequest):
            return [self._lent()] if self._begun else ()
        if isinstance(event.message, Replace):
            return self._take_over(cast(Replace, event.keep()))
        return super()._received(event)

    def _lent(self) -> Send:
        """What it is now; if that has just blown up, what it was when it last reported, and a new optimizer."""
        self._in_flight += 1
        if not is_finite(self._parameters):
            return Send(HUB, Snapshot(self._fragments[0].sent.clone(), self._buffers, (), "", self._settings))
        state, shape = flattened(self._stepper.state())
        return Send(HUB, Snapshot(self._parameters.clone(), self._buffers, state, shape, self._settings))

    def _begin(self, begin: Begin) -> Iterator[Action]:
        self._takeovers, self._taken_at, self._in_vain, self._abandoned = 0, 0, False, []
        yield from super()._begin(begin)

    def _take_over(self, given: Replace) -> Iterator[Action]:
        """Go on as another. A gradient that is under way was taken elsewhere and is of no use any more."""
        if not self._begun or given.takeovers <= self._takeovers:
            return
        self._takeovers, self._taken_at = given.takeovers, self._exchange
        self._settings = given.settings
        self._parameters.copy_(given.parameters)
        self._buffers = given.buffers
        self._stepper = self._fresh_stepper()
        if given.shape:
            self._stepper.restore(nested(given.state, given.shape))
        self._abandoned += [(first, stop) for first, stop, _, _ in self._unsent]
        self._unsent = []
        self._fragments = self._fresh_fragments()
        self._version = max(self._version, given.version)
        self._broken_in_a_row = self._blown_up_in_a_row = self._scored = 0
        if self._computing and not self._discard:
            self._in_vain = True
            yield Cancel()
        yield from self._compute()

    def _merged(self, merged: GlobalUpdate) -> Iterator[Action]:
        if merged.included >= self._taken_at:  # else it is an answer to what it was before
            yield from super()._merged(merged)

    def _computed(self, event: GradientReady | StepReady) -> Iterator[Action]:
        if self._in_vain:
            self._in_vain = False
            if event.samples:
                self._abandoned.append(event.draws)
            yield from self._compute()
        else:
            yield from super()._computed(event)

    def _progress(self) -> LocalDelta:
        progress = super()._progress()
        fields = {item.name: getattr(progress, item.name) for item in dataclasses.fields(progress)}
        abandoned, self._abandoned = tuple(self._abandoned), []
        return LocalParameters(**{**fields, "takeovers": self._takeovers, "abandoned": abandoned})

    def state(self) -> State:
        return {
            **super().state(),
            "settings": self._settings,
            "takeovers": self._takeovers,
            "taken_at": self._taken_at,
            "abandoned": [list(draws) for draws in self._abandoned],
            "in_vain": self._in_vain,
        }

    def restore(self, state: State) -> None:
        super().restore(state)
        self._settings = state["settings"]
        self._takeovers = state["takeovers"]
        self._taken_at = state["taken_at"]
        self._abandoned = [(first, stop) for first, stop in state["abandoned"]]
        self._in_vain = state["in_vain"]
        self._stepper.rate_factor = rate_factor(self._rates, self._settings)
