from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.core.configuration import from_plain
from offbeat.core.splits import Dirichlet, Split
from offbeat.errors import ConfigurationError

SEEDS = st.integers(0, 2**32 - 1)
ALPHAS = st.floats(1e-3, 1e6)


@st.composite
def divided(draw):
    workers = draw(st.integers(1, 20))
    targets = draw(st.lists(st.integers(0, 9), min_size=workers, max_size=150))
    return Dirichlet(draw(ALPHAS)), torch.tensor(targets), workers, draw(SEEDS)


@given(divided())
def test_every_example_has_exactly_one_worker_and_every_worker_has_an_example(case) -> None:
    split, targets, workers, seed = case
    parts = [split.indices(targets, worker, workers, seed) for worker in range(workers)]
    assert all(len(part) > 0 for part in parts)
    assert all(part.dtype == np.int64 for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(targets)))


@given(divided(), st.integers(0, 100))
def test_a_part_depends_on_the_seed_alone_and_workers_beyond_the_last_wrap_around(case, worker: int) -> None:
    split, targets, workers, seed = case
    part = split.indices(targets, worker, workers, seed)
    assert np.array_equal(part, Dirichlet(split.alpha).indices(targets, worker % workers, workers, seed))


TARGETS = torch.arange(10_000) % 10


def label_shares(alpha: float, seed: int, workers: int = 10) -> np.ndarray:
    """Worker × label: which part of a label's examples the worker has."""
    parts = [TARGETS[Dirichlet(alpha).indices(TARGETS, worker, workers, seed)] for worker in range(workers)]
    return np.stack([part.bincount(minlength=10).numpy() / 1000 for part in parts])


@pytest.mark.parametrize("seed", range(5))
def test_a_large_alpha_is_nearly_even(seed: int) -> None:
    assert abs(label_shares(1e6, seed) - 0.1).max() < 0.01


@pytest.mark.parametrize("seed", range(5))
def test_a_small_alpha_assigns_most_of_a_label_to_one_worker(seed: int) -> None:
    assert np.median(label_shares(0.01, seed).max(0)) > 0.9


def test_the_spread_of_shares_is_that_of_the_distribution() -> None:
    shares = np.stack([label_shares(0.3, seed) for seed in range(60)])
    # Of Dirichlet(α, …) over n: variance (1/n)(1 − 1/n) / (nα + 1).
    assert shares.var() == pytest.approx(0.1 * 0.9 / (10 * 0.3 + 1), rel=0.1)


def test_different_seeds_have_different_parts() -> None:
    assert not np.array_equal(label_shares(0.3, 0), label_shares(0.3, 1))


def test_the_split_has_a_shorthand() -> None:
    assert from_plain(Split, "dirichlet:0.7", "split") == Dirichlet(0.7)
    assert from_plain(Split, {"name": "dirichlet", "alpha": 2}, "split") == Dirichlet(2.0)


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.inf, math.nan])
def test_an_invalid_alpha_is_refused(alpha: float) -> None:
    with pytest.raises(ConfigurationError, match=r"Dirichlet.alpha must be"):
        Dirichlet(alpha)


def test_labels_and_enough_examples_are_needed() -> None:
    with pytest.raises(ConfigurationError, match="the split 'dirichlet' needs one whole number per example"):
        Dirichlet().indices(torch.zeros(10), 0, 2, 0)
    with pytest.raises(ConfigurationError, match="3 examples cannot be divided among 4 workers"):
        Dirichlet().indices(torch.zeros(3, dtype=torch.long), 0, 4, 0)
