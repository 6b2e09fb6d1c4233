"""The contract between strategies and engines.

A *strategy* is a frozen dataclass: the configuration of an algorithm. It creates one *node* per rank. A node is logic
without input or output: `handle(event)` returns actions. It has no clock (events have the time), no thread, no socket,
and no randomness but the generator of its context. So the same node runs in virtual time and on real processes, and a
run can be repeated from its seed.

Guarantees of an engine
- `Started` is the first event. `PeerJoined` precedes the first message of a peer; after `PeerLost`, no message of that
  incarnation arrives. A restarted peer has a higher incarnation.
- A message is sent to the incarnation of the peer in the last `PeerJoined`. If that is lost, the message is dropped.
- Messages of one link arrive at most once, and in order unless the cluster adds random delay.
- One `GradientReady` (or `StepReady`) per `Compute`, one `Sent` per transmitted `Send`, one `Evaluated` per `Evaluate`.
  No event after `Finish`.

Obligations of a node
- At most one `Compute` is outstanding. Messages may arrive out of order.
- It does not change a tensor that it has sent, and does not store tensors of an event without `keep()`.
- `state()` is complete: a new node after `restore(state)` behaves identically.
- It ends by `Finish`, with a hub after Stop → Stopped, and never applies a gradient that is not finite.

`offbeat.testing.check_strategy` tests all of these.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Self, cast

import numpy as np
from torch import Tensor, nn

from offbeat.core.actions import Action, Budget
from offbeat.core.compression import Compression
from offbeat.core.configuration import Family
from offbeat.core.events import Event
from offbeat.core.flat import Layout
from offbeat.core.messages import Buffers
from offbeat.core.optimizers import Optimizer
from offbeat.core.random_settings import settings_by_type
from offbeat.core.randomness import stream
from offbeat.core.validation import require, require_positive
from offbeat.errors import ConfigurationError

State = dict[str, Any]
"""Tensors and plain data (dictionaries with string keys, lists, numbers, strings, None), nested."""


class Cadence(Family):
    """How often to evaluate. Shorthand: `2s`, or `100` for updates."""

    @classmethod
    def shorthand(cls, text: str) -> Any:
        try:
            return EverySeconds(float(text[:-1])) if text.endswith("s") else EveryUpdates(int(text))
        except ValueError:  # not a number: the name of a cadence, with its settings
            return super().shorthand(text)


@dataclass(frozen=True)
class EveryUpdates(Cadence, name="updates"):
    """Evaluate after a number of updates."""

    updates: int = 1
    """updates between evaluations"""

    def __post_init__(self) -> None:
        require_positive(self, "updates")


@dataclass(frozen=True)
class EverySeconds(Cadence, name="seconds"):
    """Evaluate at the first update after this many seconds without an evaluation."""

    seconds: float = 1.0
    """seconds between evaluations"""

    def __post_init__(self) -> None:
        require_positive(self, "seconds")


@dataclass(frozen=True, eq=False)
class NodeContext:
    """The arguments of a node. `members` are the ranks expected at the start, including this one.

    `has_validation`: whether `Evaluate(is_score=True)` can be carried out.
    """

    rank: int
    members: tuple[int, ...]
    layout: Layout
    parameters: Tensor
    buffers: Buffers
    random: np.random.Generator
    until: Budget
    evaluate: Cadence | None
    has_validation: bool = True


class Node(ABC):
    """The logic of one rank. The engine calls its methods from one thread at a time."""

    @abstractmethod
    def handle(self, event: Event) -> Iterable[Action]:
        """Process an event. The engine carries out the returned actions in order, before the next event."""

    @abstractmethod
    def state(self) -> State:
        """The complete state of this node; its tensors are copies."""

    @abstractmethod
    def restore(self, state: State) -> None:
        """Continue from a `state()`. Called at most once, on a new node, before any event."""

    def extra_state(self) -> State:
        """What another run of the same loop continues with, beside parameters and buffers; its tensors are copies."""
        return {}

    def load_extra_state(self, state: State) -> None:
        """Continue with an `extra_state()` of a node of the same kind."""
        del state

    def replica(self) -> Tensor | None:
        """The parameters that this node trains as its own, read-only; None if it has none, as a hub."""
        return None


@dataclass(frozen=True)
class Strategy(Family, ABC):
    """The configuration of an algorithm."""

    summary: ClassVar[str] = ""
    """Description in one line, for `offbeat strategies`."""
    paper: ClassVar[str] = ""
    """The publication."""
    figure_style: ClassVar[int | None] = None
    """Number of its colour, dashes and marker in figures; not inherited. None: the next unused one."""

    _: KW_ONLY
    compression: Compression | None = None
    """how messages are compressed: bf16, int8, or top-k:0.01"""

    @abstractmethod
    def processes(self, workers: int) -> int:
        """The number of ranks of a run with `workers` workers."""

    @abstractmethod
    def computes(self, rank: int) -> bool:
        """Whether this rank computes gradients."""

    @abstractmethod
    def peers(self, rank: int, processes: int) -> Iterable[int]:
        """The ranks that `rank` exchanges messages with, in a run of `processes` ranks; a symmetric relation."""

    @abstractmethod
    def node(self, context: NodeContext) -> Node:
        """The node of `context.rank`. Engines call `build_node`, which also compresses its messages."""

    @classmethod
    def random_settings(cls, seed: int, workers: int) -> dict[str, Any]:
        """Fields for a random case of `offbeat.testing.check_strategy`; a pure function of its arguments.

        Override it for settings that depend on each other, or need a range. Fields with a common name (batch,
        optimizer, …: see `core/random_settings.py`) are drawn for every strategy. The default draws booleans and
        members of families.

        seed: seed of the case; draw from `stream(seed, "fuzz <strategy>")`
        workers: number of ranks that compute
        """
        return settings_by_type(cls, stream(seed, "fuzz settings"))

    def is_required(self, rank: int) -> bool:
        """Whether a run fails when this rank is lost: rank 0, unless the strategy is decentralized."""
        return rank == 0 and not self.is_decentralized

    @property
    def is_decentralized(self) -> bool:
        """Whether every rank trains its own replica of the parameters, and any rank may be lost."""
        return False

    @property
    def is_elastic(self) -> bool:
        """Whether more ranks may join than a run started with."""
        return True

    @property
    def scores_models(self) -> bool:
        """Whether nodes decide by `Evaluate(is_score=True)`, so that a part of the training data is for validation."""
        return False

    @property
    def keeps_loaders(self) -> bool:
        """Whether nodes keep the states of data loaders, so that a worker that starts again repeats lost samples."""
        return False

    @property
    def staleness_bound(self) -> int | None:
        """Upper bound of the staleness of applied gradients; None: no bound."""
        return None

    @property
    def allows_stale_compute(self) -> bool:
        """Whether a rank may compute at an older version than before."""
        return False

    def with_default_timing(self, seconds_per_sample: float) -> Self:
        """This strategy with its unset durations filled in, for workers of about this speed."""
        return self

    def with_default_optimizer(self, optimizer: Optimizer) -> Self:
        """This strategy with the optimizer of the workload, if it has none of its own."""
        if getattr(self, "optimizer", optimizer) is None:
            return dataclasses.replace(self, optimizer=optimizer)  # type: ignore[call-arg]
        return self

    def for_own_steps(self) -> Self:
        """This strategy for training loops that step an optimizer of their own, whose steps its nodes get.

        Raises `ConfigurationError` if its nodes need gradients.
        """
        name = type(self).__name__
        raise ConfigurationError(
            f"{name} needs gradients, for an optimizer of its own; type offbeat.join(model, offbeat.{name}(...)), or "
            "choose a strategy whose workers step: Gossip, LocalSGD, DiLoCo, DecoupledDiLoCo or DelayedExchange"
        )

    def check_no_optimizer(self, optimizer: Optimizer | None) -> None:
        """Raise `ConfigurationError` if an optimizer is given beside that of the loop."""
        name = type(self).__name__
        require(
            optimizer is None,
            f"{name} was given an optimizer, but the one that AsyncDataParallel was given is stepped; leave it out of "
            f"the {name}",
        )

    def for_module(self, module: nn.Module) -> Self:
        """This strategy for the parameters of a module, which optimizers that are built already refer to."""
        before = self.optimizers()
        after = {name: optimizer.for_module(module) for name, optimizer in before.items()}
        changed = any(after[name] is not before[name] for name in before)
        return dataclasses.replace(self, **cast(dict[str, Any], after)) if changed else self

    def optimizers(self) -> dict[str, Optimizer]:
        """The fields that are optimizers, by name."""
        values = ((item.name, getattr(self, item.name)) for item in dataclasses.fields(self) if item.init)
        return {name: value for name, value in values if isinstance(value, Optimizer)}
