"""Which tensors have been sent, and are immutable from then on by contract.

So the simulator can share them between a thousand ranks without a copy, and notice when somebody changes one.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass

from torch import Tensor

from offbeat.core.actions import Send
from offbeat.core.events import Event, GradientReady, MessageArrived, PeerJoined, PeerLost, Sent, StepReady
from offbeat.core.messages import Message
from offbeat.errors import ContractViolation
from offbeat.records.traffic import MessageSize, TrafficCounter, message_size
from offbeat.simulation.network import LinkState, Outbox
from offbeat.simulation.state import SimulationState


class SentTensors:
    """Tensors by identity, forgotten when they are gone; a tensor's `==` compares elements and cannot serve."""

    def __init__(self) -> None:
        self._versions: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def add(self, tensor: Tensor) -> None:
        key = id(tensor)
        if key not in self._versions:
            forget = self._versions.pop
            self._versions[key] = weakref.ref(tensor, lambda _: forget(key, None)), tensor._version

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._versions

    def changed(self, tensor: Tensor) -> bool:
        """Whether it was changed in place after it had been sent; torch counts such changes."""
        entry = self._versions.get(id(tensor))
        return entry is not None and entry[1] != tensor._version


# Messages in virtual time: they leave one after the other, travel, and arrive unless their link is gone.
#
# `network.py` says what they wait for; this makes it happen.


class Delivery:
    """Carries out `Send`."""

    def __init__(self, state: SimulationState) -> None:
        self._state = state
        self.sent = SentTensors()
        self.traffic = TrafficCounter()

    def record_traffic(self, at: float) -> None:
        """Write what all ranks together have sent and received."""
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
            link.outboxes[rank].put(send)
            self._transmit(rank, link)

    def _transmit(self, rank: int, link: LinkState) -> None:
        """Let leave what can, of what a rank has for one of its peers."""
        outbox = link.outboxes[rank]
        while outbox.leaving is None and outbox.queue and self._has_its_turn(rank, link, outbox):
            leaving = self._begin(rank, link, outbox)
            if outbox.out is not None:
                self._state.schedule(self._state.now + leaving.seconds, rank, functools.partial(self._left, leaving))
            else:
                self._leave(leaving)

    def _has_its_turn(self, rank: int, link: LinkState, outbox: Outbox) -> bool:
        """Whether the first in the queue may leave, and the card is free; otherwise its turn will come."""
        to = outbox.queue[0].to
        if outbox.rate_limit is not None:
            due = outbox.rate_limit.ready_at(outbox.queue[0].message.nbytes, self._state.now)
            if due > self._state.now:
                if due != outbox.alarm:
                    outbox.alarm = due
                    self._state.schedule(due, rank, functools.partial(self._ready, rank, link, due))
                return False
        if outbox.out is not None and outbox.out.sending is not None:
            outbox.out.waiting[to] = None
            return False
        return True

    def _ready(self, rank: int, link: LinkState, due: float) -> None:
        outbox = link.outboxes[rank]
        if outbox.alarm == due:
            outbox.alarm = None
            self._transmit(rank, link)

    def _begin(self, rank: int, link: LinkState, outbox: Outbox) -> Transmission:
        send = outbox.leaving = outbox.queue.popleft()
        weight = message_size(send.message)
        self.traffic.sent(weight)
        if outbox.rate_limit is not None:
            outbox.rate_limit.consume(weight.nbytes)
            outbox.limited_bytes += weight.nbytes
        seconds = 0.0
        if outbox.out is not None:
            outbox.out.sending = send
            seconds = weight.nbytes / outbox.out.bytes_per_second
        return Transmission(rank, send, link, link.incarnation, weight, self._state.now, seconds)

    def _left(self, leaving: Transmission) -> None:
        """The last byte has left: the card goes on with the next whose turn it is."""
        rank, card = leaving.rank, leaving.link.outboxes[leaving.rank].out
        if leaving.counts:
            self._leave(leaving)
            self._transmit(rank, leaving.link)
        if card is None or card.sending is not leaving.send:
            return
        card.sending = None
        while card.sending is None and (peer := card.next()) is not None:
            self._transmit(rank, self.link(rank, peer))

    def _leave(self, leaving: Transmission) -> None:
        rank, send = leaving.rank, leaving.send
        self._state.processes[rank].send_seconds = leaving.seconds
        self._state.emit(self._state.now, rank, lambda at: Sent(at, send.to, send.supersedes))
        free_at = self._travel(leaving)
        if free_at > self._state.now:
            self._state.schedule(free_at, rank, functools.partial(self._free, leaving))
        else:
            self._end(leaving)

    def _free(self, leaving: Transmission) -> None:
        """The receiver's card has had time for a message, so the next of its link may begin to leave."""
        if leaving.counts:
            self._end(leaving)
            self._transmit(leaving.rank, leaving.link)

    def _end(self, leaving: Transmission) -> None:
        leaving.link.outboxes[leaving.rank].leaving = None
        if self._state.processes[leaving.rank].finish is not None:
            self.close(leaving.rank, leaving.send.to)

    def _travel(self, leaving: Transmission) -> float:
        """Let a message that has left arrive; returns when its link is free for the next."""
        send, now, outbox = leaving.send, self._state.now, leaving.link.outboxes[leaving.rank]
        delay = outbox.config.latency_seconds
        last = now + delay
        if outbox.config.delay_std_seconds > 0:
            delay += outbox.config.draw_delay(self._state.processes[send.to].delay_random)
        arrives = now + delay
        free_at = now
        if outbox.into is not None:
            latency = outbox.config.latency_seconds
            received = outbox.into.receive(leaving.began + latency, last, leaving.weight.nbytes)
            if received > last:
                arrives, free_at = received + delay - latency, received - latency
        arrival = Arrival(self, leaving.rank, send, leaving.link, leaving.incarnation, leaving.weight)
        outbox.last_arrival = max(outbox.last_arrival, arrives)
        self._state.emit(arrives, send.to, arrival)
        return free_at

    def hold(self, until: float, rank: int, arrival: Arrival) -> None:
        """Let a message arrive later."""
        self._state.emit(until, rank, arrival)

    def arrived(self, at: float, source: int, message: Message, weight: MessageSize) -> MessageArrived:
        self.traffic.received(weight)
        for tensor in message.tensors():
            if self.sent.changed(tensor):
                raise ContractViolation(f"rank {source} changed a tensor of {type(message).__name__} after sending it")
        if self._state.strict:
            lease = Lease(message.copy())
            return MessageArrived(at, source, lease.message, lease)
        return MessageArrived(at, source, message, lambda: message)

    def close(self, rank: int, peer: int) -> None:
        """A process that has finished is gone once its last message has arrived; who is left gets to know."""
        link = self.link(rank, peer)
        outbox = link.outboxes[rank]
        if not link.up or outbox.leaving is not None or outbox.queue or not self._state.processes[peer].active:
            return
        gone = max(
            self._state.now + self._state.scenario.cluster.crash_seen_seconds,
            outbox.last_arrival,
            link.held_until,
        )
        self._state.schedule(gone, peer, lambda: self.cut(rank, peer, f"end of {rank}", notify=(peer,)))

    def announce(self, a: int, b: int) -> None:
        """Send `PeerJoined` to both ends of a link."""
        self._notify(PeerJoined, a, b, notify=(a, b))

    def cut(self, a: int, b: int, reason: str, notify: tuple[int, ...]) -> None:
        """Take a link down. It stays down until `restore` was called for every reason that it was cut for.

        a, b: the ends of the link.
        reason: identifies this cut; a second call with the same reason has no effect.
        notify: the ends that get `PeerLost`.
        """
        link = self.link(a, b)
        if reason in link.cuts:
            return
        was_up = link.up
        link.cuts.add(reason)
        link.cut()
        if was_up:
            self._notify(PeerLost, a, b, notify)

    def restore(self, a: int, b: int, reason: str) -> None:
        """Remove one reason why a link is down; the last one removed brings it up under the next incarnation."""
        link = self.link(a, b)
        link.cuts.discard(reason)
        if not link.cuts and not link.up and self._state.processes[a].active and self._state.processes[b].active:
            link.restore()
            self.announce(a, b)

    def _notify(self, kind: type[PeerJoined] | type[PeerLost], a: int, b: int, notify: tuple[int, ...]) -> None:
        incarnation = self.link(a, b).incarnation
        for rank, peer in ((a, b), (b, a)):
            if rank in notify:
                self._state.emit(self._state.now, rank, functools.partial(kind, peer=peer, incarnation=incarnation))

    def link(self, a: int, b: int) -> LinkState:
        """The link between two ranks that are peers."""
        link = self._state.network.link(a, b)
        assert link is not None
        return link

    def take_back(self, event: Event) -> None:
        """Overwrite what was lent with an event, unless it was kept or sent."""
        lent: list[Tensor] = []
        if isinstance(event, GradientReady):
            lent = [event.gradient, *event.buffers]
        elif isinstance(event, StepReady):
            lent = [event.delta, *event.buffers]
        elif isinstance(event, MessageArrived) and isinstance(event.keep, Lease) and not event.keep.kept:
            lent = list(event.message.tensors())
        for tensor in lent:
            if tensor not in self.sent:
                tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


class Lease:
    """`keep` of a message whose buffers will be taken back."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.kept = False

    def __call__(self) -> Message:
        self.kept = True
        return self.message


@dataclass(frozen=True, slots=True)
class Transmission:
    """A message that has begun to leave, and keeps its card busy for so many seconds."""

    rank: int
    send: Send
    link: LinkState
    incarnation: int
    weight: MessageSize
    began: float
    seconds: float

    @property
    def counts(self) -> bool:
        """Whether the link is still the one that it leaves by, and busy with it."""
        return self.link.incarnation == self.incarnation and self.link.outboxes[self.rank].leaving is self.send


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message under way. It arrives unless the link it left by is gone; a partition may hold it up."""

    delivery: Delivery
    source: int
    send: Send
    link: LinkState
    incarnation: int
    weight: MessageSize

    def __call__(self, at: float) -> Event | None:
        if not self.link.up or self.link.incarnation != self.incarnation:
            return None
        if self.link.held_until > at:
            self.delivery.hold(self.link.held_until, self.send.to, self)
            return None
        return self.delivery.arrived(at, self.source, self.send.message, self.weight)
