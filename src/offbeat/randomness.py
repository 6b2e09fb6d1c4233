"""One random stream per rank and purpose, all derived from the seed.

So a change in how often one part draws never shifts what another part sees.
"""

from __future__ import annotations

import zlib

import numpy as np


def stream(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """A generator for one purpose ("order", "speed", ...), rank and whatever else tells it apart."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *keys])))
