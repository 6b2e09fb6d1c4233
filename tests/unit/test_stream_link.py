"""A link over a byte stream: what it sends when the stream or the shared memory has no room."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from offbeat.core.events import LossReason, Sent
from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Message
from offbeat.transports import wire
from offbeat.transports.byte_stream import ByteStream
from offbeat.transports.link import ConnectionLost, LinkLoss, LinkOptions
from offbeat.transports.shared_memory import SharedSlots
from offbeat.transports.stream_link import StreamLink
from offbeat.transports.transport import InboxItem

LIMIT_SECONDS = 60.0


@dataclass(frozen=True)
class Numbered(Message):
    number: int
    body: Tensor


class FullStream(ByteStream):
    """Never sends at once. The sending thread waits until `open` is set; nothing is ever received."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.sent: list[bytes] = []
        self._broken = threading.Event()

    def write(self, parts: Iterable[memoryview]) -> None:
        assert self.open.wait(LIMIT_SECONDS)
        self.sent += [bytes(part) for part in parts]

    def write_now(self, parts: list[memoryview]) -> list[memoryview] | None:
        return None

    def _receive(self, into: memoryview, flags: int) -> int:
        assert self._broken.wait(LIMIT_SECONDS)
        raise ConnectionLost(LossReason.BROKEN, "broken off")

    def break_off(self) -> None:
        self.open.set()
        self._broken.set()

    def close(self) -> None:
        pass


class OneSlot(SharedSlots):
    """Accepts all payloads, and has a slot for the first that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0
        self.released: list[int] = []

    def accepts(self, nbytes: int) -> bool:
        return True

    def write(self, tensors: Iterable[Tensor], nbytes: int) -> int | None:
        self.written += 1
        return 3 if self.written == 1 else None

    def release(self, number: int) -> None:
        self.released.append(number)

    def grow(self, nbytes: int) -> None:
        return None


class End:
    """A link over a full stream, the events it has delivered, and the messages it has encoded."""

    def __init__(self, shared: SharedSlots | None = None) -> None:
        self.stream = FullStream()
        self.items: queue.SimpleQueue[InboxItem] = queue.SimpleQueue()
        self.encoded: list[Message] = []
        self.link = StreamLink(
            1,
            0,
            self.stream,
            options=LinkOptions(silence_seconds=4 * LIMIT_SECONDS),
            pool=Pool(),
            deliver=self.items.put,
            on_end=lambda link: None,
            shared=shared,
        )
        self.link.start()

    def wait_sent(self) -> Sent:
        item = self.items.get(timeout=LIMIT_SECONDS)
        assert callable(item)
        event = item(0.0)
        assert isinstance(event, Sent)
        return event


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., End]]:
    ends: list[End] = []
    encode = wire.encode

    def counting(message: Message, checksum: bool = False) -> wire.Encoded:
        ends[-1].encoded.append(message)
        return encode(message, checksum)

    def make_end(shared: SharedSlots | None = None) -> End:
        ends.append(End(shared))
        return ends[-1]

    monkeypatch.setattr(wire, "encode", counting)
    yield make_end
    for end in ends:
        end.link.drop(LinkLoss(LossReason.LOCAL, "the test is over"))
        assert end.link.ended.wait(LIMIT_SECONDS)


def test_a_message_that_cannot_leave_at_once_is_queued_as_encoded(make: Callable[..., End]) -> None:
    end, message = make(), Numbered(1, torch.arange(4.0))
    end.stream.open.set()
    end.link.post(message, "key")
    assert end.wait_sent().key == "key"
    assert end.encoded == [message]
    assert b"".join(end.stream.sent[1:]) == message.body.numpy().tobytes()


def test_a_queued_message_that_is_superseded_is_not_encoded(make: Callable[..., End]) -> None:
    end = make()
    first, *others = (Numbered(number, torch.ones(1)) for number in range(4))
    end.link.post(first, None)  # occupies the sending thread, or waits in front of the others
    for message in others:
        end.link.post(message, "newest")
    end.stream.open.set()
    assert [end.wait_sent().key, end.wait_sent().key] == [None, "newest"]
    assert end.encoded == [first, others[-1]]


def test_a_slot_that_was_not_used_is_no_longer_named_in_the_head(make: Callable[..., End]) -> None:
    shared = OneSlot()
    end = make(shared)
    end.stream.open.set()
    end.link.post(Numbered(1, torch.ones(4)), None)
    end.wait_sent()
    head = wire.read_head(torch.frombuffer(bytearray(end.stream.sent[0]), dtype=torch.uint8), 1 << 20)
    assert (head.slot, shared.released, shared.written) == (None, [3], 2)
    assert sum(len(part) for part in end.stream.sent[1:]) == head.payload_bytes == 16
    assert len(end.encoded) == 1
