"""Messages in virtual time: they leave one after the other, travel, and arrive unless their link is gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from offbeat.actions import Send
from offbeat.engines.network import LinkState
from offbeat.engines.sent_tensors import SentTensors
from offbeat.errors import ContractViolation
from offbeat.events import Event, GradientReady, MessageArrived, Sent, StepReady
from offbeat.messages import Message

if TYPE_CHECKING:
    from offbeat.engines.simulated import Simulation


class Mail:
    """Carries out `Send`."""

    def __init__(self, simulation: Simulation) -> None:
        self._sim = simulation
        self.sent = SentTensors()
        self.bytes_sent = 0
        self.messages_sent = 0

    def send(self, rank: int, send: Send) -> None:
        link = self._sim.network.link(rank, send.to)
        if link is None:
            raise ContractViolation(f"rank {rank} sent to {send.to}, which its strategy does not name as a peer")
        for tensor in send.message.tensors():
            self.sent.add(tensor)
        if link.up and self._sim.processes[rank].known.get(send.to) == link.incarnation:
            link.outboxes[rank].put(send)
            self._transmit(rank, link)

    def _transmit(self, rank: int, link: LinkState) -> None:
        outbox, incarnation = link.outboxes[rank], link.incarnation
        send = outbox.next()
        if send is None:
            return
        nbytes = send.message.nbytes
        self.bytes_sent += nbytes
        self.messages_sent += 1
        seconds = outbox.config.transmit_seconds(nbytes)

        def left() -> None:
            if link.incarnation != incarnation or outbox.leaving is not send:
                return
            outbox.leaving = None
            self._sim.processes[rank].send_seconds = seconds
            self._sim.deliver(self._sim.now, rank, lambda at: Sent(at, send.to, send.supersedes))
            self._travel(rank, send, link)
            self._transmit(rank, link)
            if self._sim.processes[rank].finish is not None:
                self.close(rank, send.to)

        if seconds > 0:
            self._sim.at(self._sim.now + seconds, rank, left)
        else:
            left()

    def _travel(self, source: int, send: Send, link: LinkState) -> None:
        config = link.outboxes[source].config
        delay = config.latency_seconds
        if config.delay_std_seconds > 0:
            delay += config.draw_delay(self._sim.processes[send.to].delay_random)

        arrival = Arrival(self, source, send, link, link.incarnation)
        outbox = link.outboxes[source]
        outbox.last_arrival = max(outbox.last_arrival, self._sim.now + delay)
        self._sim.deliver(self._sim.now + delay, send.to, arrival)

    def hold(self, until: float, rank: int, arrival: Arrival) -> None:
        """Let a message arrive later."""
        self._sim.deliver(until, rank, arrival)

    def arrived(self, at: float, source: int, message: Message) -> MessageArrived:
        for tensor in message.tensors():
            if self.sent.changed(tensor):
                raise ContractViolation(f"rank {source} changed a tensor of {type(message).__name__} after sending it")
        if self._sim.strict:
            lease = Lease(message.copy())
            return MessageArrived(at, source, lease.message, lease)
        return MessageArrived(at, source, message, lambda: message)

    def close(self, rank: int, peer: int) -> None:
        """A process that has finished is gone once its last message has arrived; who is left gets to know."""
        link = self._sim.troubles.link(rank, peer)
        outbox = link.outboxes[rank]
        if not link.up or outbox.leaving is not None or outbox.queue or not self._sim.processes[peer].active:
            return
        gone = max(
            self._sim.now + self._sim.scenario.cluster.crash_seen_seconds,
            outbox.last_arrival,
            link.held_until,
        )
        self._sim.at(gone, peer, lambda: self._sim.troubles.cut(rank, peer, link, f"end of {rank}", told=(peer,)))

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
class Arrival:
    """A message under way. It arrives unless the link it left by is gone; a partition may hold it up."""

    mail: Mail
    source: int
    send: Send
    link: LinkState
    incarnation: int

    def __call__(self, at: float) -> Event | None:
        if not self.link.up or self.link.incarnation != self.incarnation:
            return None
        if self.link.held_until > at:
            self.mail.hold(self.link.held_until, self.send.to, self)
            return None
        return self.mail.arrived(at, self.source, self.send.message)
