"""The live engine: one node, the wall clock and real messages.

A node is protected by a monitor (one lock and condition per `NodeRunner`) and has no thread of its own. The thread that
has an event takes the lock, lets the node handle the event and carries out the actions that it returns: the thread of
the training loop for results, a background thread for messages and timers, an evaluation thread for evaluations. So a
user's own training loop and the one of `offbeat train` are driven in the same way.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

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
    Send,
    SetTimer,
)
from offbeat.core.bandwidth import RateLimitedOutbox
from offbeat.core.events import (
    Event,
    GradientReady,
    Leave,
    LossReason,
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
from offbeat.core.wire_size import wire_size
from offbeat.errors import ContractViolation, OffbeatError, RunFailed
from offbeat.live.evaluation import Evaluator, Measure
from offbeat.live.injected_delay import InjectedDelay
from offbeat.live.live_round import LiveRound
from offbeat.records.files import Writer
from offbeat.records.schema import Ended, LinkUse, Round
from offbeat.records.traffic import TrafficCounter
from offbeat.transports.remote_records import RecordLines, RemoteRecordWriter
from offbeat.transports.transport import Transport, TransportEvent


class Clock:
    """Seconds since the start of the run; a rank that joins later synchronizes it with rank 0."""

    def __init__(self, elapsed_seconds: float = 0.0) -> None:
        self._zero = time.monotonic() - elapsed_seconds

    def now(self) -> float:
        return time.monotonic() - self._zero

    def set(self, elapsed_seconds: float, at_monotonic: float) -> None:
        """Synchronize: the run had lasted `elapsed_seconds` when `time.monotonic()` was `at_monotonic`."""
        self._zero = at_monotonic - elapsed_seconds


WAIT_SECONDS_MAX = 3600.0
"""Longest single wait: system calls overflow on very large timeouts."""

LEAVE_SECONDS = 10.0
"""How long a node may take to finish after `Leave` before it is abandoned."""

ResultEvent = Callable[..., GradientReady | StepReady]
"""Creates the event that ends a computation; both kinds have the same fields in the same order."""

RECORDS_KEY = "records "
"""Prefix of the keys of `RecordLines` messages, which the node has not sent and gets no `Sent` for."""
RECORDS_FLUSH_SECONDS = 1.0
TRAFFIC_RECORD_SECONDS = 1.0
"""Interval between two records of traffic, and thus what a killed process leaves unrecorded at most."""


@dataclass(frozen=True, slots=True)
class OutboxDue:
    """The rate limit lets the next queued message to this peer leave."""

    peer: int


Due = str | MessageArrived | PeerLost | OutboxDue
"""An entry of the heap: a timer (its name), a delayed message, a delayed loss, or an outbox turn."""


class NodeRunner:
    """Drives one node: feeds it events and carries out its actions, from `start` on.

    Methods may be called from any thread.

    node: the node to drive.
    transport: the links of this rank.
    rank: this rank.
    clock: time since the start of the run; synchronized with rank 0 at the first join.
    writer: receives the records of this rank.
    load: copies the parameters and buffers of a `Compute` into the model; None for a rank that does not compute.
    evaluate: measures loss and accuracy, on a thread of its own; None if this rank does not evaluate.
    injected_delay: delay added on purpose; None for none.
    on_remote_records: receives the records that other ranks send here.
    device: where the node's tensors are; received tensors are copied there.
    irreplaceable: peers that cannot come back; the run fails once all of them are lost.
    is_rejoining: this rank was restarted; the run fails if all peers are lost before it got their state.
    bytes_per_second: rate limit per peer; None for no limit.
    """

    finish: Finish | None = None
    linked_at_end: frozenset[int] = frozenset()
    """The peers that were linked when the node finished."""
    on_failure: Callable[[BaseException], None] | None = None
    _error: BaseException | None = None
    _round: LiveRound | None = None
    _leaving = False
    _closed = False
    _idle_since = 0.0
    _send_seconds = 0.0
    _records_flushed_at = 0.0
    _traffic_recorded_at = 0.0
    _is_synchronized = False
    _has_flushed_early_records = False
    _link_use_recorded = False

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
        injected_delay: InjectedDelay | None = None,
        on_remote_records: Callable[[int, RecordLines], None] | None = None,
        device: torch.device | None = None,
        irreplaceable: Iterable[int] = (),
        is_rejoining: bool = False,
        bytes_per_second: float | None = None,
    ) -> None:
        self.rank = rank
        self.clock = clock
        self._node = node
        self._transport = transport
        transport.clock = clock.now
        self._writer = writer
        self._load = load
        self._injected_delay = injected_delay or InjectedDelay()
        self._on_remote_records = on_remote_records
        self._irreplaceable = set(irreplaceable)
        self._awaits_state = is_rejoining
        self._device = device if device is not None and device.type != "cpu" else None
        self._monitor = threading.Condition()
        self._linked: dict[int, int] = {}
        """peer → the incarnation announced to the node"""
        self._ever_linked: set[int] = set()
        self._before_link: dict[int, list[Send]] = {}
        """peer → messages to a peer that has not joined yet"""
        self._traffic = TrafficCounter(rank)
        self._records_before_sync: list[Record] = []
        """Records from before the clock was synchronized; see `_write_early_records`."""
        self._due: list[tuple[float, int, Due]] = []
        """A heap of (time, entry number, entry)."""
        self._timers: dict[str, int] = {}
        """name → the number of its valid heap entry"""
        self._rate_limited = None if bytes_per_second is None else RateLimitedOutbox(bytes_per_second)
        self._outbox_turns: dict[int, int] = {}
        """peer → the number of its valid `OutboxDue` entry"""
        self._bytes_sent_to: dict[int, int] = {}
        """peer → bytes sent to it, without records"""
        self._entry_numbers = itertools.count()
        self._thread = threading.Thread(target=self._receive_loop, name=f"offbeat rank {rank}", daemon=True)
        self._evaluator = (
            None if evaluate is None else Evaluator(evaluate, self._deliver_evaluated, self.fail, clock.now)
        )

    # Public interface

    def start(self) -> None:
        """Deliver `Started` and start the background thread."""
        with self._monitor:
            self._idle_since = self._traffic_recorded_at = self.clock.now()
            self._traffic.begin(self._traffic_recorded_at)
            self._run_guarded(lambda: self._handle(Started(self.clock.now())))
        self._thread.start()

    @property
    def ended(self) -> bool:
        return self.finish is not None or self._error is not None

    def next_round(self) -> LiveRound | None:
        """Block until the node asks for a computation; None once the run has ended."""
        with self._monitor:
            while self._round is None and not self.ended:
                self._monitor.wait()
            return None if self.ended else self._round

    def complete(
        self, result: Tensor, loss: float | None, buffers: Buffers, finite: bool, ready: ResultEvent = GradientReady
    ) -> None:
        """End the outstanding round.

        result: the sum of gradients over its samples, or the optimizer step; owned by the engine from here on.
        loss: the sum of the losses over its samples; None if unknown.
        buffers: the model's buffers after the round.
        finite: whether result, loss and buffers are finite.
        ready: the kind of event that the node gets.
        """
        with self._monitor:
            done, self._round = self._round, None
            if done is None or self.ended:
                return
            now, action = self.clock.now(), done.action
            seconds = now - done.start
            draws = (action.draw, action.draw + done.samples)
            event = ready(
                now, result, done.samples, loss, buffers, action.version, draws, seconds, done.induced_seconds, finite
            )
            self._idle_since = now
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

            def write_and_handle() -> None:
                if done.samples:
                    self._writer.write(record)
                self._handle(event)
                if now - self._records_flushed_at >= RECORDS_FLUSH_SECONDS:
                    self._flush_records()

            self._run_guarded(write_and_handle)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the node has finished or failed, at most `timeout` seconds; returns whether it has."""
        with self._monitor:
            return self._monitor.wait_for(lambda: self.ended, timeout)

    def leave(self, complete_empty: Callable[[], None] | None = None, *, stay: bool = False) -> None:
        """Ask the node to finish in order, and wait until it has.

        complete_empty: completes an outstanding computation, which then has no samples.
        stay: keep serving the peers until they have finished, however long that takes; otherwise wait for at most
            `LEAVE_SECONDS` and send queued messages at once, whatever the rate limit.
        """
        with self._monitor:
            self._leaving = True
            if not stay:
                self._lift_rate_limit()
            if not self.ended:
                self._run_guarded(lambda: self._handle(Leave(self.clock.now(), stay)))
            waiting = self._round is not None and not self._round.cancelled.is_set()
            if waiting:  # the node ignored `Leave`: it is abandoned
                return
            if self._round is not None and complete_empty is not None and not self.ended:
                self._round.samples = 0
                complete_empty()
        self.wait(None if stay else LEAVE_SECONDS)

    def inspect(self, read: Callable[[Node], None]) -> None:
        """Call `read(node)` while the node handles no event, for checkpoints."""
        with self._monitor:
            read(self._node)

    def linked(self) -> frozenset[int]:
        """The peers that are linked now."""
        with self._monitor:
            return frozenset(self._linked)

    def close(self, linger_seconds: float = 5.0) -> None:
        """Stop the threads and close the transport.

        Messages queued by the rate limit are sent before: all of them if the node has finished in order, otherwise as
        many as fit into `linger_seconds`.
        """
        try:
            with self._monitor:
                self._drain_outbox(linger_seconds)
        finally:  # an interrupt ends the wait, not the closing
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
        """Raise the error that ended the run, if there is one."""
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
        """Write the last records of this rank; a failure to do so fails the run."""
        with self._monitor:
            self._run_guarded(self._write_early_records)
            self._run_guarded(lambda: self._record_traffic(record.at))
            self._run_guarded(lambda: self._record_link_use(record.at))
            self._run_guarded(lambda: self._writer.write(record))

    # The background thread

    def _receive_loop(self) -> None:
        try:
            while not self._closed:
                self._process(self._transport.receive(self._next_due()))
        except BaseException as error:
            self.fail(error)

    def _process(self, incoming: TransportEvent | None) -> None:
        """Handle what was received, then what is due. The tensors of `incoming` are reused after this returns."""
        with self._monitor:
            if self._closed:
                return
            if incoming is not None:
                self._run_guarded(lambda: self._handle_incoming(incoming))
            self._run_guarded(self._process_due)
            now = self.clock.now()
            if (due := self._traffic_due()) is not None and due <= now:
                self._run_guarded(lambda: self._record_traffic(now))

    def _next_due(self) -> float | None:
        with self._monitor:
            while self._due and self._is_stale(self._due[0][1], self._due[0][2]):
                heapq.heappop(self._due)
            dues = [self._due[0][0] if self._due else None, self._traffic_due()]
            due = min((due for due in dues if due is not None), default=None)
            return None if due is None else min(WAIT_SECONDS_MAX, max(0.0, due - self.clock.now()))

    def _is_stale(self, number: int, entry: Due) -> bool:
        """Whether a timer was cleared or set again, or an outbox turn was moved."""
        if isinstance(entry, OutboxDue):
            return self._outbox_turns.get(entry.peer) != number
        return isinstance(entry, str) and self._timers.get(entry) != number

    def _process_due(self) -> None:
        while self._due and self._due[0][0] <= self.clock.now():
            _, number, entry = heapq.heappop(self._due)
            if isinstance(entry, MessageArrived):
                self._deliver_message(entry)
            elif isinstance(entry, PeerLost):
                self._handle_incoming(entry)
            elif self._is_stale(number, entry):
                continue
            elif isinstance(entry, OutboxDue):
                del self._outbox_turns[entry.peer]
                self._send_ready(entry.peer)
            else:
                del self._timers[entry]
                self._handle(TimerFired(self.clock.now(), entry))

    def _handle_incoming(self, incoming: TransportEvent) -> None:
        now = self.clock.now()
        match incoming:
            case MessageArrived():
                delay = self._injected_delay.delay(incoming.source, incoming.nbytes, now)
                if delay > 0:
                    self._schedule(now + delay, incoming)
                else:
                    self._deliver_message(incoming)
            case Sent(to=to, key=key, size=size):
                assert size is not None
                self._traffic.sent(size)
                self._send_seconds = incoming.seconds
                if not (key or "").startswith(RECORDS_KEY):
                    self._bytes_sent_to[to] = self._bytes_sent_to.get(to, 0) + size.nbytes
                    if self._linked.get(to) == incoming.incarnation:
                        self._handle(dataclasses.replace(incoming, at=now))
            case PeerJoined(peer=peer, incarnation=incarnation):
                self._synchronize_clock()
                if (before := self._linked.pop(peer, None)) is not None:
                    self._drop_queued(peer)
                    self._handle(PeerLost(self.clock.now(), peer, before, LossReason.REPLACED))
                self._linked[peer] = incarnation
                self._ever_linked.add(peer)
                if self._rate_limited is not None:
                    self._rate_limited.open(peer, time.monotonic())
                for send in self._before_link.pop(peer, []):
                    self._send(send)
                self._handle(dataclasses.replace(incoming, at=self.clock.now()))
                self._flush_records()
            case PeerLost(peer=peer, incarnation=incarnation):
                held = [due for due, _, item in self._due if isinstance(item, MessageArrived) and item.source == peer]
                last = max(held, default=now)
                if last > now:  # delayed messages arrived before the link was lost
                    self._schedule(last, incoming)
                elif self._linked.get(peer) == incarnation:
                    del self._linked[peer]
                    self._drop_queued(peer)
                    if self._awaits_state and not self._linked and not self.ended:
                        raise RunFailed(
                            f"rank {self.rank} came back when the other ranks were ending, or were lost as well"
                        )
                    self._handle(dataclasses.replace(incoming, at=now))
                    if peer in self._irreplaceable:
                        self._lose_irreplaceable(incoming)

    def _lose_irreplaceable(self, lost: PeerLost) -> None:
        self._irreplaceable.remove(lost.peer)
        if not self._irreplaceable and lost.reason is not LossReason.CLOSED and not self.ended:
            raise RunFailed(f"rank {lost.peer} was lost ({lost.detail}), and no peer is left to continue with")

    def _synchronize_clock(self) -> None:
        """Adopt the time of rank 0, once, so that the records of all ranks share one time axis."""
        elapsed = self._transport.elapsed_at_join
        if elapsed is not None and not self._is_synchronized:
            self._is_synchronized = True
            before = self.clock.now()
            self.clock.set(*elapsed)
            shift = self.clock.now() - before
            self._due = [(due + shift, number, entry) for due, number, entry in self._due]
            self._idle_since += shift
            self._traffic_recorded_at += shift
            self._traffic.shift(shift)
            self._write_early_records(shift)

    def _has_run_time(self) -> bool:
        return self._is_synchronized or self._has_flushed_early_records or self.rank == 0

    def _write_record(self, record: Record) -> None:
        if self._has_run_time():
            self._writer.write(record)
        else:
            self._records_before_sync.append(record)

    def _write_early_records(self, shift: float = 0.0) -> None:
        """Write the records from before the clock was synchronized: it is now, or they cannot wait any longer."""
        self._has_flushed_early_records, undated, self._records_before_sync = True, self._records_before_sync, []
        for record in undated:
            self._writer.write(msgspec.structs.replace(record, at=record.at + shift))

    def _deliver_message(self, arrived: MessageArrived) -> None:
        message = arrived.message
        if self._linked.get(arrived.source) != arrived.incarnation:
            return  # delayed for so long that its link is gone
        self._traffic.received(wire_size(message))
        if isinstance(message, RecordLines):
            if self._on_remote_records is not None:
                self._on_remote_records(arrived.source, message)
            return
        if self._device is not None:  # messages are received into host memory
            message = message.with_tensors(tensor.to(self._device) for tensor in message.tensors())
        self._handle(dataclasses.replace(arrived, at=self.clock.now(), message=message, keep=lambda: message))

    def _deliver_evaluated(self, event: Event) -> None:
        with self._monitor:
            self._run_guarded(lambda: self._handle(event))

    # Called with the lock held

    def _run_guarded(self, work: Callable[[], None]) -> None:
        """An error in a node ends this runner and wakes all threads that wait for it."""
        try:
            work()
        except Exception as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the run of this rank with an error. May be called with or without the lock."""
        with self._monitor:
            if self.ended:
                return
            failure = error
            if not isinstance(error, OffbeatError):
                failure = RunFailed(f"rank {self.rank} failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
            self._error = failure
            self._monitor.notify_all()
        if self.on_failure is not None:
            self.on_failure(self._error)

    def _handle(self, event: Event) -> None:
        if self.ended:
            return
        for action in list(self._node.handle(event)):
            self._execute(action)

    def _execute(self, action: Action) -> None:
        match action:
            case Report(record=record):
                self._write_record(record)
            case Send():
                self._send(action)
            case Compute():
                self._begin_round(action)
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
                self.finish, self.linked_at_end = action, frozenset(self._linked)
                self._monitor.notify_all()

    def _send(self, send: Send) -> None:
        if isinstance(send.message, Stopped):
            self._send_last_records()
        incarnation = self._linked.get(send.to)
        if incarnation is not None and self._rate_limited is not None:
            self._rate_limited.put(send)
            self._send_ready(send.to)
        elif incarnation is not None:
            self._transport.send(send.to, incarnation, send.message, send.supersedes)
        elif send.to not in self._ever_linked:  # unlike in virtual time, links take a moment to come up
            self._before_link.setdefault(send.to, []).append(send)

    def _begin_round(self, action: Compute) -> None:
        if self._load is None:
            raise ContractViolation(f"rank {self.rank} asked for Compute, but by its strategy it does not compute")
        if self._round is not None:
            raise ContractViolation(f"rank {self.rank} asked for a second Compute while one was outstanding")
        now = self.clock.now()
        delay_seconds, factor = self._injected_delay.next_round_delay()
        live_round = LiveRound(action, now, time.monotonic(), delay_seconds, factor, self._injected_delay.call_seconds)
        live_round.idle_seconds = max(0.0, now - self._idle_since)
        self._write_early_records()
        self._awaits_state = False
        self._load(action.parameters, action.buffers)
        if self._leaving:
            live_round.cancelled.set()
        self._round = live_round
        self._monitor.notify_all()

    def _set_timer(self, name: str, seconds: float) -> None:
        self._timers[name] = self._schedule(self.clock.now() + seconds, name)

    def _schedule(self, at: float, entry: Due) -> int:
        """Put an entry on the heap and let the background thread know; returns the entry's number."""
        number = next(self._entry_numbers)
        heapq.heappush(self._due, (at, number, entry))
        if threading.current_thread() is not self._thread:
            self._transport.wake()
        return number

    # The rate limit

    def _send_ready(self, peer: int) -> None:
        """Send the messages that the rate limit allows now, and schedule the next."""
        assert self._rate_limited is not None
        now = time.monotonic()
        while (send := self._rate_limited.take(peer, now)) is not None:
            self._transport.send(peer, self._linked[peer], send.message, send.supersedes)
        due = self._rate_limited.ready_at(peer, now)
        if due is not None:
            self._outbox_turns[peer] = self._schedule(self.clock.now() + due - now, OutboxDue(peer))
        elif self.ended:
            self._monitor.notify_all()

    def _drop_queued(self, peer: int) -> None:
        """Drop the messages queued for a lost peer."""
        self._outbox_turns.pop(peer, None)
        if self._rate_limited is not None:
            self._rate_limited.lose(peer)
            self._monitor.notify_all()

    def _lift_rate_limit(self) -> None:
        if self._rate_limited is not None:
            self._rate_limited.is_lifted = True
            for peer in list(self._linked):
                self._send_ready(peer)

    def _drain_outbox(self, linger_seconds: float) -> None:
        limited, me = self._rate_limited, threading.current_thread()
        if limited is None or not self._thread.is_alive() or self._thread is me:
            return
        now = time.monotonic()
        in_order = self.finish is not None and self.finish.failure is None
        rest = limited.empty_at(now) - now if in_order else 0.0
        until = now + linger_seconds + rest
        while len(limited) and time.monotonic() < until:
            self._monitor.wait(min(WAIT_SECONDS_MAX, until - time.monotonic()))

    def _record_link_use(self, at: float) -> None:
        if self._rate_limited is not None and not self._link_use_recorded:
            self._link_use_recorded = True
            used = {str(peer): nbytes for peer, nbytes in sorted(self._bytes_sent_to.items())}
            rate = self._rate_limited.bytes_per_second
            self._writer.write(LinkUse(at=at, rank=self.rank, bytes_per_second=rate, used=used))

    # Traffic

    def _traffic_due(self) -> float | None:
        """When the next record of traffic is due; None if nothing is new or the clock is not synchronized."""
        if not self._traffic.moved or self.ended or not self._has_run_time():
            return None
        return self._traffic_recorded_at + TRAFFIC_RECORD_SECONDS

    def _record_traffic(self, at: float) -> None:
        self._traffic_recorded_at = at
        traffic = self._traffic.record(at)
        if traffic is not None:
            self._writer.write(traffic)

    # Records of a rank that shares no directory with rank 0 are sent there

    def _flush_records(self) -> None:
        destination = self._records_destination()
        if isinstance(self._writer, RemoteRecordWriter) and destination is not None:
            self._records_flushed_at = self.clock.now()
            for lines in self._writer.drain(destination):
                self._transport.send(
                    destination, self._linked[destination], lines, f"{RECORDS_KEY}{next(self._entry_numbers)}"
                )

    def _records_destination(self) -> int | None:
        """The rank that stores the records: rank 0, or the lowest linked rank once a decentralized run has lost it."""
        if 0 in self._linked or self._on_remote_records is None or 0 not in self._ever_linked:
            return 0 if 0 in self._linked else None
        return min((rank for rank in self._linked if rank < self.rank), default=None)

    def _send_last_records(self) -> None:
        """Send all records before `Stopped`, the last message that rank 0 waits for."""
        if isinstance(self._writer, RemoteRecordWriter):
            ended = self.ended_record()
            self._record_traffic(ended.at)
            self._record_link_use(ended.at)
            self._writer.write(ended)
            self._flush_records()

    def ended_record(self) -> Ended:
        return Ended(
            at=self.clock.now(),
            bytes_sent=self._traffic.bytes_sent,
            messages_sent=self._traffic.messages_sent,
            failure=self.failure,
            rank=self.rank,
        )
