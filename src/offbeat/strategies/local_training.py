"""Settings and messages of local training: workers train replicas of their own and exchange with the hub now and then.

hub → worker   Begin             after joining: where to begin, in the data and in the numbering of exchanges
worker → hub   LocalDelta        what was learned in one fragment of the parameters since it was last sent
worker → hub   LocalParameters   the same, but the parameters themselves
hub → worker   GlobalUpdate      new values of a fragment, and which exchanges of the worker are included in them

Each worker numbers its exchanges from 0. Exchange e carries fragment e mod (number of fragments). Stop and Stopped are
as in all families; the node of a worker is in `local_steps_worker.py`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from offbeat.core.configuration import Family
from offbeat.core.messages import Buffers, LoaderMessage, Message
from offbeat.core.optimizers import Optimizer
from offbeat.core.sample_ledger import Range
from offbeat.core.strategy import NodeContext
from offbeat.core.validation import require
from offbeat.strategies.hang_detection import HangDetector
from offbeat.strategies.member_checks import MemberCheck
from offbeat.strategies.server_node import ServerStrategy, shared_fields
from offbeat.strategies.training_node import NO_OPTIMIZER, samples_limit

EXCHANGES_AHEAD_MAX = 64
"""How many exchanges of a worker can be under way, at the most; one that claims more is not believed."""

DrawRange = tuple[int, int, int]
"""First draw, one past the last draw, and the oldest version at which one of their gradients was computed."""


@dataclass(frozen=True)
class Begin(LoaderMessage):
    """Begin with these parameters, or with your own where they are empty.

    Continue at `draw`, but skip `done`, which has already arrived. The next exchange has the number `exchange`.
    `workers` is how many are connected. The parameters may be compressed: a worker sends differences from the values
    that it received.
    """

    values: ClassVar[tuple[str, ...]] = ("parameters",)

    parameters: Tensor
    buffers: Buffers
    version: int
    exchange: int
    samples_total: int
    workers: int
    draw: int
    done: tuple[Range, ...]


@dataclass(frozen=True)
class LocalDelta(LoaderMessage):
    """What was learned from `samples` samples since the fragment was last sent; `change` is empty if there were none.

    `complete` are the draws all of whose fragments have been sent with this message, `nonfinite` those whose gradients
    were not finite and are in no message. `score` is a moving average of the training loss.
    """

    increments: ClassVar[tuple[str, ...]] = ("change",)
    residual_key_fields: ClassVar[tuple[str, ...]] = ("fragment",)

    change: Tensor
    buffers: Buffers
    """With the first fragment: what was learned in the buffers since then, see `BufferMerge.contribution`."""
    exchange: int
    fragment: int
    samples: int
    complete: tuple[DrawRange, ...]
    nonfinite: tuple[Range, ...]
    nonfinite_in_a_row: int
    score: float

    @property
    def all_draws(self) -> tuple[Range, ...]:
        """All draws that the message accounts for."""
        return (*((first, stop) for first, stop, _ in self.complete), *self.nonfinite)


@dataclass(frozen=True)
class LocalParameters(LocalDelta):
    """As `LocalDelta`, but `change` and `buffers` hold the values themselves."""

    increments: ClassVar[tuple[str, ...]] = ()
    values: ClassVar[tuple[str, ...]] = ("change",)

    replacements: int
    """How many times the sender has been replaced by a copy of another worker since it joined."""
    abandoned: tuple[Range, ...]
    """Draws that were computed before the last replacement, and are in no message."""

    @property
    def all_draws(self) -> tuple[Range, ...]:
        return (*super().all_draws, *self.abandoned)


@dataclass(frozen=True)
class GlobalUpdate(Message):
    """New values of a fragment, which include the receiver's exchanges of it up to number `included`.

    Empty parameters acknowledge the exchange; there are no new values.
    """

    values: ClassVar[tuple[str, ...]] = ("parameters",)

    parameters: Tensor
    buffers: Buffers
    version: int
    fragment: int
    included: int
    samples_total: int
    workers: int


class Content(Family):
    """What a worker sends in an exchange."""


@dataclass(frozen=True)
class Gradients(Content, name="gradients"):
    """The sum of the mean gradients of its steps; the hub makes one step of the optimizer with their mean."""


@dataclass(frozen=True)
class Differences(Content, name="differences"):
    """The difference of its parameters to those of the last exchange."""


@dataclass(frozen=True)
class Values(Content, name="values"):
    """Its parameters."""


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """How a worker trains and exchanges; the fields are those of `LocalSteps`."""

    optimizer: Optimizer
    batch: int
    microbatch: int
    every: int
    delay: int | None
    content: Content
    fragments: int = 1
    in_flight_max: int
    nonfinite_max: int
    patience_seconds: float
    hang_factor: float
    hang_seconds: float

    def hang_detector(self) -> HangDetector:
        return HangDetector(self.hang_factor, self.hang_seconds)

    @classmethod
    def of(cls, strategy: ServerStrategy, context: NodeContext, **choices: Any) -> Self:
        """The settings of a strategy, from its fields of the same name and `choices`.

        There are no more steps between exchanges than the samples of the whole run allow.
        """
        settings = {**shared_fields(strategy, cls), **choices}
        require(settings["optimizer"] is not None, NO_OPTIMIZER)
        limit = samples_limit(context.until)
        if limit is not None:
            samples_per_step = settings["batch"] * max(1, len(context.members) - 1)
            settings["every"] = min(settings["every"], -(-limit // samples_per_step))
        settings["every"] = max(settings["every"], settings.get("fragments", 1))
        return cls(**settings)


def check_local(check: MemberCheck, message: LocalDelta, numel: int, like: Tensor, samples_max: int) -> None:
    """Check a report of a worker: `numel` elements of the type of `like`, or none if it is about no samples.

    A worker without answers goes on, so that nothing but time limits the samples of a report.
    """
    check.require(0 <= message.samples <= samples_max, f"{message.samples} samples, where {samples_max} are possible")
    check.vector("change", message.change, like, numel if message.samples else 0)
    check.require(message.nonfinite_in_a_row >= 0, f"{message.nonfinite_in_a_row} gradients that were not finite")


def fragment_slices(numel: int, fragments: int) -> list[slice]:
    """A vector of `numel` entries in consecutive slices of about the same size."""
    cuts = [numel * fragment // fragments for fragment in range(fragments + 1)]
    return [slice(first, stop) for first, stop in itertools.pairwise(cuts)]
