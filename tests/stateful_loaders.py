"""Loaders with a state, for tests: small, and free of other packages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor


class ShuffledLoader:
    """Yields batches of the numbers below `size`; each pass has a new random order, which its state contains."""

    def __init__(self, size: int, batch: int, seed: int = 0) -> None:
        self.size, self.batch = size, batch
        self.passes = 0
        self._random = np.random.default_rng(seed)
        self._order: list[int] = []
        self._position = 0
        self._loaded = False

    def __iter__(self) -> Iterator[Tensor]:
        if not self._loaded:
            self._order, self._position = self._random.permutation(self.size).tolist(), 0
            self.passes += 1
        self._loaded = False
        return self._batches()

    def _batches(self) -> Iterator[Tensor]:
        while self._position < self.size:
            first, self._position = self._position, min(self.size, self._position + self.batch)
            yield torch.tensor(self._order[first : self._position])

    def state_dict(self) -> dict[str, Any]:
        return {"random": self._random.bit_generator.state, "order": list(self._order), "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._random.bit_generator.state = state["random"]
        self._order, self._position = list(state["order"]), state["position"]
        self._loaded = True


class BufferedLoader(ShuffledLoader):
    """Shuffles in a buffer that is not part of its state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._order[self._position :] = self._order[self._position :][::-1]
