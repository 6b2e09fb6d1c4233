"""One random stream per rank and purpose, all derived from the seed.

So a change in how often one part draws never shifts what another part sees.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np


def stream(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """A generator for one purpose ("order", "speed", ...), rank and whatever else tells it apart."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *keys])))


def state_of(random: np.random.Generator) -> dict[str, Any]:
    """Where a generator is, as plain data; its numbers are too long for a file's integers, so they are text."""
    state = random.bit_generator.state
    return {
        "state": str(state["state"]["state"]),
        "inc": str(state["state"]["inc"]),
        "has_uint32": int(state["has_uint32"]),
        "uinteger": int(state["uinteger"]),
    }


def restore(random: np.random.Generator, state: dict[str, Any]) -> None:
    """Put a generator back to where it was."""
    random.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": int(state["state"]), "inc": int(state["inc"])},
        "has_uint32": state["has_uint32"],
        "uinteger": state["uinteger"],
    }
