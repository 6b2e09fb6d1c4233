"""How the two ends of a connection prove to each other that they know the token of the run.

    client    → PREFACE
    listener  → status (1 byte), and if it is GO_ON its nonce (32 bytes)
    client    → its nonce (32 bytes), its proof (32 bytes)
    listener  → status (1 byte), and if it is GO_ON its proof (32 bytes)

A proof is the HMAC-SHA256, under the token, of the role of its author, both nonces, and the SHA-256 of the listener's
certificate as its author sees it (zeros without TLS). So a proof cannot be reflected or replayed, and a relay
between the two, with a certificate of its own, gets no proof that the other end accepts. A client shows its proof
first: a stranger learns nothing from a listener. A false listener could try tokens against the proof of a client, which
is hopeless for random tokens of 128 bits or more; shorter ones are refused.

Here is no I/O: both sides are generators, which yield bytes to send, or the number of bytes that they want to receive.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Generator

from offbeat.errors import ConfigurationError, OffbeatError

MAKE_A_TOKEN = "umask 077; head -c 32 /dev/urandom | base64 > FILE"
"""What to type for a new token."""

TOKEN_BYTES_MIN = 22
"""128 bits take 22 characters in base 64, and more in others."""

PREFACE = b"offbeat authentication 1\n"
NO_BINDING = bytes(32)
"""Stands for the certificate where there is none."""

GO_ON, NEEDS_TLS, WRONG_TOKEN, REFUSED = 0, 1, 2, 3

_NONCE_BYTES = _PROOF_BYTES = 32

Steps = Generator[bytes | int, bytes, None]
"""Yields bytes to send, or how many to receive."""


class NotAuthenticated(OffbeatError):
    """The other end does not know the token, or does not speak this protocol.

    status: the answer, of the other end at a client, and to it at a listener; None: there is none.
    """

    def __init__(self, why: str, status: int | None = None) -> None:
        super().__init__(why)
        self.status = status


def check_token(token: bytes) -> None:
    """Raise ConfigurationError for a token that could be guessed."""
    if len(token) < TOKEN_BYTES_MIN:
        found = "is empty" if not token else f"has {len(token)} characters"
        raise ConfigurationError(
            f"the token {found}, but at least {TOKEN_BYTES_MIN} random ones are needed, so that it cannot be guessed; "
            f"to make one type: {MAKE_A_TOKEN}"
        )


def binding_of(certificate: bytes) -> bytes:
    """What a proof says about a certificate in DER."""
    return hashlib.sha256(certificate).digest()


def listener_steps(token: bytes, binding: bytes = NO_BINDING) -> Steps:
    """The listener's side; NotAuthenticated if the client does not prove that it knows the token."""
    yield from _receive_preface()
    nonce = os.urandom(_NONCE_BYTES)
    yield bytes([GO_ON]) + nonce
    answer = yield _NONCE_BYTES + _PROOF_BYTES
    nonces = nonce + answer[:_NONCE_BYTES]
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _proof(token, b"client", nonces, binding)):
        yield bytes([WRONG_TOKEN])
        raise NotAuthenticated("it does not know the token", WRONG_TOKEN)
    yield bytes([GO_ON]) + _proof(token, b"listener", nonces, binding)


def _receive_preface() -> Steps:
    """In two parts: most programs that connect by mistake are recognised by the first."""
    name = PREFACE[:7]
    if (yield len(name)) != name or (yield len(PREFACE) - len(name)) != PREFACE[len(name) :]:
        raise NotAuthenticated("it does not speak offbeat's protocol")


def refusal_steps(status: int, why: str) -> Steps:
    """The listener's side towards a client that it does not serve: the status, once the client has spoken."""
    yield from _receive_preface()
    yield bytes([status])
    raise NotAuthenticated(why, status)


def client_steps(token: bytes, binding: bytes = NO_BINDING) -> Steps:
    """The client's side; NotAuthenticated if the listener refuses, or does not know the token itself."""
    yield PREFACE
    _check_status((yield 1)[0])
    theirs = yield _NONCE_BYTES
    nonce = os.urandom(_NONCE_BYTES)
    nonces = theirs + nonce
    yield nonce + _proof(token, b"client", nonces, binding)
    _check_status((yield 1)[0])
    if not hmac.compare_digest((yield _PROOF_BYTES), _proof(token, b"listener", nonces, binding)):
        raise NotAuthenticated("what answers there does not know the token, or stands in between")


def _check_status(status: int) -> None:
    if status != GO_ON:
        raise NotAuthenticated("refused", status)


def _proof(token: bytes, role: bytes, nonces: bytes, binding: bytes) -> bytes:
    return hmac.digest(token, PREFACE + role + b"\n" + nonces + binding, "sha256")
