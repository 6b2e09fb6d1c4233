"""The listener and its messages: which clients are accepted, which are rejected, and what a user reads."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec
import pytest

from offbeat.errors import ConfigurationError, RunFailed
from offbeat.transports import listener as listening
from offbeat.transports import rendezvous
from offbeat.transports.address import Address
from offbeat.transports.byte_stream import PlainStream
from offbeat.transports.listener import Listener
from offbeat.transports.rendezvous import (
    Assignment,
    CallRequest,
    ControlConnection,
    Rejected,
    Rejection,
    Unreachable,
    connect,
    request_assignment,
)
from offbeat.transports.tls import Credentials, Tls

SECRET = Credentials(b"a secret only for these tests")
ASSIGNMENT = Assignment(rank=3, processes=5, elapsed_seconds=1.5, experiment=b"opaque")
ANY = Address("127.0.0.1", 0)

Open = Callable[..., Listener]


@pytest.fixture
def open_listener() -> Iterator[Open]:
    listeners: list[Listener] = []

    def make(handler: Callable[[ControlConnection], bool] | None = None, credentials: Credentials = SECRET) -> Listener:
        listener = Listener(ANY, credentials)
        listeners.append(listener)
        listener.serve(handler or assign)
        return listener

    yield make
    for listener in listeners:
        listener.close()


def assign(connection: ControlConnection) -> bool:
    connection.recv(CallRequest)
    connection.send(ASSIGNMENT)
    return False


def requested(listener: Listener, credentials: Credentials = SECRET, wait_seconds: float = 20.0) -> Assignment:
    return request_assignment(listener.address, credentials, member="a worker", rank=None, wait_seconds=wait_seconds)


def unused_address() -> Address:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return Address("127.0.0.1", server.getsockname()[1])


# Addresses


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:7700", "127.0.0.1", 7700), ("node-3:0", "node-3", 0), ("[::1]:80", "::1", 80)],
)
def test_addresses_are_read_and_written(text: str, host: str, port: int) -> None:
    address = Address.parse(text)
    assert address == Address(host, port)
    assert str(address) == text


@pytest.mark.parametrize("text", ["", "here", "here:", ":80", "here:eighty", "here:65536", "here:-1", "::1:80", "a:²"])
def test_what_is_no_address_is_answered_with_one_sentence(text: str) -> None:
    with pytest.raises(ConfigurationError, match="type") as caught:
        Address.parse(text)
    assert "\n" not in str(caught.value)


def test_loopback_is_what_only_this_machine_can_reach() -> None:
    assert all(Address(host, 1).is_loopback for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"))
    assert not any(Address(host, 1).is_loopback for host in ("0.0.0.0", "10.0.0.1", "::", "node-3"))


# Listeners


def test_a_listener_on_port_0_reports_its_port(open_listener: Open) -> None:
    assert open_listener().address.port > 0


def test_a_port_that_is_taken_is_named(open_listener: Open) -> None:
    listener = open_listener()
    with pytest.raises(ConfigurationError, match=f"port {listener.address.port} of 127.0.0.1 is taken; choose another"):
        Listener(listener.address, SECRET)


def test_a_listener_may_be_open_to_other_machines() -> None:
    listener = Listener(Address("0.0.0.0", 0), SECRET)
    listener.serve(assign)
    assert (
        request_assignment(Address("127.0.0.1", listener.address.port), SECRET, member="", rank=1, wait_seconds=20)
        == ASSIGNMENT
    )
    listener.close()


@pytest.mark.parametrize(("token", "found"), [(b"", "is empty"), (b"guessable", "has 9 characters")])
def test_a_token_that_can_be_guessed_is_rejected(token: bytes, found: str) -> None:
    with pytest.raises(ConfigurationError, match=f"the token {found}, but at least 22 random ones are needed"):
        Credentials(token)


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(ConfigurationError, match="cannot listen on"):
        Listener(Address("192.0.2.1", 0), SECRET)


def test_a_listener_that_never_served_can_be_closed_twice() -> None:
    listener = Listener(ANY, SECRET)
    listener.close()
    listener.close()
    with pytest.raises(Unreachable):
        connect(listener.address, SECRET)
    again = Listener(listener.address, SECRET)
    assert again.address == listener.address
    again.close()


# Which clients are accepted


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_a_client_with_the_token_gets_an_assignment(open_listener: Open, mode: str) -> None:
    credentials = Credentials(SECRET.token, Tls(mode=mode))
    assert requested(open_listener(credentials=credentials), credentials) == ASSIGNMENT


@pytest.mark.parametrize(("source", "same"), [("127.0.0.1", True), ("127.0.0.2", False)])
def test_both_ends_know_whether_they_have_the_same_address(source: str, same: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connected = socket.create_connection(listener.getsockname(), source_address=(source, 0))
        connecting = ControlConnection(PlainStream(connected, 10))
        with connecting, ControlConnection(PlainStream(listener.accept()[0], 10)) as client:
            assert connecting.same_host == client.same_host == same


def test_a_client_may_connect_before_the_listener_serves() -> None:
    listener = Listener(ANY, SECRET)
    assignments: list[Assignment] = []
    client = threading.Thread(target=lambda: assignments.append(requested(listener)))
    client.start()
    listener.serve(assign)
    client.join()
    listener.close()
    assert assignments == [ASSIGNMENT]


WITH_TLS = Credentials(SECRET.token, Tls(mode="on"))
WITHOUT_TLS = Credentials(SECRET.token, Tls(mode="off"))


@pytest.mark.parametrize(
    ("expected", "given", "sentence"),
    [
        (SECRET, Credentials(b"a guess that is as long"), "does not accept the token; give the one of the run with"),
        (WITH_TLS, Credentials(b"a guess that is as long", Tls(mode="on")), "does not accept the token"),
        (
            WITHOUT_TLS,
            WITH_TLS,
            "does not answer with TLS .*; if it was started with --tls off, type that here",
        ),
        (WITH_TLS, SECRET, "wants encrypted connections; type --tls on"),
    ],
)
def test_a_client_without_the_token_is_rejected_at_once(
    open_listener: Open, expected: Credentials, given: Credentials, sentence: str
) -> None:
    handled: list[ControlConnection] = []

    def handle(connection: ControlConnection) -> bool:
        handled.append(connection)
        return False

    listener = open_listener(handle, expected)
    with pytest.raises(RunFailed, match=sentence):
        requested(listener, given)
    assert handled == []


def test_nothing_is_decoded_before_authentication(open_listener: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[object] = []

    class Watched(dict):  # type: ignore[type-arg]
        def __getitem__(self, kind: object) -> object:
            decoded.append(kind)
            return super().__getitem__(kind)

    monkeypatch.setattr(rendezvous, "_DECODERS", Watched(rendezvous._DECODERS))
    listener = open_listener()
    hello = msgspec.msgpack.encode(CallRequest("assignment", 1))
    with socket.create_connection((listener.address.host, listener.address.port)) as client:
        client.sendall(struct.pack("!i", len(hello)) + hello)
        with suppress(ConnectionResetError):
            while client.recv(1024):
                pass
    assert decoded == []


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n" * 20, b"\0" * 400, b"\xff" * 400])
def test_a_client_that_sends_garbage_is_disconnected_and_the_next_accepted(open_listener: Open, garbage: bytes) -> None:
    listener = open_listener()
    with socket.create_connection((listener.address.host, listener.address.port)) as client:
        try:
            client.sendall(garbage)
            while client.recv(1024):
                pass
        except ConnectionError:
            pass
    assert requested(listener) == ASSIGNMENT


def test_silent_clients_do_not_keep_others_from_connecting(open_listener: Open) -> None:
    listener = open_listener()
    address = (listener.address.host, listener.address.port)
    silent = [socket.create_connection(address) for _ in range(listening.PENDING_PER_HOST_MAX + 5)]
    assert requested(listener) == ASSIGNMENT
    listener.close()
    for client in silent:
        with client:
            try:
                while client.recv(1024):
                    pass  # closing has ended the connection, so this does not block
            except ConnectionError:
                pass


def test_a_client_that_is_silent_after_authentication_times_out(
    open_listener: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "REPLY_SECONDS", 0.2)
    ends: list[str] = []
    over = threading.Event()

    def handle(connection: ControlConnection) -> bool:
        try:
            connection.recv(CallRequest)
        except Unreachable as error:
            ends.append(str(error))
        over.set()
        return False

    listener = open_listener(handle)
    with connect(listener.address, SECRET):
        assert over.wait(60)
    assert ends == ["silent for 0.2 seconds"]


def test_a_message_that_is_too_long_ends_the_connection(open_listener: Open) -> None:
    ends: list[str] = []
    over = threading.Event()

    def handle(connection: ControlConnection) -> bool:
        try:
            connection.recv(CallRequest)
        except Unreachable as error:
            ends.append(str(error))
        over.set()
        return False

    listener = open_listener(handle)
    with connect(listener.address, SECRET) as connection:
        with pytest.raises(ConfigurationError, match="at most 65536"):
            connection.send(CallRequest("assignment", None, member="x" * (1 << 16)))
        connection._stream.write([memoryview(struct.pack("<I", (1 << 16) + 1))])
        assert over.wait(60)
    assert ends == [
        "CallRequest was expected, but something else was received: 65537 bytes are announced, but at most 65536 are "
        "accepted"
    ]


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x93\x01\x02\x03", msgspec.msgpack.encode(ASSIGNMENT)])
def test_an_unexpected_message_ends_the_connection(open_listener: Open, raw: bytes) -> None:
    over = threading.Event()

    def handle(connection: ControlConnection) -> bool:
        with pytest.raises(Unreachable, match="CallRequest was expected, but something else was received"):
            connection.recv(CallRequest)
        over.set()
        return False

    listener = open_listener(handle)
    with connect(listener.address, SECRET) as connection:
        connection._stream.write([memoryview(struct.pack("<I", len(raw)) + raw)])
        assert over.wait(60)


def test_an_exception_in_the_handler_ends_one_connection(open_listener: Open, caplog: pytest.LogCaptureFixture) -> None:
    fails = iter([True, False])

    def handle(connection: ControlConnection) -> bool:
        if next(fails):
            raise ZeroDivisionError
        return assign(connection)

    assert requested(open_listener(handle)) == ASSIGNMENT
    assert "internal error" in caplog.text


def test_a_connection_can_outlive_its_handler_and_be_ended_by_another_thread(open_listener: Open) -> None:
    kept: list[ControlConnection] = []
    stays = threading.Event()

    def handle(connection: ControlConnection) -> bool:
        connection.keep_open(10.0)
        kept.append(connection)
        stays.set()
        return True

    listener = open_listener(handle)
    with connect(listener.address, SECRET) as connection:
        assert stays.wait(60)
        threading.Timer(0.05, kept[0].close).start()
        with pytest.raises(Unreachable):
            connection.recv(Rejection)


# Requesting an assignment


def test_an_unreachable_address_is_reported_after_the_given_time() -> None:
    address = unused_address()
    with pytest.raises(RunFailed, match=f"nothing answers at {address}: .*refused; start the hub first"):
        request_assignment(address, SECRET, member="", rank=None, wait_seconds=0.3)


def test_a_host_that_does_not_exist_is_reported() -> None:
    with pytest.raises(RunFailed, match=r"nothing answers at no-such-host\.invalid:1"):
        request_assignment(Address("no-such-host.invalid", 1), SECRET, member="", rank=None, wait_seconds=0.0)


def test_a_listener_that_never_answers_is_reported() -> None:
    listener = Listener(ANY, SECRET)
    with pytest.raises(RunFailed, match="no answer in time; start the hub"):
        requested(listener, wait_seconds=0.3)
    listener.close()


def test_a_request_waits_until_the_hub_listens() -> None:
    address = unused_address()
    assignments: list[Assignment] = []
    client = threading.Thread(
        target=lambda: assignments.append(request_assignment(address, SECRET, member="", rank=None, wait_seconds=60))
    )
    client.start()
    listener = Listener(address, SECRET)
    listener.serve(assign)
    client.join()
    listener.close()
    assert assignments == [ASSIGNMENT]


def test_a_final_rejection_is_reported(open_listener: Open) -> None:
    def handle(connection: ControlConnection) -> bool:
        connection.recv(CallRequest)
        connection.send(Rejection("all ranks are in use", True))
        return False

    with pytest.raises(RunFailed, match="all ranks are in use"):
        requested(open_listener(handle))


def test_a_temporary_rejection_is_retried(open_listener: Open) -> None:
    answers = iter([Rejection("not yet", False), ASSIGNMENT])

    def handle(connection: ControlConnection) -> bool:
        connection.recv(CallRequest)
        connection.send(next(answers))
        return False

    listener = open_listener(handle)
    assert requested(listener) == ASSIGNMENT
    wrong = Credentials(b"a guess that is as long")
    with pytest.raises(Rejected, match="does not accept the token"), connect(listener.address, wrong):
        pass


def test_all_messages_can_be_decoded_by_many_threads_at_once_in_a_fresh_process() -> None:
    """Two threads that make the same decoder at once crash the process; so all are made at import."""
    script = """
import sys, threading
sys.setswitchinterval(1e-6)
import msgspec
from offbeat.transports import rendezvous

request = msgspec.msgpack.encode(rendezvous.CallRequest("register", 1, listener=rendezvous.Endpoint("here", 1, "a")))
barrier = threading.Barrier(8)


def decode():
    barrier.wait()
    assert rendezvous._DECODERS[rendezvous.CallRequest].decode(request).listener.port == 1


threads = [threading.Thread(target=decode) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=500).returncode == 0
    kinds = {kind for kind in vars(rendezvous).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)}
    parts = {msgspec.Struct, rendezvous.SlotTable, rendezvous.RunIdentity}
    assert kinds - parts == rendezvous._DECODERS.keys()
