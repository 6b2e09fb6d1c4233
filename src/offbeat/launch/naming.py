"""What ranks are called, and their processes in `top` and `ps`: copies of one process would all look the same."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

from offbeat.strategies.strategy import Strategy

_PR_SET_NAME = 15


def name_process(name: str) -> None:
    """Call this process so, as far as the system allows: 15 signs, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def hub_and_workers(rank: int) -> str:
    """What the ranks of a run with a hub are called."""
    return "hub" if rank == 0 else f"worker {rank}"


def peers(rank: int) -> str:
    """What ranks are called where everybody computes."""
    return f"peer {rank}"


def names_of(strategy: Strategy) -> Callable[[int], str]:
    """What the ranks of a strategy are called."""
    return peers if strategy.computes(0) else hub_and_workers
