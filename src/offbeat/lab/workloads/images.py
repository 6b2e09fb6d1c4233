"""Workloads on data sets of images, which `offbeat data get NAME` downloads, and their input pipeline.

Images stay bytes in a memory map that all processes share; batches are cropped, flipped and normalised when they are
drawn, without a loop over samples. The augmentation of a sample depends only on 64 random bits of its own, so it is the
same for every division into micro-batches, and when a restarted worker repeats a draw.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offbeat.core.actions import Samples
from offbeat.core.examples import Batch, Data, Indices, Order
from offbeat.core.optimizers import Adam, Optimizer
from offbeat.core.randomness import stream
from offbeat.core.validation import check_types, require, require_positive
from offbeat.core.workload import NamedWorkload, Size, Target, Workload
from offbeat.lab.data.arrays import LabeledImages, load_images
from offbeat.lab.data.catalogue import IMAGES
from offbeat.lab.workloads.models import CifarCNN, ImageShape, MnistCNN, Model, ResNet18, WideResNet28x5

PADDING = 4
"""Black pixels on each side before an image is cropped to its size."""

Pixels = npt.NDArray[np.uint8]
"""N × H × W × C."""


@dataclass(frozen=True)
class Normalisation:
    """Mean and standard deviation of each channel over the training images; black is 0 and white is 1."""

    means: tuple[float, ...]
    deviations: tuple[float, ...]

    def apply(self, pixels: Pixels) -> Tensor:
        """(x / 255 − mean) / deviation, as N × C × H × W in channels-last memory format."""
        count, height, width, channels = pixels.shape
        scale, shift = _scale_and_shift(self, width)
        # Rows of width × channels numbers: broadcasting over 3 channels would take ten times as long.
        rows = torch.from_numpy(pixels.reshape(count, height, width * channels)).float()
        return torch.addcmul(shift, rows, scale).view(count, height, width, channels).permute(0, 3, 1, 2)


@functools.lru_cache(maxsize=16)
def _scale_and_shift(normalisation: Normalisation, width: int) -> tuple[Tensor, Tensor]:
    """Factor and summand of the normalisation for a row of `width` pixels."""
    means, deviations = torch.tensor(normalisation.means), torch.tensor(normalisation.deviations)
    return (1.0 / (255.0 * deviations)).repeat(width), (-means / deviations).repeat(width)


def crop_and_flip(pixels: Pixels, chances: npt.NDArray[np.uint64]) -> Pixels:
    """Shift each image by up to 4 pixels in each direction, filling with black, and mirror about half of them.

    `chances` are 64 random bits for each image.
    """
    count, height, width, channels = pixels.shape
    down, right, mirrored = _offsets(chances)
    padded = np.zeros((count, height + 2 * PADDING, width + 2 * PADDING, channels), dtype=np.uint8)
    padded[:, PADDING:-PADDING, PADDING:-PADDING] = pixels
    # One item per pixel, so that its channels are copied at once.
    whole = padded.view(np.dtype((np.void, channels)))[..., 0]
    image, row, column = whole.strides
    offsets = 2 * PADDING + 1
    crops = np.lib.stride_tricks.as_strided(
        whole, (count, offsets, offsets, height, width), (image, row, column, row, column), writeable=False
    )
    cropped = crops[np.arange(count), down, right]
    cropped[mirrored] = cropped[mirrored, :, ::-1]
    return cropped.view(np.uint8).reshape(pixels.shape)


def _offsets(
    chances: npt.NDArray[np.uint64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Rows and columns to shift by and whether to mirror, from separate bits of each number."""
    offsets = np.uint64(2 * PADDING + 1)
    low, high = chances & np.uint64(0xFFFFFF), (chances >> np.uint64(24)) & np.uint64(0xFFFFFF)
    down, right = (((bits * offsets) >> np.uint64(24)).astype(np.int64) for bits in (low, high))
    return down, right, (chances >> np.uint64(63)).astype(np.bool_)


@dataclass(frozen=True, eq=False)
class ImageExamples(Data):
    """Images and their labels.

    pixels: all images of the data set.
    targets: the label of each example.
    normalisation: applied to every batch.
    augment: crop and flip what is drawn for training; evaluation is not affected.
    channels_last: the memory format of batches.
    chosen: the index in `pixels` of each example; None for all of them.
    """

    pixels: Pixels
    targets: Tensor
    normalisation: Normalisation
    augment: bool = False
    channels_last: bool = True
    chosen: Indices | None = None

    def take(self, indices: Tensor) -> Batch:
        return self._normalise(self._pixels(indices)), self.targets[indices]

    def between(self, first: int, stop: int) -> Batch:
        return self.take(torch.arange(first, min(stop, len(self))))

    def subset(self, indices: Indices) -> ImageExamples:
        chosen = indices if self.chosen is None else self.chosen[indices]
        return dataclasses.replace(self, targets=self.targets[torch.from_numpy(indices)], chosen=chosen)

    def drawn(self, order: Order, first: int, stop: int) -> Batch:
        indices = order.take(first, stop)
        pixels = self._pixels(indices)
        if self.augment:
            pixels = crop_and_flip(pixels, order.random_bits(first, stop))
        return self._normalise(pixels), self.targets[indices]

    def _pixels(self, indices: Tensor) -> Pixels:
        rows = indices.numpy()
        return np.asarray(self.pixels[rows if self.chosen is None else self.chosen[rows]])

    def _normalise(self, pixels: Pixels) -> Tensor:
        numbers = self.normalisation.apply(pixels)
        return numbers if self.channels_last else numbers.contiguous()


def balanced(labels: npt.NDArray[np.int64], count: int) -> Indices:
    """Indices of `count` examples, about as many of each label; the same for every seed, and nested in `count`."""
    position = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = stream(0, "balanced", int(label)).permutation(np.flatnonzero(labels == label))
        position[members] = np.arange(len(members))
    return np.sort(np.lexsort((labels, position))[:count]).astype(np.int64)


@dataclass(frozen=True)
class ImageWorkload(NamedWorkload):
    """A model for images on the data set of `offbeat.lab.data` with the same name."""

    deviations: ClassVar[tuple[float, ...]]
    """The standard deviation of each channel over the training images."""

    optimizer: ClassVar[Optimizer] = Adam(lr=1e-3)
    target: ClassVar[Target | None] = None
    until: ClassVar[Samples]

    model: Model = MnistCNN()
    """what is trained, and at which width: mnist-cnn, lenet5, cifar-cnn, all-cnn, resnet18, wrn-28-5, wrn-28-2"""
    augment: bool = False
    """move training images by up to 4 pixels, and mirror every other one"""
    examples: int | None = None
    """how many training examples, of all classes alike; none: all"""
    test_examples: int | None = None
    """how many examples to evaluate on, of all classes alike; none: all"""
    recalibrate: int = 0
    """training examples that the statistics of batch norm are computed from, anew before each evaluation; 0: none"""

    def __post_init__(self) -> None:
        check_types(self)
        require_positive(self, "examples", "test_examples")

    @property
    def shape(self) -> ImageShape:
        """The shape of the images and the number of classes."""
        entry = IMAGES[self.name]
        height, width, channels = entry.image_shape
        return ImageShape(channels, height, width, entry.classes)

    def build(self) -> Workload:
        self.model.parameters(self.shape)  # refuse an unsuitable model before loading data
        data = load_images(self.name)
        return Workload(
            model=self._module,
            loss=functools.partial(F.cross_entropy, reduction="none"),
            train=self._examples(data.train, self.examples, "training", self.augment),
            test=self._examples(data.test, self.test_examples, "test", False),
            split=self.split,
            optimizer=self.optimizer,
            target=self.target,
            until=self.until,
            label=self.name,
            recalibrate=self.recalibrate,
        )

    def size(self) -> Size:
        entry = IMAGES[self.name]
        train = entry.train if self.examples is None else self.examples
        test = entry.test if self.test_examples is None else self.test_examples
        return Size(self.model.name, self.model.parameters(self.shape), train, test, entry.classes)

    def _module(self) -> nn.Module:
        module = self.model.build(self.shape)
        if self.model.channels_last:
            cast(Any, module).to(memory_format=torch.channels_last)  # in place; missing in torch's stubs
        return module

    def _examples(self, part: LabeledImages, count: int | None, what: str, augment: bool) -> ImageExamples:
        available = len(part.labels)
        require(
            count is None or count <= available,
            f"{self.name} has {available} {what} examples, but {count} were asked for; leave that out for all of them",
        )
        labels = np.array(part.labels, dtype=np.int64)
        chosen = None if count is None or count == available else balanced(labels, count)
        return ImageExamples(
            part.images,
            torch.from_numpy(labels if chosen is None else labels[chosen]),
            Normalisation(IMAGES[self.name].means, self.deviations),
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

    model: Model = CifarCNN()
    augment: bool = True


@dataclass(frozen=True)
class Cinic10(ImageWorkload, name="cinic10"):
    """CIFAR-10 with as many photographs again from ImageNet."""

    summary = "CINIC-10's 32×32 photographs"
    paper = "L. Darlow, E. Crowley, A. Antoniou, A. Storkey: CINIC-10 is not ImageNet or CIFAR-10, 2018"
    deviations = (0.2421, 0.2383, 0.2587)
    until = Samples(450_000)

    model: Model = ResNet18()
    augment: bool = True


@dataclass(frozen=True)
class ImageNet32(ImageWorkload, name="imagenet32"):
    """ImageNet's thousand classes at 32×32."""

    summary = "ImageNet at 32×32, a thousand classes"
    paper = "P. Chrabaszcz, I. Loshchilov, F. Hutter: A downsampled variant of ImageNet, 2017 (arXiv:1707.08819)"
    deviations = (0.2604, 0.2532, 0.2682)
    until = Samples(1_281_167)

    model: Model = WideResNet28x5()
    augment: bool = True
