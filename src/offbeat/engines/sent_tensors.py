"""Which tensors have been sent, and are immutable from then on by contract.

So the simulator can share them between a thousand ranks without a copy, and notice when somebody changes one.
"""

from __future__ import annotations

import weakref

from torch import Tensor


class SentTensors:
    """Tensors by identity, forgotten when they are gone; a tensor's `==` compares elements and cannot serve."""

    def __init__(self) -> None:
        self._versions: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def add(self, tensor: Tensor) -> None:
        key = id(tensor)
        if key not in self._versions:
            forget = self._versions.pop
            self._versions[key] = weakref.ref(tensor, lambda _: forget(key, None)), tensor._version

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._versions

    def changed(self, tensor: Tensor) -> bool:
        """Whether it was changed in place after it had been sent; torch counts such changes."""
        entry = self._versions.get(id(tensor))
        return entry is not None and entry[1] != tensor._version
