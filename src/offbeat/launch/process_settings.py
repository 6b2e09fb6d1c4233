"""Names of ranks and of their processes, and how the allocator of a training process keeps memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

from offbeat.core.strategy import Strategy

_PR_SET_NAME = 15


def name_process(name: str) -> None:
    """Set the name of this process in `top` and `ps`, cut to 15 characters; does nothing but on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def hub_or_worker_name(rank: int) -> str:
    """Name of a rank in a run with a hub."""
    return "hub" if rank == 0 else f"worker {rank}"


def peer_name(rank: int) -> str:
    """Name of a rank in a run without a hub."""
    return f"peer {rank}"


def rank_names(strategy: Strategy) -> Callable[[int], str]:
    """The function that names the ranks of a strategy."""
    return peer_name if strategy.computes(0) else hub_or_worker_name


# By default glibc returns large blocks to the system when they are freed, and requests them again in the next step;
# every page of them is then cleared and mapped anew. For a small CNN on one core that is a quarter of the time. So a
# training process keeps the memory that it has used.

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_SETTINGS = {
    _MMAP_THRESHOLD: ("MALLOC_MMAP_THRESHOLD_", 32 << 20),
    _TRIM_THRESHOLD: ("MALLOC_TRIM_THRESHOLD_", 1 << 30),
    _TOP_PAD: ("MALLOC_TOP_PAD_", 64 << 20),
}
"""The largest block from the heap, the free memory that is kept, and the bytes that are requested at a time."""


def memory_environment() -> dict[str, str]:
    """The same settings as environment variables, for a program that is started."""
    return {name: str(value) for name, value in _SETTINGS.values()}


def keep_freed_memory() -> None:
    """Apply the settings to this process. Does nothing with a C library other than glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for parameter, (_, value) in _SETTINGS.items():
            mallopt(parameter, value)
