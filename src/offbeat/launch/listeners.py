"""Sockets that listen before anybody is there to use them, so that who comes early waits instead of being refused."""

from __future__ import annotations

import ipaddress
import secrets
import socket

from offbeat.transports.rendezvous import Address, listen

LOOPBACK = "127.0.0.1"


def open_listener(wanted: str | None, token: bytes | None) -> tuple[socket.socket, Address, bytes | None]:
    """The socket for rank 0, the address at which processes of this machine reach it, and the token they must show.

    Without a wish for an address, nobody but the processes that are started here can know the token.
    """
    if wanted is None and token is None:
        token = secrets.token_bytes(16)
    listener = listen(Address(LOOPBACK, 0) if wanted is None else Address.parse(wanted), token)
    host, port = listener.getsockname()[:2]
    here = ipaddress.ip_address(host)
    if here.is_unspecified:
        host = LOOPBACK if here.version == 4 else "::1"
    return listener, Address(host, port), token


def invited(wanted: str, opened: Address) -> Address:
    """What others type to come to a door. One that is open on all addresses has none that would hold elsewhere."""
    host = Address.parse(wanted).host
    return Address("THIS-HOST" if host in ("0.0.0.0", "::") else host, opened.port)
