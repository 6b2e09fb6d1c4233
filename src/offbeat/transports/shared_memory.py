"""Memory that the two ends of a link share if both are processes of one machine: a payload then costs one copy.

Each end has a *slot table* and some *slots*. It copies a payload into a free slot and sets the number of the slot in
the message's head; the other end reads the payload in place. When the last tensor over it is released, the reader
marks the slot as free in the table. So nothing has to be returned explicitly, and a tensor that a node keeps keeps its
slot.

- A slot is offered before it is used. The reader maps it and says so in the table; until then, and whenever no slot is
  free, payloads go through the connection as they would between machines. So a failure to map memory costs speed and
  nothing else, and no thread waits for a slot.
- The memory has no name: the reader opens it through the owner's entry in /proc, after which the owner closes its
  file. So nothing is left behind, however a process ends. Memory that shrinks would crash its reader, so only memory
  that is sealed against shrinking is mapped.
- A random mark behind the memory shows that it is the right one: in another container the same process number means
  another process.
- Allocating memory costs ten times as much as overwriting it. So there are few slots, and the smallest that fits is
  used first.
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
"""The smallest payload that goes through a slot. Measured: up to 64 KiB a plain connection took as long, at 128 KiB a
slot took 15% less, and at 1 MiB less than half."""

SLOTS_MAX = 5
"""Slots of each end: for messages in transit, for those that the reader keeps, and one that is being filled."""

_PAGE = 4096
_MARK_BYTES = 16
_TABLE_MAPPED = SLOTS_MAX
"""Index in a slot table of whether the other end has mapped the table; the states of the slots precede it."""

_UNMAPPED, _FREE, _IN_USE = 0, 1, 2
"""States of a slot. The owner occupies a free one; the reader frees it, also for the first time."""

_Memory = npt.NDArray[np.uint8]

_log = logging.getLogger(__name__)
_warned = threading.Event()


class SlotTable(msgspec.Struct, frozen=True):
    """Where the other end of a link finds a slot table: the process, its file descriptor, and the mark."""

    process: int
    file: int
    mark: bytes


class SharedSlots:
    """Shared memory of one link: slots of this end to send, and of the peer to receive. Either may be missing."""

    def __init__(self) -> None:
        self._own: _OwnSlots | None = None
        self._peer: _PeerSlots | None = None

    def offer(self) -> SlotTable | None:
        """Create a slot table for sending; None where there is no shared memory."""
        try:
            self._own = _OwnSlots()
        except OSError as error:
            _warn_once(error)
            return None
        return self._own.slot_table

    def accept(self, slot_table: SlotTable) -> None:
        """Map the slot table of the peer, for receiving, if possible."""
        try:
            self._peer = _PeerSlots(slot_table)
        except OSError as error:
            _warn_once(error)

    def accepts(self, nbytes: int) -> bool:
        """Whether a payload of this size is to go through a slot."""
        return nbytes >= SHARED_BYTES_MIN and self._own is not None and self._own.is_mapped

    def write(self, tensors: Iterable[Tensor], nbytes: int) -> int | None:
        """Copy a payload into a slot, and return its number; None if no slot that is large enough is free."""
        return None if self._own is None else self._own.write(tensors, nbytes)

    def release(self, number: int) -> None:
        """Free a slot that was written, but not sent."""
        if self._own is not None:
            self._own.release(number)

    def grow(self, nbytes: int) -> Slot | None:
        """A new slot for payloads of this size, which must be offered to the peer; None if there are enough."""
        if self._own is None:
            return None
        try:
            return self._own.grow(nbytes)
        except OSError as error:
            _warn_once(error)
            self._own.close()
            self._own = None
            return None

    def map(self, slot: Slot) -> None:
        """Map a slot that the peer offers. The peer does not use one that cannot be mapped."""
        if self._peer is None:
            raise WireError("a slot is offered, but no memory is shared on this link")
        try:
            self._peer.map(slot)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESRCH):  # the peer has ended meanwhile
                _warn_once(error)

    def read(self, number: int, nbytes: int) -> Tensor:
        """The payload in a slot of the peer, in place; the slot is free again when the tensor is released."""
        if self._peer is None:
            raise WireError("a message refers to a slot, but no memory is shared on this link")
        return self._peer.read(number, nbytes)

    @contextmanager
    def handshake(self) -> Iterator[None]:
        """While both ends connect; at its end each has mapped the slot table of the other, or never will."""
        try:
            yield
        except BaseException:
            self.close()
            raise
        if self._own is not None:
            self._own.close_table()

    def close(self) -> None:
        """Close the files of this end. Received tensors stay valid."""
        if self._own is not None:
            self._own.close()
        if self._peer is not None:
            self._peer.unmap()


def _warn_once(why: Exception) -> None:
    """Log, once in a process, that shared memory is not used where it could be."""
    if not _warned.is_set():
        _warned.set()
        _log.warning(
            "offbeat: tensors between processes of this machine go through sockets, which is slower than shared "
            "memory; shared memory is not available here: %s",
            why,
        )


class _OwnSlot:
    """A slot to write into. Its file is open until the peer has mapped it."""

    def __init__(self, number: int, nbytes: int, mark: bytes) -> None:
        self.number = number
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
    def is_mapped(self) -> bool:
        return bool(self._states[_TABLE_MAPPED])

    def write(self, tensors: Iterable[Tensor], nbytes: int) -> int | None:
        fitting = [slot for slot in self._slots if slot.nbytes >= nbytes and self._states[slot.number] == _FREE]
        if not fitting:
            return None
        slot = min(fitting, key=lambda slot: slot.nbytes)
        slot.close()
        self._states[slot.number] = _IN_USE
        slot.fill(tensors)
        return slot.number

    def release(self, number: int) -> None:
        self._states[number] = _FREE

    def grow(self, nbytes: int) -> Slot | None:
        """A new slot, or a larger one instead of a free one. None while the last one offered is not mapped yet."""
        states = [int(self._states[slot.number]) for slot in self._slots]
        if not self.is_mapped or _UNMAPPED in states:
            return None
        number = len(self._slots)
        if number == SLOTS_MAX:
            small = [slot for slot in self._slots if slot.nbytes < nbytes and states[slot.number] == _FREE]
            if not small:
                return None
            number = min(small, key=lambda slot: slot.nbytes).number
        rounded = 1 << (nbytes - 1).bit_length()  # pages that are never touched cost nothing
        slot = _OwnSlot(number, rounded, self.slot_table.mark)
        for old in self._slots[number : number + 1]:
            old.close()
        self._slots[number : number + 1] = [slot]
        self._states[number] = _UNMAPPED
        assert slot.file is not None
        return Slot(number, slot.file, slot.nbytes)

    def close_table(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def close(self) -> None:
        self.close_table()
        for slot in self._slots:
            slot.close()


class _Lease(weakref.ref[Any]):
    """A weak reference to a payload in use, whose slot is free when the payload is released."""

    __slots__ = ("number", "process", "slots")

    number: int
    process: int
    slots: _PeerSlots


class _PeerSlots:
    """Used by the receiving thread; leases end in any thread."""

    def __init__(self, slot_table: SlotTable) -> None:
        self._table = slot_table
        self._states = _open(slot_table, slot_table.file, _PAGE)
        self._states[_TABLE_MAPPED] = 1
        self._slots: dict[int, _Memory] = {}
        self._leases: dict[int, _Lease] = {}

    def map(self, slot: Slot) -> None:
        if slot.number >= SLOTS_MAX or slot.number in self._leases:
            raise WireError(f"the peer offers slot {slot.number}, which is out of range or in use")
        self._slots.pop(slot.number, None)
        self._slots[slot.number] = _open(self._table, slot.file, slot.nbytes)
        self._states[slot.number] = _FREE

    def read(self, number: int, nbytes: int) -> Tensor:
        memory = self._slots.get(number)
        if memory is None or nbytes > memory.size or number in self._leases:
            raise WireError(f"a message claims {nbytes} bytes in slot {number}, which is missing, too small or in use")
        view = memory[:nbytes]
        lease = _Lease(view, _end_lease)
        lease.number, lease.process, lease.slots = number, os.getpid(), self
        self._leases[number] = lease
        return torch.from_numpy(view)

    def unmap(self) -> None:
        """Keep no slot but those that are leased."""
        self._slots.clear()

    def end_lease(self, lease: _Lease) -> None:
        """Atomic steps only: this runs in the thread that releases the tensor. A forked process frees none."""
        if lease.process == os.getpid():
            del self._leases[lease.number]
            self._states[lease.number] = _FREE


def _end_lease(lease: weakref.ref[Any]) -> None:
    assert isinstance(lease, _Lease)
    lease.slots.end_lease(lease)


# Anonymous memory: the requested bytes, and a page for the mark


def _create(nbytes: int, mark: bytes) -> tuple[int | None, _Memory]:
    """New memory, and the file descriptor through which another process can map it."""
    if sys.platform != "linux":
        raise OSError(f"it is not supported on {sys.platform}")
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


def _open(slot_table: SlotTable, file: int, nbytes: int) -> _Memory:
    """Memory of another process; OSError if it does not exist, or is not the right one."""
    path = f"/proc/{slot_table.process}/fd/{file}"
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening anything else might block
        raise OSError("the processes do not see each other's files")
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(opened).st_size != nbytes + _PAGE:
            raise OSError("the processes do not see each other's files")
        if not fcntl.fcntl(opened, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError("the memory that is offered could shrink")
        memory = _map(opened, nbytes + _PAGE)
    finally:
        os.close(opened)
    if memory[nbytes : nbytes + _MARK_BYTES].tobytes() != slot_table.mark:
        raise OSError("the processes do not see each other's files")
    return memory[:nbytes]


def _map(file: int, nbytes: int) -> _Memory:
    """By torch, not by `mmap`, which would keep the file open."""
    try:
        mapped = torch.from_file(f"/proc/self/fd/{file}", shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(str(error).splitlines()[0]) from None
    return mapped.numpy()
