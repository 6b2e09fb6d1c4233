"""How processes that torchrun started find rank 0: through torchrun's own store, which they all know."""

from __future__ import annotations

import functools
import secrets
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from offbeat.errors import RunFailed
from offbeat.transports.rendezvous import Address, listen

WAIT = timedelta(seconds=60)


@dataclass(frozen=True)
class Meeting:
    """Where rank 0 listens, what it wants to hear, and for rank 0 itself the socket."""

    host: str
    port: int
    token: bytes
    door: int | None
    store: Any
    """Kept for as long as the process: rank 0 may be serving it."""


@functools.cache
def meet(
    rank: int, host: str, store: tuple[str, int], store_is_there: bool, prefix: str, token: bytes | None
) -> Meeting:
    """Rank 0 listens and publishes where; the others read it. The second call gives what the first one gave."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined,unused-ignore]

    try:
        served = TCPStore(*store, is_master=rank == 0 and not store_is_there, wait_for_workers=False, timeout=WAIT)
        shared = PrefixStore(prefix, served)
        door = None
        if rank == 0:
            # A token of the user's own is not published: the store asks nobody who they are.
            published = secrets.token_hex(16) if token is None else ""
            door = listen(Address(host, 0), token or bytes.fromhex(published))
            shared.set("rank 0", f"{door.getsockname()[1]} {published}")
        port, _, published = shared.get("rank 0").decode().partition(" ")
    except (RuntimeError, ValueError) as error:
        raise RunFailed(
            f"rank {rank} could not learn from torchrun's store at {store[0]}:{store[1]} where rank 0 listens "
            f"({' '.join(str(error).split())[:200]})"
        ) from None
    words = bytes.fromhex(published) if token is None else token
    return Meeting(host, int(port), words, None if door is None else door.detach(), served)
