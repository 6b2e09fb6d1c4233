"""MPI: what does not need mpirun. The transport itself goes through the conformance suite."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.core.events import LossReason, MessageArrived, PeerJoined, PeerLost, Sent
from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Message
from offbeat.core.run_identity import RunIdentity
from offbeat.core.wire_size import HEAD_BYTES
from offbeat.errors import ConfigurationError
from offbeat.transports import mpi, mpi_link, wire
from offbeat.transports.link import LinkLoss, LinkOptions
from offbeat.transports.link_protocol import WINDOW
from offbeat.transports.mpi_link import (
    ControlMessage,
    Frame,
    LinkBroken,
    LinkHello,
    MpiLink,
    Operation,
    decode_control,
    mismatch,
)
from offbeat.transports.transport import InboxItem, TransportEvent


@dataclass(frozen=True)
class Number(Message):
    number: int
    body: Tensor


class FakeOperation:
    """Is complete when `over` is set."""

    def __init__(self, over: bool) -> None:
        self.over = over

    def done(self) -> bool:
        return self.over


class FakeFrame:
    """A frame that has arrived."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.nbytes = memory.numel()

    def receive(self, into: Tensor) -> Operation:
        into.copy_(self.memory)
        return FakeOperation(True)


class FakePort:
    """A port that keeps whatever is sent."""

    def __init__(self) -> None:
        self.frames: list[Tensor] = []
        self.control: list[ControlMessage] = []
        self.abandoned: list[object] = []
        self.operations: list[FakeOperation] = []
        self.quick = True

    def send_frame(self, peer: int, memory: Tensor) -> Operation:
        self.frames.append(memory)
        self.operations.append(FakeOperation(self.quick))
        return self.operations[-1]

    def send_control(self, peer: int, message: ControlMessage) -> None:
        self.control.append(message)

    def abandon(self, peer: int, operations: Iterable[Operation], frames: Iterable[Frame]) -> None:
        self.abandoned += [*operations, *frames]


class End:
    """One side of a link, and what it has delivered."""

    def __init__(self) -> None:
        self.port = FakePort()
        self.events: list[TransportEvent] = []
        self.link = MpiLink(1, self.port, LinkOptions(10.0), Pool(), self.deliver)
        self.link.join()
        self.link.work()

    def deliver(self, item: InboxItem) -> None:
        assert callable(item)
        self.events.append(item(0.0))

    def send(self, number: int, key: str | None = None, size: int = 1) -> None:
        self.link.post(Number(number, torch.ones(size)), key)
        self.link.work()

    def transfer(self, other: End) -> None:
        frames, self.port.frames = self.port.frames, []
        for frame in frames:
            other.link.accept(FakeFrame(frame))
        other.link.work()

    def numbers(self) -> list[int]:
        return [item.message.number for item in self.events if isinstance(item, MessageArrived)]  # type: ignore[attr-defined]


def test_a_message_is_sent_only_while_few_before_it_are_unacknowledged() -> None:
    here, there = End(), End()
    for number in range(WINDOW + 2):
        here.send(number)
    here.transfer(there)
    assert there.numbers() == list(range(WINDOW))
    here.send(50, "key")
    here.send(51, "key")
    assert [there.link.acknowledge() for _ in range(WINDOW)] == [False] * (WINDOW - 1) + [True]
    there.link.work()
    there.transfer(here)
    here.transfer(there)
    assert there.numbers() == [*range(WINDOW + 2), 51]
    assert [item.key for item in here.events if isinstance(item, Sent)] == [None] * (WINDOW + 2) + ["key"]


def test_a_message_is_begun_when_the_one_before_it_was_sent() -> None:
    here = End()
    here.port.quick = False
    here.send(0)
    here.send(1, "newest")
    here.send(2, "newest")
    assert here.events == [PeerJoined(0.0, 1, 0)]
    for operation in here.port.operations:
        operation.over = True
    here.link.work()
    there = End()
    here.transfer(there)
    assert there.numbers() == [0, 2]


def test_large_tensors_are_sent_in_chunks_and_arrive_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_link, "CHUNK_BYTES", 1000)
    here, there = End(), End()
    here.send(7, size=1001)
    assert [frame.numel() for frame in here.port.frames] == [HEAD_BYTES, 1000, 1000, 1000, 1000, 4]
    here.transfer(there)
    assert there.numbers() == [7]
    arrived = there.events[-1]
    assert isinstance(arrived, MessageArrived)
    assert arrived.nbytes == HEAD_BYTES + 4004


def test_a_meta_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    metas: list[bytes] = []

    class CountingDecoder:
        def decode(self, meta: bytes) -> Any:
            metas.append(meta)
            return decoder.decode(meta)

    decoder = wire._META
    monkeypatch.setattr(wire, "_META", CountingDecoder())
    here, there = End(), End()
    for number in range(WINDOW):
        here.send(number, size=100)
    here.transfer(there)
    assert there.numbers() == list(range(WINDOW))
    assert len(metas) == WINDOW


def test_a_goodbye_is_answered_and_follows_everything_else() -> None:
    here, there = End(), End()
    for number in range(2 * WINDOW):
        here.send(number)
    here.link.finish()
    here.link.work()
    there.send(99)
    here.transfer(there)
    there.transfer(here)
    assert there.numbers() == list(range(2 * WINDOW))
    assert here.numbers() == [99]
    assert here.events[-1] == there.events[-1] == PeerLost(0.0, 1, 0, LossReason.CLOSED, "closed")
    assert here.link.over
    assert there.link.over
    assert not here.port.control


def test_a_frame_of_unexpected_size_raises_and_a_dropped_link_releases_everything() -> None:
    here, there = End(), End()
    here.send(0, size=100)
    head, body = here.port.frames
    there.link.accept(FakeFrame(head))
    there.link.accept(FakeFrame(body[:-1]))
    with pytest.raises(wire.WireError, match="399 bytes were received instead of 400"):
        there.link.work()
    nonsense = LinkLoss(LossReason.INVALID, "nonsense")
    there.link.drop(nonsense)
    there.link.drop(LinkLoss(LossReason.BROKEN, "again"))
    assert there.events == [PeerJoined(0.0, 1, 0), PeerLost(0.0, 1, 0, *nonsense)]
    assert there.port.control == [LinkBroken(*nonsense)]
    assert len(there.port.abandoned) == 1
    there.send(1)
    assert there.port.frames == []


def test_a_link_with_nothing_to_send_sends_heartbeats() -> None:
    here = End()
    assert here.port.frames == []
    here.link._protocol._sent_at -= 2.6  # a quarter of the time after which it would count as silent
    here.link.work()
    here.link.work()
    assert [wire.read_head(frame, 0).kind for frame in here.port.frames] == [wire.HEARTBEAT]
    assert not here.link.silent
    here.link._received_at -= 10.1
    assert here.link.silent
    here.link.reset_silence()
    assert not here.link.silent


def test_both_sides_report_why_they_cannot_be_linked() -> None:
    identity = RunIdentity("a", "fmb")
    own, old = LinkHello(1, identity, 0.0), LinkHello(0, identity, 0.0)
    other, another = (LinkHello(1, RunIdentity(*texts), 0.0) for texts in (("b", "amb"), ("a", "amb")))
    assert mismatch(0, own, 1, own) is None
    assert mismatch(0, own, 1, other) == mismatch(1, other, 0, own)
    assert "rank 1 has a different model: its fingerprint is b" in str(mismatch(0, own, 1, other))
    assert "rank 1 has a different strategy: amb, and rank 0 has fmb" in str(mismatch(0, own, 1, another))
    assert mismatch(0, own, 1, another) == mismatch(1, another, 0, own)
    assert "rank 1 uses version 0 of the wire format" in str(mismatch(0, own, 1, old))


@pytest.mark.parametrize("raw", [b"", b"{}", b"\xff", b'{"type":"hello"}', b'{"type":"other"}'])
def test_an_invalid_control_message_is_a_wire_error(raw: bytes) -> None:
    with pytest.raises(wire.WireError, match="cannot be decoded"):
        decode_control(torch.tensor(list(raw), dtype=torch.uint8))


def test_without_mpi4py_the_error_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ConfigurationError, match=r"needs mpi4py.*type: pip install 'offbeat\[mpi\]'"):
        mpi.mpi_world()


def test_without_an_mpi_library_the_error_names_the_same_command(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rc:
        initialize = finalize = True

    class BrokenModule:
        rc: Any = Rc()

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("cannot load MPI library\nand much more")

    monkeypatch.setitem(sys.modules, "mpi4py", BrokenModule())
    with pytest.raises(ConfigurationError, match=r"finds no MPI library .*type: pip install 'offbeat\[mpi\]'"):
        mpi.mpi_world()
