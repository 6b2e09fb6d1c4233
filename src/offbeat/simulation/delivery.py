"""Delivery of messages in virtual time: transmission, propagation, arrival, and links that go down and up.

`network.py` has the state of the links; this module schedules the events.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from offbeat.core.actions import Send
from offbeat.core.bandwidth import enqueue
from offbeat.core.events import (
    Event,
    GradientReady,
    LossReason,
    MessageArrived,
    PeerJoined,
    PeerLost,
    Sent,
    StepReady,
)
from offbeat.core.messages import Message
from offbeat.core.wire_size import MessageSize, wire_size
from offbeat.errors import ContractViolation
from offbeat.records.traffic import TrafficCounter
from offbeat.simulation.network import LinkState, Outbox
from offbeat.simulation.state import SimulationState


class SentTensors:
    """The tensors that have been sent, by identity; entries disappear with their tensors.

    A sent tensor is immutable by contract, so ranks share it without a copy, and a modification is detected.
    """

    def __init__(self) -> None:
        self._versions: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def add(self, tensor: Tensor) -> None:
        key = id(tensor)
        if key not in self._versions:
            forget = self._versions.pop
            self._versions[key] = weakref.ref(tensor, lambda _: forget(key, None)), tensor._version

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._versions

    def was_modified(self, tensor: Tensor) -> bool:
        """Whether a tensor was changed in place after it was sent, by torch's version counter."""
        entry = self._versions.get(id(tensor))
        return entry is not None and entry[1] != tensor._version


class Delivery:
    """Carries out `Send`, and takes links down and up."""

    def __init__(self, state: SimulationState) -> None:
        self._state = state
        self.sent = SentTensors()
        self.traffic = TrafficCounter()

    def record_traffic(self, at: float) -> None:
        """Write the traffic of all ranks together."""
        traffic = self.traffic.record(at)
        if traffic is not None:
            self._state.writer.write(traffic)

    def send(self, rank: int, send: Send) -> None:
        link = self._state.network.link(rank, send.to)
        if link is None:
            raise ContractViolation(f"rank {rank} sent to {send.to}, which its strategy does not name as a peer")
        for tensor in send.message.tensors():
            self.sent.add(tensor)
        if link.up and self._state.processes[rank].known.get(send.to) == link.incarnation:
            enqueue(link.outboxes[rank].queue, send)
            self._transmit(rank, link)

    def _transmit(self, rank: int, link: LinkState) -> None:
        """Start to transmit the queued messages of a rank to one of its peers, as far as possible now."""
        outbox = link.outboxes[rank]
        while outbox.transmitting is None and outbox.queue and self._may_transmit(rank, link, outbox):
            transmission = self._begin_transmission(rank, link, outbox)
            if outbox.sender_card is not None:
                ends = self._state.now + transmission.seconds
                self._state.schedule(ends, rank, functools.partial(self._transmitted, transmission))
            else:
                self._depart(transmission)

    def _may_transmit(self, rank: int, link: LinkState, outbox: Outbox) -> bool:
        """Whether rate limit and card allow the next message to leave; if not, `_transmit` is called again later."""
        to = outbox.queue[0].to
        if outbox.rate_limit is not None:
            due = outbox.rate_limit.ready_at(wire_size(outbox.queue[0].message).nbytes, self._state.now)
            if due > self._state.now:
                if due != outbox.ready_at_scheduled:
                    outbox.ready_at_scheduled = due
                    self._state.schedule(due, rank, functools.partial(self._rate_limit_ready, rank, link, due))
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

    def _begin_transmission(self, rank: int, link: LinkState, outbox: Outbox) -> Transmission:
        send = outbox.transmitting = outbox.queue.popleft()
        size = wire_size(send.message)
        self.traffic.sent(size)
        if outbox.rate_limit is not None:
            outbox.rate_limit.consume(size.nbytes)
            outbox.limited_bytes += size.nbytes
        seconds = 0.0
        if outbox.sender_card is not None:
            outbox.sender_card.sending = send
            seconds = size.nbytes / outbox.sender_card.bytes_per_second
        return Transmission(rank, send, link, link.incarnation, size, self._state.now, seconds)

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
            self._transmit(rank, self.link(rank, peer))

    def _depart(self, transmission: Transmission) -> None:
        rank = transmission.rank
        self._state.processes[rank].send_seconds = transmission.seconds
        self._state.emit(self._state.now, rank, transmission.sent)
        free_at = self._propagate(transmission)
        if free_at > self._state.now:
            self._state.schedule(free_at, rank, functools.partial(self._receiver_ready, transmission))
        else:
            self._end_transmission(transmission)

    def _receiver_ready(self, transmission: Transmission) -> None:
        """The receiver's card has received the message, so the next one of its link may start."""
        if transmission.is_current:
            self._end_transmission(transmission)
            self._transmit(transmission.rank, transmission.link)

    def _end_transmission(self, transmission: Transmission) -> None:
        transmission.link.outboxes[transmission.rank].transmitting = None
        if self._state.processes[transmission.rank].finish is not None:
            self.close(transmission.rank, transmission.send.to)

    def _propagate(self, transmission: Transmission) -> float:
        """Schedule the arrival of a message that has left; returns when its link is free for the next one."""
        send, now, outbox = transmission.send, self._state.now, transmission.link.outboxes[transmission.rank]
        delay = outbox.config.latency_seconds
        last = now + delay
        if outbox.config.delay_std_seconds > 0:
            delay += outbox.config.draw_delay(self._state.processes[send.to].delay_random)
        arrives = now + delay
        free_at = now
        if outbox.receiver_card is not None:
            latency = outbox.config.latency_seconds
            received = outbox.receiver_card.receive(transmission.started_at + latency, last, transmission.size.nbytes)
            if received > last:
                arrives, free_at = received + delay - latency, received - latency
        outbox.last_arrival = max(outbox.last_arrival, arrives)
        self._state.emit(arrives, send.to, functools.partial(self._arrive, transmission))
        return free_at

    def _arrive(self, transmission: Transmission, at: float) -> Event | None:
        """The event of a message that arrives now; None if its link is gone or holds messages back."""
        link, send, source = transmission.link, transmission.send, transmission.rank
        if not link.up or link.incarnation != transmission.incarnation:
            return None
        if link.held_until > at:
            self._state.emit(link.held_until, send.to, functools.partial(self._arrive, transmission))
            return None
        message = send.message
        self.traffic.received(transmission.size)
        for tensor in message.tensors():
            if self.sent.was_modified(tensor):
                raise ContractViolation(f"rank {source} changed a tensor of {type(message).__name__} after sending it")
        if self._state.strict:
            lease = Lease(message.copy())
            return MessageArrived(at, source, lease.message, lease, link.incarnation, transmission.size.nbytes)
        return MessageArrived(at, source, message, lambda: message, link.incarnation, transmission.size.nbytes)

    def close(self, rank: int, peer: int) -> None:
        """Take down the link of a finished process once its last message has arrived; the peer gets `PeerLost`."""
        link = self.link(rank, peer)
        outbox = link.outboxes[rank]
        if not link.up or outbox.transmitting is not None or outbox.queue or not self._state.processes[peer].active:
            return
        noticed = self._state.now + self._state.scenario.cluster.crash_seen_seconds
        gone = max(noticed, outbox.last_arrival, link.held_until)
        self._state.schedule(gone, peer, functools.partial(self._end_link, rank, peer))

    def _end_link(self, rank: int, peer: int) -> None:
        self.cut(rank, peer, f"end of {rank}", notify=(peer,), loss=LossReason.CLOSED)

    def announce(self, a: int, b: int) -> None:
        """Send `PeerJoined` to both ends of a link."""
        self._notify(PeerJoined, a, b, notify=(a, b))

    def cut(self, a: int, b: int, reason: str, notify: tuple[int, ...], loss: LossReason = LossReason.BROKEN) -> None:
        """Take a link down. It stays down until `restore` was called for every reason that it was cut for.

        a, b: the ends of the link.
        reason: identifies this cut; a second call with the same reason has no effect.
        notify: the ends that get `PeerLost`.
        loss: the reason in `PeerLost`.
        """
        link = self.link(a, b)
        if reason in link.cuts:
            return
        was_up = link.up
        link.cuts.add(reason)
        link.cut()
        if was_up:
            self._notify(functools.partial(PeerLost, reason=loss, detail=reason), a, b, notify)

    def restore(self, a: int, b: int, reason: str) -> None:
        """Remove one reason why a link is down; the last one removed brings it up under the next incarnation."""
        link = self.link(a, b)
        link.cuts.discard(reason)
        if not link.cuts and not link.up and self._state.processes[a].active and self._state.processes[b].active:
            link.restore()
            self.announce(a, b)

    def _notify(self, event: Callable[..., PeerJoined | PeerLost], a: int, b: int, notify: tuple[int, ...]) -> None:
        incarnation = self.link(a, b).incarnation
        for rank, peer in ((a, b), (b, a)):
            if rank in notify:
                self._state.emit(self._state.now, rank, functools.partial(event, peer=peer, incarnation=incarnation))

    def link(self, a: int, b: int) -> LinkState:
        """The link between two ranks that are peers."""
        link = self._state.network.link(a, b)
        assert link is not None
        return link

    def revoke_lease(self, event: Event) -> None:
        """Overwrite the tensors of a handled event, unless they were kept or sent."""
        tensors: list[Tensor] = []
        if isinstance(event, GradientReady):
            tensors = [event.gradient, *event.buffers]
        elif isinstance(event, StepReady):
            tensors = [event.delta, *event.buffers]
        elif isinstance(event, MessageArrived) and isinstance(event.keep, Lease) and not event.keep.kept:
            tensors = list(event.message.tensors())
        for tensor in tensors:
            if tensor not in self.sent:
                tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


class Lease:
    """`MessageArrived.keep` in strict mode: records whether the node has kept the message."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.kept = False

    def __call__(self) -> Message:
        self.kept = True
        return self.message


@dataclass(frozen=True, slots=True)
class Transmission:
    """A message on its way, from the start of its transmission, which takes `seconds`."""

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
