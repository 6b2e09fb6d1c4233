"""The rank in the middle of a star: it gathers the others, accounts for their samples, evaluates, and ends the run.

    gather     until all expected workers have joined, or patience ends
    train      what a family does with the messages of its workers
    stop       Stop(result) to all → Stopped from each that is still there → Finish

Every draw of every rank is accounted for once, as applied or as dropped with a reason; whoever joins, for the first
time or again, is told where in its data to go on. Families say the rest in the methods that they fill in.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from offbeat.core.actions import Action, ClearTimer, Finish, Report, Samples, Seconds, Send, SetTimer
from offbeat.core.events import Evaluated, Event, Leave, MessageArrived, PeerJoined, PeerLost, Started, TimerFired
from offbeat.core.messages import Buffers, Message, Stop, Stopped
from offbeat.core.sample_ledger import Range, SampleLedger
from offbeat.core.strategy import Node, NodeContext, State, Strategy
from offbeat.records.schema import Contribution, Dropped, Membership, Reason
from offbeat.strategies.evaluations import Evaluations

HUB = 0


@dataclass(frozen=True)
class ServerStrategy(Strategy):
    """A strategy whose rank 0 is a hub that does not compute; all others do, and talk to it alone."""

    def processes(self, workers: int) -> int:
        return workers + 1

    def computes(self, rank: int) -> bool:
        return rank != HUB

    def peers(self, rank: int, processes: int) -> Iterable[int]:
        return range(1, processes) if rank == HUB else (HUB,)


class ServerNode(Node):
    """What the hubs of all families share."""

    timers: ClassVar[tuple[str, ...]] = ()
    """The family's own timers, which are cleared at the end."""

    def __init__(self, context: NodeContext, patience_seconds: float) -> None:
        self._setup = context
        self._patience_seconds = patience_seconds
        self._expected = [rank for rank in context.members if rank != HUB]
        self._version = 0
        self._samples = 0
        self._live: dict[int, int] = {}
        """rank → incarnation"""
        self._draws: dict[int, SampleLedger] = {}
        self._left: set[int] = set()
        """Workers that said goodbye, and will not come back unless they join again."""
        self._evaluations = Evaluations(HUB, context.evaluate)
        self._gathered = False
        self._started = False
        self._began_at = 0.0
        self._awaited: set[int] | None = None
        """Once training is over: who has not said Stopped yet."""
        self._failure: str | None = None
        self._finished = False

    # What a family fills in

    @abstractmethod
    def _received(self, event: MessageArrived) -> Iterable[Action]:
        """A message of a worker, other than Stopped."""

    @abstractmethod
    def _result(self) -> tuple[Tensor, Buffers]:
        """The newest parameters and buffers, in tensors that nobody changes any more."""

    @abstractmethod
    def _welcome(self, rank: int) -> Message:
        """What a worker that has joined is told, so that it begins."""

    def _fired(self, event: TimerFired) -> Iterable[Action]:
        """A timer of the family's own."""
        return ()

    def _set_timers(self, at: float) -> Iterable[Action]:
        """The family's own timers, when training begins, or goes on from a checkpoint."""
        return ()

    def _members_changed(self) -> None:
        """Training goes on with others than before."""

    def _came(self, rank: int) -> None:
        """Somebody has joined, for the first time or again."""

    def _forget(self, rank: int) -> None:
        """Somebody was lost; what has arrived from it stays."""

    def _went(self, at: float) -> Iterable[Action]:
        """Somebody was lost, and others are there to go on."""
        return ()

    def _discard(self) -> list[Contribution]:
        """Training is over: let go of what has arrived and is in no update, and say what that was."""
        return []

    # Events

    def handle(self, event: Event) -> Iterable[Action]:
        if self._finished:
            return ()
        match event:
            case MessageArrived(source=rank, message=Stopped() as message):
                return self._stopped(event.at, rank, message.draws_stop)
            case MessageArrived():
                return self._received(event)
            case TimerFired(name="until") | Leave():
                return self._stop(event.at)
            case TimerFired(name="gather"):
                self._gathered = True
                return self._begin(event.at) if self._live else ()
            case TimerFired(name="workers"):
                return self._give_up(event.at)
            case TimerFired():
                return self._fired(event)
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
        yield SetTimer("gather", self._patience_seconds)
        yield SetTimer("workers", self._patience_seconds)

    def _resume(self, at: float) -> Iterator[Action]:
        """Go on from a checkpoint, in a process that knows nobody yet: whoever joins is welcomed."""
        for rank in sorted(self._live):
            self._forget(rank)
        self._live = {}
        self._evaluations.reset()
        self._awaited = None if self._awaited is None else set()
        yield SetTimer("workers", self._patience_seconds)
        yield from self._set_all_timers(at)
        if self._awaited is not None:
            yield from self._evaluate(at)  # the result, if the process before died while it was measured
        yield from self._finish_if_done(at)

    def _set_all_timers(self, at: float) -> Iterator[Action]:
        if isinstance(self._setup.until, Seconds):
            yield SetTimer("until", max(0.0, self._began_at + self._setup.until.seconds - at))
        yield from self._set_timers(at)

    def _joined(self, event: PeerJoined) -> Iterator[Action]:
        rank = event.peer
        yield Report(Membership(at=event.at, rank=HUB, peer=rank, incarnation=event.incarnation, joined=True))
        self._live[rank] = event.incarnation
        self._draws.setdefault(rank, SampleLedger())
        self._left.discard(rank)
        self._came(rank)
        yield ClearTimer("workers")
        if self._awaited is not None:
            self._awaited.add(rank)
            yield Send(rank, Stop(*self._result(), self._version))
        elif self._started:
            self._members_changed()
            yield from self._admit(event.at, rank)
        elif self._gathered or all(rank in self._live for rank in self._expected):
            yield from self._begin(event.at)

    def _admit(self, at: float, rank: int) -> Iterator[Action]:
        """Somebody has joined while the others train."""
        yield Send(rank, self._welcome(rank))  # not to be superseded: without it nobody begins

    def _begin(self, at: float) -> Iterator[Action]:
        self._started = True
        yield ClearTimer("gather")
        self._began_at = at
        yield from self._set_all_timers(at)
        self._members_changed()
        yield from self._evaluate(at)
        for rank in sorted(self._live):
            yield Send(rank, self._welcome(rank))

    def _position(self, rank: int) -> tuple[int, tuple[Range, ...]]:
        """Where in its data a worker goes on, and what has arrived of that which lies beyond."""
        draws = self._draws[rank]
        return draws.first_missing, tuple(found for found in draws.ranges if found[0] > draws.first_missing)

    def _lost(self, event: PeerLost) -> Iterator[Action]:
        rank = event.peer
        if self._live.pop(rank, None) is None:
            return
        self._forget(rank)
        yield Report(Membership(at=event.at, rank=HUB, peer=rank, incarnation=event.incarnation, joined=False))
        if self._awaited is not None:
            yield from self._no_longer_awaited(event.at, rank)
            return
        if not self._live and self._draws.keys() <= self._left:
            yield from self._stop(event.at)  # all have gone home
        elif not self._live:
            yield SetTimer("workers", self._patience_seconds)
        elif self._started:
            self._members_changed()
            yield from self._went(event.at)

    def _give_up(self, at: float) -> Iterator[Action]:
        what = "every worker was lost and none came back" if self._started else "no worker joined"
        patience = f"within {self._patience_seconds:g} s (patience_seconds)"
        self._failure = f"{what} {patience}; start workers, or be more patient"
        yield from self._stop(at)

    # Train

    def _has_enough(self) -> bool:
        until = self._setup.until
        samples_max = until.count if isinstance(until, Samples) else getattr(until, "samples_max", None)
        return samples_max is not None and self._samples >= samples_max

    def _evaluate(self, at: float) -> Iterator[Action]:
        if self._evaluations.has_new(self._version):
            yield from self._evaluations.begin(at, self._version, self._samples, self._result())

    def _evaluated(self, event: Evaluated) -> Iterable[Action]:
        yield from self._evaluations.report(event)
        yield from self._finish_if_done(event.at)

    def _drop(self, at: float, rank: int, draws: Range, reason: Reason) -> Iterator[Action]:
        self._draws[rank].add(*draws)
        yield Report(dropped(at, rank, draws, 0, reason))

    def _too_late(self, at: float, rank: int, draws: Range) -> Iterator[Action]:
        """Samples that arrive when training is over, unless a Stopped that overtook them has counted them."""
        if draws[0] not in self._draws[rank]:
            yield from self._drop(at, rank, draws, "stopped")

    # Stop

    def _stop(self, at: float) -> Iterator[Action]:
        if self._awaited is not None:
            return
        self._awaited = set(self._live) - self._left
        for name in ("gather", "workers", *self.timers, "until"):
            yield ClearTimer(name)
        for found in self._discard():
            yield Report(dropped(at, found.rank, (found.first, found.stop), found.staleness, "stopped"))
        yield from self._evaluate(at)
        for rank in sorted(self._awaited):
            yield Send(rank, Stop(*self._result(), self._version), supersedes="parameters")
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

    def _finish_if_done(self, at: float) -> Iterator[Action]:
        if self._awaited is None or self._awaited or self._evaluations.under_way:
            return
        self._finished = True
        for rank, draws in sorted(self._draws.items()):
            for gap in list(draws.missing_below(draws.stop)):
                yield from self._drop(at, rank, gap, "lost")
        yield Finish(*self._result(), self._version, self._failure)

    # State

    def state(self) -> State:
        return {
            "version": self._version,
            "samples": self._samples,
            "live": {str(rank): incarnation for rank, incarnation in self._live.items()},
            "draws": {str(rank): draws.ranges for rank, draws in self._draws.items()},
            "left": sorted(self._left),
            "evaluations": self._evaluations.state(),
            "gathered": self._gathered,
            "started": self._started,
            "began_at": self._began_at,
            "awaited": None if self._awaited is None else sorted(self._awaited),
            "failure": self._failure,
            "finished": self._finished,
        }

    def restore(self, state: State) -> None:
        self._version = state["version"]
        self._samples = state["samples"]
        self._live = {int(rank): incarnation for rank, incarnation in state["live"].items()}
        self._draws = {int(rank): SampleLedger(tuple(r) for r in ranges) for rank, ranges in state["draws"].items()}
        self._left = set(state["left"])
        self._evaluations.restore(state["evaluations"])
        self._gathered = state["gathered"]
        self._started = state["started"]
        self._began_at = state["began_at"]
        self._awaited = None if state["awaited"] is None else set(state["awaited"])
        self._failure = state["failure"]
        self._finished = state["finished"]


def dropped(at: float, rank: int, draws: Range, staleness: int, reason: Reason) -> Dropped:
    return Dropped(at=at, rank=rank, first=draws[0], stop=draws[1], staleness=staleness, reason=reason)
