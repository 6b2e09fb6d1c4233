"""What a live rank receives: turns the events of the transport into events of the node.

Injected delay is added here, above the transport. Messages of links that are gone are dropped, and so is what the node
has no part in: records of other ranks, and that records were sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from offbeat.core.device_transfer import to_device
from offbeat.core.events import Event, LossReason, MessageArrived, PeerJoined, PeerLost, Sent
from offbeat.core.wire_size import wire_size
from offbeat.errors import RunFailed
from offbeat.live.due_queue import DueQueue
from offbeat.live.live_backend import LiveBackend
from offbeat.live.live_outbox import LiveOutbox
from offbeat.live.record_sink import RecordSink
from offbeat.live.runner_options import RunnerOptions
from offbeat.records.traffic import TrafficCounter
from offbeat.transports.remote_records import RecordLines


class Inbox:
    """The received events of one rank. Not thread-safe: the caller holds the lock of the runner.

    options: rank, delays, and which peers can be replaced.
    handle: lets the node handle an event.
    backend: knows whether the node has begun to compute.
    outbox, due, records, traffic: the other parts of the runner.
    """

    def __init__(
        self,
        options: RunnerOptions,
        handle: Callable[[Event], None],
        backend: LiveBackend,
        outbox: LiveOutbox,
        due: DueQueue,
        records: RecordSink,
        traffic: TrafficCounter,
    ) -> None:
        self._rank = options.rank
        self._clock = options.clock
        self._injected_delay = options.injected_delay
        self._irreplaceable = set(options.irreplaceable)
        self._is_rejoining = options.is_rejoining
        self._device = options.device if options.device is not None and options.device.type != "cpu" else None
        self._handle = handle
        self._backend = backend
        self._outbox = outbox
        self._due = due
        self._records = records
        self._traffic = traffic
        self.send_seconds = 0.0
        """For how long the last message of the node has occupied its link."""

    def receive(self, event: Event) -> None:
        """Process an event of the transport, or a delayed loss."""
        match event:
            case MessageArrived(at=now):
                delay = self._injected_delay.delay(event.source, event.nbytes, now)
                if delay > 0:
                    self._due.put(now + delay, event)
                else:
                    self.deliver(event)
            case Sent():
                self._on_sent(event)
            case PeerJoined(at=now, peer=peer):
                if (before := self._outbox.close(peer)) is not None:
                    self._handle(PeerLost(now, peer, before, LossReason.REPLACED))
                self._outbox.open(peer, event.incarnation, now)
                self._handle(event)
                self._records.flush(now)
            case PeerLost(at=now, peer=peer):
                last = self._due.last_message_at(peer)
                if last is not None and last > now:  # delayed messages arrived before the link was lost
                    self._due.put(last, event)
                elif self._outbox.linked.get(peer) == event.incarnation:
                    self._on_lost(event)

    def deliver(self, event: MessageArrived) -> None:
        """Pass a message on, after its delay if there is one."""
        message = event.message
        if self._outbox.linked.get(event.source) != event.incarnation:
            return  # delayed for so long that its link is gone
        self._traffic.received(wire_size(message))
        if isinstance(message, RecordLines):
            self._records.receive(event.source, message)
            return
        if self._device is not None:  # messages are received into host memory
            message = message.with_tensors(to_device(tensor, self._device) for tensor in message.tensors())
            event = dataclasses.replace(event, message=message, keep=lambda: message)
        self._handle(event)

    def _on_sent(self, event: Sent) -> None:
        assert event.size is not None
        self._traffic.sent(event.size)
        if issubclass(event.size.kind, RecordLines):  # the node has not sent it
            return
        self.send_seconds = event.seconds
        self._outbox.count(event.to, event.size.nbytes)
        if self._outbox.linked.get(event.to) == event.incarnation:
            self._handle(event)

    def _on_lost(self, event: PeerLost) -> None:
        self._outbox.close(event.peer)
        if self._is_rejoining and not self._backend.has_computed and not self._outbox.linked:
            raise RunFailed(f"rank {self._rank} came back when the other ranks were ending, or were lost as well")
        self._handle(event)
        if event.peer in self._irreplaceable:
            self._irreplaceable.remove(event.peer)
            if not self._irreplaceable and event.reason is not LossReason.CLOSED:
                raise RunFailed(f"rank {event.peer} was lost ({event.detail}), and no peer is left to continue with")
