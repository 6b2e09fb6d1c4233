"""Shared memory is written and read in place, used again, never while somebody looks at it, and never believed."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from offbeat.transports import shared_memory as slots
from offbeat.transports.shared_memory import SHARED_BYTES_MIN, SLOTS_MAX, Shared, SlotTable
from offbeat.transports.wire import Slot, WireError

NBYTES = SHARED_BYTES_MIN


class Pair:
    """Both ends of one direction, in one process."""

    def __init__(self) -> None:
        self.writer, self.reader = Shared(), Shared()
        with self.writer.meeting():
            slot_table = self.writer.offer()
            assert slot_table is not None
            self.reader.accept(slot_table)

    def grow(self, nbytes: int = NBYTES) -> Slot:
        slot = self.writer.grow(nbytes)
        assert slot is not None
        self.reader.map(slot)
        return slot

    def pass_on(self, value: int, nbytes: int = NBYTES) -> Tensor:
        place = self.writer.write([filled(value, nbytes)], nbytes)
        assert place is not None
        return self.reader.read(place, nbytes)

    def close(self) -> None:
        self.writer.close()
        self.reader.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_said", threading.Event())


def filled(value: int, nbytes: int = NBYTES) -> Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def test_a_payload_is_read_where_it_was_laid(pair: Pair) -> None:
    pair.grow()
    place = pair.writer.write([filled(3, 1000), filled(4, NBYTES - 1000)], NBYTES)
    assert place is not None
    read = pair.reader.read(place, NBYTES)
    assert read[:1000].eq(3).all()
    assert read[1000:].eq(4).all()
    read[5] = 9
    assert pair.writer._own is not None
    assert pair.writer._own._slots[place]._memory[5] == 9


def test_only_large_payloads_are_taken_and_only_once_the_other_end_is_there() -> None:
    writer, reader = Shared(), Shared()
    assert not writer.takes(NBYTES)
    slot_table = writer.offer()
    assert slot_table is not None
    assert not writer.takes(NBYTES)
    assert writer.grow(NBYTES) is None
    reader.accept(slot_table)
    assert writer.takes(NBYTES)
    assert not writer.takes(NBYTES - 1)
    writer.close()


def test_a_slot_is_used_when_it_was_mapped_and_no_other_is_offered_before(pair: Pair) -> None:
    slot = pair.writer.grow(NBYTES)
    assert slot is not None
    assert pair.writer.write([filled(1)], NBYTES) is None
    assert pair.writer.grow(NBYTES) is None
    pair.reader.map(slot)
    assert pair.pass_on(1).eq(1).all()


@pytest.mark.parametrize(
    "hold",
    [
        lambda tensor: tensor[10:20],
        lambda tensor: tensor[:80].view(torch.float32),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.untyped_storage(),
    ],
)
def test_a_slot_is_free_again_when_the_last_view_is_gone(pair: Pair, hold: object) -> None:
    pair.grow()
    held = hold(pair.pass_on(1))  # type: ignore[operator]
    assert pair.writer.write([filled(2)], NBYTES) is None
    del held
    assert pair.pass_on(2).eq(2).all()


def test_there_are_only_so_many_slots_and_they_are_used_again(pair: Pair) -> None:
    held = []
    for value in range(SLOTS_MAX):
        pair.grow()
        held.append(pair.pass_on(value))
    assert pair.writer.write([filled(9)], NBYTES) is None
    assert pair.writer.grow(NBYTES) is None
    assert [int(tensor[7]) for tensor in held] == list(range(SLOTS_MAX))
    address = held[2].data_ptr()
    del held[2]
    assert pair.pass_on(9).data_ptr() == address


def test_a_larger_slot_takes_the_place_of_one_that_is_free(pair: Pair) -> None:
    for _ in range(SLOTS_MAX):
        pair.grow()
    held = pair.pass_on(1)
    slot = pair.grow(3 * NBYTES)
    assert slot.nbytes >= 3 * NBYTES
    assert pair.pass_on(2, 3 * NBYTES).eq(2).all()
    assert held.eq(1).all()


def test_what_was_laid_and_not_sent_can_be_taken_back(pair: Pair) -> None:
    pair.grow()
    place = pair.writer.write([filled(1)], NBYTES)
    assert place is not None
    pair.writer.take_back(place)
    assert pair.pass_on(2).eq(2).all()


def test_what_is_kept_outlives_both_ends() -> None:
    pair = Pair()
    pair.grow()
    kept = pair.pass_on(5)[100:200]
    pair.close()
    del pair
    gc.collect()
    assert kept.eq(5).all()
    kept.fill_(6)


def test_a_forked_copy_of_the_reader_frees_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.grow()
    held = pair.pass_on(1)
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
    tensor = pair.pass_on(1)
    assert len(os.listdir("/proc/self/fd")) == before
    pair.writer.grow(NBYTES)  # which the other end does not come to map
    pair.close()
    assert tensor.eq(1).all()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_end_that_fails_to_meet_leaves_nothing_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    shared = Shared()

    def fail_to_meet() -> None:
        with shared.meeting():
            shared.offer()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_to_meet()
    assert len(os.listdir("/proc/self/fd")) == before


# What cannot be had


def no_more_files(*_: object) -> int:
    raise OSError(24, "Too many open files")


def test_where_there_is_no_such_memory_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "memfd_create", no_more_files)
    for _ in range(2):
        shared = Shared()
        assert shared.offer() is None
        assert not shared.takes(NBYTES)
        shared.close()
    assert [record.message.partition("; ")[2] for record in caplog.records] == [
        "that cannot be had here: [Errno 24] Too many open files"
    ]


def test_no_more_slots_can_be_had(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.grow()
    monkeypatch.setattr(os, "memfd_create", no_more_files)
    assert pair.writer.grow(2 * NBYTES) is None
    assert not pair.writer.takes(NBYTES)


def test_a_board_of_somebody_else_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    writer = Shared()
    slot_table = writer.offer()
    assert slot_table is not None
    wrong_mark = SlotTable(slot_table.process, slot_table.file, bytes(16))
    with open(os.devnull) as device, open(__file__) as text:
        for other in (wrong_mark, *(SlotTable(os.getpid(), file.fileno(), slot_table.mark) for file in (device, text))):
            reader = Shared()
            reader.accept(other)
            with pytest.raises(WireError, match="no memory is shared"):
                reader.map(Slot(0, slot_table.file, 4096))
    assert not writer.takes(NBYTES)
    assert len(caplog.records) == 1
    writer.close()


def test_memory_that_could_shrink_under_its_reader_is_not_mapped(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    file = os.memfd_create("unsealed")
    os.ftruncate(file, NBYTES + 4096)
    pair.reader.map(Slot(0, file, NBYTES))
    os.close(file)
    assert "could shrink" in caplog.text
    with pytest.raises(WireError, match="which cannot be"):
        pair.reader.read(0, NBYTES)


def test_a_slot_whose_owner_has_ended_is_no_news(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    slot = pair.writer.grow(NBYTES)
    assert slot is not None
    pair.writer.close()
    pair.reader.map(slot)
    assert not caplog.records


# What a peer may say


def test_what_a_peer_says_of_slots_is_not_believed(pair: Pair) -> None:
    slot = pair.grow()
    for place, nbytes in ((1, NBYTES), (SLOTS_MAX, 1), (0, slot.nbytes + 1)):
        with pytest.raises(WireError, match="which cannot be"):
            pair.reader.read(place, nbytes)
    with pytest.raises(WireError, match="which cannot be"):
        pair.reader.map(Slot(SLOTS_MAX, slot.file, slot.nbytes))
    held = pair.pass_on(1)
    with pytest.raises(WireError, match="which cannot be"):
        pair.reader.read(0, NBYTES)
    with pytest.raises(WireError, match="which cannot be"):
        pair.reader.map(Slot(0, slot.file, slot.nbytes))
    assert held.eq(1).all()


def test_without_shared_memory_nothing_is_said_of_slots() -> None:
    with pytest.raises(WireError, match="no memory is shared"):
        Shared().read(0, 1)
    with pytest.raises(WireError, match="no memory is shared"):
        Shared().map(Slot(0, 3, 4096))


def test_threads_never_meet_in_a_slot(pair: Pair) -> None:
    """One thread writes while another reads and lets go."""
    for _ in range(SLOTS_MAX):
        pair.grow()
    wrong: list[int] = []
    passed: list[tuple[int, Tensor]] = []
    there = threading.Semaphore(0)

    def read() -> None:
        for _ in range(300):
            there.acquire()
            value, tensor = passed.pop(0)
            if not np.all(tensor.numpy() == value):
                wrong.append(value)

    reading = threading.Thread(target=read)
    reading.start()
    sent = 0
    while sent < 300:
        place = pair.writer.write([filled(sent % 251)], NBYTES)
        if place is not None:
            passed.append((sent % 251, pair.reader.read(place, NBYTES)))
            there.release()
            sent += 1
    reading.join()
    assert not wrong
