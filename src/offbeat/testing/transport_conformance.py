"""Conformance checks for transports, against the contract in `transports/transport.py`.

    class MyCase(TransportCase):
        abilities = frozenset({"cut"})
        ...

    def test_mine() -> None:
        check_transport(MyCase())

A `TransportCase` creates ranks with the transport under test. Not every check applies to every transport: garbage
cannot be sent where messages are passed by reference, and a thread cannot be stopped as a process can. So a case lists
its abilities, and checks that need a missing ability are left out.

Every wait has a generous limit, which turns a hang into an error message.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from offbeat.core.events import LossReason, MessageArrived, PeerJoined, PeerLost, Sent
from offbeat.core.messages import Buffers, Message
from offbeat.core.wire_size import HEAD_BYTES
from offbeat.errors import RunFailed
from offbeat.testing.invariants import Violation, verify
from offbeat.transports import wire
from offbeat.transports.transport import Transport, TransportEvent

LIMIT_SECONDS = 60.0
LARGE_BYTES = 100_000_000

Ability = Literal["cut", "garbage", "pool", "processes", "rejoin"]
"""cut: a link can be broken; garbage: a peer can send raw bytes; pool: allocations of receive buffers are counted;
processes: a rank can be a process of its own, to be stopped and killed; rejoin: a lost rank can come back."""

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64,
)  # fmt: skip


@dataclass(frozen=True)
class NumberedMessage(Message):
    """The message that the checks send."""

    number: int
    body: Tensor
    more: Buffers = ()


class Remote(ABC):
    """A rank in a process of its own, which sends every message back to its source."""

    @abstractmethod
    def stop(self) -> None:
        """Send SIGSTOP and wait until the process has stopped."""

    @abstractmethod
    def resume(self) -> None:
        """Send SIGCONT."""


class TransportCase(ABC):
    """Creates ranks with the transport under test, in a star: rank 0 is linked to all others."""

    abilities: ClassVar[frozenset[Ability]] = frozenset()

    @abstractmethod
    def open(self, processes: int) -> list[Transport]:
        """The transports of ranks 0 to `processes - 1`, all in this process."""

    @abstractmethod
    def close(self) -> None:
        """Close all transports and processes; the case can then be used again."""

    def rejoin(self, rank: int) -> Transport:
        """A new transport for a rank other than 0 whose transport was closed or whose process is dead."""
        raise NotImplementedError

    def cut(self, rank: int) -> None:
        """Break the link between rank 0 and another rank without closing it."""
        raise NotImplementedError

    def send_raw(self, rank: int, incarnation: int, head: Tensor) -> None:
        """Let a rank send rank 0 these `HEAD_BYTES` bytes instead of a message."""
        raise NotImplementedError

    def allocations(self, transport: Transport) -> int:
        """How many receive buffers have been allocated so far."""
        raise NotImplementedError

    def open_with_remote(self, processes: int) -> tuple[list[Transport], Remote]:
        """As `open`, but the last rank is a process of its own, and its transport is not in the list."""
        raise NotImplementedError

    def open_with_crashing_rank(self, processes: int) -> list[Transport]:
        """As `open_with_remote`, but once linked, the last rank starts to send a message and kills itself half-way."""
        raise NotImplementedError


def check_transport(case: TransportCase, *, only: str | None = None) -> list[str]:
    """Run the checks that apply to a case.

    case: creates the ranks.
    only: the name of a single check to run.
    Returns the names of the checks that were run; raises `Violation` at the first that fails.
    """
    names = transport_checks(case)
    if only is not None:
        verify(only in names, f"{type(case).__name__} has no check {only!r}; there are {', '.join(names)}")
        names = [only]
    for name in names:
        try:
            run, _ = _CHECKS[name]
            run(case)
        except Violation as error:
            raise Violation(f"{type(case).__name__}, {name}: {error}") from error
        finally:
            case.close()
    return names


def transport_checks(case: TransportCase) -> list[str]:
    """The names of the checks that apply to a case."""
    return [name for name, (_, needs) in _CHECKS.items() if needs is None or needs in case.abilities]


_CHECKS: dict[str, tuple[Callable[[TransportCase], None], Ability | None]] = {}
"""name → the check, and the ability that it needs"""


def _check(needs: Ability | None = None) -> Callable[[Callable[[TransportCase], None]], None]:
    def register(run: Callable[[TransportCase], None]) -> None:
        _CHECKS[run.__name__] = run, needs

    return register


class TransportMonitor:
    """Receives for one rank, sorts events by kind, and verifies that their order follows the contract."""

    def __init__(self, transport: Transport, rank: int) -> None:
        self.transport = transport
        self.rank = rank
        self.links: dict[int, int] = {}
        self.arrived: dict[int, deque[MessageArrived]] = defaultdict(deque)
        self.sent: list[Sent] = []
        self.lost: list[PeerLost] = []
        self._highest: dict[int, int] = {}

    def send(self, to: int, message: Message, key: str | None = None) -> None:
        self.transport.send(to, self.links[to], message, key)

    def wait_linked(self, peer: int, above: int = -1) -> int:
        """Wait until the link to a peer has an incarnation higher than `above`; returns the incarnation."""
        self._until(lambda: self.links.get(peer, -1) > above, f"a link to rank {peer} above incarnation {above}")
        return self.links[peer]

    def wait_lost(self, peer: int, incarnation: int) -> PeerLost:
        def losses() -> list[PeerLost]:
            return [loss for loss in self.lost if (loss.peer, loss.incarnation) == (peer, incarnation)]

        self._until(lambda: bool(losses()), f"the loss of rank {peer}.{incarnation}")
        return losses()[0]

    def take(self, source: int) -> MessageArrived:
        self._until(lambda: bool(self.arrived[source]), f"a message from rank {source}")
        return self.arrived[source].popleft()

    def expect(self, source: int, number: int) -> NumberedMessage:
        """Wait for the next message of `source`, which must have this number."""
        message = self.take(source).message
        verify(
            isinstance(message, NumberedMessage),
            f"rank {self.rank} was sent a NumberedMessage and received {type(message).__name__}",
        )
        assert isinstance(message, NumberedMessage)
        verify(
            message.number == number,
            f"rank {self.rank} expected message {number} of rank {source}, and received {message.number}",
        )
        return message

    def wait_sent(self, count: int) -> None:
        self._until(lambda: len(self.sent) >= count, f"the sending of {count} messages")

    def _until(self, condition: Callable[[], bool], expected: str) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not condition():
            event = self._receive(max(0.0, deadline - time.monotonic()))
            if event is not None:
                self._record(event)
            elif time.monotonic() >= deadline:
                raise Violation(f"rank {self.rank} waited {LIMIT_SECONDS:.0f} s for {expected}, in vain")

    def _receive(self, timeout: float) -> TransportEvent | None:
        try:
            return self.transport.receive(timeout)
        except RunFailed as error:
            raise Violation(f"rank {self.rank} was rejected: {error}") from None

    def _record(self, event: TransportEvent) -> None:
        match event:
            case PeerJoined(peer=peer, incarnation=incarnation):
                verify(peer not in self.links, f"rank {self.rank}: {peer} joined twice without a loss in between")
                highest = self._highest.get(peer, -1)
                verify(incarnation > highest, f"rank {self.rank}: {peer} joined as {incarnation} after {highest}")
                self.links[peer] = self._highest[peer] = incarnation
            case PeerLost(peer=peer, incarnation=incarnation, detail=detail):
                self._verify_linked(peer, incarnation, "lost")
                verify(bool(detail), f"rank {self.rank}: {peer} was lost without a reason")
                del self.links[peer]
                self.lost.append(event)
            case MessageArrived(source=source, incarnation=incarnation, nbytes=nbytes):
                self._verify_linked(source, incarnation, "received from")
                verify(nbytes > 0, f"rank {self.rank}: a message from {source} has no bytes")
                self.arrived[source].append(event)
            case Sent(to=to, incarnation=incarnation, size=size):
                self._verify_linked(to, incarnation, "sent to")
                verify(
                    size is not None and size.nbytes > 0 and event.seconds >= 0,
                    f"rank {self.rank}: a message was sent without bytes or duration: {event}",
                )
                assert size is not None
                verify(
                    issubclass(size.kind, Message), f"rank {self.rank}: the kind of a sent message is unknown: {event}"
                )
                self.sent.append(event)

    def _verify_linked(self, peer: int, incarnation: int, expected: str) -> None:
        verify(
            self.links.get(peer) == incarnation,
            f"rank {self.rank}: {expected} {peer}.{incarnation} while the link was {self.links.get(peer)}; PeerJoined "
            "must come first of an incarnation and PeerLost last",
        )


def _linked(case: TransportCase, processes: int = 2) -> list[TransportMonitor]:
    """The monitors of all ranks, once they are linked."""
    monitors = [TransportMonitor(transport, rank) for rank, transport in enumerate(case.open(processes))]
    for monitor in monitors:
        for peer in range(1, processes) if monitor.rank == 0 else (0,):
            monitor.wait_linked(peer)
    return monitors


def _tensor(size: int, value: float = 1.0) -> Tensor:
    return torch.full((size,), value, dtype=torch.float32)


def _exchange(here: TransportMonitor, there: TransportMonitor, number: int = 0) -> None:
    """Send one message each way."""
    here.send(there.rank, NumberedMessage(number, _tensor(3, 1.0)))
    there.send(here.rank, NumberedMessage(number, _tensor(3, 2.0)))
    verify(there.expect(here.rank, number).body.tolist() == [1.0] * 3, "a message was changed on its way")
    verify(here.expect(there.rank, number).body.tolist() == [2.0] * 3, "a message was changed on its way")


def _verify_ended(thread: threading.Thread, call: str) -> None:
    thread.join(LIMIT_SECONDS)
    verify(not thread.is_alive(), f"{call} did not return within {LIMIT_SECONDS:.0f} s")


# Checks for every transport


@_check()
def messages_keep_their_order(case: TransportCase) -> None:
    hub, worker = _linked(case)
    for number in range(300):
        hub.send(1, NumberedMessage(number, _tensor(number % 7)), f"key {number}")
        worker.send(0, NumberedMessage(-number, _tensor(number % 5)))
    for number in range(300):
        verify(worker.expect(0, number).body.numel() == number % 7, "a tensor has another size than was sent")
        verify(hub.expect(1, -number).body.numel() == number % 5, "a tensor has another size than was sent")
    hub.wait_sent(300)
    verify(
        [item.key for item in hub.sent] == [f"key {n}" for n in range(300)], "reports of sent messages are out of order"
    )
    worker.wait_sent(300)


@_check()
def large_and_empty_payloads_arrive(case: TransportCase) -> None:
    hub, worker = _linked(case)
    large = torch.arange(LARGE_BYTES // 4, dtype=torch.int32)
    for number, body in enumerate((torch.empty(0), large, torch.empty(0, dtype=torch.bool), large[:1])):
        hub.send(1, NumberedMessage(number, body, (torch.empty(0), body)))
    for number, body in enumerate((torch.empty(0), large, torch.empty(0, dtype=torch.bool), large[:1])):
        message = worker.expect(0, number)
        same = torch.equal(message.body, body) and torch.equal(message.more[1], body)
        verify(same, f"{body.nbytes} bytes were changed")
        verify(message.body.dtype is body.dtype, f"a tensor of {body.dtype} became {message.body.dtype}")
        worker.send(0, message)
        verify(torch.equal(hub.expect(1, number).body, body), f"{body.nbytes} bytes were changed on their way back")


@_check()
def every_dtype_arrives(case: TransportCase) -> None:
    hub, worker = _linked(case)
    sent = [torch.tensor([0, 1, 1, 0, 1]).to(dtype) for dtype in DTYPES]
    strided = torch.arange(12.0).reshape(3, 4).t()[1]
    hub.send(1, NumberedMessage(0, strided, tuple(sent)))
    message = worker.expect(0, 0)
    verify(message.body.tolist() == [1.0, 5.0, 9.0], "a strided tensor was changed")
    for original, copy in zip(sent, message.more, strict=True):
        same = original.dtype is copy.dtype and torch.equal(original, copy)
        verify(same, f"a tensor of {original.dtype} was changed")


@_check()
def concurrent_bidirectional_messages_arrive(case: TransportCase) -> None:
    ranks = 3
    hub, *workers = _linked(case, ranks)
    count = 60

    def send_all(monitor: TransportMonitor, to: int) -> None:
        for number in range(count):
            monitor.send(to, NumberedMessage(number, _tensor(number * 4000, number), (_tensor(1, monitor.rank),)))

    routes = [(hub, worker.rank) for worker in workers] + [(worker, 0) for worker in workers]
    threads = [threading.Thread(target=send_all, args=route, daemon=True) for route in routes]
    for thread in threads:
        thread.start()
    for number in range(count):
        for source, to in [(hub, worker) for worker in workers] + [(worker, hub) for worker in workers]:
            message = to.expect(source.rank, number)
            verify(message.body.numel() == number * 4000, "a message has another size than was sent")
            verify(bool(message.body.eq(number).all()), "a message was changed")
            verify(message.more[0].item() == source.rank, "a message has the wrong source")
    for thread in threads:
        _verify_ended(thread, "send")


@_check()
def a_peer_that_does_not_receive_blocks_no_other_link(case: TransportCase) -> None:
    hub, slow, quick = _linked(case, 3)
    for number in range(100):
        hub.send(1, NumberedMessage(number, _tensor(100_000, number)))
    for number in range(20):
        _exchange(hub, quick, number)
    for number in range(100):
        verify(bool(slow.expect(0, number).body.eq(number).all()), "a message was changed while it waited")


@_check()
def kept_tensors_are_not_overwritten(case: TransportCase) -> None:
    hub, worker = _linked(case)
    kept = []
    for number in range(60):
        hub.send(1, NumberedMessage(number, _tensor(5000, number)))
        if number % 3 == 0:
            kept.append((number, worker.expect(0, number).body[7:11]))
        else:
            worker.expect(0, number)
    for number, part in kept:
        verify(part.tolist() == [number] * 4, "a tensor that was kept was written over by a later message")


@_check()
def wake_unblocks_receive(case: TransportCase) -> None:
    hub, worker = _linked(case)
    worker.transport.wake()
    _verify_receives_none(worker.transport, "after wake()")
    _verify_receives_none(worker.transport, "woken from another thread", worker.transport.wake)
    _exchange(hub, worker)


def _verify_receives_none(transport: Transport, when: str, trigger: Callable[[], None] = lambda: None) -> None:
    """Verify that `receive` returns None, once `trigger` was called from another thread."""
    received: list[TransportEvent | None] = []
    waiting = threading.Thread(target=lambda: received.append(transport.receive()), daemon=True)
    waiting.start()
    trigger()
    _verify_ended(waiting, f"receive {when}")
    verify(received == [None], f"receive returned {received[0]} {when}")


@_check()
def close_delivers_queued_messages_then_reports_the_loss(case: TransportCase) -> None:
    hub, worker, other = _linked(case, 3)
    incarnation = hub.links[1]
    for number in range(20):
        worker.send(0, NumberedMessage(number, _tensor(250_000, number)))
    worker.transport.close(linger_seconds=LIMIT_SECONDS)
    worker.transport.close()
    for number in range(20):
        verify(bool(hub.expect(1, number).body.eq(number).all()), "a message was changed")
    hub.wait_lost(1, incarnation)
    _verify_receives_none(worker.transport, "after close()")
    worker.transport.send(0, incarnation, NumberedMessage(0, _tensor(1)))
    hub.transport.send(1, incarnation, NumberedMessage(0, _tensor(1)))
    _exchange(hub, other)
    verify(2 in hub.links, "the link to a rank that did not close was lost")


@_check()
def close_unblocks_receive(case: TransportCase) -> None:
    _, worker = _linked(case)

    def receive_all() -> None:
        while worker.transport.receive() is not None:
            pass  # received before or during close()

    waiting = threading.Thread(target=receive_all, daemon=True)
    waiting.start()
    worker.transport.close()
    _verify_ended(waiting, "receive, after close(),")
    _verify_receives_none(worker.transport, "after close()")


@_check()
def a_disconnected_peer_is_lost_for_the_reason_given_and_no_other_is(case: TransportCase) -> None:
    hub, worker, other = _linked(case, 3)
    before = hub.links[1]
    hub.transport.disconnect(1, before + 1, "of another incarnation")
    _exchange(hub, worker)
    hub.transport.disconnect(1, before, "it lied", final=True)
    lost = hub.wait_lost(1, before)
    found = lost.reason, lost.detail
    verify(found == (LossReason.INVALID, "it lied"), f"the loss was reported as {found}")
    worker.wait_lost(0, before)
    _exchange(hub, other)


@_check("rejoin")
def a_rejoining_rank_gets_a_higher_incarnation(case: TransportCase) -> None:
    hub, worker, other = _linked(case, 3)
    for _ in range(3):
        before = hub.links[1]
        worker.transport.close()
        hub.wait_lost(1, before)
        worker = TransportMonitor(case.rejoin(1), 1)
        now = hub.wait_linked(1, above=before)
        verify(worker.wait_linked(0) == now, "the two ends of a link do not agree about its incarnation")
        hub.transport.send(1, before, NumberedMessage(-1, _tensor(1)))
        _exchange(hub, worker, now)
        _exchange(hub, other, now)
    verify(not any(loss.peer == 2 for loss in hub.lost), "the link to an idle rank was lost")


# Checks that need an ability


@_check("cut")
def a_broken_link_is_reconnected(case: TransportCase) -> None:
    hub, worker, other = _linked(case, 3)
    before = hub.links[1]
    case.cut(1)
    hub.wait_lost(1, before)
    worker.wait_lost(0, before)
    now = hub.wait_linked(1, above=before)
    verify(worker.wait_linked(0, above=before) == now, "the two ends of a link do not agree about its incarnation")
    worker.transport.send(0, before, NumberedMessage(-1, _tensor(1)))
    _exchange(hub, worker)
    _exchange(hub, other)
    verify(not any(loss.peer == 2 for loss in hub.lost), "the link to another rank was lost")


@_check("garbage")
def garbage_closes_only_its_own_link(case: TransportCase) -> None:
    hub, worker, other = _linked(case, 3)
    for head in _garbage():
        before = hub.wait_linked(1)
        worker.wait_linked(0)
        case.send_raw(1, before, head)
        hub.wait_lost(1, before)
        worker.wait_lost(0, before)
        if "rejoin" in case.abilities:
            hub.wait_linked(1, above=before)
            worker.wait_linked(0, above=before)
            _exchange(hub, worker)
        _exchange(hub, other)
        verify(not any(loss.peer == 2 for loss in hub.lost), "the link to another rank was lost")
        verify(not hub.arrived[1], "garbage was delivered as a message")
        if "rejoin" not in case.abilities:
            case.close()
            hub, worker, other = _linked(case, 3)


def _garbage() -> list[Tensor]:
    """Heads that are noise, of another version, of too large a payload, and with inconsistent sizes."""
    valid = wire.encode(NumberedMessage(0, _tensor(4))).head
    junk = torch.arange(HEAD_BYTES).to(torch.uint8)
    other_version, too_large, cut_meta, more = (valid.clone() for _ in range(4))
    other_version[4] += 1
    too_large[12:20] = 255
    cut_meta[8] -= 1
    more[12] += 1
    return [junk, other_version, too_large, cut_meta, more]


@_check("pool")
def the_steady_state_allocates_no_buffers(case: TransportCase) -> None:
    hub, worker = _linked(case)

    def round_trip(number: int) -> None:
        hub.send(1, NumberedMessage(number, _tensor(50_000), (_tensor(10),)))
        worker.expect(0, number)
        worker.send(0, NumberedMessage(number, _tensor(50_000), (_tensor(10),)))
        hub.expect(1, number)

    for number in range(5):
        round_trip(number)
    before = case.allocations(hub.transport), case.allocations(worker.transport)
    for number in range(50):
        round_trip(number)
    after = case.allocations(hub.transport), case.allocations(worker.transport)
    verify(before == after, f"the allocations of the two ends went from {before} to {after} in 50 round trips")


@_check("processes")
def a_crash_in_mid_message_loses_only_that_peer(case: TransportCase) -> None:
    (hub_transport, other_transport) = case.open_with_crashing_rank(3)
    hub, other = TransportMonitor(hub_transport, 0), TransportMonitor(other_transport, 1)
    hub.wait_linked(1)
    other.wait_linked(0)
    incarnation = hub.wait_linked(2) if not hub.lost else hub.lost[0].incarnation
    hub.wait_lost(2, incarnation)
    verify(not hub.arrived[2], "half a message was delivered")
    _exchange(hub, other)
    if "rejoin" in case.abilities:
        rejoined = TransportMonitor(case.rejoin(2), 2)
        hub.wait_linked(2, above=incarnation)
        rejoined.wait_linked(0)
        _exchange(hub, rejoined)
    _exchange(hub, other)
    verify(not any(loss.peer == 1 for loss in hub.lost), "the link to a live rank was lost")


@_check("processes")
def a_stopped_peer_is_lost_and_reconnects_when_it_resumes(case: TransportCase) -> None:
    (hub_transport, other_transport), remote = case.open_with_remote(3)
    hub, other = TransportMonitor(hub_transport, 0), TransportMonitor(other_transport, 1)
    hub.wait_linked(1)
    before = hub.wait_linked(2)
    other.wait_linked(0)
    remote.stop()
    large = _tensor(LARGE_BYTES // 20)
    for number in range(40):
        hub.send(2, NumberedMessage(number, large))
    _exchange(hub, other)
    hub.wait_lost(2, before)
    verify(1 in hub.links and not other.lost, "a rank that was only idle was lost as well")
    _exchange(hub, other)
    remote.resume()
    if "rejoin" in case.abilities:
        hub.wait_linked(2, above=before)
        hub.send(2, NumberedMessage(1000, _tensor(1)))
        hub.expect(2, 1000)
    _exchange(hub, other)


@_check("processes")
def a_queued_message_is_replaced_by_a_newer_one(case: TransportCase) -> None:
    (hub_transport,), remote = case.open_with_remote(2)
    hub = TransportMonitor(hub_transport, 0)
    hub.wait_linked(1)
    remote.stop()
    hub.send(1, NumberedMessage(0, _tensor(LARGE_BYTES // 4)))  # occupies the link: it is not read
    hub.send(1, NumberedMessage(1, _tensor(1)))
    for number in range(10, 30):
        hub.send(1, NumberedMessage(number, _tensor(1)), "newest")
    hub.send(1, NumberedMessage(2, _tensor(1)), "other")
    remote.resume()
    hub.send(1, NumberedMessage(3, _tensor(1)))
    numbers = []
    while 3 not in numbers:
        message = hub.take(1).message
        assert isinstance(message, NumberedMessage)
        numbers.append(message.number)
    verify(sorted(numbers) == [0, 1, 2, 3, 29], f"of 20 messages under one key 29 should be left, but came {numbers}")
    verify([number for number in numbers if number < 10] == [0, 1, 2, 3], f"messages are out of order: {numbers}")
    hub.wait_sent(5)
    verify(sum(item.key == "newest" for item in hub.sent) == 1, "a message that was replaced was sent")
