"""Both ends of a connection prove that they know the token; whoever does not, learns nothing and gets nowhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.transports.authentication import (
    GO_ON,
    NEEDS_TLS,
    PREFACE,
    WRONG_TOKEN,
    NotAuthenticated,
    Steps,
    client_steps,
    listener_steps,
    refusal_steps,
)

TOKEN, OTHER = b"a token only for these tests", b"another token for these tests"
MINE, THINE = b"\x01" * 32, b"\x02" * 32

Change = Callable[[str, bytes], bytes]


def unchanged(author: str, data: bytes) -> bytes:
    return data


def run(client: Steps, listener: Steps, change: Change = unchanged) -> dict[str, object]:
    """Connect the two; how each side ends: None if it is satisfied, an error, or "waits" if it wants more.

    `change` is applied to all that is sent, and gets the name of its author.
    """
    steps = {"client": client, "listener": listener}
    inbox = {"client": b"", "listener": b""}
    wanted: dict[str, bytes | int] = {}
    ends: dict[str, object] = {}

    def resume(side: str, value: bytes | None) -> None:
        try:
            wanted[side] = next(steps[side]) if value is None else steps[side].send(value)
        except StopIteration:
            ends[side] = None
        except NotAuthenticated as error:
            ends[side] = error

    for side in steps:
        resume(side, None)
    moved = True
    while moved:
        moved = False
        for side, other in (("client", "listener"), ("listener", "client")):
            if side in ends:
                continue
            want = wanted[side]
            if isinstance(want, bytes):
                inbox[other] += change(side, want)
                resume(side, b"")
                moved = True
            elif len(inbox[side]) >= want:
                received, inbox[side] = inbox[side][:want], inbox[side][want:]
                resume(side, received)
                moved = True
    return {side: ends.get(side, "waits") for side in steps}


def test_two_ends_with_one_token_and_one_certificate_accept_each_other() -> None:
    assert run(client_steps(TOKEN), listener_steps(TOKEN)) == {"client": None, "listener": None}
    assert run(client_steps(TOKEN, MINE), listener_steps(TOKEN, MINE)) == {"client": None, "listener": None}


@pytest.mark.parametrize(
    ("client", "listener"),
    [
        (client_steps(OTHER), listener_steps(TOKEN)),
        (client_steps(TOKEN, MINE), listener_steps(TOKEN, THINE)),
        (client_steps(TOKEN, MINE), listener_steps(TOKEN)),
    ],
    ids=["another token", "another certificate", "a certificate where there is none"],
)
def test_another_token_or_another_certificate_is_refused_by_the_listener(client: Steps, listener: Steps) -> None:
    ends = run(client, listener)
    assert isinstance(ends["client"], NotAuthenticated)
    assert isinstance(ends["listener"], NotAuthenticated)
    assert ends["client"].status == WRONG_TOKEN


def test_a_client_that_is_not_served_is_told_why() -> None:
    ends = run(client_steps(TOKEN), refusal_steps(NEEDS_TLS, "it does not speak TLS"))
    assert isinstance(ends["client"], NotAuthenticated)
    assert ends["client"].status == NEEDS_TLS


def test_a_listener_shows_no_proof_before_it_has_seen_one() -> None:
    sent = b""

    def listen(author: str, data: bytes) -> bytes:
        nonlocal sent
        sent += data if author == "listener" else b""
        return data

    run(client_steps(OTHER), listener_steps(TOKEN), listen)
    assert len(sent) == 1 + 32 + 1  # two statuses and a nonce


def test_the_proof_of_a_client_is_of_no_use_as_that_of_a_listener() -> None:
    """A false listener that sends the client's own nonce and proof back to it."""
    client = client_steps(TOKEN)
    assert next(client) == PREFACE
    assert client.send(b"") == 1
    assert client.send(bytes([GO_ON])) == 32
    answer = client.send(b"n" * 32)
    assert isinstance(answer, bytes)
    assert client.send(b"") == 1
    assert client.send(bytes([GO_ON])) == 32
    with pytest.raises(NotAuthenticated, match="does not know the token, or stands in between"):
        client.send(answer[32:])


def test_a_recorded_conversation_cannot_be_repeated() -> None:
    recorded = b""

    def record(author: str, data: bytes) -> bytes:
        nonlocal recorded
        recorded += data if author == "client" else b""
        return data

    run(client_steps(TOKEN), listener_steps(TOKEN), record)
    listener = listener_steps(TOKEN)
    next(listener)
    listener.send(recorded[:7])
    listener.send(recorded[7 : len(PREFACE)])
    listener.send(b"")
    assert listener.send(recorded[len(PREFACE) :]) == bytes([WRONG_TOKEN])
    with pytest.raises(NotAuthenticated, match="does not know the token"):
        listener.send(b"")


@given(st.sampled_from(["client", "listener"]), st.integers(0, 200), st.integers(0, 7))
def test_no_bit_of_the_conversation_can_be_changed(author: str, position: int, bit: int) -> None:
    """Whichever bit is flipped, at most the one whose last word it was is satisfied."""
    count = 0
    flipped = False

    def flip(side: str, data: bytes) -> bytes:
        nonlocal count, flipped
        if side != author:
            return data
        at, count = position - count, count + len(data)
        if not 0 <= at < len(data):
            return data
        flipped = True
        return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]

    ends = run(client_steps(TOKEN, MINE), listener_steps(TOKEN, MINE), flip)
    assert not flipped or ends[{"client": "listener", "listener": "client"}[author]] is not None


@given(st.binary(max_size=200))
def test_any_bytes_from_a_stranger_end_in_a_refusal_or_in_waiting(data: bytes) -> None:
    for steps in (client_steps(TOKEN), listener_steps(TOKEN)):
        left = data
        try:
            want = next(steps)
            while True:
                if isinstance(want, bytes):
                    want = steps.send(b"")
                elif len(left) < want:
                    break
                else:
                    given, left = left[:want], left[want:]
                    want = steps.send(given)
        except NotAuthenticated:
            pass
        except StopIteration:
            pytest.fail("a stranger was accepted")
