"""Sockets that listen before anybody is there to use them, so that who comes early waits instead of being refused."""

from __future__ import annotations

import functools
import ipaddress
import secrets
import socket
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from offbeat.errors import RunFailed
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


def advertised_address(wanted: str, opened: Address) -> Address:
    """What others type to come to a door. One that is open on all addresses has none that would hold elsewhere."""
    host = Address.parse(wanted).host
    return Address("THIS-HOST" if host in ("0.0.0.0", "::") else host, opened.port)


# How processes that torchrun started find rank 0: through torchrun's own store, which they all know.


WAIT = timedelta(seconds=60)


@dataclass(frozen=True)
class ListenerInfo:
    """Where rank 0 listens, what it wants to hear, and for rank 0 itself the socket."""

    host: str
    port: int
    token: bytes
    listener: int | None


_met: Counter[tuple[int, str]] = Counter()


@functools.cache
def _store(host: str, port: int, serves: bool) -> Any:
    """Kept for as long as the process: rank 0 may be serving it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined,unused-ignore]

    return TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=WAIT)


def meet(
    rank: int, host: str, store: tuple[str, int], store_is_there: bool, prefix: str, token: bytes | None
) -> ListenerInfo:
    """Rank 0 listens and publishes where; the others read it. A script may do so for one run after the other."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined,unused-ignore]

    number = _met[rank, prefix]
    _met[rank, prefix] += 1
    try:
        shared = PrefixStore(f"{prefix}/{number}", _store(*store, rank == 0 and not store_is_there))
        listener = None
        if rank == 0:
            # A token of the user's own is not published: the store asks nobody who they are.
            published = secrets.token_hex(16) if token is None else ""
            listener = listen(Address(host, 0), token or bytes.fromhex(published))
            shared.set("rank 0", f"{listener.getsockname()[1]} {published}")
        port, _, published = shared.get("rank 0").decode().partition(" ")
    except (RuntimeError, ValueError) as error:
        raise RunFailed(
            f"rank {rank} could not learn from torchrun's store at {store[0]}:{store[1]} where rank 0 listens "
            f"({' '.join(str(error).split())[:200]})"
        ) from None
    words = bytes.fromhex(published) if token is None else token
    return ListenerInfo(host, int(port), words, None if listener is None else listener.detach())
