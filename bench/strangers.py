"""What strangers at a hub's port cost: processor time of the hub for each, the pace of a link, and the time to join.

    python bench/strangers.py [--json] [--seconds N] [--repeats N]

A hub and a worker, in processes of their own, exchange messages of 100 kB as fast as they can, over TCP (`plain`) and
over TLS. Attackers in a third process open connections as fast as they can, from another address: and say nothing
(`silent`), send 400 bytes of nonsense (`nonsense`), or ask for a TLS handshake (`hello`). In the control they do the
same to a port of their own, so that the processor that they use is accounted for. Hub and worker share one core, and
all other processes another one: a scheduler that moves them makes the control differ from itself twofold. In a turn
each attack is between two controls; medians of the turns.

`pace`: exchanges per second under attack over those of the controls. `control`: those of the second control over those
of the first one. `join_seconds`: from the start of another worker's transport until it is linked, under attack.
`cpu_ms`: processor time of the listener's thread for each stranger.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import ssl
import statistics
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from offbeat.core.events import MessageArrived, PeerJoined
from offbeat.core.run_identity import RunIdentity
from offbeat.testing.transport_conformance import NumberedMessage
from offbeat.transports.address import Address
from offbeat.transports.listener import Listener
from offbeat.transports.tcp import TcpTransport
from offbeat.transports.tls import Credentials, Tls

FORK = multiprocessing.get_context("fork")
TOKEN = b"only for this measurement"
OPEN_MAX = 200
"""Connections that an attacker holds open; then it closes its oldest one."""


@dataclass(frozen=True)
class Row:
    link: str
    attack: str
    strangers_per_second: float
    cpu_ms: float
    pace: float
    control: float
    join_seconds: float


def credentials(tls: str) -> Credentials:
    return Credentials(TOKEN, Tls(mode=tls))


def transport(rank: int, rendezvous: Any, tls: str) -> TcpTransport:
    return TcpTransport(
        rank=rank,
        processes=3,
        peers=[1, 2] if rank == 0 else [0],
        rendezvous=rendezvous,
        credentials=credentials(tls),
        identity=RunIdentity("", ""),
    )


def pin(core: int) -> None:
    """Keep this process on one of the cores that it may use."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[core % len(cores)]})


def be_hub(tls: str, pipe: Connection) -> None:
    """Send everything back; answer with counts when asked."""
    pin(0)
    torch.set_num_threads(1)
    listener = Listener(Address("127.0.0.1", 0), credentials(tls))
    hub = transport(0, listener, tls)
    pipe.send(listener.address.port)
    answering = threading.Thread(target=answer, args=(listener, pipe), daemon=True)
    answering.start()
    while answering.is_alive():
        event = hub.receive(0.2)
        if isinstance(event, MessageArrived):
            hub.send(event.source, event.incarnation, event.message)
    hub.close(0.2)


def answer(listener: Listener, pipe: Connection) -> None:
    while pipe.recv() != "end":
        pipe.send((listener.accepted, listener.processor_seconds))


def be_worker(tls: str, port: int, pipe: Connection) -> None:
    """Count exchanges until asked to end."""
    pin(0)
    torch.set_num_threads(1)
    worker = transport(1, Address("127.0.0.1", port), tls)
    body = torch.ones(25_000)
    count = 0
    while not pipe.poll():
        event = worker.receive(0.2)
        if isinstance(event, PeerJoined | MessageArrived):
            count += isinstance(event, MessageArrived)
            worker.send(0, event.incarnation, NumberedMessage(count, body))
            if count == 1:
                pipe.send("linked")
                count, begun = 1, time.monotonic()
    pipe.send(count / (time.monotonic() - begun))
    worker.close(0.2)


def be_attacker(attack: str, port: int, pipe: Connection) -> None:
    pin(1)
    words = {"silent": b"", "nonsense": b"x" * 400, "hello": client_hello()}[attack]
    held: list[socket.socket] = []
    while not pipe.poll():
        with suppress(OSError):
            stranger = socket.create_connection(("127.0.0.1", port), 1.0, ("127.0.0.2", 0))
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # frees its port at once
            held.append(stranger)
            if words:
                stranger.send(words)
        if len(held) > OPEN_MAX:
            held.pop(0).close()


def be_other_port(pipe: Connection) -> None:
    """What the attackers of the control talk to: accepts, and closes the oldest."""
    pin(1)
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        pipe.send(server.getsockname()[1])
        server.settimeout(0.2)
        held: list[socket.socket] = []
        while not pipe.poll():
            with suppress(TimeoutError):
                held.append(server.accept()[0])
            if len(held) > OPEN_MAX:
                held.pop(0).close()


def client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        Tls(mode="on").client_side().wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


def start(target: Any, *arguments: Any) -> Connection:
    here, there = FORK.Pipe()
    FORK.Process(target=target, args=(*arguments, there), daemon=True).start()
    return here


def turn(tls: str, attack: str, seconds: float, is_control: bool) -> tuple[float, float, float, float]:
    """Exchanges per second, strangers per second, processor seconds per stranger, and seconds to join."""
    hub = start(be_hub, tls)
    port = hub.recv()
    worker = start(be_worker, tls, port)
    worker.recv()
    other = start(be_other_port)
    target = other.recv() if is_control else port
    attackers = [start(be_attacker, attack, target) for _ in range(1)]
    hub.send("count")
    before = hub.recv()
    begun = time.monotonic()
    time.sleep(seconds)
    hub.send("count")
    after = hub.recv()
    lasted = time.monotonic() - begun
    joining = time.monotonic()
    late = transport(2, Address("127.0.0.1", port), tls)
    while not isinstance(late.receive(60), PeerJoined):
        pass
    joined = time.monotonic() - joining
    worker.send("end")
    pace = worker.recv()
    late.close(0.2)
    for pipe in (*attackers, other, hub):
        pipe.send("end")
    for process in FORK.active_children():
        process.join(5)
    strangers = after[0] - before[0]
    return pace, strangers / lasted, (after[1] - before[1]) / max(strangers, 1), joined


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each attack lasts")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for link, tls in (("plain", "off"), ("tls", "on")):
        for attack in ("silent", "nonsense", "hello"):
            turns = []
            for _ in range(arguments.repeats):
                control = turn(tls, attack, arguments.seconds, is_control=True)
                attacked = turn(tls, attack, arguments.seconds, is_control=False)
                again = turn(tls, attack, arguments.seconds, is_control=True)
                pace = 2 * attacked[0] / (control[0] + again[0])
                turns.append((attacked[1], attacked[2] * 1e3, pace, again[0] / control[0], attacked[3]))
            rows.append(Row(link, attack, *(statistics.median(values) for values in zip(*turns, strict=True))))
            print(f"{link} {attack}: {rows[-1]}", file=sys.stderr)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for head in ("link", "attack", "strangers/s", "CPU ms each", "pace", "control", "s to join"):
        table.add_column(head, justify="left" if head in ("link", "attack") else "right")
    for row in rows:
        strangers, ratios = f"{row.strangers_per_second:,.0f}", (row.pace, row.control, row.join_seconds)
        table.add_row(row.link, row.attack, strangers, f"{row.cpu_ms:.3f}", *(f"{ratio:.2f}" for ratio in ratios))
    Console().print(table)


if __name__ == "__main__":
    main()
