from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.core.examples import Order
from offbeat.core.splits import ByLabel, Sharded, Shared
from offbeat.errors import ConfigurationError
from offbeat.lab.workloads.digits import Digits

SEEDS = st.integers(0, 2**32 - 1)
RANKS = st.integers(0, 1000)
SIZES = st.integers(1, 60)


@given(SIZES, SEEDS, RANKS, st.integers(0, 5))
def test_every_epoch_is_a_permutation(size: int, seed: int, rank: int, epoch: int) -> None:
    indices = np.arange(size) * 3 + 1
    taken = Order(indices, seed, rank).take(epoch * size, (epoch + 1) * size)
    assert taken.dtype == torch.int64
    assert sorted(taken.tolist()) == indices.tolist()


@given(SIZES, SEEDS, RANKS, st.lists(st.tuples(st.integers(0, 300), st.integers(0, 100)), max_size=6))
def test_a_draw_is_the_same_whenever_and_however_it_is_taken(size, seed, rank, ranges) -> None:
    everything = Order(np.arange(size), seed, rank).take(0, 400).tolist()
    order = Order(np.arange(size), seed, rank)
    for first, count in ranges:
        assert order.take(first, first + count).tolist() == everything[first : first + count]


def test_ranks_seeds_and_epochs_have_different_orders() -> None:
    def taken(seed: int, rank: int, epoch: int) -> list[int]:
        return Order(np.arange(100), seed, rank).take(epoch * 100, epoch * 100 + 100).tolist()

    orders = [taken(0, 0, 0), taken(1, 0, 0), taken(0, 1, 0), taken(0, 0, 1)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


def test_a_thousand_orders_over_shared_data_are_small() -> None:
    targets = torch.zeros(50_000)
    orders = [Order(Shared().indices(targets, rank, 1000, 0), 0, rank) for rank in range(1000)]
    assert all(order._indices is orders[0]._indices for order in orders)
    for order in orders[:20]:
        order.take(40_000, 160_000)
    cached = [order._cached[1].nbytes for order in orders[:20] if order._cached is not None]
    assert cached == [100_000] * 20


@st.composite
def divided(draw):
    workers = draw(st.integers(1, 20))
    targets = draw(st.lists(st.integers(0, 9), min_size=workers, max_size=150))
    split = draw(st.sampled_from([Sharded(), ByLabel(1), ByLabel(2), ByLabel(7)]))
    return split, torch.tensor(targets), workers, draw(SEEDS)


@given(divided())
def test_parts_are_disjoint_and_cover_everything_and_none_is_empty(case) -> None:
    split, targets, workers, seed = case
    parts = [split.indices(targets, worker, workers, seed) for worker in range(workers)]
    assert all(len(part) > 0 for part in parts)
    assert all(part.dtype == np.int64 for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(targets)))


@given(divided(), st.integers(0, 100))
def test_a_worker_beyond_the_last_wraps_around_and_parts_depend_on_the_seed_alone(case, worker: int) -> None:
    split, targets, workers, seed = case
    part = split.indices(targets, worker, workers, seed)
    assert np.array_equal(part, split.indices(targets, worker % workers, workers, seed))


@given(divided())
def test_parts_are_of_nearly_one_size(case) -> None:
    split, targets, workers, seed = case
    sizes = [len(split.indices(targets, worker, workers, seed)) for worker in range(workers)]
    pieces_each = split.labels if isinstance(split, ByLabel) else 1
    assert max(sizes) - min(sizes) <= pieces_each


@given(st.integers(1, 100), st.integers(0, 30), st.integers(1, 30))
def test_shared_data_is_all_examples_for_every_worker(size: int, worker: int, workers: int) -> None:
    indices = Shared().indices(torch.zeros(size), worker, workers, 0)
    assert indices.tolist() == list(range(size))
    assert not indices.flags.writeable


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(1, 3))
def test_by_label_gives_each_worker_few_labels(seed: int, labels: int) -> None:
    targets = Digits().build().train.targets
    seen = [len(targets[ByLabel(labels).indices(targets, worker, 20, seed)].unique()) for worker in range(20)]
    assert max(seen) <= 2 * labels
    assert np.mean(seen) <= 1.6 * labels


@pytest.mark.parametrize("split", [Sharded(), ByLabel()])
def test_fewer_examples_than_workers_are_refused_in_a_sentence(split) -> None:
    with pytest.raises(ConfigurationError, match="3 examples cannot be divided among 4 workers; use the split"):
        split.indices(torch.zeros(3, dtype=torch.long), 0, 4, 0)


def test_by_label_needs_labels() -> None:
    with pytest.raises(ConfigurationError, match="needs one whole number per example"):
        ByLabel().indices(torch.zeros(10), 0, 2, 0)
