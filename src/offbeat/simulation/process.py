"""What the simulator keeps for each rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from offbeat.cluster import RoundDelay, Speed
from offbeat.core.actions import Action, Compute, Finish
from offbeat.core.events import Event
from offbeat.core.optimizers import Stepper
from offbeat.core.strategy import Node
from offbeat.simulation.round_timing import Pace


@dataclass(frozen=True, slots=True)
class PendingEvent:
    """An event for the node of a rank, made when it is handled; None where it has lost its point by then."""

    life: int
    event: Callable[[float], Event | None]


@dataclass
class Computation:
    """The outstanding computation of a rank."""

    action: Compute
    pace: Pace
    samples: int
    start: float
    ends: float
    parameters_version: int
    """torch's count of in-place changes, to notice a node that changes what it should not"""
    paused: float = 0.0
    """Seconds of the round that the process stood still."""


@dataclass
class Process:
    """One rank: its node and what the engine keeps for it."""

    node: Node
    worker: int | None
    speed: Speed
    round_delays: Iterator[RoundDelay]
    """What happens to its rounds, one after the other."""
    delay_random: np.random.Generator
    alive: bool = True
    life: int = 0
    """How many times it has been started anew."""
    finish: Finish | None = None
    finished_at: float = 0.0
    busy_until: float = 0.0
    asleep: bool = False
    """Whether it is paused or busy with an update: its actions and events wait until it wakes up."""
    unfinished: list[Action] = field(default_factory=list)
    waiting: deque[PendingEvent] = field(default_factory=deque)
    computation: Computation | None = None
    timers: dict[str, int] = field(default_factory=dict)
    """name → the sequence number of the firing that counts"""
    free_since: float = 0.0
    send_seconds: float = 0.0
    stepper: tuple[Stepper, Tensor] | None = None
    position: int = 0
    """How far it is in the recorded spread of its speed, in samples."""
    known: dict[int, int] = field(default_factory=dict)
    """peer → the incarnation that the node has been told of, to which it means to send"""

    @property
    def active(self) -> bool:
        return self.alive and self.finish is None


ScheduledEvent = PendingEvent | Callable[[], None]
"""What the heap holds. None of them refers to itself: gradients must go when they are used, not when memory is low."""
