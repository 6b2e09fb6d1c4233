"""Listening sockets, opened before the processes that use them: clients that connect early wait in the backlog."""

from __future__ import annotations

import functools
import ipaddress
import secrets
import socket
from collections import Counter
from datetime import timedelta
from typing import Any

from offbeat.errors import RunFailed
from offbeat.transports.rendezvous import Address, listen

LOOPBACK = "127.0.0.1"


def open_listener(address: str | None, token: bytes | None) -> tuple[socket.socket, Address, bytes | None]:
    """The socket for rank 0, the address by which processes of this machine reach it, and the token.

    Without an address it listens on loopback, with a new random token unless one is given. Raises ConfigurationError.
    """
    if address is None and token is None:
        token = secrets.token_bytes(16)
    listener = listen(Address(LOOPBACK, 0) if address is None else Address.parse(address), token)
    host, port = listener.getsockname()[:2]
    local = ipaddress.ip_address(host)
    if local.is_unspecified:
        host = LOOPBACK if local.version == 4 else "::1"
    return listener, Address(host, port), token


def advertised_address(requested: str, opened: Address) -> Address:
    """The address that users of other machines type; THIS-HOST stands for a listener on all interfaces."""
    host = Address.parse(requested).host
    return Address("THIS-HOST" if host in ("0.0.0.0", "::") else host, opened.port)


# Processes that torchrun started find rank 0 through torchrun's own store, which they all know.


STORE_TIMEOUT = timedelta(seconds=60)


_runs: Counter[tuple[int, str]] = Counter()
"""Runs of this process so far, by rank and prefix: each has its own entry in the store."""


@functools.cache
def _store(host: str, port: int, serves: bool) -> Any:
    """Kept until the process ends: rank 0 may be serving it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined,unused-ignore]

    return TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=STORE_TIMEOUT)


def find_listener(
    rank: int, host: str, store: tuple[str, int], store_exists: bool, prefix: str, token: bytes | None
) -> tuple[Address, bytes, int | None]:
    """Open and publish the listener on rank 0, and look it up on the others. May be called for one run after another.

    Returns the address, the token, and on rank 0 the file descriptor of the listener.

    Args:
        rank: of this process.
        host: at which rank 0 listens.
        store: host and port of torchrun's store.
        store_exists: whether torchrun's agent serves the store; otherwise rank 0 does.
        prefix: of keys in the store.
        token: secret of the run; None to make one and publish it.

    Raises:
        RunFailed: the store cannot be used.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined,unused-ignore]

    number = _runs[rank, prefix]
    _runs[rank, prefix] += 1
    try:
        shared = PrefixStore(f"{prefix}/{number}", _store(*store, rank == 0 and not store_exists))
        listener = None
        if rank == 0:
            # A token of the user is not published: the store has no authentication.
            published = secrets.token_hex(16) if token is None else ""
            listener = listen(Address(host, 0), token or bytes.fromhex(published))
            shared.set("rank 0", f"{listener.getsockname()[1]} {published}")
        port, _, published = shared.get("rank 0").decode().partition(" ")
    except (RuntimeError, ValueError) as error:
        raise RunFailed(
            f"rank {rank} could not learn from torchrun's store at {store[0]}:{store[1]} where rank 0 listens "
            f"({' '.join(str(error).split())[:200]})"
        ) from None
    secret = bytes.fromhex(published) if token is None else token
    return Address(host, int(port)), secret, None if listener is None else listener.detach()
