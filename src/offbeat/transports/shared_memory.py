"""Memory that the two ends of a link share, where both are processes of one machine: a payload costs one copy.

Each end has a *board* and some *slots*. It copies a payload into a slot that is free, and the message's head says into
which; the other end reads it there, in place. When the last tensor over it is gone, the reader notes on the board that
the slot is free again, so nobody has to give anything back, and what a node keeps keeps its slot.

- A slot is offered before it is used. The reader maps it and says so on the board; until then, and wherever no slot is
  free, messages go through the connection as they would between machines. So whatever cannot be mapped costs speed and
  nothing else, and nobody waits for a slot.
- The memory has no name: the reader opens it through the owner's entry in /proc, after which the owner closes its
  file. So nothing is left behind, however a process ends. Memory that could shrink under its reader would end it, so
  only memory that is sealed against that is mapped.
- A random mark behind the memory shows that it is the one that was meant: the same process number means another
  process in another container.
- Fresh memory costs ten times what filling it again does. So there are few slots, and the first that fits is used.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offbeat.transports.wire import Slot, WireError

SHARED_BYTES_MIN = 128 << 10
"""From this payload on a slot is used. Up to 64 KiB a plain connection took as long here; at 128 KiB a slot took 15%
less, and at 1 MiB less than half."""

SLOTS_MAX = 5
"""Slots of each end: for what may be on the way at once, for what the reader keeps, and one that is being filled."""

_PAGE = 4096
_MARK_BYTES = 16
_SEEN = SLOTS_MAX
"""Where on a board it stands whether the other end has mapped it; before come the states of the slots."""

_UNMAPPED, _FREE, _TAKEN = 0, 1, 2
"""States of a slot. The owner takes one that is free, and the reader frees it, also for the first time."""

_Memory = npt.NDArray[np.uint8]

_log = logging.getLogger(__name__)
_said = threading.Event()


class SlotTable(msgspec.Struct, frozen=True):
    """Where the other end of a link finds a board: which process has it, as which of its files, and the mark."""

    process: int
    file: int
    mark: bytes


class Shared:
    """What one link shares: slots of our own, to send, and theirs, to receive. Either may be missing."""

    def __init__(self) -> None:
        self._own: _OwnSlots | None = None
        self._theirs: _TheirSlots | None = None

    def offer(self) -> SlotTable | None:
        """Have slots of our own, and say where the board is; None where there can be none."""
        try:
            self._own = _OwnSlots()
        except OSError as error:
            fall_back(error)
            return None
        return self._own.slot_table

    def accept(self, slot_table: SlotTable) -> None:
        """Have slots of theirs, if their board can be mapped."""
        try:
            self._theirs = _TheirSlots(slot_table)
        except OSError as error:
            fall_back(error)

    def takes(self, nbytes: int) -> bool:
        """Whether a payload of this size is to go through a slot."""
        return nbytes >= SHARED_BYTES_MIN and self._own is not None and self._own.is_seen

    def write(self, tensors: Iterable[Tensor], nbytes: int) -> int | None:
        """Copy a payload into a slot, and return which; None where none is free that is large enough."""
        return None if self._own is None else self._own.write(tensors, nbytes)

    def take_back(self, place: int) -> None:
        """What was laid there is not sent."""
        if self._own is not None:
            self._own.take_back(place)

    def grow(self, nbytes: int) -> Slot | None:
        """One slot more for payloads of this size, which the other end must be told of; None if there are enough."""
        if self._own is None:
            return None
        try:
            return self._own.grow(nbytes)
        except OSError as error:
            fall_back(error)
            self._own.close()
            self._own = None
            return None

    def map(self, slot: Slot) -> None:
        """A slot of theirs that was offered. One that cannot be mapped is not used by them either."""
        if self._theirs is None:
            raise WireError("a slot is offered, but no memory is shared on this link")
        try:
            self._theirs.map(slot)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESRCH):  # its owner has ended meanwhile
                fall_back(error)

    def read(self, place: int, nbytes: int) -> Tensor:
        """The payload in one of their slots, as it lies there; the slot is theirs again when the tensor is gone."""
        if self._theirs is None:
            raise WireError("a message lies in a slot, but no memory is shared on this link")
        return self._theirs.read(place, nbytes)

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """While both ends connect; at the end they have mapped each other's boards, or never will."""
        try:
            yield
        except BaseException:
            self.close()
            raise
        if self._own is not None:
            self._own.close_board()

    def close(self) -> None:
        """Give our files back. What was received stays readable for as long as somebody looks at it."""
        if self._own is not None:
            self._own.close()
        if self._theirs is not None:
            self._theirs.forget()


def fall_back(why: Exception) -> None:
    """Say, once in a process, that shared memory is not used where it could be."""
    if not _said.is_set():
        _said.set()
        _log.warning(
            "offbeat: tensors between processes of this machine go through sockets, which is slower than shared "
            "memory; that cannot be had here: %s",
            why,
        )


class _OwnSlot:
    """A slot to write into. Its file is open until the other end has mapped it."""

    def __init__(self, place: int, nbytes: int, mark: bytes) -> None:
        self.place = place
        self.nbytes = nbytes
        self.file, self._memory = _create(nbytes, mark)

    def fill(self, tensors: Iterable[Tensor]) -> None:
        memory = torch.from_numpy(self._memory)
        first = 0
        for tensor in tensors:
            memory[first : first + tensor.numel()].copy_(tensor)
            first += tensor.numel()

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None


class _OwnSlots:
    """Used by one thread at a time."""

    def __init__(self) -> None:
        mark = os.urandom(_MARK_BYTES)
        self._file, self._states = _create(_PAGE, mark)
        assert self._file is not None
        self.slot_table = SlotTable(os.getpid(), self._file, mark)
        self._slots: list[_OwnSlot] = []

    @property
    def is_seen(self) -> bool:
        return bool(self._states[_SEEN])

    def write(self, tensors: Iterable[Tensor], nbytes: int) -> int | None:
        fitting = [slot for slot in self._slots if slot.nbytes >= nbytes and self._states[slot.place] == _FREE]
        if not fitting:
            return None
        slot = min(fitting, key=lambda slot: slot.nbytes)
        slot.close()
        self._states[slot.place] = _TAKEN
        slot.fill(tensors)
        return slot.place

    def take_back(self, place: int) -> None:
        self._states[place] = _FREE

    def grow(self, nbytes: int) -> Slot | None:
        """A new slot, or a larger one in the place of one that is free; the next when this one has been mapped."""
        states = [int(self._states[slot.place]) for slot in self._slots]
        if not self.is_seen or _UNMAPPED in states:
            return None
        place = len(self._slots)
        if place == SLOTS_MAX:
            small = [slot for slot in self._slots if slot.nbytes < nbytes and states[slot.place] == _FREE]
            if not small:
                return None
            place = min(small, key=lambda slot: slot.nbytes).place
        slot = _OwnSlot(
            place, 1 << (nbytes - 1).bit_length(), self.slot_table.mark
        )  # memory that is not touched is free
        for old in self._slots[place : place + 1]:
            old.close()
        self._slots[place : place + 1] = [slot]
        self._states[place] = _UNMAPPED
        assert slot.file is not None
        return Slot(place, slot.file, slot.nbytes)

    def close_board(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def close(self) -> None:
        self.close_board()
        for slot in self._slots:
            slot.close()


class _Lease(weakref.ref[Any]):
    """A payload that somebody looks at, and which slot is free afterwards."""

    __slots__ = ("place", "process", "slots")

    place: int
    process: int
    slots: _TheirSlots


class _TheirSlots:
    """Used by the thread that receives; leases end in any thread."""

    def __init__(self, slot_table: SlotTable) -> None:
        self._board = slot_table
        self._states = _adopt(slot_table, slot_table.file, _PAGE)
        self._states[_SEEN] = 1
        self._slots: dict[int, _Memory] = {}
        self._leases: dict[int, _Lease] = {}

    def map(self, slot: Slot) -> None:
        if slot.place >= SLOTS_MAX or slot.place in self._leases:
            raise WireError(f"slot {slot.place} is offered, which cannot be")
        self._slots.pop(slot.place, None)
        self._slots[slot.place] = _adopt(self._board, slot.file, slot.nbytes)
        self._states[slot.place] = _FREE

    def read(self, place: int, nbytes: int) -> Tensor:
        memory = self._slots.get(place)
        if memory is None or nbytes > memory.size or place in self._leases:
            raise WireError(f"{nbytes} bytes are said to lie in slot {place}, which cannot be")
        view = memory[:nbytes]
        lease = _Lease(view, _end)
        lease.place, lease.process, lease.slots = place, os.getpid(), self
        self._leases[place] = lease
        return torch.from_numpy(view)

    def forget(self) -> None:
        """Keep no slot but those that somebody still looks at."""
        self._slots.clear()

    def end(self, lease: _Lease) -> None:
        """Only steps that are atomic: this runs in whichever thread let go. A forked copy of us has no say."""
        if lease.process == os.getpid():
            del self._leases[lease.place]
            self._states[lease.place] = _FREE


def _end(lease: weakref.ref[Any]) -> None:
    assert isinstance(lease, _Lease)
    lease.slots.end(lease)


# Memory without a name: as many bytes as wanted, and a page for the mark


def _create(nbytes: int, mark: bytes) -> tuple[int | None, _Memory]:
    """New memory, and the file by which another process can have it too."""
    if sys.platform != "linux":
        raise OSError(f"there is no such memory on {sys.platform}")
    file = os.memfd_create("offbeat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, nbytes + _PAGE)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        memory = _map(file, nbytes + _PAGE)
    except BaseException:
        os.close(file)
        raise
    memory[nbytes : nbytes + _MARK_BYTES] = np.frombuffer(mark, dtype=np.uint8)
    return file, memory[:nbytes]


def _adopt(slot_table: SlotTable, file: int, nbytes: int) -> _Memory:
    """Memory of another process; OSError if it is not there, or not what it should be."""
    path = f"/proc/{slot_table.process}/fd/{file}"
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening something else might wait
        raise OSError("the processes do not see each other's files")
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(opened).st_size != nbytes + _PAGE:
            raise OSError("the processes do not see each other's files")
        if not fcntl.fcntl(opened, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError("what is offered could shrink")
        memory = _map(opened, nbytes + _PAGE)
    finally:
        os.close(opened)
    if memory[nbytes : nbytes + _MARK_BYTES].tobytes() != slot_table.mark:
        raise OSError("the processes do not see each other's files")
    return memory[:nbytes]


def _map(file: int, nbytes: int) -> _Memory:
    """By torch, and not by `mmap`, which would keep a file open for each."""
    try:
        mapped = torch.from_file(f"/proc/self/fd/{file}", shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(str(error).splitlines()[0]) from None
    return mapped.numpy()
