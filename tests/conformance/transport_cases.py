"""All transports, as cases for `check_transport`. Run as a script, this file is a rank in a process of its own."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from offbeat.core.events import LossReason, MessageArrived, PeerJoined, PeerLost
from offbeat.core.messages import Message
from offbeat.core.run_identity import RunIdentity
from offbeat.core.wire_size import HEAD_BYTES, MessageSize
from offbeat.testing.transport_conformance import NumberedMessage, Remote, TransportCase
from offbeat.transports import wire
from offbeat.transports.address import Address
from offbeat.transports.link import LinkLoss, LinkOptions
from offbeat.transports.listener import Listener
from offbeat.transports.loopback import Loopback
from offbeat.transports.tcp import TcpTransport
from offbeat.transports.tls import Credentials, Tls
from offbeat.transports.transport import SILENCE_SECONDS, Transport

TOKEN = b"a token only for these tests"
IDENTITY = RunIdentity("the same everywhere", "FixedMinibatch(batch=256)")
SHORT_SILENCE_SECONDS = 3.0
DOOMED_NUMBER = -99


class LoopbackCase(TransportCase):
    abilities = frozenset({"cut", "pool", "rejoin"})

    def __init__(self) -> None:
        self._loopback: Loopback | None = None
        self._transports: list[Transport] = []

    def open(self, processes: int) -> list[Transport]:
        self._loopback = Loopback({0: range(1, processes), **{rank: [0] for rank in range(1, processes)}})
        return [self._make(rank) for rank in range(processes)]

    def _make(self, rank: int) -> Transport:
        assert self._loopback is not None
        self._transports.append(self._loopback.transport(rank))
        return self._transports[-1]

    def rejoin(self, rank: int) -> Transport:
        return self._make(rank)

    def cut(self, rank: int) -> None:
        assert self._loopback is not None
        self._loopback.cut(0, rank)

    def allocations(self, transport: Transport) -> int:
        return 0  # messages pass by reference

    def close(self) -> None:
        for transport in self._transports:
            transport.close()
        self._transports.clear()


@dataclass(frozen=True)
class RawHead(Message):
    """Is sent as the bytes that it holds."""

    head: Tensor


def encode_or_not(message: Message, checksum: bool = False) -> wire.Encoded:
    if isinstance(message, RawHead):
        return wire.Encoded(message.head, None, [], MessageSize(RawHead, HEAD_BYTES, HEAD_BYTES))
    return ENCODE(message, checksum)


ENCODE = wire.encode


class TcpCase(TransportCase):
    abilities = frozenset({"cut", "garbage", "pool", "processes", "rejoin"})

    def __init__(self, tls: str = "auto", **options: Any) -> None:
        self._credentials = Credentials(TOKEN, Tls(mode=tls))
        self._options = options
        self._silence_seconds = SILENCE_SECONDS
        self._processes = 0
        self._listener: Listener | None = None
        self._ranks: dict[int, TcpTransport] = {}
        self._past: list[TcpTransport] = []
        self._child: Child | None = None

    def open(self, processes: int, here: int | None = None) -> list[Transport]:
        self._processes = processes
        self._listener = Listener(Address("127.0.0.1", 0), self._credentials)
        return [self._make(rank) for rank in range(processes if here is None else here)]

    def _make(self, rank: int) -> TcpTransport:
        assert self._listener is not None
        transport = TcpTransport(
            rank=rank,
            processes=self._processes,
            peers=range(1, self._processes) if rank == 0 else [0],
            rendezvous=self._listener if rank == 0 else self._listener.address,
            credentials=self._credentials,
            identity=IDENTITY,
            options=LinkOptions(silence_seconds=self._silence_seconds, **self._options),
        )
        self._ranks[rank] = transport
        self._past.append(transport)
        return transport

    def rejoin(self, rank: int) -> Transport:
        return self._make(rank)

    def cut(self, rank: int) -> None:
        self._ranks[rank]._links[0].drop(LinkLoss(LossReason.LOCAL, "cut by a test"))

    def send_raw(self, rank: int, incarnation: int, head: Tensor) -> None:
        with mock.patch.object(wire, "encode", encode_or_not):
            self._ranks[rank].send(0, incarnation, RawHead(head))
            self._wait_for_end(rank, incarnation)

    def _wait_for_end(self, rank: int, incarnation: int) -> None:
        link = self._ranks[rank]._links.get(0)
        if link is not None and link.incarnation == incarnation:
            link.ended.wait(30)

    def allocations(self, transport: Transport) -> int:
        assert isinstance(transport, TcpTransport)
        return transport.pool.allocated

    def open_with_remote(self, processes: int) -> tuple[list[Transport], Remote]:
        transports = self._open_with_child(processes, "echo")
        assert self._child is not None
        return transports, self._child

    def open_with_crashing_rank(self, processes: int) -> list[Transport]:
        return self._open_with_child(processes, "doomed")

    def _open_with_child(self, processes: int, role: str) -> list[Transport]:
        self._silence_seconds = SHORT_SILENCE_SECONDS
        transports = self.open(processes, processes - 1)
        assert self._listener is not None
        self._child = Child(role, processes - 1, self._listener.address, self._credentials.tls.mode)
        return transports

    def close(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None
        for transport in reversed(self._past):
            transport.close()
        self._past.clear()
        self._ranks.clear()
        self._silence_seconds = SILENCE_SECONDS


class Child(Remote):
    """This file as a process. It also ends with the process that started it: its standard input is closed."""

    def __init__(self, role: str, rank: int, rendezvous: Address, tls: str) -> None:
        line = [sys.executable, __file__, role, str(rank), str(rendezvous), tls]
        self._process = subprocess.Popen(line, stdin=subprocess.PIPE)

    def stop(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


class Deadly(list[Tensor]):
    """Tensors of which only the first is ever sent: the process is killed then."""

    def __iter__(self) -> Iterator[Tensor]:
        yield self[0]
        os.kill(os.getpid(), signal.SIGKILL)


def encode_and_die(message: Message, checksum: bool = False) -> wire.Encoded:
    encoded = ENCODE(message, checksum)
    return dataclasses.replace(encoded, tensors=Deadly(encoded.tensors))


def main(role: str, rank: int, rendezvous: str, tls: str) -> None:
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    transport = TcpTransport(
        rank=rank,
        processes=rank + 1,
        peers=[0],
        rendezvous=Address.parse(rendezvous),
        credentials=Credentials(TOKEN, Tls(mode=tls)),
        identity=IDENTITY,
        options=LinkOptions(silence_seconds=SHORT_SILENCE_SECONDS),
    )
    while True:
        match transport.receive():
            case MessageArrived(source=source, incarnation=incarnation, message=message):
                transport.send(source, incarnation, message)
            case PeerJoined(peer=peer, incarnation=incarnation) if role == "doomed":
                wire.encode = encode_and_die
                large = torch.ones(10_000_000)
                transport.send(peer, incarnation, NumberedMessage(DOOMED_NUMBER, large, (large,)))
            case PeerLost(reason=LossReason.CLOSED):
                return


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
