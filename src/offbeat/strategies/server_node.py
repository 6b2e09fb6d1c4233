"""The hub: the node of rank 0 in strategies with a server. It starts workers, accounts for samples and ends the run.

    gather     until all expected workers have joined, or patience_seconds have passed
    train      a family handles the messages of its workers
    stop       Stop(result) to all workers → Stopped from each that is still connected → Finish

A worker whose computation hangs is announced, then treated as lost; see `hang_detection.py`.

Every draw of every rank is accounted for once, as applied or as dropped with a reason. A worker that joins, for the
first time or again, receives the position in its data at which to continue.
"""

from __future__ import annotations

import dataclasses
import itertools
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from offbeat.core.actions import Action, ClearTimer, Disconnect, Finish, Report, Send, SetTimer
from offbeat.core.events import Evaluated, Event, Leave, MessageArrived, PeerJoined, PeerLost, Started, TimerFired
from offbeat.core.flat import is_finite
from offbeat.core.messages import Message, Stop, Stopped
from offbeat.core.sample_ledger import Range, SampleLedger
from offbeat.core.strategy import NodeContext, Strategy
from offbeat.records.schema import Contribution, Membership, Notice, Reason
from offbeat.strategies.hang_detection import LOST_FACTOR, HangDetector, Probe, ProbeAnswer
from offbeat.strategies.loader_keeping import LoaderKeeper
from offbeat.strategies.member_checks import SAMPLES_PER_SECOND_MAX, MemberCheck
from offbeat.strategies.training_node import TrainingNode, dropped

HUB = 0

ROUNDS_AHEAD_MAX = 1000
"""How many rounds a worker can be ahead of what has arrived from it, at the most; those before may be lost."""


@dataclass(frozen=True)
class ServerStrategy(Strategy):
    """A strategy whose rank 0 is a hub that computes no gradients; all other ranks do, and are linked to it alone."""

    hang_factor: float = field(default=10.0, kw_only=True)
    """a round of a worker hangs if it takes longer than the median of its peers, times this; 0: it never does"""
    hang_seconds: float = field(default=30.0, kw_only=True)
    """seconds; a shorter round never hangs"""

    def processes(self, workers: int) -> int:
        return workers + 1

    def computes(self, rank: int) -> bool:
        return rank != HUB

    def peers(self, rank: int, processes: int) -> Iterable[int]:
        return range(1, processes) if rank == HUB else (HUB,)

    @property
    def keeps_loaders(self) -> bool:
        return True


def shared_fields(config: Strategy, kind: Any) -> dict[str, Any]:
    """The fields of `config` that the dataclass `kind` has under the same name."""
    names = {item.name for item in dataclasses.fields(kind)}
    return {item.name: getattr(config, item.name) for item in dataclasses.fields(config) if item.name in names}


class ServerNode(TrainingNode):
    """What the hubs of all families share."""

    timers: ClassVar[tuple[str, ...]] = ()
    """Timers that the family sets itself; they are cleared when training ends."""

    _live: dict[int, int]
    """rank → incarnation, of connected workers"""
    _ledgers: dict[int, SampleLedger]
    """rank → draws that are accounted for"""
    _loaders: LoaderKeeper
    _left: set[int]
    """Workers that have sent Stopped on their own, and have not joined again."""
    _staying: dict[int, int]
    """rank → incarnation, of workers whose loops have ended: all they learned has arrived, and they wait for Stop"""
    _ending: dict[int, int]
    """rank → the end of its data, of those whose last messages have not all arrived"""
    _gather_timed_out: bool = False
    _unconfirmed: set[int] | None = None
    """After the end of training: workers that have not sent Stopped yet. None: training goes on."""
    _hangs: HangDetector
    _hung: dict[int, int]
    """rank → incarnation, of workers that hung, were treated as lost, and have not answered a probe since"""
    _is_watching: bool = False
    """Whether the timer for workers that hang is set."""

    def __init__(self, context: NodeContext, patience_seconds: float, hangs: HangDetector) -> None:
        super().__init__(context)
        self._patience_seconds = patience_seconds
        self._hangs, self._hung = hangs, {}
        self._expected = [rank for rank in context.members if rank != HUB]
        self._live, self._ledgers, self._left = {}, {}, set()
        self._loaders = LoaderKeeper()
        self._staying, self._ending = {}, {}

    @property
    def _is_stopping(self) -> bool:
        return self._unconfirmed is not None

    # Methods of a family

    @abstractmethod
    def _message_arrived(self, event: MessageArrived) -> Iterable[Action]:
        """Handle a message of a worker, other than Stopped; raises UnexpectedMessage for unknown kinds."""

    @abstractmethod
    def _welcome(self, rank: int) -> Message:
        """The first message to a worker that has joined, with which it begins to compute."""

    def _timer_fired(self, event: TimerFired) -> Iterable[Action]:
        """Handle a timer that the family has set."""
        return ()

    def _set_timers(self, at: float) -> Iterable[Action]:
        """Set the family's timers, when training begins or continues from a checkpoint."""
        return ()

    def _members_changed(self) -> None:
        """Training begins, or `_live` has changed during training."""

    def _worker_joined(self, rank: int) -> None:
        """Prepare for a worker that has joined, for the first time or again."""

    def _worker_lost(self, rank: int) -> None:
        """Discard what is known of a lost worker; the samples that have arrived from it stay."""

    def _continue_without(self, at: float) -> Iterable[Action]:
        """A worker was lost during training, and others are connected."""
        return ()

    def _merge_rest(self, at: float) -> Iterable[Action]:
        """All loops have ended: apply what has arrived and waits for other workers."""
        return ()

    def _take_unused(self) -> list[Contribution]:
        """Discard the samples that have arrived and are in no update, and return them."""
        return []

    # Events

    def handle(self, event: Event) -> Iterable[Action]:
        actions = () if self._finished else self._handle(event)
        return self._watch(event.at, actions) if actions else ()

    def _handle(self, event: Event) -> Iterable[Action]:
        match event:
            case MessageArrived(source=rank, message=Stopped() as message):
                self._check_stopped(event, message)
                return self._stopped(event.at, rank, message)
            case MessageArrived(source=rank, message=ProbeAnswer()) if rank in self._hung:
                return self._returned(event.at, rank)
            case MessageArrived():
                return self._arrived(event)
            case TimerFired(name="until") | Leave():
                return self._stop(event.at)
            case TimerFired(name="hang"):
                return self._look_for_hangs(event.at)
            case TimerFired(name="gather"):
                self._gather_timed_out = True
                return self._begin(event.at) if self._live else ()
            case TimerFired(name="workers"):
                return self._give_up(event.at)
            case TimerFired():
                return self._timer_fired(event)
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

    def _arrived(self, event: MessageArrived) -> Iterable[Action]:
        actions = self._checked(event)  # raises if the message is invalid
        if event.source not in self._hangs.announced and event.source not in self._ending:
            self._hangs.answered(event.source, event.at)
            return actions
        answered = self._note_answer(event.at, event.source)
        return itertools.chain(answered, actions, self._stay_if_complete(event.at, event.source))

    # Gather

    def _gather(self) -> Iterator[Action]:
        self._live = {}  # a checkpoint may list workers of the process that wrote it
        yield SetTimer("gather", self._patience_seconds)
        yield SetTimer("workers", self._patience_seconds)

    def _resume(self, at: float) -> Iterator[Action]:
        """Continue from a checkpoint, in a process to which no worker is connected yet."""
        for rank in sorted(self._live):
            self._worker_lost(rank)
        self._live = {}
        self._evaluations.reset()
        self._hangs.reset()
        self._hung, self._is_watching = {}, False
        self._unconfirmed = None if self._unconfirmed is None else set()
        self._staying, self._ending = {}, {}
        yield SetTimer("workers", self._patience_seconds)
        yield from self._set_until_timer(at)
        yield from self._set_timers(at)
        if self._is_stopping:
            yield from self._evaluate(at)  # the result, if the process ended during its evaluation
        yield from self._finish_if_done(at)

    def _joined(self, event: PeerJoined) -> Iterator[Action]:
        rank = event.peer
        if rank in self._hung:
            self._hung[rank] = event.incarnation
            yield Send(rank, Probe())
            return
        yield Report(Membership(at=event.at, rank=HUB, peer=rank, incarnation=event.incarnation, joined=True))
        self._live[rank] = event.incarnation
        self._ledgers.setdefault(rank, SampleLedger())
        self._left.discard(rank)
        self._staying.pop(rank, None)
        self._ending.pop(rank, None)
        self._worker_joined(rank)
        yield ClearTimer("workers")
        if self._unconfirmed is not None:
            self._unconfirmed.add(rank)
            yield Send(rank, Stop(*self._result(), self._version))
        elif self._started:
            self._members_changed()
            yield from self._admit(event.at, rank)
        elif self._gather_timed_out or self._all_expected_are_here():
            yield from self._begin(event.at)

    def _all_expected_are_here(self) -> bool:
        enough = len(self._live) >= len(self._expected)  # asked at each join: looking for each rank would be quadratic
        return enough and all(rank in self._live for rank in self._expected)

    def _admit(self, at: float, rank: int) -> Iterator[Action]:
        """Start a worker that has joined during training."""
        yield Send(rank, self._welcome(rank))  # under no key, so that no later message supersedes it

    def _begin(self, at: float) -> Iterator[Action]:
        self._started = True
        yield ClearTimer("gather")
        self._began_at = at
        yield from self._set_until_timer(at)
        yield from self._set_timers(at)
        self._members_changed()
        yield from self._evaluate(at)
        for rank in sorted(self._live):
            yield Send(rank, self._welcome(rank))

    def _position(self, rank: int) -> dict[str, Any]:
        """Fields of a welcome: the draw at which a worker continues, later ranges that have arrived, and its loader."""
        ledger = self._ledgers[rank]
        draw = ledger.first_missing
        done = tuple(draws for draws in ledger.ranges if draws[0] > draw)
        return {"draw": draw, "done": done, **self._loaders.fields(rank, draw)}

    def _lost(self, event: PeerLost) -> Iterator[Action]:
        rank = event.peer
        self._ending.pop(rank, None)
        if self._live.pop(rank, None) is None and self._staying.pop(rank, None) is None:
            return
        if rank not in self._hung:
            self._hangs.forget(rank)
        self._worker_lost(rank)
        yield Report(Membership(at=event.at, rank=HUB, peer=rank, incarnation=event.incarnation, joined=False))
        if self._is_stopping:
            yield from self._confirmed(event.at, rank)
        else:
            yield from self._go_on(event.at)

    def _go_on(self, at: float) -> Iterator[Action]:
        """A worker computes no more: continue without it, or end."""
        if not self._live and self._ledgers.keys() <= self._left:  # all workers have left on their own
            if self._staying:
                yield from self._merge_rest(at)
            yield from self._stop(at)
        elif not self._live:
            yield SetTimer("workers", self._patience_seconds)
        elif self._started:
            self._members_changed()
            yield from self._continue_without(at)

    def _give_up(self, at: float) -> Iterator[Action]:
        if self._staying:  # they have ended in order
            lost = ", ".join(str(rank) for rank in sorted(self._ledgers.keys() - self._left))
            yield self._notice(at, f"worker {lost} was lost before its loop had ended; the run ends without it")
            yield from self._merge_rest(at)
            yield from self._stop(at)
            return
        what = "every worker was lost and none came back" if self._started else "no worker joined"
        patience = f"within {self._patience_seconds:g} s (patience_seconds)"
        self._failure = f"{what} {patience}; start workers, or raise patience_seconds"
        yield from self._stop(at)

    # Workers that hang

    def _watch(self, at: float, actions: Iterable[Action]) -> Iterator[Action]:
        """Note which workers the actions make busy, and check on them in time."""
        for action in actions:
            if isinstance(action, Send):
                self._hangs.sent(action.to, at)
            yield action
        if self._hangs.busy_since and not self._is_watching and not self._finished:
            yield from self._check_later(self._hangs.check_seconds)

    def _check_later(self, seconds: float | None) -> Iterator[Action]:
        if seconds is not None:
            self._is_watching = True
            yield SetTimer("hang", seconds)

    def _note_answer(self, at: float, rank: int) -> Iterator[Action]:
        seconds = self._hangs.answered(rank, at)
        if seconds is not None:
            yield self._notice(at, f"worker {rank} has answered after {seconds:.3g} s")

    def _look_for_hangs(self, at: float) -> Iterator[Action]:
        self._is_watching = False
        deadlines = []
        for rank in sorted(self._live):
            since = self._hangs.busy_since.get(rank)
            limit = self._hangs.limit(rank, self._live.keys() - self._hung.keys())
            if since is None or limit is None or rank in self._hung:
                continue
            is_announced = rank in self._hangs.announced
            due = since + (limit * LOST_FACTOR if is_announced else limit)
            if due > at:
                deadlines.append(due)
            elif is_announced:
                yield from self._treat_as_lost(at, rank, at - since)
            else:
                self._hangs.announced.add(rank)
                deadlines.append(since + limit * LOST_FACTOR)
                yield self._notice(at, self._hang_sentence(rank, at - since, limit * LOST_FACTOR))
        if self._hangs.busy_since.keys() & self._live.keys() - self._hung.keys():
            check_seconds = self._hangs.check_seconds
            assert check_seconds is not None
            yield from self._check_later(max(0.0, min([*deadlines, at + check_seconds]) - at))

    def _hang_sentence(self, rank: int, seconds: float, lost_seconds: float) -> str:
        return (
            f"worker {rank} has not answered for {seconds:.3g} s, far longer than its peers need for a round; it is "
            f"treated as lost after {lost_seconds:.3g} s; if it is merely slow, raise hang_factor or hang_seconds"
        )

    def _treat_as_lost(self, at: float, rank: int, seconds: float) -> Iterator[Action]:
        self._hung[rank] = self._live[rank]
        what = f"worker {rank} has not answered for {seconds:.3g} s"
        yield self._notice(at, f"{what} and is treated as lost; it joins again when its computation has ended")
        yield Disconnect(rank, f"{what} (hang_factor, hang_seconds)")

    def _returned(self, at: float, rank: int) -> Iterator[Action]:
        """A worker that hung has ended its computation."""
        incarnation = self._hung.pop(rank)
        yield from self._note_answer(at, rank)
        yield from self._joined(PeerJoined(at, rank, incarnation))

    def _notice(self, at: float, text: str) -> Report:
        return Report(Notice(at=at, rank=HUB, text=text))

    # Account for samples

    def _drop(self, at: float, rank: int, draws: Range, reason: Reason) -> Iterator[Action]:
        self._ledgers[rank].add(*draws)
        yield dropped(at, rank, draws, 0, reason)

    def _drop_after_stop(self, at: float, rank: int, ranges: Iterable[Range]) -> Iterator[Action]:
        """Drop samples that arrive after the end of training, unless an earlier Stopped has accounted for them."""
        for draws in ranges:
            if draws[0] not in self._ledgers[rank]:
                yield from self._drop(at, rank, draws, "stopped")

    # What a worker may claim

    def _round_samples_max(self) -> int | None:
        """The most samples that one message of a worker can be about; None: unlimited."""
        return None

    def _stop_max(self, at: float, rank: int) -> int:
        """Where the data position of a worker can be by now: after what it has sent, what is under way, and lost."""
        size = self._round_samples_max()
        if size is not None:
            return self._ledgers[rank].stop + ROUNDS_AHEAD_MAX * size
        return self._ledgers[rank].stop + int(SAMPLES_PER_SECOND_MAX * max(at - self._began_at, 1.0))

    def _check_draws(self, check: MemberCheck, event: MessageArrived, ranges: Iterable[Range]) -> None:
        """After the end of training, `Stopped` may have accounted for draws of messages that it has overtaken."""
        ledger = self._ledgers[event.source]
        if self._is_stopping:
            ranges = [draws for draws in ranges if draws[0] not in ledger]
        check.draws(ranges, ledger, self._stop_max(event.at, event.source))

    def _checked(self, event: MessageArrived) -> Iterable[Action]:
        """Handle a message of a worker; its loader's state is kept only if the message is valid."""
        if not getattr(event.message, "loader", ()):
            return self._message_arrived(event)
        if event.source in self._ledgers:
            self._loaders.check(event, HUB, self._stop_max(event.at, event.source))
        actions = self._message_arrived(event)
        self._loaders.keep(event)
        return actions

    def _check_stopped(self, event: MessageArrived, message: Stopped) -> None:
        check = MemberCheck(event, HUB)
        limit = self._stop_max(event.at, event.source)
        check.require(0 <= message.draws_stop <= limit, f"draws up to {message.draws_stop}, where {limit} is possible")

    def _check_parameters(self, updated: Tensor) -> None:
        """End training if an update has made parameters that are not finite: nothing can be learned from then on."""
        if not is_finite(updated):
            self._failure = (
                f"update {self._version} has made parameters that are not finite, from gradients that were; lower the "
                "learning rate, or clip the gradient (clip_norm)"
            )

    # Stop

    def _stop(self, at: float) -> Iterator[Action]:
        if self._is_stopping:
            return
        self._unconfirmed = set(self._live) - self._left | set(self._ending) | set(self._staying)
        for name in ("gather", "workers", *self.timers, "until"):
            yield ClearTimer(name)
        for unused in self._take_unused():
            yield dropped(at, unused.rank, (unused.first, unused.stop), unused.staleness, "stopped")
        yield from self._evaluate(at)
        for rank in sorted(self._unconfirmed):
            yield Send(rank, Stop(*self._result(), self._version), supersedes="parameters")
        yield from self._finish_if_done(at)

    def _stopped(self, at: float, rank: int, message: Stopped) -> Iterator[Action]:
        if not self._is_stopping:  # the worker leaves on its own; its link will close, or it waits for the result
            self._left.add(rank)
            if message.stays:
                self._ending[rank] = message.draws_stop
                yield from self._stay_if_complete(at, rank)
            return
        for gap in list(self._ledgers[rank].missing_below(message.draws_stop)):
            yield from self._drop(at, rank, gap, "stopped")
        if not message.stays:  # otherwise it confirms when Stop has arrived
            yield from self._confirmed(at, rank)

    def _stay_if_complete(self, at: float, rank: int) -> Iterator[Action]:
        """Go on without a worker whose loop has ended, once its last messages have arrived."""
        stop = self._ending.get(rank)
        if stop is None or self._is_stopping or rank not in self._live:
            return
        if self._ledgers[rank].first_missing >= stop:
            del self._ending[rank]
            self._staying[rank] = self._live.pop(rank)
            self._hangs.forget(rank)
            yield from self._go_on(at)

    def _confirmed(self, at: float, rank: int) -> Iterator[Action]:
        assert self._unconfirmed is not None
        self._unconfirmed.discard(rank)
        self._live.pop(rank, None)
        yield from self._finish_if_done(at)

    def _finish_if_done(self, at: float) -> Iterator[Action]:
        if self._unconfirmed is None or self._unconfirmed or self._evaluations.under_way:
            return
        self._finished = True
        for rank, ledger in sorted(self._ledgers.items()):
            for gap in list(ledger.missing_below(ledger.stop)):
                yield from self._drop(at, rank, gap, "lost")
        yield Finish(*self._result(), self._version, self._failure)


def nonfinite_failure(rank: int, count: int) -> str:
    """Why a run fails after `count` gradients in a row of one worker that were not finite."""
    return (
        f"worker {rank} reported {count} gradients in a row that were not finite; "
        "lower the learning rate, clip the gradient (clip_norm), or look at that worker's data"
    )
