"""Independent random streams per rank and purpose, derived from the seed.

The number of values that one component draws does not affect the streams of others.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np


def stream(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """The generator of a purpose ("order", "speed", …) and of `keys`, such as a rank."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *keys])))


def state_of(random: np.random.Generator) -> dict[str, Any]:
    """The state of a generator as plain data; its 128-bit integers are written as text."""
    state = random.bit_generator.state
    return {
        "state": str(state["state"]["state"]),
        "inc": str(state["state"]["inc"]),
        "has_uint32": int(state["has_uint32"]),
        "uinteger": int(state["uinteger"]),
    }


def restore(random: np.random.Generator, state: dict[str, Any]) -> None:
    """Set the state of a generator."""
    random.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": int(state["state"]), "inc": int(state["inc"])},
        "has_uint32": state["has_uint32"],
        "uinteger": state["uinteger"],
    }
