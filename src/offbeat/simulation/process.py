"""One rank of a simulation: its node, and everything that concerns no other rank."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable

from torch import Tensor

from offbeat.cluster.stragglers import Speed
from offbeat.core.actions import Action, Finish, Report
from offbeat.core.events import Event, PeerJoined, PeerLost, TimerFired
from offbeat.core.optimizers import Stepper
from offbeat.core.randomness import stream
from offbeat.core.strategy import Node
from offbeat.simulation.event_queue import EventQueue
from offbeat.simulation.round_timing import Computation, RoundTiming

EventFactory = Callable[[float], Event | None]
"""Creates an event at the time when it is handled; None if it is obsolete by then."""


class RankSpeed:
    """The speed of a rank in virtual time, round by round.

    speed: its speed without delays.
    natural_speed: its speed without injected slow-down as well.
    seed: the seed of the run.
    rank: selects the random stream of its delays.
    """

    def __init__(self, speed: Speed, natural_speed: Speed, seed: int, rank: int) -> None:
        self.seconds_per_update = speed.seconds_per_update
        self._speed = speed
        self._natural_speed = None if natural_speed == speed else natural_speed
        self._round_delays = speed.straggle.draws(stream(seed, "speed", rank))
        trace = speed.speed_trace
        # A random first position in the recorded trace, so that workers are not slow at the same time.
        first = 0 if trace is None else int(stream(seed, "spread", rank).integers(len(trace.factors))) * trace.samples
        self._position = first
        """The position in the recorded trace, in samples."""

    def next_round(self, microbatch: int) -> RoundTiming:
        """The timing of the next round; draws its delay."""
        return RoundTiming(self._speed, next(self._round_delays), microbatch, self._position, self._natural_speed)

    def advance(self, samples: int) -> None:
        """Move on in the recorded trace, after a round of `samples` samples."""
        self._position += samples


class Process:
    """One rank: its node, timers and outstanding computation, and what waits while it sleeps."""

    def __init__(
        self,
        rank: int,
        worker: int | None,
        node: Node,
        speed: RankSpeed,
        queue: EventQueue,
        on_event: Callable[[Process, Event], None],
    ) -> None:
        """Nothing is scheduled yet.

        rank: its rank.
        worker: its index among the ranks that compute; None for a rank that does not compute.
        node: the logic.
        speed: how fast it computes.
        queue: the clock.
        on_event: is called for each event at the time when the node handles it.
        """
        self.rank = rank
        self.worker = worker
        self.node = node
        self.speed = speed
        self._queue = queue
        self._on_event = on_event
        self._receiver = self._receive
        """Bound once: an event is scheduled for every message, and each object counts for the garbage collector."""
        self.on_action: Callable[[Action], None]
        """Called for each action at the time when it takes effect; set when all parts of the simulation exist."""
        self.life = 0
        """How many times it was restarted."""
        self.alive = True
        self.finish: Finish | None = None
        self.finished_at = 0.0
        self.computation: Computation | None = None
        self.free_since = 0.0
        """The end of its last round."""
        self.send_seconds = 0.0
        """How long the transmission of its last message took."""
        self.stepper: tuple[Stepper, Tensor] | None = None
        """The optimizer of the user's loop, and the copy of the parameters that it changes."""
        self.known: dict[int, int] = {}
        """peer → the incarnation announced to the node, to which its messages are addressed"""
        self._timers: dict[str, int] = {}
        """name → the sequence number of the valid firing"""
        self._asleep = False
        """Whether it is paused or busy with an update: its actions and events wait until it wakes up."""
        self._busy_until = 0.0
        self._deferred_actions: list[Action] = []
        self._deferred_events: deque[EventFactory] = deque()

    @property
    def active(self) -> bool:
        """Whether it has neither crashed nor finished."""
        return self.alive and self.finish is None

    # Events

    def emit(self, time: float, event: EventFactory) -> int:
        """Let the node handle an event at `time`, or when it wakes up; obsolete after a restart."""
        return self._queue.schedule(time, self._receiver, self.life, event)

    def _receive(self, life: int, event: EventFactory) -> None:
        if not self.active or self.life != life:
            return
        if self._asleep:
            self._deferred_events.append(event)
        elif (created := event(self._queue.now)) is not None:
            self._on_event(self, created)

    def note_link(self, event: PeerJoined | PeerLost) -> None:
        """Remember which incarnation of a peer the node knows."""
        if isinstance(event, PeerJoined):
            self.known[event.peer] = event.incarnation
        else:
            self.known.pop(event.peer, None)

    # Actions

    def carry_out(self, actions: Iterable[Action]) -> None:
        """Let actions take effect in their order: now, or, except for records, when the process wakes up."""
        for action in actions:
            if self._asleep and not isinstance(action, Report):
                self._deferred_actions.append(action)
            else:
                self.on_action(action)

    def set_timer(self, name: str, seconds: float) -> None:
        """Let `TimerFired` happen after this time; replaces a timer of the same name."""

        def event(at: float) -> Event | None:
            if self._timers.get(name) != sequence:
                return None
            del self._timers[name]
            return TimerFired(at, name)

        sequence = self.emit(self._queue.now + seconds, event)
        self._timers[name] = sequence

    def clear_timer(self, name: str) -> None:
        self._timers.pop(name, None)

    # Sleep

    def sleep(self, seconds: float) -> None:
        """Suspend it for this time from now on: its actions are deferred, and so are its events."""
        self._asleep = True
        self._busy_until = max(self._busy_until, self._queue.now + seconds)
        self._queue.schedule(self._busy_until, functools.partial(self._wake, self.life))

    def _wake(self, life: int) -> None:
        """Carry out the deferred actions, then handle the deferred events, in order."""
        if self.life != life or not self.active or self._queue.now < self._busy_until:
            return
        self._asleep = False
        actions, self._deferred_actions = self._deferred_actions, []
        self.carry_out(actions)
        while self._deferred_events and not self._asleep and self.active:
            self._receive(self.life, self._deferred_events.popleft())

    # Ends and restarts; `ProcessTable` counts them

    def end(self, finish: Finish) -> None:
        """The node has finished."""
        self.finish, self.finished_at = finish, self._queue.now
        self.computation, self._timers = None, {}

    def crash(self) -> None:
        """Lose the state."""
        self.alive = False
        self.computation, self.stepper, self._timers, self.known = None, None, {}, {}

    def restart(self, node: Node) -> None:
        """Begin the next life, with a new node."""
        self.node, self.alive, self.life = node, True, self.life + 1
        self._busy_until = self.free_since = self._queue.now
        self._asleep, self._deferred_actions, self._deferred_events = False, [], deque()
