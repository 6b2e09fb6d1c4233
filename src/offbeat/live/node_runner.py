"""The live engine: one node, the wall clock and real messages.

A node is protected by a monitor (one lock and condition per `NodeRunner`) and has no thread of its own. The thread that
has an event takes the lock, lets the node handle the event and carries out the actions that it returns: the thread of
the training loop for results, that of a link for what it has received, an evaluation thread for evaluations, and a
background thread for timers and all else. So a user's own training loop and the one of `offbeat train` are driven in
the same way.

What links receive goes through the queue of the transport, and their threads do not wait for the lock: the thread that
holds it handles what is queued. A thread switch takes longer than most messages do.

The runner has the lock and dispatches. Its parts do the rest: `Inbox` turns what was received into events of the node,
`LiveBackend` carries out actions, `LiveOutbox` sends, `RecordSink` writes records, and `DueQueue` holds what happens
later.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from offbeat.core.actions import Finish, Send
from offbeat.core.events import (
    Event,
    GradientReady,
    Leave,
    MessageArrived,
    PeerJoined,
    PeerLost,
    Started,
    StepReady,
    TimerFired,
)
from offbeat.core.messages import Buffers, Stopped
from offbeat.core.strategy import Node
from offbeat.engine.dispatcher import dispatch
from offbeat.errors import InvalidMessage, LinkLost, OffbeatError, RunFailed
from offbeat.live.due_queue import DueQueue, Entry, OutboxDue, TimerDue
from offbeat.live.inbox import Inbox
from offbeat.live.live_backend import LiveBackend
from offbeat.live.live_outbox import LiveOutbox
from offbeat.live.live_round import LiveRound
from offbeat.live.record_sink import FLUSH_SECONDS, RecordSink
from offbeat.live.runner_options import RunnerOptions
from offbeat.records.schema import Ended, Notice, Round
from offbeat.records.traffic import TrafficCounter
from offbeat.transports.tensor_threads import TensorThread
from offbeat.transports.transport import QueuedTransport

VIOLATIONS_MAX = 3
"""A rank that has sent so many invalid messages may not connect again."""

WAIT_SECONDS_MAX = 3600.0
"""Longest single wait: system calls overflow on very large timeouts."""

TURNS_MAX = 4
EVENTS_PER_TURN_MAX = 8
"""The thread of a link handles that many events at a time, that often; then it must read what comes over the link."""

LEAVE_SECONDS = 10.0
"""How long a node may take to finish after `Leave` before it is abandoned."""

ResultEvent = Callable[..., GradientReady | StepReady]
"""Creates the event that ends a computation; both kinds have the same fields in the same order."""


class NodeRunner:
    """Drives one node: feeds it events and carries out its actions, from `start` on.

    Methods may be called from any thread.

    node: the node to drive.
    transport: the links of this rank.
    options: its rank, clock, records, delays and limits.
    """

    linked_at_end: frozenset[int] = frozenset()
    """The peers that were linked when the node finished."""
    on_failure: Callable[[BaseException], None] | None = None
    _error: BaseException | None = None
    _closed = False
    _is_draining = False
    """Whether `close` waits until the outbox is empty."""
    _idle_since = 0.0
    _is_synchronized = False

    def __init__(self, node: Node, transport: QueuedTransport, options: RunnerOptions) -> None:
        self.rank = options.rank
        self.clock = options.clock
        self._hub = options.hub
        self._node = node
        self._transport = transport
        transport.clock = options.clock.now
        self._monitor = threading.Condition()
        self._thread = TensorThread(self._receive_loop, f"offbeat rank {self.rank}")
        self._due = DueQueue()
        self._holder: int | None = None
        """The thread that handles an event or carries out an action."""
        self._next_look = 0.0
        """When the background thread looks next for what is due, if nothing wakes it before."""
        self._outbox = LiveOutbox(transport, self._due, options.bytes_per_second)
        self._traffic = TrafficCounter(self.rank)
        self._records = RecordSink(
            self.rank,
            options.writer,
            transport,
            self._outbox,
            self._traffic,
            options.on_remote_records,
            options.records_max_bytes,
        )
        self._violations: Counter[int] = Counter()
        self._distrusted: dict[int, int] = {}
        """Ranks whose links are closed because of what they sent, and the incarnations of these links."""
        evaluator = None
        if options.measure is not None:
            evaluator = options.make_evaluator(options.measure, self.deliver, self.fail, self.clock.now)
        parts = self._outbox, self._due, self._records
        self._backend = LiveBackend(options, *parts, evaluator)
        self._inbox = Inbox(options, self._handle, self._backend, *parts, self._traffic)

    # Public interface

    def start(self, *, threaded: bool = True) -> None:
        """Deliver `Started`, and start the background thread; without it, the caller delivers what is received."""
        with self._turn():
            now = self._idle_since = self.clock.now()
            self._traffic.begin(now)
            self._run_guarded(lambda: self._handle(Started(now)))
        if threaded:
            self._transport.process_in_links(self._process_received)
            self._thread.start()

    @property
    def finish(self) -> Finish | None:
        """The `Finish` action of the node; None before."""
        return self._backend.finished

    @property
    def ended(self) -> bool:
        return self.finish is not None or self._error is not None

    @property
    def round(self) -> LiveRound | None:
        """The outstanding round; None if there is none, or the run has ended."""
        with self._monitor:
            return None if self.ended else self._backend.round

    def next_round(self) -> LiveRound | None:
        """Block until the node asks for a computation; None once the run has ended."""
        with self._monitor:
            self._monitor.wait_for(lambda: self._backend.round is not None or self.ended)
            return self.round

    def complete(
        self,
        result: Tensor,
        loss: float | None,
        buffers: Buffers,
        finite: bool,
        ready: ResultEvent = GradientReady,
        **more: Any,
    ) -> None:
        """End the outstanding round.

        result: the sum of gradients over its samples, or the optimizer step; owned by the engine from here on.
        loss: the sum of the losses over its samples; None if unknown.
        buffers: the model's buffers after the round.
        finite: whether result, loss and buffers are finite.
        ready: the kind of event that the node gets.
        more: further fields of that event.
        """
        with self._turn(looks_again=True):
            done, self._backend.round = self._backend.round, None
            if done is None or self.ended:
                return
            now, action = self.clock.now(), done.action
            seconds = now - done.start
            draws = (action.draw, action.draw + done.samples)
            times = seconds, done.induced_seconds
            event = ready(now, result, done.samples, loss, buffers, action.version, draws, *times, finite, **more)
            idle_seconds, self._idle_since = max(0.0, done.start - self._idle_since), now
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
                idle_seconds=idle_seconds,
                send_seconds=self._inbox.send_seconds,
                finite=finite,
            )

            def write_and_handle() -> None:
                if done.samples or not self._backend.is_leaving:  # a loop that was left has begun no round
                    self._records.write(record)
                self._handle(event)
                self._records.flush(now, FLUSH_SECONDS)

            self._run_guarded(write_and_handle)
        self._process_received()  # that the result was sent, above all

    def deliver(self, event: Event) -> None:
        """Let the node handle an event that neither a message nor a timer has caused, such as `Evaluated`."""
        with self._turn():
            self._run_guarded(lambda: self._handle(event))

    def notice(self, text: str) -> None:
        """Record a message for the user."""
        with self._turn():
            self._run_guarded(lambda: self._records.write(Notice(at=self.clock.now(), rank=self.rank, text=text)))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the node has finished or failed, at most `timeout` seconds; returns whether it has."""
        with self._monitor:
            return self._monitor.wait_for(lambda: self.ended, timeout)

    def process(self, received: Event | None) -> None:
        """Without the background thread: handle what was received, if anything, then what is due.

        The tensors of a message are reused after this returns.
        """
        with self._turn():
            if received is not None and not self._closed:
                self._take(received)
            self._process_due()

    def next_due(self) -> float | None:
        """When something is due that no message announces; None if nothing is."""
        with self._monitor:
            return self._next_due()

    def leave(self, complete_empty: Callable[[], None] | None = None, *, stay: bool = False) -> None:
        """Ask the node to finish in order, and wait until it has.

        complete_empty: completes an outstanding computation, which then has no samples.
        stay: keep serving the peers until they have finished, however long that takes; otherwise wait for at most
            `LEAVE_SECONDS` and send queued messages at once, whatever the rate limit.
        """
        with self._turn():
            self._backend.is_leaving = True
            if not stay:
                self._outbox.lift_limit(self.clock.now())
            if not self.ended:
                self._run_guarded(lambda: self._handle(Leave(self.clock.now(), stay)))
            outstanding = self._backend.round
            if outstanding is not None and not outstanding.cancelled.is_set():
                return  # the node ignored `Leave`: it is abandoned
            if outstanding is not None and complete_empty is not None and not self.ended:
                outstanding.samples = 0
                complete_empty()
        self.wait(None if stay else LEAVE_SECONDS)

    def inspect(self, read: Callable[[Node], None]) -> None:
        """Call `read(node)` while the node handles no event and all records are written, for checkpoints."""
        with self._monitor:
            self._records.write_pending()
            read(self._node)

    def replace_node(self, node: Node) -> None:
        """Go on with a node that was restored from a state; the peers that are linked join it."""
        with self._turn():
            self._node = node
            self._due.clear_timers()
            now = self.clock.now()
            events: list[Event] = [Started(now)]
            events += [PeerJoined(now, peer, number) for peer, number in sorted(self._outbox.linked.items())]
            for event in events:
                self._run_guarded(functools.partial(self._handle, event))

    def linked(self) -> frozenset[int]:
        """The peers that are linked now."""
        with self._monitor:
            return frozenset(self._outbox.linked)

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

    def _drain_outbox(self, linger_seconds: float) -> None:
        if not self._thread.is_alive() or self._thread is threading.current_thread():
            return
        self._is_draining = True
        now = self.clock.now()
        in_order = self.finish is not None and self.finish.failure is None
        until = now + linger_seconds + (self._outbox.empty_at(now) - now if in_order else 0.0)
        while not self._outbox.is_empty and (left := until - self.clock.now()) > 0:
            self._monitor.wait(min(WAIT_SECONDS_MAX, left))

    def _close(self, linger_seconds: float) -> None:
        with self._monitor:
            self._closed = True
        self._backend.close()
        self._transport.close(linger_seconds)
        self._transport.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(linger_seconds)

    def check(self) -> None:
        """Raise the error that ended the run, if there is one."""
        if self._error is not None:
            raise self._error
        if self.finish is not None and self.finish.failure is not None:
            failure = self.finish.failure
            if self._hub is not None and self._hub not in self.linked_at_end:
                raise LinkLost(self._hub, failure, failure)
            raise RunFailed(failure)

    @property
    def failure(self) -> str | None:
        if self._error is not None:
            return str(self._error) or type(self._error).__name__
        return self.finish.failure if self.finish is not None else None

    def ended_record(self) -> Ended:
        return Ended(
            at=self.clock.now(),
            bytes_sent=self._traffic.bytes_sent,
            messages_sent=self._traffic.messages_sent,
            failure=self.failure,
            rank=self.rank,
        )

    def write_last(self, record: Ended) -> None:
        """Write the last records of this rank; a failure to do so fails the run."""
        with self._turn():
            self._run_guarded(lambda: self._records.write_last(record))

    # The background thread

    def _receive_loop(self) -> None:
        try:
            while not self._closed:
                with self._monitor:
                    now, due = self.clock.now(), self._next_due()
                    self._next_look = math.inf if due is None else due
                self._transport.wait(None if due is None else min(WAIT_SECONDS_MAX, max(0.0, due - now)))
                with self._turn(looks_again=True):
                    self._process_queued()
        except BaseException as error:
            self.fail(error)

    # Any thread

    @contextmanager
    def _turn(self, looks_again: bool = False) -> Iterator[None]:
        """Hold the lock in order to handle events.

        At the end the background thread learns what is due next, and of messages that the threads of links have left to
        this one, unless the caller `looks_again` for these.
        """
        with self._monitor:
            outer, self._holder = self._holder, threading.get_ident()
            try:
                yield
            finally:
                self._holder = outer
                due = None if outer is not None else self._next_due()
                if due is not None and due < self._next_look:
                    self._transport.wake()
        if not looks_again and self._transport.has_received:
            self._transport.wake()

    def _process_received(self) -> None:
        """Handle what was received, unless another thread has its turn, which then sees to it."""
        if self._holder == threading.get_ident():
            return
        for _ in range(TURNS_MAX):
            if self._closed or not self._transport.has_received:
                return
            if not self._monitor.acquire(blocking=False):
                if self._holder is None:  # the lock is held for something else, by a thread that sees to nothing
                    self._transport.wake()
                return
            try:
                with self._turn(looks_again=True):
                    self._process_queued()
            except Exception as error:
                self.fail(error)
            finally:
                self._monitor.release()
        if self._transport.has_received:  # left to the background thread, since this link is not read meanwhile
            self._transport.wake()

    # Called with the lock held

    def _process_queued(self) -> None:
        for _ in range(EVENTS_PER_TURN_MAX):
            if self._closed or (received := self._transport.receive_now()) is None:
                break
            self._take(received)
        self._process_due()

    def _take(self, received: Event) -> None:
        if isinstance(received, PeerJoined) and self._synchronize_clock():
            received = dataclasses.replace(received, at=self.clock.now())
        self._run_guarded(functools.partial(self._receive, self._inbox.receive, received))

    def _process_due(self) -> None:
        if self._closed:
            return
        self._run_guarded(self._handle_due)
        if self._is_draining:
            self._monitor.notify_all()
        if not self.ended:
            self._run_guarded(lambda: self._records.record_traffic_if_due(self.clock.now()))

    def _next_due(self) -> float | None:
        dues = (self._due.next_at(), None if self.ended else self._records.traffic_due())
        return min((due for due in dues if due is not None), default=None)

    def _handle_due(self) -> None:
        while (entry := self._due.pop(self.clock.now())) is not None:
            self._on_due(entry)

    def _on_due(self, entry: Entry) -> None:
        match entry:
            case TimerDue(name=name):
                self._handle(TimerFired(self.clock.now(), name))
            case OutboxDue(peer=peer):
                self._outbox.send_ready(peer, self.clock.now())
            case MessageArrived():
                self._receive(self._inbox.deliver, dataclasses.replace(entry, at=self.clock.now()))
            case PeerLost():
                self._inbox.receive(dataclasses.replace(entry, at=self.clock.now()))

    def _synchronize_clock(self) -> bool:
        """Adopt the time of rank 0, once, so that the records of all ranks share one time axis."""
        elapsed = self._transport.elapsed_at_join
        if elapsed is None or self._is_synchronized:
            return False
        self._is_synchronized = True
        before = self.clock.now()
        self.clock.set(*elapsed)
        shift = self.clock.now() - before
        self._next_look += shift
        for part in (self._due, self._outbox, self._traffic, self._backend):
            part.shift(shift)
        self._idle_since += shift
        self._run_guarded(lambda: self._records.date(shift))
        return True

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
            is_last = isinstance(action, Send) and isinstance(action.message, Stopped) and not action.message.stays
            if is_last:
                self._records.send_last(self.ended_record())
            dispatch(action, self._backend)
        if self.finish is not None:
            self.linked_at_end = frozenset(self._outbox.linked)
        if self.finish is not None or self._backend.round is not None:
            self._monitor.notify_all()

    def _receive(self, receive: Callable[[Any], None], event: Event) -> None:
        """Receive an event; a message that is invalid is its sender's error, and must not end this rank."""
        if not isinstance(event, MessageArrived):
            receive(event)
        elif self._distrusted.get(event.source) != event.incarnation:
            try:
                receive(event)
            except InvalidMessage as error:
                self._disconnect(event, error)

    def _disconnect(self, event: MessageArrived, error: InvalidMessage) -> None:
        """Close the link over which an invalid message came. A rank that sends too many is refused from then on."""
        self._distrusted[event.source] = event.incarnation
        self._violations[event.source] += 1
        count = self._violations[event.source]
        is_refused = count >= VIOLATIONS_MAX
        end = "its link is closed" + (f", and after {count} such messages it is refused" if is_refused else "")
        self._records.write(Notice(at=self.clock.now(), rank=self.rank, text=f"{error}; {end}"))
        self._transport.disconnect(event.source, event.incarnation, str(error), final=is_refused)
