"""What transports cost: one message from one process into the hands of another, over one copy of as many bytes.

    python bench/transports.py [--json] [--repeats N]
    python bench/transports.py --between-hosts 1gbit       # network namespaces; needs root and iproute2

One way: from just before `send` in one process until `receive` has returned the message in the other, by the clock that
both share. The receiver then reads all of it, lets go of it and answers, and only then the next message is sent; so the
memory of both ends is used again, as it is in a run. Between two messages the sender copies as many bytes from one
place to another, through memory that was used before and is larger than any cache: `over_memcpy` is the median of the
one over the median of the other. All transports take turns; each figure is the median of the repeats.

`tcp` and `tcp+tls` have shared memory switched off, `tcp+shm` has it as it comes. `socket` is a plain connection and
memory that is used again. `openmpi` and `mpich` are ours over those; where one of them is not installed, a note says
so.

`cpu_s_per_gb`: processor time of all threads of both processes per 10⁹ bytes; reading the message once is part of it.

`--between-hosts RATE`: both processes are in network namespaces of their own, with a cable of that rate between them;
`line_share` is what arrived per second over what the cable carries, headers of Ethernet, IP and TCP taken off.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from offbeat.transports.address import Address
from offbeat.transports.link import LinkOptions
from offbeat.transports.listener import Listener
from offbeat.transports.tcp import TcpTransport
from offbeat.transports.tls import Credentials, Tls
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
    cpu_s_per_gb: float | None = None
    line_share: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Figures:
    """What the two processes of one turn found out."""

    seconds: dict[int, float]
    memcpy_seconds: dict[int, float]
    idle_share: float
    processor_seconds: dict[int, float]
    """Per message of so many bytes."""


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
    seconds: dict[int, float] = {}
    copying: dict[int, float] = {}
    processor: dict[int, float] = {}
    arenas = tuple(torch.ones(CACHE_BYTES if rank else 0, dtype=torch.uint8) for _ in range(2))
    for nbytes, times in TIMES.items():
        if rank == 0:
            begun = time.process_time()
            for _ in range(WARM_UP + times):
                line.serve()
            processor[nbytes] = (time.process_time() - begun) / (WARM_UP + times)
        else:
            seconds[nbytes], copying[nbytes], processor[nbytes] = _send_all(line, nbytes, times, arenas)
    return Figures(seconds, copying, share, processor)


def _send_all(line: Line, nbytes: int, times: int, arenas: tuple[Tensor, ...]) -> tuple[float, float, float]:
    body = torch.ones(nbytes, dtype=torch.uint8)
    count = CACHE_BYTES // nbytes
    sources, targets = (arena.split(nbytes) for arena in arenas)
    one_way, copies = [], []
    processor = 0.0
    for number in range(WARM_UP + times):
        begun = time.process_time()
        one_way.append(line.send(body))
        processor += time.process_time() - begun
        began = time.perf_counter()
        targets[number % count].copy_(sources[number % count])
        copies.append(time.perf_counter() - began)
    median = statistics.median
    return median(one_way[WARM_UP:]), median(copies[WARM_UP:]), processor / (WARM_UP + times)


def merged(parts: list[Figures]) -> Figures:
    server, sender = sorted(parts, key=lambda part: len(part.seconds))
    both = {nbytes: seconds + server.processor_seconds[nbytes] for nbytes, seconds in sender.processor_seconds.items()}
    return replace(sender, idle_share=max(server.idle_share, sender.idle_share), processor_seconds=both)


# Contestants: one turn of each


def tcp(idle_seconds: float, tls: str = "off", shared_memory: bool = False) -> Figures:
    listener = Listener(Address("127.0.0.1", 0), _credentials(tls))
    try:
        return merged(in_processes(_tcp, 2, listener, tls, shared_memory, idle_seconds))
    finally:
        listener.close()


def _credentials(tls: str) -> Credentials:
    return Credentials(b"only for this measurement", Tls(mode=tls))


def _tcp(rank: int, listener: Listener, tls: str, shared_memory: bool, idle_seconds: float) -> Figures:
    transport = _transport(rank, listener if rank == 0 else listener.address, tls, shared_memory)
    return _closing(transport, rank, idle_seconds)


def _transport(rank: int, rendezvous: Address | Listener, tls: str, shared_memory: bool) -> Transport:
    return TcpTransport(
        rank=rank,
        processes=2,
        peers=[1 - rank],
        rendezvous=rendezvous,
        credentials=_credentials(tls),
        identity=RunIdentity("", ""),
        options=LinkOptions(shared_memory=shared_memory),
    )


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
        "tcp": tcp,
        "tcp+tls": lambda seconds: tcp(seconds, tls="on"),
        "tcp+shm": lambda seconds: tcp(seconds, shared_memory=True),
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


# Between hosts


HUB_HOST, FAR_HOST, HUB_ADDRESS = "obbenchhub", "obbenchfar", "10.213.9.1"


@contextmanager
def two_hosts(rate: str) -> Iterator[None]:
    """Two network namespaces with a cable between them, each end of which sends at `rate` at the most."""
    ends = ((HUB_HOST, "obbh", f"{HUB_ADDRESS}/24"), (FAR_HOST, "obbf", "10.213.9.2/24"))
    try:
        for host, _, _ in ends:
            _do("ip", "netns", "add", host)
        _do("ip", "link", "add", "obbh", "netns", HUB_HOST, "type", "veth", "peer", "name", "obbf", "netns", FAR_HOST)
        for host, end, address in ends:
            _do("ip", "-n", host, "addr", "add", address, "dev", end)
            _do("ip", "-n", host, "link", "set", end, "up")
            _do("ip", "-n", host, "link", "set", "lo", "up")
            queue = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            _do("tc", "-n", host, "qdisc", "add", "dev", end, "root", *queue)
        yield
    finally:
        for host, _, _ in ends:
            subprocess.run(["ip", "netns", "delete", host], check=False, capture_output=True)


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def between_hosts(role: str) -> Figures:
    """One turn: this file as two processes, each on its host."""
    parts: list[Figures] = []
    line = [sys.executable, __file__, "--idle-seconds", "0", "--role", role]
    hub, far = (
        subprocess.Popen(["ip", "netns", "exec", host, *line, "--rank", str(rank)], stdout=subprocess.PIPE, text=True)
        for rank, host in enumerate((HUB_HOST, FAR_HOST))
    )
    try:
        for process in (hub, far):
            output, _ = process.communicate(timeout=4 * LIMIT_SECONDS)
            parts += [msgspec.json.decode(text, type=Figures) for text in output.splitlines() if text.startswith("{")]
    finally:
        hub.kill()
        far.kill()
    return merged(parts)


def be_on_host(role: str, rank: int) -> None:
    there = Address(HUB_ADDRESS, 7709)
    if role == "socket":
        figures = _socket_on_host(rank, there)
    else:
        tls = "on" if role == "tcp+tls" else "off"
        rendezvous = Listener(there, _credentials(tls)) if rank == 0 else there
        figures = _closing(_transport(rank, rendezvous, tls, False), rank, 0.0)
    print(msgspec.json.encode(figures).decode(), flush=True)


def _socket_on_host(rank: int, there: Address) -> Figures:
    if rank == 0:
        with socket.create_server((there.host, there.port)) as server:
            connection = server.accept()[0]
    else:
        for _ in range(200):
            try:
                connection = socket.create_connection((there.host, there.port))
                break
            except ConnectionRefusedError:
                time.sleep(0.1)
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return measure(SocketLine(connection), rank, 0.0)


ON_THE_WIRE = 1448 / 1514
"""Of each packet of a cable of Ethernet, with time stamps in the headers of TCP, as tbf counts it."""


def bits_per_second(rate: str) -> float:
    number, unit = rate.rstrip("abcdefghijklmnopqrstuvwxyz"), rate.lstrip("0123456789.")
    return float(number) * {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}[unit]


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
    parser.add_argument("--between-hosts", metavar="RATE", help="network namespaces with a cable of that rate: 1gbit")
    parser.add_argument("--role", choices=["mpi", "tcp", "tcp+tls", "socket"], help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--idle-seconds", type=float, default=IDLE_SECONDS, help="how long nothing is sent, once")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.role == "mpi":
        be_mpi(arguments.idle_seconds)
    elif arguments.role:
        be_on_host(arguments.role, arguments.rank)
    elif arguments.between_hosts:
        with two_hosts(arguments.between_hosts):
            names = ("tcp", "tcp+tls", "socket")
            found = {name: lambda seconds, name=name: between_hosts(name) for name in names}
            compare(arguments, found, [], bits_per_second(arguments.between_hosts) / 8 * ON_THE_WIRE)
    else:
        compare(arguments, *contestants())


def compare(
    arguments: argparse.Namespace,
    found: dict[str, Callable[[float], Figures]],
    notes: list[Row],
    line_bytes_per_second: float | None = None,
) -> None:
    """Let all take turns, and print the rows."""
    turns: dict[str, list[Figures]] = {name: [] for name in found}
    for repeat in range(arguments.repeats):
        for name, turn in found.items():
            figures = turn(0.0 if repeat else arguments.idle_seconds)
            turns[name].append(figures)
            ratios = ", ".join(f"{figures.seconds[size] / figures.memcpy_seconds[size]:.2f}" for size in TIMES)
            print(f"repeat {repeat}: {name} {ratios} × one copy", file=sys.stderr)
    rows = [row for name, figures in turns.items() for row in rows_of(name, figures, line_bytes_per_second)] + notes
    ratios_44 = {row.transport: row.over_memcpy for row in rows if row.bytes == 44 << 20}
    shares = {name: round(figures[0].idle_share, 4) for name, figures in turns.items()}
    if arguments.json:
        found_out = {"over_memcpy_44mib": ratios_44, "idle_core_share": shares, "rows": [asdict(row) for row in rows]}
        print(json.dumps(found_out))
    else:
        show(rows, shares)


def rows_of(name: str, turns: list[Figures], line: float | None) -> list[Row]:
    rows = []
    for nbytes in TIMES:
        seconds = statistics.median(turn.seconds[nbytes] for turn in turns)
        over = statistics.median(turn.seconds[nbytes] / turn.memcpy_seconds[nbytes] for turn in turns)
        processor = statistics.median(turn.processor_seconds[nbytes] for turn in turns) / nbytes * 1e9
        share = None if line is None else round(nbytes / seconds / line, 4)
        rate = round(nbytes / seconds / 1e6, 1)
        rows.append(Row(name, nbytes, seconds, round(over, 4), rate, round(processor, 3), share))
    return rows


def show(rows: list[Row], shares: dict[str, float]) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("transport")
    for head in ("bytes", "ms", "× one copy", "MB/s", "CPU s/GB", "of the line", "core, idle"):
        table.add_column(head, justify="right")
    for row in rows:
        if row.seconds is None:
            table.add_row(row.transport, row.note)
            continue
        share = f"{shares[row.transport]:.3f}" if row.bytes == min(TIMES) else ""
        line = "" if row.line_share is None else f"{row.line_share:.3f}"
        figures = (f"{row.seconds * 1e3:.3f}", f"{row.over_memcpy:.2f}", f"{row.mb_per_second:,.0f}")
        table.add_row(row.transport, f"{row.bytes:,}", *figures, f"{row.cpu_s_per_gb:.2f}", line, share)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
