"""Images as bytes to batches of numbers: crop, flip, normalise; whole batches at a time, without a loop over samples.

What happens to a sample depends on 64 random bits of its own alone, so it is the same however draws are cut into
micro-batches, and again when a worker that was lost repeats them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PADDING = 4
"""Black pixels on each side before an image is cut back to its size."""

Pixels = npt.NDArray[np.uint8]
"""Images as they lie in memory: N × H × W × C."""


@dataclass(frozen=True)
class Normalisation:
    """Mean and standard deviation of each channel over the training images, where black is 0 and white is 1."""

    means: tuple[float, ...]
    deviations: tuple[float, ...]

    def apply(self, pixels: Pixels) -> Tensor:
        """(x / 255 − mean) / deviation, as N × C × H × W that lies in memory as the pixels do: channels last."""
        count, height, width, channels = pixels.shape
        scale, shift = _scale_and_shift(self, width)
        # Rows of width × channels numbers: a loop over 3 channels at a time would take ten times as long.
        rows = torch.from_numpy(pixels.reshape(count, height, width * channels)).float()
        return torch.addcmul(shift, rows, scale).view(count, height, width, channels).permute(0, 3, 1, 2)


@functools.lru_cache(maxsize=16)
def _scale_and_shift(normalisation: Normalisation, width: int) -> tuple[Tensor, Tensor]:
    """What to multiply a row of so many pixels by, and what to add then."""
    means, deviations = torch.tensor(normalisation.means), torch.tensor(normalisation.deviations)
    return (1.0 / (255.0 * deviations)).repeat(width), (-means / deviations).repeat(width)


def crop_and_flip(pixels: Pixels, chances: npt.NDArray[np.uint64]) -> Pixels:
    """Each image moved by up to 4 pixels each way, black coming in, and every other one mirrored, as its bits say."""
    count, height, width, channels = pixels.shape
    down, right, mirrored = _choices(chances)
    padded = np.zeros((count, height + 2 * PADDING, width + 2 * PADDING, channels), dtype=np.uint8)
    padded[:, PADDING:-PADDING, PADDING:-PADDING] = pixels
    # One item per pixel, so that its channels are copied together.
    whole = padded.view(np.dtype((np.void, channels)))[..., 0]
    image, row, column = whole.strides
    places = 2 * PADDING + 1
    crops = np.lib.stride_tricks.as_strided(
        whole, (count, places, places, height, width), (image, row, column, row, column), writeable=False
    )
    taken = crops[np.arange(count), down, right]
    taken[mirrored] = taken[mirrored, :, ::-1]
    return taken.view(np.uint8).reshape(pixels.shape)


def _choices(
    chances: npt.NDArray[np.uint64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Rows and columns to move by, and whether to mirror, from separate bits of each number."""
    places = np.uint64(2 * PADDING + 1)
    low, high = chances & np.uint64(0xFFFFFF), (chances >> np.uint64(24)) & np.uint64(0xFFFFFF)
    down, right = (((part * places) >> np.uint64(24)).astype(np.int64) for part in (low, high))
    return down, right, (chances >> np.uint64(63)).astype(np.bool_)
