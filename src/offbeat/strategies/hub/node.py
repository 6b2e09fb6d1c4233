"""The hub: collects gradients, updates, and hands out parameters.

    gather     until all expected workers have joined, or patience ends
    train      a gradient arrives → it is counted, dropped or collected → perhaps an update → answers
    stop       Stop(final parameters) to all → Stopped from each that is still there → Finish

Invariants: every draw of every rank is accounted for once, as applied or as dropped with a reason; versions grow
by one per update; one copy of the parameters is made per version, and all messages of that version share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from offbeat.actions import Action, ClearTimer, Finish, Report, Samples, Seconds, Send, SetTimer
from offbeat.draws import Draws, Range
from offbeat.events import Evaluated, Event, Leave, MessageArrived, PeerJoined, PeerLost, Started, TimerFired
from offbeat.messages import Stop, Stopped
from offbeat.pool import Pool
from offbeat.records.schema import Dropped, Membership, Reason, Update
from offbeat.strategies.evaluations import Evaluations
from offbeat.strategies.hub.collected import Collected
from offbeat.strategies.hub.messages import Gradient, Parameters, Welcome
from offbeat.strategies.hub.pacing import Effort, Pacing, SharePacing, TargetPacing
from offbeat.strategies.hub.parts import Census, Every, Share, TargetBatch
from offbeat.strategies.strategy import Node, Setup, State

if TYPE_CHECKING:
    from offbeat.strategies.hub.composition import Hub

HUB = 0


class HubNode(Node):
    def __init__(self, config: Hub, setup: Setup) -> None:
        self._config = config
        self._setup = setup
        self._expected = [rank for rank in setup.members if rank != HUB]

        self._parameters = setup.parameters.clone()
        self._buffers = setup.buffers
        self._copies = Pool()
        self._snapshot = self._parameters.clone()
        assert config.optimizer is not None, "Strategy.suited fills it in"
        self._stepper = config.optimizer.build(self._parameters, setup.layout)
        self._version = 0
        self._samples = 0

        self._live: dict[int, int] = {}
        """rank → incarnation"""
        self._draws: dict[int, Draws] = {}
        self._reported: set[int] = set()
        """Live workers that have reported since the last update."""
        self._idle: set[int] = set()
        """Workers that wait for an answer."""
        self._left: set[int] = set()
        """Workers that said goodbye, and will not come back unless they join again."""
        self._nonfinite_in_a_row: dict[int, int] = {}
        self._sum = torch.empty_like(self._parameters)
        """Where gradients are added up: one at a time, so one is enough."""
        self._collected = Collected(config.collect.in_rank_order, self._sum)
        self._pacing = _pacing(config)
        self._evaluations = Evaluations(HUB, setup.evaluate)

        self._gathered = False
        self._started = False
        self._began_at = 0.0
        self._update_due = 0.0
        self._awaited: set[int] | None = None
        """Once training is over: who has not said Stopped yet."""
        self._failure: str | None = None
        self._finished = False

    # Events

    def handle(self, event: Event) -> Iterable[Action]:
        if self._finished:
            return ()
        match event:
            case MessageArrived(message=Gradient()):
                return self._gradient(event)
            case MessageArrived(source=rank, message=Stopped() as message):
                return self._stopped(event.at, rank, message.draws_stop)
            case TimerFired(name="update"):
                return self._update_timer(event.at)
            case TimerFired(name="until") | Leave():
                return self._stop(event.at)
            case TimerFired(name="gather"):
                self._gathered = True
                return self._begin(event.at) if self._live else ()
            case TimerFired(name="workers"):
                return self._give_up(event.at)
            case Evaluated():
                return self._evaluated(event)
            case PeerJoined():
                return self._joined(event)
            case PeerLost():
                return self._lost(event)
            case Started():
                return self._resume(event.at) if self._started else self._gather()
            case _:
                return ()

    # Gather

    def _gather(self) -> Iterator[Action]:
        self._live = {}  # a checkpoint may know of some who have joined the process before
        yield SetTimer("gather", self._config.patience_seconds)
        yield SetTimer("workers", self._config.patience_seconds)

    def _resume(self, at: float) -> Iterator[Action]:
        """Go on from a checkpoint, in a process that knows nobody yet: whoever joins is welcomed."""
        self._live, self._idle, self._reported = {}, set(), set()
        self._evaluations.forget()
        self._awaited = None if self._awaited is None else set()
        yield SetTimer("workers", self._config.patience_seconds)
        yield from self._set_timers(at)
        yield from self._finish_if_done(at)

    def _set_timers(self, at: float) -> Iterator[Action]:
        if isinstance(self._setup.until, Seconds):
            yield SetTimer("until", max(0.0, self._began_at + self._setup.until.seconds - at))
        if isinstance(self._config.collect, Every):
            self._update_due = at + self._config.collect.seconds
            yield SetTimer("update", self._config.collect.seconds)

    def _joined(self, event: PeerJoined) -> Iterator[Action]:
        rank = event.peer
        yield Report(Membership(at=event.at, rank=HUB, peer=rank, incarnation=event.incarnation, joined=True))
        self._live[rank] = event.incarnation
        self._draws.setdefault(rank, Draws())
        self._left.discard(rank)
        self._nonfinite_in_a_row[rank] = 0
        yield ClearTimer("workers")
        if self._awaited is not None:
            self._awaited.add(rank)
            yield Send(rank, Stop(self._snapshot, self._buffers, self._version))
        elif self._started:
            self._pacing.members_changed(self._live)
            yield self._welcome(rank)
        elif self._gathered or all(rank in self._live for rank in self._expected):
            yield from self._begin(event.at)

    def _begin(self, at: float) -> Iterator[Action]:
        self._started = True
        yield ClearTimer("gather")
        self._began_at = at
        yield from self._set_timers(at)
        self._pacing.members_changed(self._live)
        yield from self._evaluate(at)
        for rank in sorted(self._live):
            yield self._welcome(rank)

    def _welcome(self, rank: int) -> Send:
        draws = self._draws[rank]
        beyond = tuple((first, stop) for first, stop in draws.ranges if first > draws.first_missing)
        budget = self._pacing.budget(rank, self._live)
        welcome = Welcome(self._snapshot, self._buffers, self._version, budget, draws.first_missing, beyond)
        return Send(rank, welcome)  # parameters that took its place in a queue would not let the worker begin

    def _lost(self, event: PeerLost) -> Iterator[Action]:
        rank = event.peer
        if self._live.pop(rank, None) is None:
            return
        self._idle.discard(rank)
        self._reported.discard(rank)
        yield Report(Membership(at=event.at, rank=HUB, peer=rank, incarnation=event.incarnation, joined=False))
        if self._awaited is not None:
            yield from self._no_longer_awaited(event.at, rank)
            return
        if not self._live and self._draws.keys() <= self._left:
            yield from self._stop(event.at)  # all have gone home
        elif not self._live:
            yield SetTimer("workers", self._config.patience_seconds)
        elif self._started:
            self._pacing.members_changed(self._live)
            yield from self._update_if_ready(event.at)

    def _give_up(self, at: float) -> Iterator[Action]:
        patience = self._config.patience_seconds
        what = "every worker was lost and none came back" if self._started else "no worker joined"
        self._failure = f"{what} within {patience:g} s (patience_seconds); start workers, or be more patient"
        yield from self._stop(at)

    # Train

    def _gradient(self, event: MessageArrived) -> Iterator[Action]:
        rank, message = event.source, event.message
        assert isinstance(message, Gradient)
        if self._awaited is not None:
            if message.draws[0] not in self._draws[rank]:  # a Stopped that overtook it has counted it
                yield from self._drop(event.at, rank, message.draws, "stopped")
            return
        staleness = self._version - message.version
        self._draws[rank].add(*message.draws)
        reason = self._reason_to_drop(message, staleness)
        if reason is not None:
            yield Report(_dropped(event.at, rank, message.draws, staleness, reason))
        self._count_nonfinite(rank, message.finite)
        if self._failure is not None:
            yield from self._stop(event.at)
        elif reason in ("stale", "late") and self._config.waits:
            yield self._answer(rank)
        elif reason is None or reason == "nonfinite":
            self._collect(rank, event, message, staleness)
            yield from self._update_if_ready(event.at)

    def _reason_to_drop(self, message: Gradient, staleness: int) -> Reason | None:
        if self._config.collect.current_only and staleness > 0:
            return "late"
        if self._config.staleness_max is not None and staleness > self._config.staleness_max:
            return "stale"
        return None if message.finite else "nonfinite"

    def _count_nonfinite(self, rank: int, finite: bool) -> None:
        self._nonfinite_in_a_row[rank] = 0 if finite else self._nonfinite_in_a_row[rank] + 1
        if self._nonfinite_in_a_row[rank] >= self._config.nonfinite_max:
            self._failure = (
                f"worker {rank} reported {self._config.nonfinite_max} gradients in a row that were not finite; "
                "lower the learning rate, clip the gradient (clip_norm), or look at that worker's data"
            )

    def _collect(self, rank: int, event: MessageArrived, message: Gradient, staleness: int) -> None:
        self._reported.add(rank)
        if self._config.waits:
            self._idle.add(rank)
        if message.finite:
            weight = (1.0 + staleness) ** -self._config.damping
            self._collected.add(rank, event, message, staleness, weight)
        else:
            self._collected.note(rank, Effort(message.samples, message.seconds))

    def _update_if_ready(self, at: float) -> Iterator[Action]:
        census = Census(len(self._live), len(self._reported), self._collected.messages)
        if self._awaited is None and self._config.collect.ready(census):
            yield from self._update(at)

    def _update_timer(self, at: float) -> Iterator[Action]:
        assert isinstance(self._config.collect, Every)
        if self._awaited is not None:
            return
        while self._update_due <= at:
            self._update_due += self._config.collect.seconds
        yield SetTimer("update", self._update_due - at)
        if self._collected.messages:
            yield from self._update(at)

    def _update(self, at: float) -> Iterator[Action]:
        collected, self._collected = self._collected, Collected(self._config.collect.in_rank_order, self._sum)
        self._reported.clear()
        self._pacing.observe(collected.efforts, self._live)
        if collected.samples:
            rate = self._stepper.step(collected.mean(), self._samples)
            self._buffers = collected.merged_buffers(self._buffers)
            self._snapshot = self._copies.copy(self._parameters)
            self._version += 1
            self._samples += collected.samples
            yield Report(
                Update(
                    at=at,
                    rank=HUB,
                    version=self._version,
                    messages=len(collected.contributions),
                    samples=collected.samples,
                    samples_total=self._samples,
                    learning_rate=rate,
                    contributions=tuple(collected.contributions),
                )
            )
            if self._evaluations.due(at, self._version):
                yield from self._evaluate(at)
        if self._has_enough():
            yield from self._stop(at)
        else:
            yield from self._answers()

    def _has_enough(self) -> bool:
        until = self._setup.until
        samples_max = until.count if isinstance(until, Samples) else getattr(until, "samples_max", None)
        return samples_max is not None and self._samples >= samples_max

    def _answers(self) -> Iterator[Action]:
        to = self._idle if self._config.waits else self._live
        for rank in sorted(to):
            yield self._answer(rank)
        self._idle.clear()

    def _answer(self, rank: int) -> Send:
        budget = self._pacing.budget(rank, self._live)
        message = Parameters(self._snapshot, self._buffers, self._version, budget)
        return Send(rank, message, supersedes="parameters")

    # Evaluate

    def _evaluate(self, at: float) -> Iterator[Action]:
        if self._evaluations.wants(self._version):
            yield from self._evaluations.begin(at, self._version, self._samples, (self._snapshot, self._buffers))

    def _evaluated(self, event: Evaluated) -> Iterator[Action]:
        yield from self._evaluations.ended(event)
        yield from self._finish_if_done(event.at)

    # Stop

    def _stop(self, at: float) -> Iterator[Action]:
        if self._awaited is not None:
            return
        self._awaited = set(self._live) - self._left
        for name in ("gather", "workers", "update", "until"):
            yield ClearTimer(name)
        for contribution in self._collected.contributions:
            draws = (contribution.first, contribution.stop)
            yield Report(_dropped(at, contribution.rank, draws, contribution.staleness, "stopped"))
        self._collected = Collected(self._config.collect.in_rank_order, self._sum)
        yield from self._evaluate(at)
        for rank in sorted(self._awaited):
            yield Send(rank, Stop(self._snapshot, self._buffers, self._version), supersedes="parameters")
        yield from self._finish_if_done(at)

    def _stopped(self, at: float, rank: int, draws_stop: int) -> Iterator[Action]:
        if self._awaited is None:  # it leaves of its own accord; its link will close
            self._left.add(rank)
            return
        for gap in list(self._draws[rank].missing_below(draws_stop)):
            yield from self._drop(at, rank, gap, "stopped")
        yield from self._no_longer_awaited(at, rank)

    def _no_longer_awaited(self, at: float, rank: int) -> Iterator[Action]:
        assert self._awaited is not None
        self._awaited.discard(rank)
        self._live.pop(rank, None)
        yield from self._finish_if_done(at)

    def _drop(self, at: float, rank: int, draws: Range, reason: Reason) -> Iterator[Action]:
        self._draws[rank].add(*draws)
        yield Report(_dropped(at, rank, draws, 0, reason))

    def _finish_if_done(self, at: float) -> Iterator[Action]:
        if self._awaited is None or self._awaited or self._evaluations.under_way:
            return
        self._finished = True
        for rank, draws in sorted(self._draws.items()):
            for gap in list(draws.missing_below(draws.stop)):
                yield from self._drop(at, rank, gap, "lost")
        yield Finish(self._snapshot, self._buffers, self._version, self._failure)

    # State

    def state(self) -> State:
        return {
            "parameters": self._parameters.clone(),
            "buffers": [buffer.clone() for buffer in self._buffers],
            "optimizer": self._stepper.state(),
            "version": self._version,
            "samples": self._samples,
            "live": {str(rank): incarnation for rank, incarnation in self._live.items()},
            "draws": {str(rank): draws.ranges for rank, draws in self._draws.items()},
            "reported": sorted(self._reported),
            "idle": sorted(self._idle),
            "left": sorted(self._left),
            "nonfinite_in_a_row": {str(rank): count for rank, count in self._nonfinite_in_a_row.items()},
            "collected": self._collected.state(),
            "pacing": self._pacing.state(),
            "evaluations": self._evaluations.state(),
            "gathered": self._gathered,
            "started": self._started,
            "began_at": self._began_at,
            "update_due": self._update_due,
            "awaited": None if self._awaited is None else sorted(self._awaited),
            "failure": self._failure,
            "finished": self._finished,
        }

    def restore(self, state: State) -> None:
        self._parameters.copy_(state["parameters"])
        self._snapshot = self._parameters.clone()
        self._buffers = tuple(state["buffers"])
        self._stepper.restore(state["optimizer"])
        self._version = state["version"]
        self._samples = state["samples"]
        self._live = {int(rank): incarnation for rank, incarnation in state["live"].items()}
        self._draws = {int(rank): Draws(tuple(r) for r in ranges) for rank, ranges in state["draws"].items()}
        self._reported = set(state["reported"])
        self._idle = set(state["idle"])
        self._left = set(state["left"])
        self._nonfinite_in_a_row = {int(rank): count for rank, count in state["nonfinite_in_a_row"].items()}
        self._collected.restore(state["collected"])
        self._pacing.restore(state["pacing"])
        self._evaluations.restore(state["evaluations"])
        self._gathered = state["gathered"]
        self._started = state["started"]
        self._began_at = state["began_at"]
        self._update_due = state["update_due"]
        self._awaited = None if state["awaited"] is None else set(state["awaited"])
        self._failure = state["failure"]
        self._finished = state["finished"]


def _pacing(config: Hub) -> Pacing:
    if isinstance(config.compute, TargetBatch):
        return TargetPacing(config.compute, config.microbatch)
    if isinstance(config.compute, Share):
        return SharePacing(config.compute)
    return Pacing(config.compute)


def _dropped(at: float, rank: int, draws: Range, staleness: int, reason: Reason) -> Dropped:
    return Dropped(at=at, rank=rank, first=draws[0], stop=draws[1], staleness=staleness, reason=reason)
