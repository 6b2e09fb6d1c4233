"""Sockets that listen before anybody is there to use them, so that who comes early waits instead of being refused."""

from __future__ import annotations

import errno
import ipaddress
import secrets
import socket

from offbeat.errors import ConfigurationError
from offbeat.transports.rendezvous import Address

BACKLOG = 128
LOOPBACK = "127.0.0.1"


def listening(host: str, port: int = 0) -> socket.socket:
    """A socket that listens, at a port that is free where none is named."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server((str(place[0]), int(place[1])), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"port {port} of {host} is taken; choose another, or 0 for any that is free"
            ) from None
        reason = (error.strerror or str(error)).lower()
        raise ConfigurationError(
            f"cannot listen on {Address(host, port)}: {reason}; type an address of this machine, such as {LOOPBACK}:0"
        ) from None


def open_door(listen: str | None, token: bytes | None) -> tuple[socket.socket, Address, bytes | None]:
    """The socket for rank 0, the address at which processes of this machine reach it, and the token they must show.

    Without a wish for an address, nobody but the processes that are started here can know the token.
    """
    wanted = Address(LOOPBACK, 0) if listen is None else Address.parse(listen)
    door = listening(wanted.host, wanted.port)
    host, port = door.getsockname()[:2]
    here = ipaddress.ip_address(host)
    if token is None and not here.is_loopback:
        door.close()
        raise ConfigurationError(
            f"listening on {wanted} lets other machines in, which needs a token; give one with --token-file FILE, or "
            f"listen on {LOOPBACK}"
        )
    if token is None and listen is None:
        token = secrets.token_bytes(16)
    if here.is_unspecified:
        host = LOOPBACK if here.version == 4 else "::1"
    return door, Address(host, port), token
