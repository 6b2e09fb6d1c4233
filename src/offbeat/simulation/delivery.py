"""Delivery of messages in virtual time: transmission, propagation, arrival.

`network.py` has the state of the links, and `link_control.py` takes them down and up.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.core.actions import Send
from offbeat.core.bandwidth import enqueue
from offbeat.core.events import Event, MessageArrived, Sent
from offbeat.core.messages import Message
from offbeat.core.wire_size import MessageSize, wire_size
from offbeat.errors import ContractViolation
from offbeat.records.traffic import TrafficCounter
from offbeat.simulation.event_queue import EventQueue
from offbeat.simulation.leases import Lease, SentTensors
from offbeat.simulation.link_control import LinkControl
from offbeat.simulation.network import LinkState, Outbox, SimulatedNetwork
from offbeat.simulation.process import Process


class Delivery:
    """Carries out `Send`."""

    def __init__(
        self,
        queue: EventQueue,
        processes: Sequence[Process],
        network: SimulatedNetwork,
        links: LinkControl,
        sent: SentTensors,
        *,
        strict: bool,
    ) -> None:
        """Nothing is on its way yet.

        queue: the clock.
        processes: by rank, senders and receivers.
        network: the links.
        links: takes down the links of a finished sender when its last message has left.
        sent: receives the tensors of all messages.
        strict: lease messages, so that they can be overwritten after they were handled.
        """
        self._queue = queue
        self._processes = processes
        self._network = network
        self._links = links
        self._sent = sent
        self._strict = strict
        self.traffic = TrafficCounter()
        """The messages of all ranks together."""
        self._sized: tuple[Message | None, MessageSize | None] = None, None
        """The message that was measured last: a hub sends the same one to all workers."""

    def send(self, process: Process, send: Send) -> None:
        """Queue a message of a process to one of its peers; it is dropped if the node's incarnation of it is gone."""
        link = self._network.link(process.rank, send.to)
        for tensor in send.message.tensors():
            self._sent.add(tensor)
        if not link.up or process.known.get(send.to) != link.incarnation:
            return
        outbox = link.outboxes[process.rank]
        if outbox.is_unlimited and not outbox.queue and outbox.transmitting is None:
            self._depart(self._begin_transmission(process.rank, link, outbox, send))
        else:
            enqueue(outbox.queue, send)
            self._transmit(process.rank, link)

    def _transmit(self, rank: int, link: LinkState) -> None:
        """Start to transmit the queued messages of a rank to one of its peers, as far as possible now."""
        outbox = link.outboxes[rank]
        while outbox.transmitting is None and outbox.queue and self._may_transmit(rank, link, outbox):
            transmission = self._begin_transmission(rank, link, outbox, outbox.queue.popleft())
            if outbox.sender_card is not None:
                ends = self._queue.now + transmission.seconds
                self._queue.schedule(ends, functools.partial(self._transmitted, transmission))
            else:
                self._depart(transmission)

    def _may_transmit(self, rank: int, link: LinkState, outbox: Outbox) -> bool:
        """Whether rate limit and card allow the next message to leave; if not, `_transmit` is called again later."""
        to = outbox.queue[0].to
        if outbox.rate_limit is not None:
            due = outbox.rate_limit.ready_at(wire_size(outbox.queue[0].message).nbytes, self._queue.now)
            if due > self._queue.now:
                if due != outbox.ready_at_scheduled:
                    outbox.ready_at_scheduled = due
                    self._queue.schedule(due, functools.partial(self._rate_limit_ready, rank, link, due))
                return False
        if outbox.sender_card is not None and outbox.sender_card.sending is not None:
            outbox.sender_card.waiting[to] = None
            return False
        return True

    def _rate_limit_ready(self, rank: int, link: LinkState, due: float) -> None:
        outbox = link.outboxes[rank]
        if outbox.ready_at_scheduled == due:
            outbox.ready_at_scheduled = None
            self._transmit(rank, link)

    def _begin_transmission(self, rank: int, link: LinkState, outbox: Outbox, send: Send) -> Transmission:
        outbox.transmitting = send
        size = self._size(send.message)
        self.traffic.sent(size)
        if outbox.rate_limit is not None:
            outbox.rate_limit.consume(size.nbytes)
            outbox.limited_bytes += size.nbytes
        seconds = 0.0
        if outbox.sender_card is not None:
            outbox.sender_card.sending = send
            seconds = size.nbytes / outbox.sender_card.bytes_per_second
        return Transmission(rank, send, link, link.incarnation, size, self._queue.now, seconds)

    def _size(self, message: Message) -> MessageSize:
        measured, size = self._sized
        if measured is not message or size is None:
            size = wire_size(message)
            self._sized = message, size
        return size

    def _transmitted(self, transmission: Transmission) -> None:
        """The last byte has left: the card continues with the next waiting peer."""
        rank, card = transmission.rank, transmission.link.outboxes[transmission.rank].sender_card
        if transmission.is_current:
            self._depart(transmission)
            self._transmit(rank, transmission.link)
        if card is None or card.sending is not transmission.send:
            return
        card.sending = None
        while card.sending is None and (peer := card.next()) is not None:
            self._transmit(rank, self._network.link(rank, peer))

    def _depart(self, transmission: Transmission) -> None:
        rank = transmission.rank
        process = self._processes[rank]
        process.send_seconds = transmission.seconds
        process.emit(self._queue.now, transmission.sent)
        free_at = self._propagate(transmission)
        if free_at > self._queue.now:
            self._queue.schedule(free_at, functools.partial(self._receiver_ready, transmission))
        else:
            self._end_transmission(transmission)

    def _receiver_ready(self, transmission: Transmission) -> None:
        """The receiver's card has received the message, so the next one of its link may start."""
        if transmission.is_current:
            self._end_transmission(transmission)
            self._transmit(transmission.rank, transmission.link)

    def _end_transmission(self, transmission: Transmission) -> None:
        transmission.link.outboxes[transmission.rank].transmitting = None
        if self._processes[transmission.rank].finish is not None:
            self._links.close(transmission.rank, transmission.send.to)

    def _propagate(self, transmission: Transmission) -> float:
        """Schedule the arrival of a message that has left; returns when its link is free for the next one."""
        send, now, outbox = transmission.send, self._queue.now, transmission.link.outboxes[transmission.rank]
        delay = outbox.config.latency_seconds
        last = now + delay
        if outbox.config.delay_std_seconds > 0:
            delay += outbox.config.draw_delay(outbox.delay_random)
        arrives = now + delay
        free_at = now
        if outbox.receiver_card is not None:
            latency = outbox.config.latency_seconds
            received = outbox.receiver_card.receive(transmission.started_at + latency, last, transmission.size.nbytes)
            if received > last:
                arrives, free_at = received + delay - latency, received - latency
        outbox.last_arrival = max(outbox.last_arrival, arrives)
        self._processes[send.to].emit(arrives, functools.partial(self._arrive, transmission))
        return free_at

    def _arrive(self, transmission: Transmission, at: float) -> Event | None:
        """The event of a message that arrives now; None if its link is gone or holds messages back."""
        link, send, source = transmission.link, transmission.send, transmission.rank
        if not link.up or link.incarnation != transmission.incarnation:
            return None
        if link.held_until > at:
            self._processes[send.to].emit(link.held_until, functools.partial(self._arrive, transmission))
            return None
        message = send.message
        self.traffic.received(transmission.size)
        for tensor in message.tensors():
            if self._sent.was_modified(tensor):
                raise ContractViolation(f"rank {source} changed a tensor of {type(message).__name__} after sending it")
        if self._strict:
            lease = Lease(message.copy())
            return MessageArrived(at, source, lease.message, lease, link.incarnation, transmission.size.nbytes)
        return MessageArrived(at, source, message, lambda: message, link.incarnation, transmission.size.nbytes)


@dataclass(slots=True)
class Transmission:
    """A message on its way, from the start of its transmission, which takes `seconds`.

    Not frozen: that would make the creation of one, which happens for every message, four times as slow.
    """

    rank: int
    send: Send
    link: LinkState
    incarnation: int
    size: MessageSize
    started_at: float
    seconds: float

    def sent(self, at: float) -> Sent:
        """The event for its sender."""
        return Sent(at, self.send.to, self.send.supersedes, self.incarnation, self.size, self.seconds)

    @property
    def is_current(self) -> bool:
        """Whether its link has not been cut since, and is still busy with it."""
        return self.link.incarnation == self.incarnation and self.link.outboxes[self.rank].transmitting is self.send
