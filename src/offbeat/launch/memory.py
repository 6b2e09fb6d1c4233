"""Let a process keep the memory that it has used, as training wants it again a moment later.

By default glibc gives large blocks back to the system when they are freed, and asks for them again in the next step;
every page of them is then cleared and mapped anew. For a small CNN on one core that is a quarter of the time.
"""

from __future__ import annotations

import ctypes
import sys

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


def keep_memory() -> None:
    """Tell glibc in a process that runs already. Other libraries have no such function, and stay as they are."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for parameter, (_, value) in _SETTINGS.items():
            mallopt(parameter, value)
