"""A live computation: how far it may go, and how it is held up on purpose."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from offbeat.core.actions import (
    Action,
    Cancel,
    ClearTimer,
    Compute,
    Evaluate,
    Finish,
    Record,
    Report,
    Samples,
    Seconds,
    Send,
    SetTimer,
)
from offbeat.core.bandwidth import RateLimitedOutbox
from offbeat.core.events import (
    Event,
    GradientReady,
    Leave,
    MessageArrived,
    PeerJoined,
    PeerLost,
    Sent,
    Started,
    StepReady,
    TimerFired,
)
from offbeat.core.messages import Buffers, Stopped
from offbeat.core.strategy import Node
from offbeat.errors import ContractViolation, OffbeatError, RunFailed
from offbeat.live.evaluation import Evaluator, Measure
from offbeat.live.injected_delay import InjectedDelay
from offbeat.records.files import Writer
from offbeat.records.schema import Ended, LinkUse, Round
from offbeat.records.traffic import MessageSize, TrafficCounter, message_size
from offbeat.transports.link import CLOSED
from offbeat.transports.remote_records import RecordLines, RemoteRecordWriter
from offbeat.transports.transport import Arrived, Departed, Incoming, Joined, Lost, Refused, Transport


class Clock:
    """Seconds since the run began; a rank that joins later sets it by the hub's."""

    def __init__(self, elapsed_seconds: float = 0.0) -> None:
        self._zero = time.monotonic() - elapsed_seconds

    def now(self) -> float:
        return time.monotonic() - self._zero

    def set(self, elapsed_seconds: float, at_monotonic: float) -> None:
        """It was `elapsed_seconds` when this machine's monotonic clock said `at_monotonic`."""
        self._zero = at_monotonic - elapsed_seconds


@dataclass
class LiveRound:
    """The outstanding computation: what was asked for, since when, and how it is held up."""

    action: Compute
    start: float
    began: float
    """When it was accepted, by the machine's own clock: there the anytime clock starts."""
    delay_seconds: float
    factor: float
    call_seconds: float
    samples: int = 0
    induced_seconds: float = 0.0
    idle_seconds: float = 0.0
    cancelled: threading.Event = field(default_factory=threading.Event)

    def wanted(self) -> int:
        """How many samples the next micro-batch has; 0 where the round is over."""
        if self.cancelled.is_set():
            return 0
        budget, microbatch = self.action.budget, self.action.microbatch
        if isinstance(budget, Samples):
            return min(microbatch, budget.count - self.samples)
        assert isinstance(budget, Seconds)
        if self.samples and time.monotonic() - self.began >= budget.seconds:
            return 0
        return microbatch if budget.samples_max is None else min(microbatch, budget.samples_max - self.samples)

    def hold_up(self) -> None:
        """The induced delay before the first micro-batch."""
        self._sleep(self.delay_seconds)

    def stretch(self, seconds: float) -> None:
        """A micro-batch took so many seconds; let it have taken as much longer as this worker is slower."""
        self._sleep(seconds * (self.factor - 1.0) + self.call_seconds)

    def _sleep(self, seconds: float) -> None:
        if seconds > 0:
            before = time.monotonic()
            self.cancelled.wait(seconds)
            self.induced_seconds += time.monotonic() - before


# The live engine: one node, real time, real messages.
#
# A node is a monitor, not a thread: whoever has an event takes the lock, lets the node handle it, and carries out what
# it asks for. The thread that computes hands in its own gradients; a background thread hands in messages and timers;
# an evaluating thread hands in what it measured. So a user's own training loop and ours are the same thing.


WAIT_SECONDS_MAX = 3600.0
"""Clocks of the system do not take any number."""

LEAVE_SECONDS = 10.0
"""How long a node that was asked to leave may take before it is left behind."""

ResultEvent = Callable[..., GradientReady | StepReady]
"""Makes the event by which a computation ends: one of the two, which have the same fields in the same order."""

JOURNAL = "journal "
"""How the keys of journals begin: the node has not sent them, and is not told that they have left."""
JOURNAL_SECONDS = 1.0
TRAFFIC_SECONDS = 1.0
"""How long what was sent and received may go unrecorded, while the process lives."""


@dataclass(frozen=True, slots=True)
class OutboxDue:
    """What waits for this peer may leave."""

    peer: int


Due = str | Arrived | Lost | OutboxDue
"""What becomes due: a timer by its name, a message or a loss that was held up, a turn."""


class NodeRunner:
    """One node with everything that makes its actions happen."""

    finish: Finish | None = None
    linked_at_end: frozenset[int] = frozenset()
    """The peers that were there when the node finished."""
    on_failure: Callable[[BaseException], None] | None = None
    _error: BaseException | None = None
    _round: LiveRound | None = None
    _leaving = False
    _closed = False
    _free_since = 0.0
    _send_seconds = 0.0
    _flushed_at = 0.0
    _counted_at = 0.0
    _clock_set = False
    _dated = False
    _use_recorded = False

    def __init__(
        self,
        node: Node,
        transport: Transport,
        *,
        rank: int,
        clock: Clock,
        writer: Writer,
        load: Callable[[Tensor, Buffers], None] | None = None,
        evaluate: Measure | None = None,
        induced: InjectedDelay | None = None,
        on_remote_records: Callable[[int, RecordLines], None] | None = None,
        device: torch.device | None = None,
        irreplaceable: Iterable[int] = (),
        returned: bool = False,
        bytes_per_second: float | None = None,
    ) -> None:
        """`load` takes the values of an accepted `Compute` into the model; without it this rank does not compute.

        Peers that are `irreplaceable` do not come back once they are lost. A rank that has lost all of them gives up.
        So does one that has `returned` to a run, when all are gone before it has learnt from them how far that was.
        With `bytes_per_second`, no more than that leaves for each peer; what would be more waits.
        """
        self.rank = rank
        self.clock = clock
        self._node = node
        self._transport = transport
        self._writer = writer
        self._load = load
        self._induced = induced or InjectedDelay()
        self._on_journal = on_remote_records
        self._irreplaceable = set(irreplaceable)
        self._knows_nothing = returned
        self._device = device if device is not None and device.type != "cpu" else None
        self._monitor = threading.Condition()
        self._known: dict[int, int] = {}
        """peer → the incarnation that the node has been told of"""
        self._met: set[int] = set()
        self._unmet: dict[int, list[Send]] = {}
        """What waits for peers that have not joined for the first time."""
        self._traffic = TrafficCounter(rank)
        self._undated: list[Record] = []
        """Records from before the clock was set; see `_date`."""
        self._due: list[tuple[float, int, Due]] = []
        """A heap of what becomes due when: timers, messages held up, losses behind them, turns of those that wait."""
        self._timers: dict[str, int] = {}
        """name → the number of the entry that counts"""
        self._limited = None if bytes_per_second is None else RateLimitedOutbox(bytes_per_second, transport.weight)
        self._turns: dict[int, int] = {}
        """peer → the number of the entry at which what waits for it may leave"""
        self._used: dict[int, int] = {}
        """peer → bytes that have left for it, without records"""
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._serve, name=f"offbeat rank {rank}", daemon=True)
        self._evaluator = (
            None if evaluate is None else Evaluator(evaluate, self._deliver_evaluated, self.fail, clock.now)
        )

    # From outside

    def start(self) -> None:
        """Let the node begin."""
        with self._monitor:
            self._free_since = self._counted_at = self.clock.now()
            self._traffic.begin(self._counted_at)
            self._guarded(lambda: self._handle(Started(self.clock.now())))
        self._thread.start()

    @property
    def ended(self) -> bool:
        return self.finish is not None or self._error is not None

    def next_round(self) -> LiveRound | None:
        """Wait for something to compute; None once there will be nothing any more."""
        with self._monitor:
            while self._round is None and not self.ended:
                self._monitor.wait()
            return None if self.ended else self._round

    def complete(
        self, result: Tensor, loss: float | None, buffers: Buffers, finite: bool, ready: ResultEvent = GradientReady
    ) -> None:
        """The outstanding round has ended with this sum of gradients over its samples, or with this step.

        `loss` is a sum over the samples as well; None where a step does not say. The tensor is the engine's from here.
        """
        with self._monitor:
            done, self._round = self._round, None
            if done is None or self.ended:
                return
            now, action = self.clock.now(), done.action
            seconds = now - done.start
            draws = (action.draw, action.draw + done.samples)
            event = ready(
                now,
                result,
                done.samples,
                loss,
                buffers,
                action.version,
                draws,
                seconds,
                done.induced_seconds,
                finite,
            )
            self._free_since = now
            record = Round(
                at=now,
                rank=self.rank,
                start=done.start,
                seconds=seconds,
                induced_seconds=done.induced_seconds,
                samples=done.samples,
                loss=loss,
                version=action.version,
                draws=draws,
                idle_seconds=done.idle_seconds,
                send_seconds=self._send_seconds,
                finite=finite,
            )

            def hand_in() -> None:
                if done.samples:
                    self._writer.write(record)
                self._handle(event)
                if now - self._flushed_at >= JOURNAL_SECONDS:
                    self._flush_journal()

            self._guarded(hand_in)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the node has finished, or something has failed; whether it has."""
        with self._monitor:
            return self._monitor.wait_for(lambda: self.ended, timeout)

    def leave(self, give_up: Callable[[], None] | None = None, *, stay: bool = False) -> None:
        """Ask the node to end in order. `give_up` completes a computation that is outstanding, and has no samples then.

        With `stay` the node goes on serving its peers until they have come to their ends, however long that takes.
        Without, what waits for the rate limit leaves at once: whoever leaves does not want to wait for it.
        """
        with self._monitor:
            self._leaving = True
            if not stay:
                self._hurry()
            if not self.ended:
                self._guarded(lambda: self._handle(Leave(self.clock.now(), stay)))
            waiting = self._round is not None and not self._round.cancelled.is_set()
            if waiting:  # a node that does not know of leaving goes on, and is left behind
                return
            if self._round is not None and give_up is not None and not self.ended:
                self._round.samples = 0
                give_up()
        self.wait(None if stay else LEAVE_SECONDS)

    def inspect(self, look: Callable[[Node], None]) -> None:
        """Look at the node while nothing happens to it: a checkpoint does."""
        with self._monitor:
            look(self._node)

    def linked(self) -> frozenset[int]:
        """The peers that are there."""
        with self._monitor:
            return frozenset(self._known)

    def close(self, linger_seconds: float = 5.0) -> None:
        """End the threads and say goodbye to the peers.

        What waits for the rate limit leaves before: all of it where the node has come to its end in order, however long
        that takes, and otherwise as much as can in these seconds.
        """
        try:
            with self._monitor:
                self._let_leave(linger_seconds)
        finally:  # whoever is interrupted here does not want to wait any longer, and closes all the same
            self._close(linger_seconds)

    def _close(self, linger_seconds: float) -> None:
        with self._monitor:
            self._closed = True
        if self._evaluator is not None:
            self._evaluator.close()
        self._transport.close(linger_seconds)
        self._transport.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(linger_seconds)

    def check(self) -> None:
        """Raise what went wrong, if anything did."""
        if self._error is not None:
            raise self._error
        if self.finish is not None and self.finish.failure is not None:
            raise RunFailed(self.finish.failure)

    @property
    def failure(self) -> str | None:
        if self._error is not None:
            return str(self._error) or type(self._error).__name__
        return self.finish.failure if self.finish is not None else None

    def write_last(self, record: Ended) -> None:
        """Write the last record. Where not even that can be written, that is the failure."""
        with self._monitor:
            self._guarded(self._date)
            self._guarded(lambda: self._record_traffic(record.at))
            self._guarded(lambda: self._record_link_use(record.at))
            self._guarded(lambda: self._writer.write(record))

    # The background thread

    def _serve(self) -> None:
        try:
            while not self._closed:
                self._turn(self._transport.receive(self._next_due()))
        except BaseException as error:
            self.fail(error)

    def _turn(self, incoming: Incoming | None) -> None:
        """What has come in, then what has become due. Its tensors are free again when this returns."""
        with self._monitor:
            if self._closed:
                return
            if incoming is not None:
                self._guarded(lambda: self._take(incoming))
            self._guarded(self._fire)
            now = self.clock.now()
            if (due := self._traffic_due()) is not None and due <= now:
                self._guarded(lambda: self._record_traffic(now))

    def _next_due(self) -> float | None:
        with self._monitor:
            while self._due and self._is_stale(self._due[0][1], self._due[0][2]):
                heapq.heappop(self._due)
            dues = [self._due[0][0] if self._due else None, self._traffic_due()]
            due = min((due for due in dues if due is not None), default=None)
            return None if due is None else min(WAIT_SECONDS_MAX, max(0.0, due - self.clock.now()))

    def _is_stale(self, number: int, entry: Due) -> bool:
        """Whether it is a timer that was cleared or set anew, or a turn that has been moved."""
        if isinstance(entry, OutboxDue):
            return self._turns.get(entry.peer) != number
        return isinstance(entry, str) and self._timers.get(entry) != number

    def _fire(self) -> None:
        while self._due and self._due[0][0] <= self.clock.now():
            _, number, entry = heapq.heappop(self._due)
            if isinstance(entry, Arrived):
                self._arrived(entry)
            elif isinstance(entry, Lost):
                self._take(entry)
            elif self._is_stale(number, entry):
                continue
            elif isinstance(entry, OutboxDue):
                del self._turns[entry.peer]
                self._pace(entry.peer)
            else:
                del self._timers[entry]
                self._handle(TimerFired(self.clock.now(), entry))

    def _take(self, incoming: Incoming) -> None:
        now = self.clock.now()
        match incoming:
            case Arrived():
                delay = self._induced.delay(incoming.source, incoming.nbytes, now)
                if delay > 0:
                    heapq.heappush(self._due, (now + delay, next(self._numbers), incoming))
                else:
                    self._arrived(incoming)
            case Departed(to=to, key=key):
                self._traffic.sent(MessageSize(incoming.kind, incoming.nbytes, incoming.nbytes_uncompressed))
                self._send_seconds = incoming.seconds
                if not (key or "").startswith(JOURNAL):
                    self._used[to] = self._used.get(to, 0) + incoming.nbytes
                    if self._known.get(to) == incoming.incarnation:
                        self._handle(Sent(now, to, key))
            case Joined(peer=peer, incarnation=incarnation):
                self._set_clock(peer)
                if (before := self._known.pop(peer, None)) is not None:
                    self._give_up(peer)
                    self._handle(PeerLost(self.clock.now(), peer, before))
                self._known[peer] = incarnation
                self._met.add(peer)
                if self._limited is not None:
                    self._limited.open(peer, time.monotonic())
                for send in self._unmet.pop(peer, []):
                    self._send(send)
                self._handle(PeerJoined(self.clock.now(), peer, incarnation))
                self._flush_journal()
            case Lost(peer=peer, incarnation=incarnation):
                held = [due for due, _, item in self._due if isinstance(item, Arrived) and item.source == peer]
                last = max(held, default=now)
                if last > now:  # what is held up has arrived before the link was lost
                    heapq.heappush(self._due, (last, next(self._numbers), incoming))
                elif self._known.get(peer) == incarnation:
                    del self._known[peer]
                    self._give_up(peer)
                    if self._knows_nothing and not self._known and not self.ended:
                        raise RunFailed(f"rank {self.rank} came back when the others were ending, or were lost as well")
                    self._handle(PeerLost(now, peer, incarnation))
                    if peer in self._irreplaceable:
                        self._miss(peer, incoming.why)
            case Refused(why=why):
                raise RunFailed(why)

    def _miss(self, peer: int, why: str) -> None:
        self._irreplaceable.remove(peer)
        if not self._irreplaceable and why != CLOSED and not self.ended:
            raise RunFailed(f"rank {peer} was lost ({why}), and nobody is left to go on with")

    def _set_clock(self, peer: int) -> None:
        """Take the time from rank 0, once, so that the records of all ranks can be laid side by side."""
        told = self._transport.elapsed_at_join
        if told is not None and not self._clock_set:
            self._clock_set = True
            before = self.clock.now()
            self.clock.set(*told)
            shift = self.clock.now() - before
            self._due = [(due + shift, number, entry) for due, number, entry in self._due]
            self._free_since += shift
            self._counted_at += shift
            self._traffic.shift(shift)
            self._date(shift)

    def _knows_the_time(self) -> bool:
        return self._clock_set or self._dated or self.rank == 0

    def _record(self, record: Record) -> None:
        if self._knows_the_time():
            self._writer.write(record)
        else:
            self._undated.append(record)

    def _date(self, shift: float = 0.0) -> None:
        """Write what was recorded by a clock that had not been set: now it is, or there is no more time to wait."""
        self._dated, undated, self._undated = True, self._undated, []
        for record in undated:
            self._writer.write(msgspec.structs.replace(record, at=record.at + shift))

    def _arrived(self, arrived: Arrived) -> None:
        message = arrived.message
        if self._known.get(arrived.source) != arrived.incarnation:
            return  # held up for so long that its link is gone
        self._traffic.received(message_size(message, arrived.nbytes))
        if isinstance(message, RecordLines):
            if self._on_journal is not None:
                self._on_journal(arrived.source, message)
            return
        if self._device is not None:  # what was received lies in host memory, and the node's tensors where the model is
            message = message.with_tensors(tensor.to(self._device) for tensor in message.tensors())
        self._handle(MessageArrived(self.clock.now(), arrived.source, message, lambda: message))

    def _deliver_evaluated(self, event: Event) -> None:
        with self._monitor:
            self._guarded(lambda: self._handle(event))

    # The monitor: the lock is held from here on

    def _guarded(self, work: Callable[[], None]) -> None:
        """An error in a node ends the participant; whoever waits for it gets to know."""
        try:
            work()
        except Exception as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Something went wrong that no node can mend."""
        with self._monitor:
            if self.ended:
                return
            self._error = error if isinstance(error, OffbeatError) else _Unexpected(self.rank, error)
            self._monitor.notify_all()
        if self.on_failure is not None:
            self.on_failure(self._error)

    def _handle(self, event: Event) -> None:
        if self.ended:
            return
        for action in list(self._node.handle(event)):
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Report(record=record):
                self._record(record)
            case Send():
                self._send(action)
            case Compute():
                self._accept(action)
            case Cancel():
                if self._round is not None:
                    self._round.cancelled.set()
            case SetTimer(name=name, seconds=seconds):
                self._set_timer(name, seconds)
            case ClearTimer(name=name):
                self._timers.pop(name, None)
            case Evaluate():
                if self._evaluator is None:
                    raise ContractViolation(
                        f"rank {self.rank} asked for Evaluate, but has nothing to evaluate with; pass one: "
                        "offbeat.join(model, strategy, until, evaluate=lambda model: (loss, accuracy))"
                    )
                self._evaluator.put(action)
            case Finish():
                self.finish, self.linked_at_end = action, frozenset(self._known)
                self._monitor.notify_all()

    def _send(self, send: Send) -> None:
        if isinstance(send.message, Stopped):
            self._end_journal()
        incarnation = self._known.get(send.to)
        if incarnation is not None and self._limited is not None:
            self._limited.put(send)
            self._pace(send.to)
        elif incarnation is not None:
            self._transport.send(send.to, incarnation, send.message, send.supersedes)
        elif send.to not in self._met:  # links take a moment to come up; in virtual time they are there at once
            self._unmet.setdefault(send.to, []).append(send)

    def _accept(self, action: Compute) -> None:
        if self._load is None:
            raise ContractViolation(f"rank {self.rank} asked for Compute, but by its strategy it does not compute")
        if self._round is not None:
            raise ContractViolation(f"rank {self.rank} asked for a second Compute while one was outstanding")
        now = self.clock.now()
        delay_seconds, factor = self._induced.next_round_delay()
        accepted = LiveRound(action, now, time.monotonic(), delay_seconds, factor, self._induced.call_seconds)
        accepted.idle_seconds = max(0.0, now - self._free_since)
        self._date()
        self._knows_nothing = False
        self._load(action.parameters, action.buffers)
        if self._leaving:
            accepted.cancelled.set()
        self._round = accepted
        self._monitor.notify_all()

    def _set_timer(self, name: str, seconds: float) -> None:
        number = next(self._numbers)
        self._timers[name] = number
        heapq.heappush(self._due, (self.clock.now() + seconds, number, name))
        if threading.current_thread() is not self._thread:
            self._transport.wake()

    # The rate limit

    def _pace(self, peer: int) -> None:
        """Let leave what is paid for, and come back when the next will be."""
        assert self._limited is not None
        now = time.monotonic()
        while (send := self._limited.take(peer, now)) is not None:
            self._transport.send(peer, self._known[peer], send.message, send.supersedes)
        due = self._limited.ready_at(peer, now)
        if due is not None:
            number = self._turns[peer] = next(self._numbers)
            heapq.heappush(self._due, (self.clock.now() + due - now, number, OutboxDue(peer)))
            if threading.current_thread() is not self._thread:
                self._transport.wake()
        elif self.ended:
            self._monitor.notify_all()

    def _give_up(self, peer: int) -> None:
        """What waits for a peer that is gone has nowhere to go."""
        self._turns.pop(peer, None)
        if self._limited is not None:
            self._limited.lose(peer)
            self._monitor.notify_all()

    def _hurry(self) -> None:
        if self._limited is not None:
            self._limited.is_lifted = True
            for peer in list(self._known):
                self._pace(peer)

    def _let_leave(self, linger_seconds: float) -> None:
        limited, me = self._limited, threading.current_thread()
        if limited is None or not self._thread.is_alive() or self._thread is me:
            return
        now = time.monotonic()
        in_order = self.finish is not None and self.finish.failure is None
        rest = limited.empty_at(now) - now if in_order else 0.0
        until = now + linger_seconds + rest
        while len(limited) and time.monotonic() < until:
            self._monitor.wait(min(WAIT_SECONDS_MAX, until - time.monotonic()))

    def _record_link_use(self, at: float) -> None:
        if self._limited is not None and not self._use_recorded:
            self._use_recorded = True
            used = {str(peer): nbytes for peer, nbytes in sorted(self._used.items())}
            rate = self._limited.bytes_per_second
            self._writer.write(LinkUse(at=at, rank=self.rank, bytes_per_second=rate, used=used))

    # What was sent and received

    def _traffic_due(self) -> float | None:
        """When the next record of it is to be written; None where there is nothing new, or the time is not known."""
        if not self._traffic.moved or self.ended or not self._knows_the_time():
            return None
        return self._counted_at + TRAFFIC_SECONDS

    def _record_traffic(self, at: float) -> None:
        self._counted_at = at
        traffic = self._traffic.record(at)
        if traffic is not None:
            self._writer.write(traffic)

    # Records of a rank that shares no disk with rank 0 travel there

    def _flush_journal(self) -> None:
        keeper = self._keeper()
        if isinstance(self._writer, RemoteRecordWriter) and keeper is not None:
            self._flushed_at = self.clock.now()
            for journal in self._writer.take(keeper):
                self._transport.send(keeper, self._known[keeper], journal, f"{JOURNAL}{next(self._numbers)}")

    def _keeper(self) -> int | None:
        """Who keeps the records: rank 0; where it was lost and any rank can, as among equals, the lowest there is."""
        if 0 in self._known or self._on_journal is None or 0 not in self._met:
            return 0 if 0 in self._known else None
        return min((rank for rank in self._known if rank < self.rank), default=None)

    def _end_journal(self) -> None:
        """Before Stopped, which is the last that rank 0 waits for."""
        if isinstance(self._writer, RemoteRecordWriter):
            ended = self.ended_record()
            self._record_traffic(ended.at)
            self._record_link_use(ended.at)
            self._writer.write(ended)
            self._flush_journal()

    def ended_record(self) -> Ended:
        return Ended(
            at=self.clock.now(),
            bytes_sent=self._traffic.bytes_sent,
            messages_sent=self._traffic.messages_sent,
            failure=self.failure,
            rank=self.rank,
        )


class _Unexpected(RunFailed):
    """Something that should not happen; where it came from is chained, for whoever mends it."""

    def __init__(self, rank: int, error: BaseException) -> None:
        super().__init__(f"rank {rank} failed: {type(error).__name__}: {error}")
        self.__cause__ = error
