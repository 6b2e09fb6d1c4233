"""What strangers, relays and lying members do to links: each is refused, and training goes on."""

from __future__ import annotations

import os
import resource
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from offbeat.core.events import LossReason
from offbeat.core.run_identity import RunIdentity
from offbeat.testing.transport_conformance import NumberedMessage, TransportMonitor
from offbeat.transports import listener as listening
from offbeat.transports import wire
from offbeat.transports.address import Address
from offbeat.transports.link import LinkOptions
from offbeat.transports.listener import Listener
from offbeat.transports.rendezvous import Rejected, Unreachable, connect
from offbeat.transports.tcp import TcpTransport
from offbeat.transports.tls import Credentials, Tls

TOKEN = b"a token only for these tests"
PLAIN, TLS = Credentials(TOKEN), Credentials(TOKEN, Tls(mode="on"))
IDENTITY = RunIdentity("m", "s")
LARGE = torch.ones(500_000)


class Run:
    """A hub, and workers that connect to `port`, where it is not the hub's own."""

    def __init__(self, credentials: Credentials) -> None:
        self.credentials = credentials
        self.listener = Listener(Address("127.0.0.1", 0), credentials)
        self.transports: list[TcpTransport] = []
        self.hub = self._open(0, [1, 2], self.listener)

    def _open(self, rank: int, peers: list[int], rendezvous: Any) -> TransportMonitor:
        transport = TcpTransport(
            rank=rank,
            processes=3,
            peers=peers,
            rendezvous=rendezvous,
            credentials=self.credentials,
            identity=IDENTITY,
            options=LinkOptions(shared_memory=False),
        )
        self.transports.append(transport)
        return TransportMonitor(transport, rank)

    def worker(self, rank: int, port: int | None = None) -> TransportMonitor:
        return self._open(rank, [0], Address("127.0.0.1", self.listener.address.port if port is None else port))

    def exchange(self, worker: TransportMonitor, number: int = 0) -> None:
        """2 MB each way."""
        self.hub.wait_linked(worker.rank)
        worker.wait_linked(0)
        worker.send(0, NumberedMessage(number, LARGE))
        assert torch.equal(self.hub.expect(worker.rank, number).body, LARGE)
        self.hub.send(worker.rank, NumberedMessage(number, LARGE))
        assert torch.equal(worker.expect(0, number).body, LARGE)

    def close(self) -> None:
        for transport in reversed(self.transports):
            transport.close(1.0)
        self.listener.close()


@pytest.fixture(params=[PLAIN, TLS], ids=["plain", "tls"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    started = Run(request.param)
    yield started
    started.close()


@pytest.fixture
def tls_run() -> Iterator[Run]:
    started = Run(TLS)
    yield started
    started.close()


# Strangers


def test_a_thousand_bare_connections_neither_end_the_hub_nor_keep_a_worker_out(run: Run) -> None:
    first = run.worker(1)
    run.exchange(first)
    strangers = [socket.create_connection(("127.0.0.1", run.listener.address.port)) for _ in range(1010)]
    second = run.worker(2)
    run.exchange(second)
    run.exchange(first, 1)
    assert len(run.listener._pending) <= listening.PENDING_PER_HOST_MAX
    assert run.listener.turned_away >= 1010 - listening.PENDING_PER_HOST_MAX
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00" + os.urandom(512),
        b"\x16\x03\x01\xff\xff",
        b"offbeat authentication 1\n" + bytes(64),
        b"offbeat authentication 1\n" + os.urandom(100_000),
        os.urandom(100_000),
        b"\x00",
    ],
    ids=["http", "damaged hello", "half a hello", "no proof", "much after no proof", "noise", "one byte"],
)
def test_nonsense_is_disconnected_and_costs_nobody_else_anything(run: Run, words: bytes) -> None:
    strangers = []
    for _ in range(20):
        stranger = socket.create_connection(("127.0.0.1", run.listener.address.port))
        with suppress(ConnectionError):
            stranger.sendall(words)
        strangers.append(stranger)
    run.exchange(run.worker(1))
    for stranger in strangers:
        stranger.close()


def test_a_connection_that_does_not_show_the_token_is_closed_after_the_deadline(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "HANDSHAKE_SECONDS", 0.3)
    begun = time.monotonic()
    with socket.create_connection(("127.0.0.1", run.listener.address.port)) as drips:
        drips.settimeout(30)
        for byte in b"offbeat authentication":  # it says something now and then, which prolongs nothing
            with suppress(ConnectionError):
                drips.send(bytes([byte]))
            if run.listener.turned_away:
                break
            time.sleep(0.05)
        with suppress(ConnectionError):
            assert drips.recv(1024) == b""
    assert time.monotonic() - begun >= 0.3
    run.exchange(run.worker(1))


def test_strangers_are_logged_once_a_minute(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    wrong = Credentials(b"a guess that is long enough", run.credentials.tls)
    for _ in range(20):
        with pytest.raises(Rejected, match="does not accept the token"):
            connect(run.listener.address, wrong)
    assert len(caplog.records) == 1
    assert "did not show the token" in caplog.text


def test_tls_handshakes_are_begun_at_a_limited_rate_and_for_one_address_after_the_other(
    tls_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand strangers at one address ask for handshakes; a worker at another is not behind them in the queue."""
    monkeypatch.setattr(listening, "TLS_PER_SECOND", 20.0)
    tls_run.listener._tls_allowance = 0.0
    hello = client_hello()
    strangers = []
    for _ in range(listening.PENDING_PER_HOST_MAX):
        stranger = socket.create_connection(
            ("127.0.0.1", tls_run.listener.address.port), source_address=("127.0.0.2", 0)
        )
        stranger.sendall(hello)
        strangers.append(stranger)
    tls_run.exchange(tls_run.worker(1))
    assert tls_run.listener._tls_queue["127.0.0.2"], "it did not have to wait for all of them"
    for stranger in strangers:
        stranger.close()


def client_hello() -> bytes:
    context = Tls(mode="on").client_side()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


def test_a_hub_without_free_file_descriptors_closes_strangers_and_goes_on(run: Run) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    run.exchange(run.worker(1))
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    strangers: list[socket.socket] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 60, hard))
        with suppress(OSError):
            while True:
                strangers.append(socket.create_connection(("127.0.0.1", run.listener.address.port), timeout=5))
        for stranger in strangers[-10:]:  # both ends are in this process: what the test holds, the hub cannot have
            stranger.close()
        run.exchange(run.worker(2))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for stranger in strangers:
            stranger.close()


# Somebody else answers


def test_a_stranger_who_answers_first_gets_no_worker(tls_run: Run) -> None:
    """The port of the hub is taken by somebody who has a certificate, but not the token."""
    false = Listener(Address("127.0.0.1", 0), Credentials(b"the token of somebody else", Tls(mode="on")))
    handled: list[object] = []
    false.serve(lambda connection: bool(handled.append(connection)))
    with pytest.raises(Rejected, match="does not accept the token"):
        connect(false.address, TLS)
    false.close()
    assert handled == []


def test_a_listener_that_claims_success_without_the_token_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def claim() -> None:
            connected = server.accept()[0]
            connected.recv(25)
            connected.sendall(bytes(33))
            connected.recv(64)
            connected.sendall(bytes(33))
            connected.recv(1)
            connected.close()

        claiming = threading.Thread(target=claim)
        claiming.start()
        with pytest.raises(Unreachable, match="is not a process of this run"):
            connect(Address(*server.getsockname()[:2]), PLAIN)
        claiming.join()


class Relay:
    """Sits between a worker and the hub. `change` sees each chunk and whether it goes to the hub."""

    def __init__(self, target: int, change: Callable[[bytes, bool], bytes]) -> None:
        self.target, self.change = target, change
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.server.getsockname()[1]
        self.open: list[socket.socket] = []
        self.threads = [threading.Thread(target=self._run)]
        self.threads[0].start()

    def _encrypt(self, connected: socket.socket, is_client: bool) -> socket.socket:
        return connected

    def _run(self) -> None:
        with suppress(OSError):  # the server is closed
            while True:
                ends = [self.server.accept()[0], socket.create_connection(("127.0.0.1", self.target))]
                self.open += ends
                with suppress(OSError):  # an end does not like the certificate
                    for place in range(2):
                        ends[place] = self._encrypt(ends[place], is_client=place == 0)
                        self.open.append(ends[place])
                    for source, sink, to_hub in ((*ends, True), (*ends[::-1], False)):
                        self.threads.append(threading.Thread(target=self._pump, args=(source, sink, to_hub)))
                        self.threads[-1].start()

    def _pump(self, source: socket.socket, sink: socket.socket, to_hub: bool) -> None:
        with suppress(OSError, ValueError):
            while data := source.recv(65536):
                sink.sendall(self.change(data, to_hub))
        for end in (source, sink):
            with suppress(OSError):
                socket.socket.shutdown(end, socket.SHUT_RDWR)

    def close(self) -> None:
        for one in (self.server, *self.open):
            with suppress(OSError):
                socket.socket.shutdown(one, socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join()
        for one in (self.server, *self.open):
            one.close()


class DecryptingRelay(Relay):
    """Speaks TLS with both, with a certificate of its own."""

    def _encrypt(self, connected: socket.socket, is_client: bool) -> socket.socket:
        tls = Tls(mode="on")
        context = tls.listener_side().context if is_client else tls.client_side()
        return context.wrap_socket(connected, server_side=is_client)


def test_a_relay_with_a_certificate_of_its_own_gets_nobody_through(tls_run: Run) -> None:
    seen: list[bytes] = []

    def watch(data: bytes, to_hub: bool) -> bytes:
        seen.append(data)
        return data

    relay = DecryptingRelay(tls_run.listener.address.port, watch)
    with pytest.raises(Rejected, match="does not accept the token"):
        connect(Address("127.0.0.1", relay.port), TLS)
    assert b"".join(seen).startswith(b"offbeat authentication")  # it did read what both said
    relay.close()
    tls_run.exchange(tls_run.worker(1))


def test_a_relay_that_flips_bits_breaks_the_link_and_nothing_false_is_received(tls_run: Run) -> None:
    sent = 0

    def flip(data: bytes, to_hub: bool) -> bytes:
        nonlocal sent
        if to_hub:
            sent += len(data)
            if sent > 1_000_000:  # in the middle of the first gradient
                return data[:-1] + bytes([data[-1] ^ 0x80])
        return data

    relay = Relay(tls_run.listener.address.port, flip)
    worker = tls_run.worker(1, relay.port)
    tls_run.hub.wait_linked(1)
    worker.wait_linked(0)
    worker.send(0, NumberedMessage(0, LARGE))
    lost = tls_run.hub.wait_lost(1, 0)
    assert (lost.reason, lost.detail.split(" (")[0]) == (LossReason.INVALID, "the encrypted data is damaged")
    assert not tls_run.hub.arrived[1]
    relay.close()
    tls_run.exchange(tls_run.worker(2))


# Members that lie


@pytest.mark.parametrize("extra", [1, 100_000])
def test_a_member_that_sends_more_than_it_announced_loses_its_link_alone(
    run: Run, extra: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    liar, honest = run.worker(1), run.worker(2)
    run.exchange(liar)
    run.exchange(honest)
    encode = wire.encode

    def lie(message: Any, checksum: bool = False) -> wire.Encoded:
        encoded = encode(message, checksum)
        return wire.Encoded(
            encoded.head, encoded.meta, [*encoded.tensors, torch.zeros(extra, dtype=torch.uint8)], encoded.size
        )

    before = run.hub.links[1]
    with monkeypatch.context() as lying:
        lying.setattr(wire, "encode", lie)
        liar.send(0, NumberedMessage(7, torch.ones(10)))
        liar.send(0, NumberedMessage(8, torch.ones(10)))
        lost = run.hub.wait_lost(1, before)
    assert lost.reason is LossReason.INVALID
    run.exchange(honest, 1)
