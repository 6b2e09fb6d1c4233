"""What transports cost: one message from one process into the hands of another, over one copy of as many bytes.

    python bench/transports.py [--json] [--repeats N]

One way: from just before `send` in one process until `receive` has returned the message in the other, by the clock that
both share. The receiver then reads all of it, lets go of it and answers, and only then the next message is sent; so the
memory of both ends is used again, as it is in a run. Between two messages the sender copies as many bytes from one
place to another, through memory that was used before and is larger than any cache: `over_memcpy` is the median of the
one over the median of the other. All transports take turns; each figure is the median of the repeats.

`gloo` has shared memory switched off, `gloo-shm` has it as it comes. `socket` is a plain connection and memory that is
used again. `openmpi` and `mpich` are ours over those; where one of them is not installed, a note says so.

`idle_core_share`: the share of a core that the busier of two linked processes burns while nothing is sent.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cifar_shaped import in_processes
from offbeat.core.events import MessageArrived, PeerJoined, PeerLost
from offbeat.core.messages import Message
from offbeat.core.run_identity import RunIdentity
from offbeat.transports.gloo import GlooTransport
from offbeat.transports.link import LinkOptions
from offbeat.transports.rendezvous import Address, Listener
from offbeat.transports.transport import Transport, TransportEvent

REPEATS = 5
WARM_UP = 5
"""Messages of each size that are not counted: memory is touched for the first time."""
TIMES = {4 << 10: 50, 1 << 20: 30, 44 << 20: 11, 100_000_000: 7}
"""How often a message of so many bytes is sent."""
IDLE_SECONDS = 5.0
CACHE_BYTES = 256 << 20
"""More than any cache holds."""
LIMIT_SECONDS = 60.0

Item = TypeVar("Item", bound=TransportEvent)

_STAMP = struct.Struct("<dQ")


@dataclass(frozen=True)
class Row:
    """One size over one transport; without figures, why there are none."""

    transport: str
    bytes: int | None = None
    seconds: float | None = None
    over_memcpy: float | None = None
    mb_per_second: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Figures:
    """What the two processes of one turn found out."""

    seconds: dict[int, float]
    memcpy_seconds: dict[int, float]
    idle_share: float


@dataclass(frozen=True)
class Parcel(Message):
    sent_at: float
    body: Tensor


@dataclass(frozen=True)
class Receipt(Message):
    seconds: float


class Line(Protocol):
    """One end of a connection between two processes."""

    def send(self, body: Tensor) -> float:
        """Send, and return the seconds until the other end had it."""

    def serve(self) -> None:
        """Receive one, read it, let it go and answer."""

    def idle(self, seconds: float) -> None:
        """Let nothing happen for so long."""


# Lines


class OurLine(Line):
    """One of our transports, whichever it is."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        joined = self._next(PeerJoined)
        self._peer, self._incarnation = joined.peer, joined.incarnation

    def _next(self, kind: type[Item]) -> Item:
        until = time.monotonic() + LIMIT_SECONDS
        while (left := until - time.monotonic()) > 0:
            item = self.transport.receive(left)
            if isinstance(item, kind):
                return item
            if isinstance(item, PeerLost):
                raise ConnectionError(item.detail)
        raise TimeoutError(f"no {kind.__name__} came")

    def send(self, body: Tensor) -> float:
        self.transport.send(self._peer, self._incarnation, Parcel(time.monotonic(), body))
        receipt = self._next(MessageArrived).message
        assert isinstance(receipt, Receipt)
        return receipt.seconds

    def serve(self) -> None:
        parcel = self._next(MessageArrived).message
        now = time.monotonic()
        assert isinstance(parcel, Parcel)
        _read(parcel.body)
        seconds = now - parcel.sent_at
        del parcel
        self.transport.send(self._peer, self._incarnation, Receipt(seconds))

    def idle(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.transport.receive(left)


class SocketLine(Line):
    """A stamp and the bytes, over a plain connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._memory = torch.zeros(max(TIMES), dtype=torch.uint8)

    def send(self, body: Tensor) -> float:
        self._connection.sendmsg([_STAMP.pack(time.monotonic(), body.numel())])
        self._connection.sendall(memoryview(body.numpy()))  # type: ignore[arg-type]
        answer = memoryview(bytearray(_STAMP.size))
        self._fill(answer)
        return float(_STAMP.unpack(answer)[0])

    def serve(self) -> None:
        stamp = memoryview(bytearray(_STAMP.size))
        self._fill(stamp)
        sent_at, nbytes = _STAMP.unpack(stamp)
        body = self._memory[:nbytes]
        self._fill(memoryview(body.numpy()))  # type: ignore[arg-type]
        seconds = time.monotonic() - sent_at
        _read(body)
        self._connection.sendall(_STAMP.pack(seconds, 0))

    def _fill(self, memory: memoryview) -> None:
        while memory:
            memory = memory[self._connection.recv_into(memory, len(memory), socket.MSG_WAITALL) or _gone() :]

    def idle(self, seconds: float) -> None:
        time.sleep(seconds)


def _gone() -> int:
    raise ConnectionError("the other end is gone")


def _read(body: Tensor) -> None:
    body.view(torch.int32).sum()


# What both processes do


def measure(line: Line, rank: int, idle_seconds: float) -> Figures:
    """Rank 1 sends, rank 0 serves."""
    burnt = time.process_time()
    line.idle(idle_seconds)
    share = (time.process_time() - burnt) / idle_seconds if idle_seconds else 0.0
    seconds, copying = {}, {}
    arenas = tuple(torch.ones(CACHE_BYTES if rank else 0, dtype=torch.uint8) for _ in range(2))
    for nbytes, times in TIMES.items():
        if rank == 0:
            for _ in range(WARM_UP + times):
                line.serve()
        else:
            seconds[nbytes], copying[nbytes] = _send_all(line, nbytes, times, arenas)
    return Figures(seconds, copying, share)


def _send_all(line: Line, nbytes: int, times: int, arenas: tuple[Tensor, ...]) -> tuple[float, float]:
    body = torch.ones(nbytes, dtype=torch.uint8)
    count = CACHE_BYTES // nbytes
    sources, targets = (arena.split(nbytes) for arena in arenas)
    one_way, copies = [], []
    for number in range(WARM_UP + times):
        one_way.append(line.send(body))
        began = time.perf_counter()
        targets[number % count].copy_(sources[number % count])
        copies.append(time.perf_counter() - began)
    return statistics.median(one_way[WARM_UP:]), statistics.median(copies[WARM_UP:])


def merged(parts: list[Figures]) -> Figures:
    server, sender = sorted(parts, key=lambda part: len(part.seconds))
    return replace(sender, idle_share=max(server.idle_share, sender.idle_share))


# Contestants: one turn of each


def gloo(idle_seconds: float, shared_memory: bool) -> Figures:
    listener = Listener(Address("127.0.0.1", 0), None)
    try:
        return merged(in_processes(_gloo, 2, listener, shared_memory, idle_seconds))
    finally:
        listener.close()


def _gloo(rank: int, listener: Listener, shared_memory: bool, idle_seconds: float) -> Figures:
    transport = GlooTransport(
        rank=rank,
        processes=2,
        peers=[1 - rank],
        rendezvous=listener if rank == 0 else listener.address,
        token=None,
        identity=RunIdentity("", ""),
        options=LinkOptions(shared_memory=shared_memory),
    )
    return _closing(transport, rank, idle_seconds)


def _closing(transport: Transport, rank: int, idle_seconds: float) -> Figures:
    try:
        return measure(OurLine(transport), rank, idle_seconds)
    finally:
        transport.close()


def plain_socket(idle_seconds: float) -> Figures:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return merged(in_processes(_plain_socket, 2, listener, idle_seconds))


def _plain_socket(rank: int, listener: socket.socket, idle_seconds: float) -> Figures:
    connection = listener.accept()[0] if rank == 0 else socket.create_connection(listener.getsockname())
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return measure(SocketLine(connection), rank, idle_seconds)


def mpi(idle_seconds: float, command: list[str]) -> Figures:
    """Two processes of mpirun, each of which prints what it found out."""
    line = [*command, "-n", "2", sys.executable, __file__, "--role", "mpi", "--idle-seconds", str(idle_seconds)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    try:
        output, _ = process.communicate(timeout=2 * LIMIT_SECONDS)
    finally:
        if process.poll() is None:
            process.terminate()  # which mpirun passes on
            process.communicate()
    if process.returncode:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}")
    return merged([msgspec.json.decode(text, type=Figures) for text in output.splitlines() if text.startswith("{")])


def be_mpi(idle_seconds: float) -> None:
    from offbeat.transports.mpi import MpiTransport, mpi_world

    rank, processes = mpi_world()
    transport = MpiTransport(rank=rank, processes=processes, peers=[1 - rank], identity=RunIdentity("", ""))
    print(msgspec.json.encode(_closing(transport, rank, idle_seconds)).decode(), flush=True)


def contestants() -> tuple[dict[str, Callable[[float], Figures]], list[Row]]:
    """Those that can run here, and notes about the others."""
    found: dict[str, Callable[[float], Figures]] = {
        "gloo": lambda seconds: gloo(seconds, shared_memory=False),
        "gloo-shm": lambda seconds: gloo(seconds, shared_memory=True),
        "socket": plain_socket,
    }
    notes = []
    beside = Path(sys.executable).parent
    starters = {
        "openmpi": [str(beside / "mpirun"), "--allow-run-as-root", "--oversubscribe"],
        "mpich": [str(beside / "mpiexec.hydra"), "-genv", "MPI4PY_MPIABI", "mpich"],
    }
    for name, command in starters.items():
        if _installed("mpi4py") and _installed(name) and Path(command[0]).exists():
            found[name] = lambda seconds, command=command: mpi(seconds, command)  # type: ignore[misc]
        else:
            notes.append(Row(name, note=f"not installed: pip install mpi4py {name}"))
    return found, notes


def _installed(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="how often all of them take turns")
    parser.add_argument("--role", choices=["mpi"], help=argparse.SUPPRESS)
    parser.add_argument("--idle-seconds", type=float, default=IDLE_SECONDS, help="how long nothing is sent, once")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.role:
        be_mpi(arguments.idle_seconds)
        return
    found, notes = contestants()
    turns: dict[str, list[Figures]] = {name: [] for name in found}
    for repeat in range(arguments.repeats):
        for name, turn in found.items():
            figures = turn(0.0 if repeat else arguments.idle_seconds)
            turns[name].append(figures)
            ratios = ", ".join(f"{figures.seconds[size] / figures.memcpy_seconds[size]:.2f}" for size in TIMES)
            print(f"repeat {repeat}: {name} {ratios} × one copy", file=sys.stderr)
    rows = [row for name, figures in turns.items() for row in rows_of(name, figures)] + notes
    ratios_44 = {row.transport: row.over_memcpy for row in rows if row.bytes == 44 << 20}
    shares = {name: round(figures[0].idle_share, 4) for name, figures in turns.items()}
    if arguments.json:
        found_out = {"over_memcpy_44mib": ratios_44, "idle_core_share": shares, "rows": [asdict(row) for row in rows]}
        print(json.dumps(found_out))
    else:
        show(rows, shares)


def rows_of(name: str, turns: list[Figures]) -> list[Row]:
    rows = []
    for nbytes in TIMES:
        seconds = statistics.median(turn.seconds[nbytes] for turn in turns)
        over = statistics.median(turn.seconds[nbytes] / turn.memcpy_seconds[nbytes] for turn in turns)
        rows.append(Row(name, nbytes, seconds, round(over, 4), round(nbytes / seconds / 1e6, 1)))
    return rows


def show(rows: list[Row], shares: dict[str, float]) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("transport")
    for head in ("bytes", "ms", "× one copy", "MB/s", "core, idle"):
        table.add_column(head, justify="right")
    for row in rows:
        if row.seconds is None:
            table.add_row(row.transport, row.note)
            continue
        share = f"{shares[row.transport]:.3f}" if row.bytes == min(TIMES) else ""
        figures = (f"{row.seconds * 1e3:.3f}", f"{row.over_memcpy:.2f}", f"{row.mb_per_second:,.0f}", share)
        table.add_row(row.transport, f"{row.bytes:,}", *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
