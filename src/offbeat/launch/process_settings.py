"""What ranks are called, and their processes in `top` and `ps`: copies of one process would all look the same."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

from offbeat.core.strategy import Strategy

_PR_SET_NAME = 15


def name_process(name: str) -> None:
    """Call this process so, as far as the system allows: 15 signs, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def hub_or_worker_name(rank: int) -> str:
    """What the ranks of a run with a hub are called."""
    return "hub" if rank == 0 else f"worker {rank}"


def peers(rank: int) -> str:
    """What ranks are called where everybody computes."""
    return f"peer {rank}"


def rank_names(strategy: Strategy) -> Callable[[int], str]:
    """What the ranks of a strategy are called."""
    return peers if strategy.computes(0) else hub_or_worker_name


# Let a process keep the memory that it has used, as training wants it again a moment later.
#
# By default glibc gives large blocks back to the system when they are freed, and asks for them again in the next step;
# every page of them is then cleared and mapped anew. For a small CNN on one core that is a quarter of the time.


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_SETTINGS = {
    _MMAP_THRESHOLD: ("MALLOC_MMAP_THRESHOLD_", 32 << 20),
    _TRIM_THRESHOLD: ("MALLOC_TRIM_THRESHOLD_", 1 << 30),
    _TOP_PAD: ("MALLOC_TOP_PAD_", 64 << 20),
}
"""The largest block that glibc takes from its heap; how much free memory it keeps; how much it takes at a time."""


def environment() -> dict[str, str]:
    """The variables that tell glibc when a program starts."""
    return {name: str(value) for name, value in _SETTINGS.values()}


def keep_freed_memory() -> None:
    """Tell glibc in a process that runs already. Other libraries have no such function, and stay as they are."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for parameter, (_, value) in _SETTINGS.items():
            mallopt(parameter, value)
