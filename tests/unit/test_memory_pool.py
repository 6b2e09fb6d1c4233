"""Memory returns to the pool by itself, is reused, and never while a tensor refers to it."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from offbeat.core.memory_pool import SIZES_MAX, Pool


@pytest.mark.parametrize("nbytes", [1, 7, 4096, 65536, 65537, 1_000_001])
def test_a_tensor_of_the_requested_size_is_returned(nbytes: int) -> None:
    taken = Pool().take(nbytes)
    assert (taken.dtype, taken.shape) == (torch.uint8, (nbytes,))
    taken.fill_(3)


def test_zero_bytes_need_no_slab() -> None:
    pool = Pool()
    assert pool.take(0).numel() == 0
    assert (pool.allocated, pool.lent) == (0, 0)


def test_memory_is_reused_when_no_tensor_refers_to_it() -> None:
    pool = Pool()
    first = pool.take(100_000)
    address = first.data_ptr()
    del first
    assert pool.lent == 0
    assert pool.take(100_001).data_ptr() == address
    for _ in range(100):
        pool.take(99_999)
    assert pool.allocated == 1


@pytest.mark.parametrize(
    "hold",
    [
        lambda tensor: tensor[10:20],
        lambda tensor: tensor[:80].view(torch.float32),
        lambda tensor: tensor.detach(),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: (tensor[:8], [tensor[8:16].view(2, 4)]),
    ],
)
def test_any_view_keeps_the_memory(hold: object) -> None:
    pool = Pool()
    tensor = pool.take(1000)
    held = hold(tensor)  # type: ignore[operator]
    address = tensor.data_ptr()
    del tensor
    assert pool.lent == 1
    assert pool.take(1000).data_ptr() != address
    del held
    assert pool.lent == 0


def test_memory_of_a_tensor_in_a_cycle_returns_when_the_collector_runs() -> None:
    pool = Pool()
    cycle: list[object] = [pool.take(1000)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.lent == 0


def test_only_a_few_free_slabs_are_kept() -> None:
    pool = Pool(keep=2)
    taken = [pool.take(1000) for _ in range(5)]
    del taken
    again = [pool.take(1000) for _ in range(5)]
    assert pool.allocated == 5 + 3
    del again


def test_slabs_of_sizes_that_are_no_longer_requested_are_dropped() -> None:
    pool = Pool()
    pool.take(1000)
    for pages in range(20, 20 + SIZES_MAX):
        pool.take(pages * 4096)
    made = pool.allocated
    pool.take(1000)
    assert pool.allocated == made + 1


def test_memory_in_use_outlives_the_pool() -> None:
    pool = Pool()
    tensor = pool.take(1000).fill_(5)
    del pool
    gc.collect()
    assert tensor.eq(5).all()


def test_threads_never_share_a_slab() -> None:
    pool = Pool()
    clashes: list[int] = []

    def use(mark: int) -> None:
        kept = []
        for i in range(400):
            tensor = pool.take(2000 + i % 3).fill_(mark)
            kept.append(tensor[:9])
            if not all(bool(part.eq(mark).all()) for part in kept):
                clashes.append(mark)
            if len(kept) > 3:
                kept.pop(0)

    threads = [threading.Thread(target=use, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes
    assert pool.lent == 0
    assert pool.allocated <= 4 * 6
