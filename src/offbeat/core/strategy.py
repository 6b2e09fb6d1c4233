"""The contract between strategies and engines.

A *strategy* is a frozen dataclass: the configuration of an algorithm. It makes one *node* per rank. A node is
logic and nothing else: `handle(event)` returns actions. It has no clock (events carry the time), no thread, no
socket and no randomness but the generator it was born with, so the same node runs in virtual time and on real
processes, and a run can be repeated from its seed.

What an engine promises
- `Started` comes first. `PeerJoined` comes before the first message of a peer; after `PeerLost` none of that
  incarnation arrives any more. A peer that comes back has a higher incarnation.
- A message goes to the incarnation of the peer that the node has been told of. If that is gone, it vanishes.
- Messages of one link arrive in order unless the cluster induces delay; each arrives at most once.
- One `GradientReady` (or `StepReady`) for each `Compute`, one `Sent` for each `Send` that left, one `Evaluated`
  for each `Evaluate`. Nothing after `Finish`.

What a node promises
- At most one `Compute` outstanding. It tolerates messages that overtake one another.
- It does not change a tensor that it has sent, and does not hold on to the tensors of an event without `keep()`.
- `state()` holds everything that matters: a new node after `restore(state)` behaves exactly the same.
- It ends by Stop → Stopped → Finish, and a gradient that is not finite never touches its parameters.

`offbeat.testing.check_strategy` tests all of this.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Self

import numpy as np
from torch import Tensor

from offbeat.core.actions import Action, Budget
from offbeat.core.compression import Compression
from offbeat.core.configuration import Family
from offbeat.core.events import Event
from offbeat.core.flat import Layout
from offbeat.core.messages import Buffers
from offbeat.core.optimizers import Optimizer
from offbeat.core.random_settings import settings_by_type
from offbeat.core.randomness import stream
from offbeat.core.validation import require_positive

State = dict[str, Any]
"""Tensors and plain data (dictionaries with string keys, lists, numbers, strings, None), nested as needed."""


class Cadence(Family):
    """How often to evaluate."""


@dataclass(frozen=True)
class EveryUpdates(Cadence, name="updates"):
    """After every so many updates."""

    updates: int = 1
    """updates between evaluations"""

    def __post_init__(self) -> None:
        require_positive(self, "updates")


@dataclass(frozen=True)
class EverySeconds(Cadence, name="seconds"):
    """After the first update that follows so many seconds without one."""

    seconds: float = 1.0
    """seconds between evaluations"""

    def __post_init__(self) -> None:
        require_positive(self, "seconds")


@dataclass(frozen=True, eq=False)
class NodeContext:
    """What a node is born with. `members` are the ranks expected at the start, this one among them."""

    rank: int
    members: tuple[int, ...]
    layout: Layout
    parameters: Tensor
    buffers: Buffers
    random: np.random.Generator
    until: Budget
    evaluate: Cadence | None


class Node(ABC):
    """The logic of one participant."""

    @abstractmethod
    def handle(self, event: Event) -> Iterable[Action]:
        """What to do about an event. The engine carries out the actions in order, before the next event."""

    @abstractmethod
    def state(self) -> State:
        """Everything that matters about this node, in tensors of its own."""

    @abstractmethod
    def restore(self, state: State) -> None:
        """Become the node whose `state()` this was. Called once, on a new node, before any event."""

    def replica(self) -> Tensor | None:
        """The parameters that this node trains as its own, to look at; None where it has none, as by a hub."""
        return None


@dataclass(frozen=True)
class Strategy(Family, ABC):
    """The configuration of an algorithm."""

    summary: ClassVar[str] = ""
    """One line for `offbeat strategies`."""
    paper: ClassVar[str] = ""
    """Where it was published."""
    figure_style: ClassVar[int | None] = None
    """Number of its colour, dashes and marker in figures; not inherited. None: the next that is free."""

    _: KW_ONLY
    compression: Compression | None = None
    """how messages are compressed: bf16, int8, or top-k:0.01"""

    @abstractmethod
    def processes(self, workers: int) -> int:
        """How many ranks it takes so that `workers` of them compute."""

    @abstractmethod
    def computes(self, rank: int) -> bool:
        """Whether this rank computes gradients."""

    @abstractmethod
    def peers(self, rank: int, processes: int) -> Iterable[int]:
        """The ranks with which this one exchanges messages; the relation is symmetric."""

    @abstractmethod
    def node(self, context: NodeContext) -> Node:
        """The node of `context.rank`. Engines call `build_node`, which also compresses its messages."""

    @classmethod
    def random_settings(cls, seed: int, workers: int) -> dict[str, Any]:
        """Fields for a random case of `offbeat.testing.check_strategy`; a pure function of its arguments.

        Override it where settings only work together, or need a range. Fields with a usual name (batch, optimizer, …:
        see `core/random_settings.py`) are drawn for every strategy. The default draws booleans and members of families.

        seed: seed of the case; draw from `stream(seed, "fuzz <strategy>")`.
        workers: ranks that compute.
        """
        return settings_by_type(cls, stream(seed, "fuzz settings"))

    def is_required(self, rank: int) -> bool:
        """Whether a run is over when this rank is lost: rank 0's, unless ranks are equals, of whom any may go."""
        return rank == 0 and not self.is_decentralized

    @property
    def is_decentralized(self) -> bool:
        """Whether every rank trains parameters of its own, so that they differ until the end, and none is essential."""
        return False

    @property
    def is_elastic(self) -> bool:
        """Whether more ranks may join than a run began with."""
        return True

    @property
    def staleness_bound(self) -> int | None:
        """The staleness that no applied gradient exceeds; None: no promise."""
        return None

    @property
    def allows_stale_compute(self) -> bool:
        """Whether a rank may compute at an older version than it has computed at before, on purpose."""
        return False

    def with_default_timing(self, seconds_per_sample: float) -> Self:
        """This strategy with the times that it leaves open filled in, for workers that are about so fast."""
        return self

    def with_default_optimizer(self, optimizer: Optimizer) -> Self:
        """This strategy with what it leaves open filled in: the optimizer that suits the workload."""
        if getattr(self, "optimizer", optimizer) is None:
            return dataclasses.replace(self, optimizer=optimizer)  # type: ignore[call-arg]
        return self
