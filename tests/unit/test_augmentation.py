from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.core.examples import Order
from offbeat.lab.workloads.images import PADDING, Normalisation, crop_and_flip


def images(count: int, channels: int = 3, height: int = 6, width: int = 5) -> np.ndarray:
    return np.random.default_rng(1).integers(1, 256, (count, height, width, channels), dtype=np.uint8)


def bits(down: int, right: int, mirrored: bool) -> np.uint64:
    """Chances that say exactly this: the middle of the range of each choice."""
    places = 2 * PADDING + 1
    low, high = (int((place + 0.5) / places * 2**24) for place in (down, right))
    return np.uint64(low | high << 24 | int(mirrored) << 63)


def by_hand(image: np.ndarray, down: int, right: int, mirrored: bool) -> np.ndarray:
    height, width, _ = image.shape
    padded = np.pad(image, ((PADDING, PADDING), (PADDING, PADDING), (0, 0)))
    cut = padded[down : down + height, right : right + width]
    return cut[:, ::-1] if mirrored else cut


CHOICE = st.tuples(st.integers(0, 2 * PADDING), st.integers(0, 2 * PADDING), st.booleans())


@given(st.lists(CHOICE, min_size=1, max_size=8), st.sampled_from([1, 3]))
def test_every_image_is_cropped_and_mirrored_by_its_own_bits(choices, channels: int) -> None:
    before = images(len(choices), channels)
    after = crop_and_flip(before, np.array([bits(*choice) for choice in choices]))
    for image, result, choice in zip(before, after, choices, strict=True):
        assert np.array_equal(result, by_hand(image, *choice))


def test_what_stays_in_the_middle_unmirrored_is_the_image_itself() -> None:
    before = images(3)
    assert np.array_equal(crop_and_flip(before, np.array([bits(PADDING, PADDING, False)] * 3)), before)


def test_all_offsets_and_both_orientations_occur_about_equally_often() -> None:
    one = np.zeros((1, 1, 1, 1), dtype=np.uint8) + 9
    chances = Order(np.arange(10), 0, 0).random_bits(0, 81_000)
    marked = np.repeat(np.pad(one, ((0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0))), 81_000, axis=0)
    seen = (crop_and_flip(marked, chances)[..., 0] == 9).sum(0)
    # The mark is moved by −4 .. 4 each way, 1000 times to each of 81 places, up to chance.
    assert seen.shape == (9, 9)
    assert abs(seen - 1000).max() < 200
    assert abs((chances >> np.uint64(63)).mean() - 0.5) < 0.01


SEEDS = st.integers(0, 2**32 - 1)


@given(SEEDS, st.integers(0, 100), st.integers(0, 2**40), st.lists(st.integers(1, 20), min_size=1, max_size=5))
def test_the_chances_of_a_draw_are_the_same_however_draws_are_cut(seed, rank, first, sizes) -> None:
    whole = Order(np.arange(3), seed, rank).random_bits(first, first + sum(sizes))
    parts, order = [], Order(np.arange(7), seed, rank)
    for size in sizes:
        parts.append(order.random_bits(first, first + size))
        first += size
    assert np.array_equal(np.concatenate(parts), whole)


def test_draws_ranks_and_seeds_have_chances_of_their_own() -> None:
    every = [Order(np.arange(3), seed, rank).random_bits(0, 1000) for seed in range(3) for rank in range(3)]
    assert len(np.unique(np.concatenate(every))) == 9000


@pytest.mark.parametrize("channels", [1, 3])
def test_normalised_images_have_mean_0_and_deviation_1(channels: int) -> None:
    means, deviations = (0.2, 0.5, 0.7)[:channels], (0.1, 0.3, 0.5)[:channels]
    pixels = images(4, channels)
    made = Normalisation(means, deviations).apply(pixels)
    assert made.shape == (4, channels, 6, 5)
    assert made.dtype == torch.float32
    expected = (torch.from_numpy(pixels).permute(0, 3, 1, 2).double() / 255 - torch.tensor(means).view(-1, 1, 1)) / (
        torch.tensor(deviations).view(-1, 1, 1)
    )
    torch.testing.assert_close(made.double(), expected, rtol=1e-5, atol=1e-5)
