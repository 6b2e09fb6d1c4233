"""Run by mpirun: one rank that a test controls over two sockets; see `mpi_cases.py` for the other end.

One socket is for blocking receives, the other for all else. When they close, the rank ends.
"""

from __future__ import annotations

import os
import sys
import threading
import zlib
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from typing import Any

import msgspec
import torch
from torch import Tensor
from transport_cases import DOOMED_NUMBER, RawHead, encode_and_die, encode_or_not

from offbeat.core.events import LossReason, MessageArrived, PeerJoined, PeerLost, Sent
from offbeat.core.messages import Message
from offbeat.core.run_identity import RunIdentity
from offbeat.core.wire_size import HEAD_BYTES, MessageSize
from offbeat.errors import ContractViolation, OffbeatError, RunFailed
from offbeat.testing.transport_conformance import NumberedMessage
from offbeat.transports import wire
from offbeat.transports.link import LinkOptions
from offbeat.transports.mpi import MpiTransport, is_fault_tolerant, mpi_world
from offbeat.transports.transport import TransportEvent

KEPT = 4
"""Messages of each transport that are kept until it closes, to check that they do not change."""

ENCODE = wire.encode
ERRORS = {kind.__name__: kind for kind in (ContractViolation, RunFailed)}


@dataclass(frozen=True)
class TooMuch(Message):
    """Does not fit into a header."""

    numbers: list[int]


def pack(message: Message) -> bytes:
    encoded = ENCODE(message)
    pieces = [encoded.head, *([] if encoded.meta is None else [encoded.meta]), *encoded.tensors]
    return b"".join(piece.numpy().data for piece in pieces)


def unpack(raw: bytes) -> Message:
    memory = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    head = wire.read_head(memory[:HEAD_BYTES].clone(), len(raw))
    first = HEAD_BYTES + (head.meta_bytes if head.meta is None else 0)
    meta = head.meta if head.meta is not None else memory[HEAD_BYTES:first].numpy().tobytes()
    return wire.decode(wire.read_meta(head, meta), memory[first:])


def send_plain(connection: Connection, *plain: Any, body: bytes = b"") -> None:
    connection.send_bytes(msgspec.msgpack.encode(plain))
    connection.send_bytes(body)


def recv_plain(connection: Connection) -> tuple[list[Any], bytes]:
    return msgspec.msgpack.decode(connection.recv_bytes()), connection.recv_bytes()


def write_incoming(item: TransportEvent | OffbeatError | None) -> tuple[list[Any], bytes]:
    match item:
        case MessageArrived():
            return ["MessageArrived", item.at, item.source, item.incarnation, item.nbytes], pack(item.message)
        case Sent(size=size):
            assert size is not None
            kind, *nbytes = size
            return ["Sent", item.at, item.to, item.key, item.incarnation, kind.key, *nbytes, item.seconds], b""
        case PeerJoined():
            return ["PeerJoined", item.at, item.peer, item.incarnation], b""
        case PeerLost():
            return ["PeerLost", item.at, item.peer, item.incarnation, item.reason.value, item.detail], b""
        case None:
            return ["nothing"], b""
        case _:
            return [type(item).__name__, str(item)], b""


def read_incoming(plain: list[Any], body: bytes) -> TransportEvent | None:
    name, *fields = plain
    match name:
        case "MessageArrived":
            at, source, incarnation, nbytes = fields
            message = unpack(body)
            return MessageArrived(at, source, message, lambda: message, incarnation, nbytes)
        case "Sent":
            at, to, key, incarnation, kind, nbytes, nbytes_uncompressed, seconds = fields
            size = MessageSize(Message.kinds[kind], nbytes, nbytes_uncompressed)
            return Sent(at, to, key, incarnation, size, seconds)
        case "PeerJoined":
            return PeerJoined(*fields)
        case "PeerLost":
            at, peer, incarnation, reason, detail = fields
            return PeerLost(at, peer, incarnation, LossReason(reason), detail)
        case "nothing":
            return None
    raise ERRORS[name](*fields)


class Rank:
    """The open transport, and messages that are kept of it."""

    def __init__(self) -> None:
        self.rank, self.size = mpi_world()
        self.transport: MpiTransport | None = None
        self.kept: list[tuple[Message, int]] = []

    def open(
        self, peers: list[int], silence_seconds: float, role: str, model: str, strategy: str, checksum: bool
    ) -> None:
        self.transport = MpiTransport(
            rank=self.rank,
            processes=self.size,
            peers=peers,
            identity=RunIdentity(model, strategy),
            elapsed=lambda: 12.5,
            options=LinkOptions(silence_seconds=silence_seconds, checksum=checksum),
        )
        if role:
            threading.Thread(target=self.run_role, args=(role,), daemon=True).start()

    def run_role(self, role: str) -> None:
        """Echo what arrives, or begin a message and die in the middle of it."""
        assert self.transport is not None
        while True:
            match self.transport.receive():
                case MessageArrived(source=source, incarnation=incarnation, message=message):
                    self.transport.send(source, incarnation, message)
                case PeerJoined(peer=peer, incarnation=incarnation) if role == "doomed":
                    wire.encode = encode_and_die
                    large = torch.ones(10_000_000)
                    self.transport.send(peer, incarnation, NumberedMessage(DOOMED_NUMBER, large, (large,)))
                case None:
                    return

    def receive(self, timeout: float | None) -> TransportEvent | OffbeatError | None:
        assert self.transport is not None
        try:
            item = self.transport.receive(timeout)
        except OffbeatError as error:
            return error
        if isinstance(item, MessageArrived) and len(self.kept) < KEPT:
            self.kept.append((item.message, _sum_of(item.message.tensors())))
        return item

    def close(self, linger_seconds: float) -> bool:
        """Whether the kept messages are unchanged."""
        assert self.transport is not None
        self.transport.close(linger_seconds)
        kept, self.kept = self.kept, []
        return all(_sum_of(message.tensors()) == before for message, before in kept)

    def do(self, what: str, fields: list[Any], body: bytes) -> Any:
        if what == "open":
            return self.open(*fields)
        assert self.transport is not None
        match what:
            case "send" | "raw":
                return self.send(what, fields, body)
            case "disconnect":
                self.transport.disconnect(*fields)
                return None
            case "close":
                return self.close(*fields)
            case "wake":
                return self.transport.wake()
            case "allocated":
                return self.transport.pool.allocated
            case "elapsed":
                return self.transport.elapsed_at_join
            case "send_too_much":
                return self.transport.send(fields[0], 0, TooMuch(list(range(wire.META_BYTES_MAX))))
        raise ValueError(what)

    def send(self, what: str, fields: list[Any], body: bytes) -> None:
        assert self.transport is not None
        to, incarnation, key = fields
        message = RawHead(torch.frombuffer(bytearray(body), dtype=torch.uint8)) if what == "raw" else unpack(body)
        self.transport.send(to, incarnation, message, key)


def _sum_of(tensors: Any) -> int:
    total = 0
    for tensor in tensors:
        total = zlib.crc32(_bytes(tensor), total)
    return total


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def serve_receives(rank: Rank, connection: Connection) -> None:
    with suppress(EOFError, OSError):
        while True:
            (timeout,), _ = recv_plain(connection)
            plain, body = write_incoming(rank.receive(timeout))
            send_plain(connection, *plain, body=body)


def serve(rank: Rank, connection: Connection) -> None:
    """Until the command to finish; when the test is gone, end at once."""
    with suppress(EOFError, OSError):
        while True:
            (what, *fields), body = recv_plain(connection)
            if what == "finish":
                return
            send_plain(connection, rank.do(what, fields, body))
    os._exit(0)


def main(address: str) -> None:
    torch.set_num_threads(1)
    wire.encode = encode_or_not
    key = bytes.fromhex(os.environ["OFFBEAT_TEST_KEY"])
    rank = Rank()
    connections = []
    for purpose in ("receives", "rest"):
        connections.append(Client(address, "AF_UNIX", authkey=key))
        send_plain(connections[-1], rank.rank, purpose, os.getpid(), is_fault_tolerant())
    receives, rest = connections
    threading.Thread(target=serve_receives, args=(rank, receives), daemon=True).start()
    serve(rank, rest)


if __name__ == "__main__":
    main(sys.argv[1])
