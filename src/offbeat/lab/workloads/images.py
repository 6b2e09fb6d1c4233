"""Real images by name. `offbeat data get NAME` fetches them; what they are like is known without."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offbeat.core.actions import Samples
from offbeat.core.configuration import option
from offbeat.core.examples import Batch, Data, Indices, Order
from offbeat.core.optimizers import Adam, Optimizer
from offbeat.core.randomness import stream
from offbeat.core.validation import require, require_positive
from offbeat.core.workload import NamedWorkload, Size, Target, Workload
from offbeat.lab.data import CATALOGUE, LabeledImages, load
from offbeat.lab.workloads.models import CifarCNN, ImageShape, MnistCNN, Model, ResNet18, WideResNet28x5

_MODEL = "what is trained, and at which width: " + ", ".join(Model.members)
_AUGMENT = "move training images by up to 4 pixels, and mirror every other one"


@dataclass(frozen=True)
class ImageWorkload(NamedWorkload):
    """A model for images on one of the data sets of `offbeat.lab.data`, whose name it has."""

    deviations: ClassVar[tuple[float, ...]]
    """Of each channel over the training images."""

    optimizer: ClassVar[Optimizer] = Adam(lr=1e-3)
    target: ClassVar[Target | None] = None
    until: ClassVar[Samples]

    model: Model = option(MnistCNN(), _MODEL)
    augment: bool = option(False, _AUGMENT)
    examples: int | None = option(None, "how many training examples, of all classes alike; none: all")
    test_examples: int | None = option(None, "how many examples to evaluate on, of all classes alike; none: all")

    def __post_init__(self) -> None:
        require_positive(self, "examples", "test_examples")

    @property
    def shape(self) -> ImageShape:
        """What the images are like."""
        entry = CATALOGUE[self.name]
        return ImageShape(entry.channels, entry.height, entry.width, entry.classes)

    def build(self) -> Workload:
        self.model.parameters(self.shape)  # a model that cannot work is refused before data is asked for
        loaded = load(self.name)
        return Workload(
            model=self._module,
            loss=functools.partial(F.cross_entropy, reduction="none"),
            train=self._pictures(loaded.train, self.examples, "training", self.augment),
            test=self._pictures(loaded.test, self.test_examples, "test", False),
            split=self.split,
            optimizer=self.optimizer,
            target=self.target,
            until=self.until,
            label=self.name,
        )

    def size(self) -> Size:
        entry = CATALOGUE[self.name]
        train = entry.train if self.examples is None else self.examples
        test = entry.test if self.test_examples is None else self.test_examples
        return Size(self.model.name, self.model.parameters(self.shape), train, test, entry.classes)

    def _module(self) -> nn.Module:
        module = self.model.build(self.shape)
        if self.model.channels_last:
            cast(Any, module).to(memory_format=torch.channels_last)  # in place; torch's stubs do not know it
        return module

    def _pictures(self, part: LabeledImages, count: int | None, what: str, augment: bool) -> ImageExamples:
        held = len(part.labels)
        require(
            count is None or count <= held,
            f"{self.name} has {held} {what} examples, but {count} were asked for; leave that out for all of them",
        )
        labels = np.array(part.labels, dtype=np.int64)
        chosen = None if count is None or count == held else balanced(labels, count)
        return ImageExamples(
            part.images,
            torch.from_numpy(labels if chosen is None else labels[chosen]),
            Normalisation(CATALOGUE[self.name].means, self.deviations),
            augment,
            self.model.channels_last,
            chosen,
        )


@dataclass(frozen=True)
class Mnist(ImageWorkload, name="mnist"):
    """Handwritten digits."""

    summary = "MNIST's 28×28 digits"
    paper = "Y. LeCun, C. Cortes, C. Burges: The MNIST database of handwritten digits, 1998"
    deviations = (0.3081,)
    optimizer = Adam(lr=5e-4)
    target = Target("accuracy", 0.98)
    until = Samples(90_000)


@dataclass(frozen=True)
class FashionMnist(ImageWorkload, name="fashion-mnist"):
    """Pictures of clothes, in the format of MNIST and harder."""

    summary = "Fashion-MNIST's 28×28 pictures of clothes"
    paper = "H. Xiao, K. Rasul, R. Vollgraf: Fashion-MNIST, 2017 (arXiv:1708.07747)"
    deviations = (0.3530,)
    target = Target("accuracy", 0.87)
    until = Samples(150_000)


@dataclass(frozen=True)
class Cifar10(ImageWorkload, name="cifar10"):
    """Small photographs of ten kinds of things."""

    summary = "CIFAR-10's 32×32 photographs"
    paper = "A. Krizhevsky: Learning multiple layers of features from tiny images, 2009"
    deviations = (0.2470, 0.2435, 0.2616)
    target = Target("accuracy", 0.6)
    until = Samples(250_000)

    model: Model = option(CifarCNN(), _MODEL)
    augment: bool = option(True, _AUGMENT)


@dataclass(frozen=True)
class Cinic10(ImageWorkload, name="cinic10"):
    """CIFAR-10 with as many photographs again from ImageNet."""

    summary = "CINIC-10's 32×32 photographs"
    paper = "L. Darlow, E. Crowley, A. Antoniou, A. Storkey: CINIC-10 is not ImageNet or CIFAR-10, 2018"
    deviations = (0.2421, 0.2383, 0.2587)
    until = Samples(450_000)

    model: Model = option(ResNet18(), _MODEL)
    augment: bool = option(True, _AUGMENT)


@dataclass(frozen=True)
class ImageNet32(ImageWorkload, name="imagenet32"):
    """ImageNet's thousand classes at 32×32."""

    summary = "ImageNet at 32×32, a thousand classes"
    paper = "P. Chrabaszcz, I. Loshchilov, F. Hutter: A downsampled variant of ImageNet, 2017 (arXiv:1707.08819)"
    deviations = (0.2604, 0.2532, 0.2682)
    until = Samples(1_281_167)

    model: Model = option(WideResNet28x5(), _MODEL)
    augment: bool = option(True, _AUGMENT)


# Images as bytes to batches of numbers: crop, flip, normalise; whole batches at a time, without a loop over samples.
#
# What happens to a sample depends on 64 random bits of its own alone, so it is the same however draws are cut into
# micro-batches, and again when a worker that was lost repeats them.


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


# Images that stay bytes in a memory map which all processes share, and become numbers batch by batch.


@dataclass(frozen=True, eq=False)
class ImageExamples(Data):
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
