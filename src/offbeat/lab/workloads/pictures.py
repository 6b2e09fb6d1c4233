"""Images that stay bytes in a memory map which all processes share, and become numbers batch by batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offbeat.core.examples import Batch, Data, Indices, Order
from offbeat.core.randomness import stream
from offbeat.lab.workloads.augmentation import Normalisation, Pixels, crop_and_flip


@dataclass(frozen=True, eq=False)
class Pictures(Data):
    """Images and their labels: all of them, or those that `chosen` names.

    `augment` concerns what is drawn for training; what is evaluated is normalised and nothing else. `channels_last` is
    how batches lie in memory: as the bytes do, or channel after channel.
    """

    pixels: Pixels
    targets: Tensor
    normalisation: Normalisation
    augment: bool = False
    channels_last: bool = True
    chosen: Indices | None = None

    def take(self, indices: Tensor) -> Batch:
        return self._normalised(self._pixels(indices)), self.targets[indices]

    def between(self, first: int, stop: int) -> Batch:
        return self.take(torch.arange(first, min(stop, len(self))))

    def drawn(self, order: Order, first: int, stop: int) -> Batch:
        indices = order.take(first, stop)
        pixels = self._pixels(indices)
        if self.augment:
            pixels = crop_and_flip(pixels, order.chances(first, stop))
        return self._normalised(pixels), self.targets[indices]

    def _pixels(self, indices: Tensor) -> Pixels:
        wanted = indices.numpy()
        return np.asarray(self.pixels[wanted if self.chosen is None else self.chosen[wanted]])

    def _normalised(self, pixels: Pixels) -> Tensor:
        numbers = self.normalisation.apply(pixels)
        return numbers if self.channels_last else numbers.contiguous()


def balanced(labels: npt.NDArray[np.int64], count: int) -> Indices:
    """So many examples, about as many of each label; the same ones whatever the seed, and all of a smaller choice."""
    turn = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = stream(0, "balanced", int(label)).permutation(np.flatnonzero(labels == label))
        turn[members] = np.arange(len(members))
    return np.sort(np.lexsort((labels, turn))[:count]).astype(np.int64)
