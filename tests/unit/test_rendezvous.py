"""The door and what is said there: who gets in, who does not, and what a user reads."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from offbeat.errors import ConfigurationError, RunFailed
from offbeat.transports import rendezvous
from offbeat.transports.rendezvous import (
    Address,
    Assignment,
    Call,
    CallRequest,
    Listener,
    Rejected,
    Rejection,
    Unreachable,
    dial,
    request_assignment,
)

TERMS = Assignment(rank=3, processes=5, elapsed_seconds=1.5, experiment=b"opaque")
ANY = Address("127.0.0.1", 0)

Open = Callable[..., Listener]


@pytest.fixture
def opened() -> Iterator[Open]:
    listeners: list[Listener] = []

    def make(token: bytes | None = None, visit: Callable[[Call], bool] | None = None) -> Listener:
        listener = Listener(ANY, token)
        listeners.append(listener)
        listener.serve(visit or tell_terms)
        return listener

    yield make
    for listener in listeners:
        listener.close()


def tell_terms(call: Call) -> bool:
    call.recv(CallRequest)
    call.send(TERMS)
    return False


def asked(listener: Listener, token: bytes | None = None, wait_seconds: float = 20.0) -> Assignment:
    return request_assignment(listener.address, token, member="a worker", rank=None, wait_seconds=wait_seconds)


def unused_address() -> Address:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return Address("127.0.0.1", taken.getsockname()[1])


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


# Doors


def test_a_door_on_port_0_says_which_port_it_got(opened: Open) -> None:
    assert opened().address.port > 0


def test_a_port_that_is_taken_is_named(opened: Open) -> None:
    listener = opened()
    with pytest.raises(ConfigurationError, match=f"port {listener.address.port} of 127.0.0.1 is taken; choose another"):
        Listener(listener.address, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_listening_beyond_this_machine_needs_a_token(host: str) -> None:
    with pytest.raises(ConfigurationError, match="needs a token; give one with --token-file"):
        Listener(Address(host, 0), None)


def test_with_a_token_a_door_may_listen_everywhere() -> None:
    listener = Listener(Address("0.0.0.0", 0), b"secret")
    listener.serve(tell_terms)
    assert (
        request_assignment(Address("127.0.0.1", listener.address.port), b"secret", member="", rank=1, wait_seconds=20)
        == TERMS
    )
    listener.close()


def test_an_empty_token_is_none() -> None:
    with pytest.raises(ConfigurationError, match="token is empty"):
        Listener(ANY, b"")


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(ConfigurationError, match="cannot listen on"):
        Listener(Address("192.0.2.1", 0), b"secret")


def test_a_door_that_was_never_served_can_be_closed_and_closed_again() -> None:
    listener = Listener(ANY, None)
    listener.close()
    listener.close()
    Listener(listener.address, None).close()


# Who gets in


@pytest.mark.parametrize("token", [None, b"secret"])
def test_who_holds_the_token_gets_terms(opened: Open, token: bytes | None) -> None:
    assert asked(opened(token), token) == TERMS


@pytest.mark.parametrize(("source", "same"), [("127.0.0.1", True), ("127.0.0.2", False)])
def test_both_ends_know_whether_they_have_one_address(source: str, same: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialer = Call(socket.create_connection(listener.getsockname(), source_address=(source, 0)))
        with dialer, Call(listener.accept()[0]) as visitor:
            assert dialer.same_host == visitor.same_host == same


def test_a_visitor_may_come_before_the_door_is_served() -> None:
    listener = Listener(ANY, None)
    found: list[Assignment] = []
    visitor = threading.Thread(target=lambda: found.append(asked(listener)))
    visitor.start()
    listener.serve(tell_terms)
    visitor.join()
    listener.close()
    assert found == [TERMS]


@pytest.mark.parametrize(
    ("held", "shown", "sentence"),
    [
        (b"secret", b"guess", "does not accept the token; give the one of the run with --token-file"),
        (b"secret", None, "wants a token; give the one of the run with --token-file"),
        (None, b"guess", "does not accept the token"),
    ],
)
def test_who_does_not_hold_the_token_is_refused_at_once(
    opened: Open, held: bytes | None, shown: bytes | None, sentence: str
) -> None:
    visits: list[Call] = []

    def visit(call: Call) -> bool:
        visits.append(call)
        return False

    listener = opened(held, visit)
    with pytest.raises(RunFailed, match=sentence):
        asked(listener, shown)
    assert visits == []


def test_nothing_is_decoded_that_comes_without_the_token(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[object] = []

    class Watched(dict):  # type: ignore[type-arg]
        def __getitem__(self, kind: object) -> object:
            decoded.append(kind)
            return super().__getitem__(kind)

    monkeypatch.setattr(rendezvous, "_DECODERS", Watched(rendezvous._DECODERS))
    listener = opened(b"secret")
    hello = msgspec.msgpack.encode(CallRequest("assignment", 1))
    with socket.create_connection((listener.address.host, listener.address.port)) as visitor:
        visitor.sendall(struct.pack("!i", len(hello)) + hello)
        while visitor.recv(1024):
            pass
    assert decoded == []


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n\r\n" * 20, b"\0" * 400, b"\xff" * 400])
def test_whoever_talks_nonsense_is_shown_out_and_the_next_one_let_in(opened: Open, words: bytes) -> None:
    listener = opened(b"secret")
    with socket.create_connection((listener.address.host, listener.address.port)) as visitor:
        try:
            visitor.sendall(words)
            while visitor.recv(1024):
                pass
        except ConnectionError:
            pass
    assert asked(listener, b"secret") == TERMS


def test_visitors_who_say_nothing_do_not_keep_the_others_out(opened: Open) -> None:
    listener = opened(b"secret")
    place = (listener.address.host, listener.address.port)
    silent = [socket.create_connection(place) for _ in range(rendezvous.VISITORS_MAX + 5)]
    assert asked(listener, b"secret") == TERMS
    listener.close()
    for visitor in silent:
        with visitor:
            try:
                while visitor.recv(1024):
                    pass  # closing has ended the call, so this does not wait
            except ConnectionError:
                pass


def test_a_visitor_that_goes_silent_after_the_token_has_limited_time(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Call.__init__, "__defaults__", (0.2,))
    ends: list[str] = []
    over = threading.Event()

    def visit(call: Call) -> bool:
        try:
            call.recv(CallRequest)
        except Unreachable as error:
            ends.append(str(error))
        over.set()
        return False

    listener = opened(None, visit)
    with dial(listener.address, None):
        assert over.wait(60)
    assert ends == ["no answer in time"]


def test_a_message_that_is_too_long_ends_the_call(opened: Open) -> None:
    ends: list[str] = []
    over = threading.Event()

    def visit(call: Call) -> bool:
        try:
            call.recv(CallRequest)
        except Unreachable as error:
            ends.append(str(error))
        over.set()
        return False

    listener = opened(None, visit)
    with dial(listener.address, None) as call:
        with pytest.raises(ConfigurationError, match="at most 65536"):
            call.send(CallRequest("assignment", None, member="x" * (1 << 16)))
        call._connection.send_bytes(b"x" * ((1 << 16) + 1))
        assert over.wait(60)
    assert ends == ["bad message length"]


@pytest.mark.parametrize("words", [b"", b"\xc1", b"\x93\x01\x02\x03", msgspec.msgpack.encode(TERMS)])
def test_words_of_another_kind_end_the_call(opened: Open, words: bytes) -> None:
    over = threading.Event()

    def visit(call: Call) -> bool:
        with pytest.raises(Unreachable, match="something else than CallRequest came"):
            call.recv(CallRequest)
        over.set()
        return False

    listener = opened(None, visit)
    with dial(listener.address, None) as call:
        call._connection.send_bytes(words)
        assert over.wait(60)


def test_a_mistake_of_ours_costs_one_visitor(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    fails = iter([True, False])

    def visit(call: Call) -> bool:
        if next(fails):
            raise ZeroDivisionError
        return tell_terms(call)

    assert asked(opened(None, visit)) == TERMS
    assert "a mistake of ours" in caplog.text


def test_a_call_can_outlive_the_visit_and_be_ended_from_elsewhere(opened: Open) -> None:
    kept: list[Call] = []
    stays = threading.Event()

    def visit(call: Call) -> bool:
        call.keep()
        kept.append(call)
        stays.set()
        return True

    listener = opened(None, visit)
    with dial(listener.address, None) as call:
        assert stays.wait(60)
        threading.Timer(0.05, kept[0].close).start()
        with pytest.raises(Unreachable):
            call.recv(Rejection)


# Asking for terms


def test_nobody_there_is_said_after_the_time_that_was_given() -> None:
    address = unused_address()
    with pytest.raises(RunFailed, match=f"nothing answers at {address}: .*refused; start the hub first"):
        request_assignment(address, None, member="", rank=None, wait_seconds=0.3)


def test_a_host_that_does_not_exist_is_said() -> None:
    with pytest.raises(RunFailed, match=r"nothing answers at no-such-host\.invalid:1"):
        request_assignment(Address("no-such-host.invalid", 1), None, member="", rank=None, wait_seconds=0.0)


def test_somebody_who_never_answers_is_said() -> None:
    listener = Listener(ANY, None)
    with pytest.raises(RunFailed, match="no answer in time; start the hub"):
        asked(listener, wait_seconds=0.3)
    listener.close()


def test_asking_waits_until_the_hub_is_there() -> None:
    address = unused_address()
    found: list[Assignment] = []
    visitor = threading.Thread(
        target=lambda: found.append(request_assignment(address, None, member="", rank=None, wait_seconds=60))
    )
    visitor.start()
    listener = Listener(address, None)
    listener.serve(tell_terms)
    visitor.join()
    listener.close()
    assert found == [TERMS]


def test_a_refusal_is_passed_on(opened: Open) -> None:
    def visit(call: Call) -> bool:
        call.recv(CallRequest)
        call.send(Rejection("there is no place left", True))
        return False

    with pytest.raises(RunFailed, match="there is no place left"):
        asked(opened(None, visit))


def test_a_refusal_for_now_is_tried_again(opened: Open) -> None:
    answers = iter([Rejection("not yet", False), TERMS])

    def visit(call: Call) -> bool:
        call.recv(CallRequest)
        call.send(next(answers))
        return False

    listener = opened(None, visit)
    assert asked(listener) == TERMS
    with pytest.raises(Rejected, match="wants a token"), dial(opened(b"x").address, None):
        pass


def test_all_words_can_be_heard_by_many_threads_at_once_in_a_fresh_process() -> None:
    """A decoder that two threads make at once may be half-made, and kill the process; so none is made later."""
    script = """
import sys, threading
sys.setswitchinterval(1e-6)
import msgspec
from offbeat.transports import rendezvous

request = msgspec.msgpack.encode(rendezvous.CallRequest("register", 1, listener=rendezvous.Endpoint("here", 1, "a")))
together = threading.Barrier(8)


def hear():
    together.wait()
    assert rendezvous._DECODERS[rendezvous.CallRequest].decode(request).listener.port == 1


threads = [threading.Thread(target=hear) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=500).returncode == 0
    told = {kind for kind in vars(rendezvous).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)}
    assert told - {msgspec.Struct, rendezvous.SlotTable} == rendezvous._DECODERS.keys()
