"""Listening sockets, opened before the processes that use them: clients that connect early wait in the backlog."""

from __future__ import annotations

import functools
import ipaddress
import secrets
import socket
from collections import Counter
from datetime import timedelta
from typing import Any

from offbeat.errors import ConfigurationError, RunFailed
from offbeat.launch.token_files import listener_name, shared_token
from offbeat.transports.address import Address
from offbeat.transports.listener import listen
from offbeat.transports.tls import Credentials, Tls

LOOPBACK = "127.0.0.1"


def open_listener(
    address: str | None,
    token: bytes | None,
    tls: Tls = Tls(),  # noqa: B008 (frozen)
) -> tuple[socket.socket, Address, Credentials]:
    """The socket for rank 0, the address by which processes of this machine reach it, and the credentials of the run.

    Without an address it listens on loopback, with a new random token. Where only this machine can connect, the token
    of a given address is shared among the processes of this user. Raises ConfigurationError.
    """
    tls.check()
    if address is None:
        listener = listen(Address(LOOPBACK, 0))
        return listener, Address(*listener.getsockname()[:2]), Credentials(token or secrets.token_hex(32).encode(), tls)
    listener = listen(Address.parse(address))
    host, port = listener.getsockname()[:2]
    local = ipaddress.ip_address(host)
    if token is None:
        if not local.is_loopback:
            listener.close()
            raise ConfigurationError(
                f"listening on {address} lets other machines in, which needs a token; give one with --token-file FILE, "
                "or listen on 127.0.0.1"
            )
        token = shared_token(listener_name(port))
    if local.is_unspecified:
        host = LOOPBACK if local.version == 4 else "::1"
    return listener, Address(host, port), Credentials(token, tls)


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
    rank: int, host: str, store: tuple[str, int], store_exists: bool, prefix: str
) -> tuple[Address, int | None]:
    """Open and publish the listener on rank 0, and look it up on the others. May be called for one run after another.

    The store has no authentication, so it holds no secret, and what it says is not believed: the process at the
    address must know the token.

    Returns the address, and on rank 0 the file descriptor of the listener.

    Args:
        rank: of this process.
        host: at which rank 0 listens.
        store: host and port of torchrun's store.
        store_exists: whether torchrun's agent serves the store; otherwise rank 0 does.
        prefix: of keys in the store.

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
            listener = listen(Address(host, 0))
            shared.set("rank 0", str(listener.getsockname()[1]))
        port = int(shared.get("rank 0"))
    except (RuntimeError, ValueError) as error:
        raise RunFailed(
            f"rank {rank} could not learn from torchrun's store at {store[0]}:{store[1]} where rank 0 listens "
            f"({' '.join(str(error).split())[:200]})"
        ) from None
    return Address(host, port), None if listener is None else listener.detach()
