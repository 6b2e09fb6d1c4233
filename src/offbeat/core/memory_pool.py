"""Memory for messages and copies, used again as soon as nobody looks at it any more.

Fresh memory costs many times what filling it again does, and a run receives messages of the same few sizes over and
over. Nobody has to give anything back: what is lent is a numpy view of a slab, seen as a tensor. Torch's storage holds
on to the view for as long as any tensor shares the storage, and when the view goes, a weak reference to it puts the
slab back.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Slab = npt.NDArray[np.uint8]

KEEP = 8
"""Free slabs that are kept of each size. A hub that waits for everybody wants one per worker and one to spare."""

SIZES_MAX = 16
"""Sizes of which free slabs are kept; those that were asked for last."""

COPY_BYTES_MIN = 128 << 10
"""Below this, fresh memory comes from a heap that is used again anyway."""

_SMALL_BYTES_MAX = 64 << 10
_PAGE_BYTES = 4 << 10


class _Loan(weakref.ref[Any]):
    """A view that is out, the slab it shows, and where that goes afterwards."""

    __slots__ = ("home", "slab")

    slab: _Slab
    home: deque[_Slab]


class Pool:
    """`take` memory, from any thread. It holds at most `keep` free slabs of each of the last SIZES_MAX sizes."""

    def __init__(self, keep: int = KEEP) -> None:
        self.allocated = 0
        """Slabs made so far; it stands still once there are enough."""
        self._keep = keep
        self._free: OrderedDict[int, deque[_Slab]] = OrderedDict()
        self._loans: dict[int, _Loan] = {}
        self._lock = Lock()

    @property
    def lent(self) -> int:
        """How many slabs are out."""
        return len(self._loans)

    def take(self, nbytes: int) -> Tensor:
        """A tensor of `nbytes` bytes that hold anything. It may be kept for ever; so may views of it."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        size = _size_class(nbytes)
        with self._lock:
            home = self._free.get(size)
            if home is None:
                home = self._free[size] = deque(maxlen=self._keep)
                if len(self._free) > SIZES_MAX:
                    self._free.popitem(last=False)
            self._free.move_to_end(size)
            slab = home.pop() if home else None  # only `take` pops, and it holds the lock
            if slab is None:
                self.allocated += 1
        if slab is None:
            slab = np.empty(size, dtype=np.uint8)
        view = slab[:nbytes]
        loan = _Loan(view, self._come_back)
        loan.slab, loan.home = slab, home
        self._loans[id(loan)] = loan
        return torch.from_numpy(view)

    def copy(self, vector: Tensor) -> Tensor:
        """A copy of a contiguous vector. A small one is not worth the trouble, and a GPU keeps memory of its own."""
        return self.like(vector).copy_(vector)

    def like(self, vector: Tensor) -> Tensor:
        """Memory for a vector like this one; it holds anything."""
        if vector.nbytes < COPY_BYTES_MIN or vector.device.type != "cpu":
            return torch.empty_like(vector)
        return self.take(vector.nbytes).view(vector.dtype)

    def _come_back(self, loan: weakref.ref[Any]) -> None:
        """Runs in whichever thread let go, even in the middle of `take`: no lock, only steps that are atomic."""
        ended = self._loans.pop(id(loan))
        ended.home.append(ended.slab)


def _size_class(nbytes: int) -> int:
    if nbytes <= _SMALL_BYTES_MAX:
        return int(1 << (nbytes - 1).bit_length())
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
