"""Check a transport against the contract in `transports/transport.py`.

    class MyCase(TransportCase):
        abilities = frozenset({"cut"})
        ...

    def test_mine() -> None:
        check_transport(MyCase())

A case knows how to set up ranks with the transport in question. Not everything can be done to every transport: garbage
cannot be sent where messages pass by reference, and a thread cannot be stopped as a process can. So a case says what
it is able to do, and what needs an ability is checked where it is there.

Every wait has a limit that is far beyond what anything takes; it is there to turn a hang into a sentence.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from offbeat.core.messages import Buffers, Message
from offbeat.testing.invariants import Violation, verify
from offbeat.transports import wire
from offbeat.transports.transport import Arrived, Departed, Incoming, Joined, Lost, Refused, Transport

LIMIT_SECONDS = 60.0
LARGE_BYTES = 100_000_000

Ability = Literal["cut", "garbage", "pool", "processes", "rejoin"]
"""cut: a link can be broken; garbage: a peer can send raw bytes; pool: what is received lies in memory whose
allocations are counted; processes: a rank can be a process of its own, to be stopped and killed; rejoin: who was lost
comes back."""

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64,
)  # fmt: skip


@dataclass(frozen=True)
class NumberedMessage(Message):
    """What the checks send."""

    number: int
    body: Tensor
    more: Buffers = ()


class Remote(ABC):
    """A rank in a process of its own, which sends every message back to whom it came from."""

    @abstractmethod
    def stop(self) -> None:
        """SIGSTOP; return when it stands still."""

    @abstractmethod
    def resume(self) -> None:
        """SIGCONT."""


class TransportCase(ABC):
    """How to set up ranks. Rank 0 is the peer of all others; these are not each other's peers."""

    abilities: ClassVar[frozenset[Ability]] = frozenset()

    @abstractmethod
    def open(self, processes: int) -> list[Transport]:
        """The transports of ranks 0, 1 …, all in this process."""

    @abstractmethod
    def close(self) -> None:
        """Close whatever was opened; the case can then be used again."""

    def rejoin(self, rank: int) -> Transport:
        """A rank other than 0, whose transport has been closed or whose process is dead, comes again."""
        raise NotImplementedError

    def cut(self, rank: int) -> None:
        """Break the link between rank 0 and another, without a goodbye."""
        raise NotImplementedError

    def send_raw(self, rank: int, incarnation: int, head: Tensor) -> None:
        """Let a rank send rank 0 these `wire.HEAD_BYTES` bytes in the place of a message."""
        raise NotImplementedError

    def allocations(self, transport: Transport) -> int:
        """How often memory to receive into has been allocated so far."""
        raise NotImplementedError

    def open_with_remote(self, processes: int) -> tuple[list[Transport], Remote]:
        """As `open`, but the last rank is a process of its own, and its transport not in the list."""
        raise NotImplementedError

    def open_with_crashing_rank(self, processes: int) -> list[Transport]:
        """As `open_with_remote`; as soon as it is linked, the last rank begins a message and kills itself half-way."""
        raise NotImplementedError


def check_transport(case: TransportCase, *, only: str | None = None) -> list[str]:
    """Run every check that a case is able to go through, or one; returns their names. Raises `Violation`."""
    names = transport_checks(case)
    if only is not None:
        verify(only in names, f"{type(case).__name__} has no check {only!r}; there are {', '.join(names)}")
        names = [only]
    for name in names:
        try:
            _CHECKS[name].run(case)
        except Violation as error:
            raise Violation(f"{type(case).__name__}, {name}: {error}") from error
        finally:
            case.close()
    return names


def transport_checks(case: TransportCase) -> list[str]:
    """The names of the checks that apply to a case."""
    return [name for name, check in _CHECKS.items() if check.needs is None or check.needs in case.abilities]


class _Check(NamedTuple):
    run: Callable[[TransportCase], None]
    needs: Ability | None


_CHECKS: dict[str, _Check] = {}


def _check(needs: Ability | None = None) -> Callable[[Callable[[TransportCase], None]], None]:
    def register(run: Callable[[TransportCase], None]) -> None:
        _CHECKS[run.__name__] = _Check(run, needs)

    return register


class TransportMonitor:
    """Receives for one rank, sorts what comes, and sees to it that it comes in an order that makes sense."""

    def __init__(self, transport: Transport, rank: int) -> None:
        self.transport = transport
        self.rank = rank
        self.links: dict[int, int] = {}
        self.arrived: dict[int, deque[Arrived]] = defaultdict(deque)
        self.departed: list[Departed] = []
        self.lost: list[Lost] = []
        self._highest: dict[int, int] = {}

    def send(self, to: int, message: Message, key: str | None = None) -> None:
        self.transport.send(to, self.links[to], message, key)

    def wait_linked(self, peer: int, above: int = -1) -> int:
        """The incarnation of the link to a peer, once there is one higher than `above`."""
        self._until(lambda: self.links.get(peer, -1) > above, f"a link to rank {peer} above incarnation {above}")
        return self.links[peer]

    def wait_lost(self, peer: int, incarnation: int) -> Lost:
        self._until(lambda: self._loss(peer, incarnation) is not None, f"the loss of rank {peer}.{incarnation}")
        found = self._loss(peer, incarnation)
        assert found is not None
        return found

    def take(self, source: int) -> Arrived:
        self._until(lambda: bool(self.arrived[source]), f"a message from rank {source}")
        return self.arrived[source].popleft()

    def expect(self, source: int, number: int) -> NumberedMessage:
        """The next message, which must be this one."""
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

    def wait_departed(self, count: int) -> None:
        self._until(lambda: len(self.departed) >= count, f"the departure of {count} messages")

    def _loss(self, peer: int, incarnation: int) -> Lost | None:
        return next((loss for loss in self.lost if (loss.peer, loss.incarnation) == (peer, incarnation)), None)

    def _until(self, there: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not there():
            item = self.transport.receive(max(0.0, deadline - time.monotonic()))
            if item is not None:
                self._sort(item)
            elif time.monotonic() >= deadline:
                raise Violation(f"rank {self.rank} waited {LIMIT_SECONDS:.0f} s for {what}, and nothing came")

    def _sort(self, item: Incoming) -> None:
        match item:
            case Joined(peer, incarnation):
                verify(peer not in self.links, f"rank {self.rank}: {peer} joined twice, and was not lost in between")
                highest = self._highest.get(peer, -1)
                verify(incarnation > highest, f"rank {self.rank}: {peer} joined as {incarnation} after {highest}")
                self.links[peer] = self._highest[peer] = incarnation
            case Lost(peer, incarnation, why):
                self._must_be_linked(peer, incarnation, "lost")
                verify(bool(why), f"rank {self.rank}: {peer} was lost, and nothing says why")
                del self.links[peer]
                self.lost.append(item)
            case Arrived(source, incarnation, _, nbytes):
                self._must_be_linked(source, incarnation, "heard")
                verify(nbytes > 0, f"rank {self.rank}: a message from {source} weighs nothing")
                self.arrived[source].append(item)
            case Departed(to, incarnation, _, nbytes, seconds, kind):
                self._must_be_linked(to, incarnation, "sent to")
                verify(nbytes > 0 and seconds >= 0, f"rank {self.rank}: a departure weighs or takes nothing: {item}")
                known = {message.__name__ for message in Message.kinds.values()}
                verify(kind in known, f"rank {self.rank}: a message of an unknown kind has left: {item}")
                self.departed.append(item)
            case Refused(peer, why):
                raise Violation(f"rank {self.rank} was refused by {peer}: {why}")

    def _must_be_linked(self, peer: int, incarnation: int, what: str) -> None:
        verify(
            self.links.get(peer) == incarnation,
            f"rank {self.rank}: {what} {peer}.{incarnation} while the link was {self.links.get(peer)}; Joined comes "
            "before everything else of an incarnation and Lost after it",
        )


def _linked(case: TransportCase, processes: int = 2) -> list[TransportMonitor]:
    return _watched(case.open(processes), processes)


def _watched(transports: Iterable[Transport], processes: int) -> list[TransportMonitor]:
    watches = [TransportMonitor(transport, rank) for rank, transport in enumerate(transports)]
    for watch in watches:
        for peer in range(1, processes) if watch.rank == 0 else (0,):
            watch.wait_linked(peer)
    return watches


def _body(size: int, value: float = 1.0) -> Tensor:
    return torch.full((size,), value, dtype=torch.float32)


def _exchange(here: TransportMonitor, there: TransportMonitor, number: int = 0) -> None:
    """One message each way."""
    here.send(there.rank, NumberedMessage(number, _body(3, 1.0)))
    there.send(here.rank, NumberedMessage(number, _body(3, 2.0)))
    verify(there.expect(here.rank, number).body.tolist() == [1.0] * 3, "a message was changed on its way")
    verify(here.expect(there.rank, number).body.tolist() == [2.0] * 3, "a message was changed on its way")


def _has_ended(thread: threading.Thread, what: str) -> None:
    thread.join(LIMIT_SECONDS)
    verify(not thread.is_alive(), f"{what} did not return within {LIMIT_SECONDS:.0f} s")


# What every transport goes through


@_check()
def messages_keep_their_order(case: TransportCase) -> None:
    hub, worker = _linked(case)
    for number in range(300):
        hub.send(1, NumberedMessage(number, _body(number % 7)), f"key {number}")
        worker.send(0, NumberedMessage(-number, _body(number % 5)))
    for number in range(300):
        verify(worker.expect(0, number).body.numel() == number % 7, "a tensor has another size than was sent")
        verify(hub.expect(1, -number).body.numel() == number % 5, "a tensor has another size than was sent")
    hub.wait_departed(300)
    verify([item.key for item in hub.departed] == [f"key {n}" for n in range(300)], "departures are out of order")
    worker.wait_departed(300)


@_check()
def large_and_empty_payloads_arrive(case: TransportCase) -> None:
    hub, worker = _linked(case)
    large = torch.arange(LARGE_BYTES // 4, dtype=torch.int32)
    for number, body in enumerate((torch.empty(0), large, torch.empty(0, dtype=torch.bool), large[:1])):
        hub.send(1, NumberedMessage(number, body, (torch.empty(0), body)))
    for number, body in enumerate((torch.empty(0), large, torch.empty(0, dtype=torch.bool), large[:1])):
        got = worker.expect(0, number)
        verify(torch.equal(got.body, body) and torch.equal(got.more[1], body), f"{body.nbytes} bytes were changed")
        verify(got.body.dtype is body.dtype, f"a tensor of {body.dtype} became {got.body.dtype}")
        worker.send(0, got)
        verify(torch.equal(hub.expect(1, number).body, body), f"{body.nbytes} bytes were changed on their way back")


@_check()
def every_dtype_arrives(case: TransportCase) -> None:
    hub, worker = _linked(case)
    sent = [torch.tensor([0, 1, 1, 0, 1]).to(dtype) for dtype in DTYPES]
    scattered = torch.arange(12.0).reshape(3, 4).t()[1]
    hub.send(1, NumberedMessage(0, scattered, tuple(sent)))
    got = worker.expect(0, 0)
    verify(got.body.tolist() == [1.0, 5.0, 9.0], "a tensor with gaps between its elements was changed")
    for one, other in zip(sent, got.more, strict=True):
        verify(one.dtype is other.dtype and torch.equal(one, other), f"a tensor of {one.dtype} was changed")


@_check()
def concurrent_bidirectional_messages_arrive(case: TransportCase) -> None:
    ranks = 3
    hub, *workers = _linked(case, ranks)
    count = 60

    def speak(watch: TransportMonitor, to: int) -> None:
        for number in range(count):
            watch.send(to, NumberedMessage(number, _body(number * 4000, number), (_body(1, watch.rank),)))

    routes = [(hub, worker.rank) for worker in workers] + [(worker, 0) for worker in workers]
    threads = [threading.Thread(target=speak, args=route, daemon=True) for route in routes]
    for thread in threads:
        thread.start()
    for number in range(count):
        for source, to in [(hub, worker) for worker in workers] + [(worker, hub) for worker in workers]:
            got = to.expect(source.rank, number)
            verify(got.body.numel() == number * 4000, "a message has another size than was sent")
            verify(bool(got.body.eq(number).all()), "a message was changed")
            verify(got.more[0].item() == source.rank, "a message came from somebody else")
    for thread in threads:
        _has_ended(thread, "send")


@_check()
def a_peer_that_does_not_receive_blocks_no_other_link(case: TransportCase) -> None:
    hub, slow, quick = _linked(case, 3)
    for number in range(100):
        hub.send(1, NumberedMessage(number, _body(100_000, number)))
    for number in range(20):
        _exchange(hub, quick, number)
    for number in range(100):
        verify(bool(slow.expect(0, number).body.eq(number).all()), "a message was changed while it waited")


@_check()
def kept_tensors_are_not_overwritten(case: TransportCase) -> None:
    hub, worker = _linked(case)
    kept = []
    for number in range(60):
        hub.send(1, NumberedMessage(number, _body(5000, number)))
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
    _receives_nothing(worker.transport, "after wake()")
    found: list[Incoming | None] = []
    waiting = threading.Thread(target=lambda: found.append(worker.transport.receive()), daemon=True)
    waiting.start()
    worker.transport.wake()
    _has_ended(waiting, "receive, woken from another thread,")
    verify(found == [None], f"receive returned {found[0]} when it was woken")
    _exchange(hub, worker)


def _receives_nothing(transport: Transport, when: str) -> None:
    found: list[Incoming | None] = []
    waiting = threading.Thread(target=lambda: found.append(transport.receive()), daemon=True)
    waiting.start()
    _has_ended(waiting, f"receive {when}")
    verify(found == [None], f"receive returned {found[0]} {when}")


@_check()
def close_delivers_queued_messages_then_reports_the_loss(case: TransportCase) -> None:
    hub, worker, other = _linked(case, 3)
    incarnation = hub.links[1]
    for number in range(20):
        worker.send(0, NumberedMessage(number, _body(250_000, number)))
    worker.transport.close(linger_seconds=LIMIT_SECONDS)
    worker.transport.close()
    for number in range(20):
        verify(bool(hub.expect(1, number).body.eq(number).all()), "a message was changed")
    hub.wait_lost(1, incarnation)
    _receives_nothing(worker.transport, "after close()")
    worker.transport.send(0, incarnation, NumberedMessage(0, _body(1)))
    hub.transport.send(1, incarnation, NumberedMessage(0, _body(1)))
    _exchange(hub, other)
    verify(2 in hub.links, "the link to a rank that did not close was lost")


@_check()
def close_unblocks_receive(case: TransportCase) -> None:
    _, worker = _linked(case)

    def receive_all() -> None:
        while worker.transport.receive() is not None:
            pass  # what came in before it was closed, or while it was closing

    waiting = threading.Thread(target=receive_all, daemon=True)
    waiting.start()
    worker.transport.close()
    _has_ended(waiting, "receive, after close(),")
    _receives_nothing(worker.transport, "after close()")


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
        hub.transport.send(1, before, NumberedMessage(-1, _body(1)))
        _exchange(hub, worker, now)
        _exchange(hub, other, now)
    verify(not any(loss.peer == 2 for loss in hub.lost), "the link to a rank that did nothing was lost")


# What some can be put through


@_check("cut")
def a_broken_link_is_reconnected(case: TransportCase) -> None:
    hub, worker, other = _linked(case, 3)
    before = hub.links[1]
    case.cut(1)
    hub.wait_lost(1, before)
    worker.wait_lost(0, before)
    now = hub.wait_linked(1, above=before)
    verify(worker.wait_linked(0, above=before) == now, "the two ends of a link do not agree about its incarnation")
    worker.transport.send(0, before, NumberedMessage(-1, _body(1)))
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
        verify(not hub.arrived[1], "garbage was taken for a message")
        if "rejoin" not in case.abilities:
            case.close()
            hub, worker, other = _linked(case, 3)


def _garbage() -> list[Tensor]:
    """Heads that are none, of another version, that announce more than may be, and whose sums are wrong."""
    sound = wire.encode(NumberedMessage(0, _body(4))).head
    junk = torch.arange(wire.HEAD_BYTES).to(torch.uint8)
    other_version, too_large, cut_meta, more = (sound.clone() for _ in range(4))
    other_version[4] += 1
    too_large[12:20] = 255
    cut_meta[8] -= 1
    more[12] += 1
    return [junk, other_version, too_large, cut_meta, more]


@_check("pool")
def the_steady_state_allocates_no_buffers(case: TransportCase) -> None:
    hub, worker = _linked(case)

    def round_trip(number: int) -> None:
        hub.send(1, NumberedMessage(number, _body(50_000), (_body(10),)))
        worker.expect(0, number)
        worker.send(0, NumberedMessage(number, _body(50_000), (_body(10),)))
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
    (hub_end, other_end) = case.open_with_crashing_rank(3)
    hub, other = TransportMonitor(hub_end, 0), TransportMonitor(other_end, 1)
    hub.wait_linked(1)
    other.wait_linked(0)
    incarnation = hub.wait_linked(2) if not hub.lost else hub.lost[0].incarnation
    hub.wait_lost(2, incarnation)
    verify(not hub.arrived[2], "half a message was delivered")
    _exchange(hub, other)
    if "rejoin" in case.abilities:
        again = TransportMonitor(case.rejoin(2), 2)
        hub.wait_linked(2, above=incarnation)
        again.wait_linked(0)
        _exchange(hub, again)
    _exchange(hub, other)
    verify(not any(loss.peer == 1 for loss in hub.lost), "the link to a rank that lives was lost")


@_check("processes")
def a_stopped_peer_is_lost_and_reconnects_when_it_resumes(case: TransportCase) -> None:
    (hub_end, other_end), remote = case.open_with_remote(3)
    hub, other = TransportMonitor(hub_end, 0), TransportMonitor(other_end, 1)
    hub.wait_linked(1)
    before = hub.wait_linked(2)
    other.wait_linked(0)
    remote.stop()
    large = _body(LARGE_BYTES // 20)
    for number in range(40):
        hub.send(2, NumberedMessage(number, large))
    _exchange(hub, other)
    hub.wait_lost(2, before)
    verify(1 in hub.links and not other.lost, "a rank that had nothing to say for as long was lost as well")
    _exchange(hub, other)
    remote.resume()
    if "rejoin" in case.abilities:
        hub.wait_linked(2, above=before)
        hub.send(2, NumberedMessage(1000, _body(1)))
        hub.expect(2, 1000)
    _exchange(hub, other)


@_check("processes")
def a_queued_message_is_replaced_by_a_newer_one(case: TransportCase) -> None:
    (hub_end,), remote = case.open_with_remote(2)
    hub = TransportMonitor(hub_end, 0)
    hub.wait_linked(1)
    remote.stop()
    hub.send(1, NumberedMessage(0, _body(LARGE_BYTES // 4)))  # occupies the link: nobody reads it
    hub.send(1, NumberedMessage(1, _body(1)))
    for number in range(10, 30):
        hub.send(1, NumberedMessage(number, _body(1)), "newest")
    hub.send(1, NumberedMessage(2, _body(1)), "other")
    remote.resume()
    hub.send(1, NumberedMessage(3, _body(1)))
    numbers = []
    while 3 not in numbers:
        message = hub.take(1).message
        assert isinstance(message, NumberedMessage)
        numbers.append(message.number)
    verify(sorted(numbers) == [0, 1, 2, 3, 29], f"of 20 messages under one key 29 should be left, but came {numbers}")
    verify([number for number in numbers if number < 10] == [0, 1, 2, 3], f"messages are out of order: {numbers}")
    hub.wait_departed(5)
    verify(sum(item.key == "newest" for item in hub.departed) == 1, "a message that was replaced departed")
