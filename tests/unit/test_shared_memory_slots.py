"""Shared memory is written and read in number, reused, never while a tensor over it exists, and never trusted."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from offbeat.transports import shared_memory
from offbeat.transports.shared_memory import SHARED_BYTES_MIN, SLOTS_MAX, SharedSlots, SlotTable
from offbeat.transports.wire import Slot, WireError

NBYTES = SHARED_BYTES_MIN


class Pair:
    """Both ends of one direction, in one process."""

    def __init__(self) -> None:
        self.writer, self.reader = SharedSlots(), SharedSlots()
        with self.writer.handshake():
            slot_table = self.writer.offer()
            assert slot_table is not None
            self.reader.accept(slot_table)

    def grow(self, nbytes: int = NBYTES) -> Slot:
        slot = self.writer.grow(nbytes)
        assert slot is not None
        self.reader.map(slot)
        return slot

    def transfer(self, value: int, nbytes: int = NBYTES) -> Tensor:
        number = self.writer.write([filled(value, nbytes)], nbytes)
        assert number is not None
        return self.reader.read(number, nbytes)

    def close(self) -> None:
        self.writer.close()
        self.reader.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture(autouse=True)
def not_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_warned", threading.Event())


def filled(value: int, nbytes: int = NBYTES) -> Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def test_a_payload_is_read_where_it_was_written(pair: Pair) -> None:
    pair.grow()
    number = pair.writer.write([filled(3, 1000), filled(4, NBYTES - 1000)], NBYTES)
    assert number is not None
    read = pair.reader.read(number, NBYTES)
    assert read[:1000].eq(3).all()
    assert read[1000:].eq(4).all()
    read[5] = 9
    assert pair.writer._own is not None
    assert pair.writer._own._slots[number]._memory[5] == 9


def test_only_large_payloads_are_accepted_and_only_after_the_reader_has_mapped_the_table() -> None:
    writer, reader = SharedSlots(), SharedSlots()
    assert not writer.accepts(NBYTES)
    slot_table = writer.offer()
    assert slot_table is not None
    assert not writer.accepts(NBYTES)
    assert writer.grow(NBYTES) is None
    reader.accept(slot_table)
    assert writer.accepts(NBYTES)
    assert not writer.accepts(NBYTES - 1)
    writer.close()


def test_a_slot_is_used_after_it_was_mapped_and_no_other_is_offered_before(pair: Pair) -> None:
    slot = pair.writer.grow(NBYTES)
    assert slot is not None
    assert pair.writer.write([filled(1)], NBYTES) is None
    assert pair.writer.grow(NBYTES) is None
    pair.reader.map(slot)
    assert pair.transfer(1).eq(1).all()


@pytest.mark.parametrize(
    "hold",
    [
        lambda tensor: tensor[10:20],
        lambda tensor: tensor[:80].view(torch.float32),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.untyped_storage(),
    ],
)
def test_a_slot_is_free_again_when_the_last_view_is_released(pair: Pair, hold: object) -> None:
    pair.grow()
    held = hold(pair.transfer(1))  # type: ignore[operator]
    assert pair.writer.write([filled(2)], NBYTES) is None
    del held
    assert pair.transfer(2).eq(2).all()


def test_the_number_of_slots_is_limited_and_they_are_reused(pair: Pair) -> None:
    held = []
    for value in range(SLOTS_MAX):
        pair.grow()
        held.append(pair.transfer(value))
    assert pair.writer.write([filled(9)], NBYTES) is None
    assert pair.writer.grow(NBYTES) is None
    assert [int(tensor[7]) for tensor in held] == list(range(SLOTS_MAX))
    address = held[2].data_ptr()
    del held[2]
    assert pair.transfer(9).data_ptr() == address


def test_a_larger_slot_replaces_one_that_is_free(pair: Pair) -> None:
    for _ in range(SLOTS_MAX):
        pair.grow()
    held = pair.transfer(1)
    slot = pair.grow(3 * NBYTES)
    assert slot.nbytes >= 3 * NBYTES
    assert pair.transfer(2, 3 * NBYTES).eq(2).all()
    assert held.eq(1).all()


def test_a_slot_that_was_written_but_not_sent_can_be_released(pair: Pair) -> None:
    pair.grow()
    number = pair.writer.write([filled(1)], NBYTES)
    assert number is not None
    pair.writer.release(number)
    assert pair.transfer(2).eq(2).all()


def test_a_kept_tensor_outlives_both_ends() -> None:
    pair = Pair()
    pair.grow()
    kept = pair.transfer(5)[100:200]
    pair.close()
    del pair
    gc.collect()
    assert kept.eq(5).all()
    kept.fill_(6)


def test_a_forked_copy_of_the_reader_frees_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.grow()
    held = pair.transfer(1)
    mine = os.getpid()
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: mine + 1)
        del held
    assert pair.writer.write([filled(2)], NBYTES) is None


def test_no_file_stays_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    pair = Pair()
    assert len(os.listdir("/proc/self/fd")) == before
    pair.grow()
    tensor = pair.transfer(1)
    assert len(os.listdir("/proc/self/fd")) == before
    pair.writer.grow(NBYTES)  # which the other end never maps
    pair.close()
    assert tensor.eq(1).all()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_failed_handshake_leaves_no_file_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    shared = SharedSlots()

    def fail() -> None:
        with shared.handshake():
            shared.offer()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(os.listdir("/proc/self/fd")) == before


# Memory that is not available


def no_more_files(*_: object) -> int:
    raise OSError(24, "Too many open files")


def test_missing_shared_memory_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "memfd_create", no_more_files)
    for _ in range(2):
        shared = SharedSlots()
        assert shared.offer() is None
        assert not shared.accepts(NBYTES)
        shared.close()
    assert [record.message.partition("; ")[2] for record in caplog.records] == [
        "shared memory is not available here: [Errno 24] Too many open files"
    ]


def test_without_memory_for_another_slot_shared_memory_is_given_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.grow()
    monkeypatch.setattr(os, "memfd_create", no_more_files)
    assert pair.writer.grow(2 * NBYTES) is None
    assert not pair.writer.accepts(NBYTES)


def test_the_slot_table_of_another_process_is_not_mapped(caplog: pytest.LogCaptureFixture) -> None:
    writer = SharedSlots()
    slot_table = writer.offer()
    assert slot_table is not None
    wrong_mark = SlotTable(slot_table.process, slot_table.file, bytes(16))
    with open(os.devnull) as device, open(__file__) as text:
        for other in (wrong_mark, *(SlotTable(os.getpid(), file.fileno(), slot_table.mark) for file in (device, text))):
            reader = SharedSlots()
            reader.accept(other)
            with pytest.raises(WireError, match="no memory is shared"):
                reader.map(Slot(0, slot_table.file, 4096))
    assert not writer.accepts(NBYTES)
    assert len(caplog.records) == 1
    writer.close()


def test_memory_that_could_shrink_under_its_reader_is_not_mapped(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    file = os.memfd_create("unsealed")
    os.ftruncate(file, NBYTES + 4096)
    pair.reader.map(Slot(0, file, NBYTES))
    os.close(file)
    assert "could shrink" in caplog.text
    with pytest.raises(WireError, match="which is missing"):
        pair.reader.read(0, NBYTES)


def test_a_slot_whose_owner_has_ended_is_not_logged(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    slot = pair.writer.grow(NBYTES)
    assert slot is not None
    pair.writer.close()
    pair.reader.map(slot)
    assert not caplog.records


# Invalid data of a peer


def test_invalid_slots_are_rejected(pair: Pair) -> None:
    slot = pair.grow()
    for number, nbytes in ((1, NBYTES), (SLOTS_MAX, 1), (0, slot.nbytes + 1)):
        with pytest.raises(WireError, match="missing, too small or in use"):
            pair.reader.read(number, nbytes)
    with pytest.raises(WireError, match="out of range or in use"):
        pair.reader.map(Slot(SLOTS_MAX, slot.file, slot.nbytes))
    held = pair.transfer(1)
    with pytest.raises(WireError, match="missing, too small or in use"):
        pair.reader.read(0, NBYTES)
    with pytest.raises(WireError, match="out of range or in use"):
        pair.reader.map(Slot(0, slot.file, slot.nbytes))
    assert held.eq(1).all()


def test_without_shared_memory_slots_are_rejected() -> None:
    with pytest.raises(WireError, match="no memory is shared"):
        SharedSlots().read(0, 1)
    with pytest.raises(WireError, match="no memory is shared"):
        SharedSlots().map(Slot(0, 3, 4096))


def test_a_slot_is_never_written_while_another_thread_reads_it(pair: Pair) -> None:
    """One thread writes while another reads and releases."""
    for _ in range(SLOTS_MAX):
        pair.grow()
    wrong: list[int] = []
    passed: list[tuple[int, Tensor]] = []
    available = threading.Semaphore(0)

    def read() -> None:
        for _ in range(300):
            available.acquire()
            value, tensor = passed.pop(0)
            if not np.all(tensor.numpy() == value):
                wrong.append(value)

    reading = threading.Thread(target=read)
    reading.start()
    sent = 0
    while sent < 300:
        number = pair.writer.write([filled(sent % 251)], NBYTES)
        if number is not None:
            passed.append((sent % 251, pair.reader.read(number, NBYTES)))
            available.release()
            sent += 1
    reading.join()
    assert not wrong
