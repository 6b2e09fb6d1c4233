"""Memory for messages and copies, reused as soon as no tensor refers to it.

Page faults on new memory cost many times what writing to it again does, and a run receives messages of the same few
sizes repeatedly. Memory need not be returned explicitly: a loan is a numpy view of a slab, wrapped as a tensor. The
storage of the tensor refers to the view as long as any tensor shares it; when the view is freed, the callback of a weak
reference returns the slab.

Any thread may call any method, without a lock. Each step on shared state is a single operation of a built-in container
that Python makes atomic (`dict.get`, `setdefault`, `pop`, item assignment, `list(dict)`, `deque.append`, `deque.pop`;
the keys are integers, so none of them runs Python code in between). A slab is in one place at a time, a deque of free
slabs or a loan: `deque.pop` gives it to one thread alone, and it returns by one `append`. What two threads can do to
each other between two steps is to allocate one slab too many, or to drop one that could have been kept.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Slab = npt.NDArray[np.uint8]

KEEP = 8
"""Free slabs kept of each size. A hub that waits for all workers uses one per worker and one more."""

SIZES_MAX = 16
"""How many sizes have free slabs kept: those that were requested last."""

COPY_BYTES_MIN = 128 << 10
"""Below this size, the C heap reuses memory by itself."""

_SMALL_BYTES_MAX = 64 << 10
_PAGE_BYTES = 4 << 10


class _Loan(weakref.ref[Any]):
    """A view in use, the slab it is part of, and the deque to which the slab returns."""

    __slots__ = ("home", "slab")

    slab: _Slab
    home: deque[_Slab]


class Pool:
    """Lends memory, to any thread. It keeps at most `keep` free slabs of each of the last SIZES_MAX sizes."""

    def __init__(self, keep: int = KEEP) -> None:
        self.allocated = 0
        """Slabs allocated so far; constant once there are enough. Calls at the same moment may count as one."""
        self._keep = keep
        self._free: dict[int, deque[_Slab]] = {}
        """size → free slabs; the size requested last is the last key"""
        self._loans: dict[int, _Loan] = {}

    @property
    def lent(self) -> int:
        """How many slabs are in use."""
        return len(self._loans)

    def take(self, nbytes: int) -> Tensor:
        """A tensor of `nbytes` uninitialized bytes. It, and views of it, may be kept for any time."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        size = _size_class(nbytes)
        home = self._slabs_of(size)
        try:
            slab = home.pop()
        except IndexError:
            slab = np.empty(size, dtype=np.uint8)
            self.allocated += 1
        view = slab[:nbytes]
        loan = _Loan(view, self._return)
        loan.slab, loan.home = slab, home
        self._loans[id(loan)] = loan
        return torch.from_numpy(view)

    def _slabs_of(self, size: int) -> deque[_Slab]:
        home = self._free.get(size)
        if home is None:
            home = self._free.setdefault(size, deque(maxlen=self._keep))
        self._free[size] = self._free.pop(size, home)
        if len(self._free) > SIZES_MAX:
            for unused in list(self._free)[:-SIZES_MAX]:
                self._free.pop(unused, None)
        return home

    def copy(self, vector: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of a contiguous vector, in memory of the pool unless it is small or on a GPU.

        vector: what is copied
        dtype: that of the copy; None: that of the vector
        """
        return self.like(vector, dtype).copy_(vector)

    def like(self, vector: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Uninitialized memory for a vector of this size and device, and of this dtype or that of the vector."""
        dtype = dtype or vector.dtype
        nbytes = vector.numel() * dtype.itemsize
        if nbytes < COPY_BYTES_MIN or vector.device.type != "cpu":
            return torch.empty_like(vector, dtype=dtype)
        return self.take(nbytes).view(dtype)

    def _return(self, loan: weakref.ref[Any]) -> None:
        """Called when a view is freed: in any thread, and even in the middle of `take`."""
        ended = self._loans.pop(id(loan))
        ended.home.append(ended.slab)


def _size_class(nbytes: int) -> int:
    if nbytes <= _SMALL_BYTES_MAX:
        return int(1 << (nbytes - 1).bit_length())
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
