"""How processes that torchrun started find rank 0: through torchrun's own store, which they all know."""

from __future__ import annotations

import functools
import secrets
from collections import Counter
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
    listener: int | None


_met: Counter[tuple[int, str]] = Counter()


@functools.cache
def _store(host: str, port: int, serves: bool) -> Any:
    """Kept for as long as the process: rank 0 may be serving it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined,unused-ignore]

    return TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=WAIT)


def meet(
    rank: int, host: str, store: tuple[str, int], store_is_there: bool, prefix: str, token: bytes | None
) -> Meeting:
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
    return Meeting(host, int(port), words, None if listener is None else listener.detach())
