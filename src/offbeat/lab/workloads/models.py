"""Models for images, by name: plain convolutional networks and residual networks.

`Model` is the configuration; `Model.build` makes the torch module for images of a given shape. `linear_layers`,
`pooled_convolution` and `small_cnn` are also for other workloads.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offbeat.core.configuration import Family
from offbeat.core.validation import check_types, require, require_field, require_positive


def linear_layers(*widths: int) -> list[nn.Module]:
    """Linear layers between consecutive widths, with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return layers[:-1]


def small_cnn(side: int, width: int, classes: int) -> nn.Module:
    """Two convolutions of `width` and twice as many channels, for images of one channel and `side` × `side` pixels."""
    return nn.Sequential(
        *pooled_convolution(1, width, 3, padding=1),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * (side // 2) ** 2, classes),
    )


def pooled_convolution(
    before: int, after: int, kernel: int, padding: int = 0, *, ceil_mode: bool = False
) -> list[nn.Module]:
    """A convolution, ReLU and pooling of 2×2, where `ceil_mode` rounds odd sides up, as TensorFlow's SAME pooling."""
    return [nn.Conv2d(before, after, kernel, padding=padding), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=ceil_mode)]


@dataclass(frozen=True)
class ImageShape:
    """The shape of the inputs of a model, and the number of classes."""

    channels: int
    height: int
    width: int
    classes: int


@dataclass(frozen=True)
class Model(Family, ABC):
    """A model for images: the configuration, from which `build` makes a torch module."""

    narrowest: ClassVar[int]
    """Units of the narrowest layer at width 1."""

    usual: ClassVar[str]
    """The data set that it is usually trained on."""

    width: float = 1.0
    """scale on channels and hidden units; 1 is the model as published"""

    def __post_init__(self) -> None:
        check_types(self)
        require_positive(self, "width")
        self.units(self.narrowest)

    @property
    def channels_last(self) -> bool:
        """Whether weights and batches use the channels-last memory format, which is faster on a CPU for most models."""
        return True

    @abstractmethod
    def build(self, shape: ImageShape) -> nn.Module:
        """A new module for images of this shape, initialized from torch's default generator."""

    def units(self, published: int) -> int:
        """A published number of channels or hidden units, scaled by the width."""
        scaled = round(published * self.width)
        require(
            scaled > 0,
            f"{self.name} with width {self.width:g} has a layer of {published} that becomes one of 0; "
            f"a width of {1 / published:.3g} leaves it one unit",
        )
        return scaled

    def parameters(self, shape: ImageShape) -> int:
        """The number of parameters for images of this shape; nothing is allocated."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build(shape).parameters())

    def _require_size(self, shape: ImageShape, least: int) -> None:
        require(
            min(shape.height, shape.width) >= least,
            f"{self.name} needs images of at least {least}×{least} pixels, but these are {shape.height}×{shape.width}",
        )


@dataclass(frozen=True)
class MnistCNN(Model, name="mnist-cnn"):
    """Two convolutions of 5×5, each with pooling, and a hidden layer of 1024: 3,274,634 parameters on MNIST."""

    narrowest = 32
    usual = "mnist"

    def build(self, shape: ImageShape) -> nn.Module:
        self._require_size(shape, 4)
        first, second, hidden = self.units(32), self.units(64), self.units(1024)
        return nn.Sequential(
            *pooled_convolution(shape.channels, first, 5, padding=2),
            *pooled_convolution(first, second, 5, padding=2),
            nn.Flatten(),
            *linear_layers(second * (shape.height // 4) * (shape.width // 4), hidden, shape.classes),
        )


@dataclass(frozen=True)
class LeNet5(Model, name="lenet5"):
    """LeNet5 with ReLU and max pooling: two convolutions without padding, and 120 and 84 hidden units."""

    narrowest = 6
    usual = "mnist"

    def build(self, shape: ImageShape) -> nn.Module:
        self._require_size(shape, 16)
        first, second, third, fourth = (self.units(count) for count in (6, 16, 120, 84))
        rows, columns = (((side - 4) // 2 - 4) // 2 for side in (shape.height, shape.width))
        return nn.Sequential(
            *pooled_convolution(shape.channels, first, 5),
            *pooled_convolution(first, second, 5),
            nn.Flatten(),
            *linear_layers(second * rows * columns, third, fourth, shape.classes),
        )


@dataclass(frozen=True)
class CifarCNN(Model, name="cifar-cnn"):
    """Four convolutions and three hidden layers, all with batch norm: 4,607,178 parameters on CIFAR-10."""

    narrowest = 64
    usual = "cifar10"

    dropout: float = 0.3
    """share of hidden units that are left out at a time"""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_valid = 0 <= self.dropout < 1
        require_field(self, "dropout", is_valid, f"must be at least 0 and below 1, but is {self.dropout!r}")

    @property
    def channels_last(self) -> bool:
        """False where its 5×5 convolutions have more than 256 channels, for which it is slower."""
        return self.units(512) <= 256

    def build(self, shape: ImageShape) -> nn.Module:
        self._require_size(shape, 16)
        layers: list[nn.Module] = []
        before = shape.channels
        for published, kernel in ((64, 3), (128, 3), (256, 5), (512, 5)):
            after = self.units(published)
            convolution = nn.Conv2d(before, after, kernel, padding=kernel // 2, bias=False)
            layers += [convolution, nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(after)]
            before = after
        layers.append(nn.Flatten())
        before *= (shape.height // 16) * (shape.width // 16)
        for published in (128, 256, 512):
            after = self.units(published)
            layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(self.dropout), nn.BatchNorm1d(after)]
            before = after
        return nn.Sequential(*layers, nn.Linear(before, shape.classes))


@dataclass(frozen=True)
class AllCNN(Model, name="all-cnn"):
    """Nine convolutions with batch norm and a global mean: 1,681,268 parameters on CIFAR-10."""

    narrowest = 96
    usual = "cifar10"

    track_running_stats: bool = True
    """keep running statistics of batch norm; false: normalise by the batch in evaluation too, as APAM's code"""

    def build(self, shape: ImageShape) -> nn.Module:
        self._require_size(shape, 9)
        widths = [shape.channels, *[self.units(96)] * 3, *[self.units(192)] * 5, shape.classes]
        strides, paddings = (1, 1, 2, 1, 1, 2, 1, 1, 1), (1, 1, 1, 1, 1, 1, 0, 1, 1)
        layers: list[nn.Module] = []
        for (before, after), stride, padding in zip(itertools.pairwise(widths), strides, paddings, strict=True):
            convolution = nn.Conv2d(before, after, 3, stride=stride, padding=padding, bias=False)
            norm = nn.BatchNorm2d(after, track_running_stats=self.track_running_stats)
            layers += [convolution, norm, nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), _Scaled(0.125))


class _Scaled(nn.Module):
    """Multiplies its input by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.factor


@dataclass(frozen=True)
class ResNet18(Model, name="resnet18"):
    """Four stages of two blocks, after one convolution of 3×3: 11,173,962 parameters on CIFAR-10."""

    narrowest = 64
    usual = "cifar10"

    def build(self, shape: ImageShape) -> nn.Module:
        self._require_size(shape, 8)
        before = self.units(64)
        layers: list[nn.Module] = [_convolution(shape.channels, before, 1), nn.BatchNorm2d(before), nn.ReLU()]
        for published, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            after = self.units(published)
            layers += [_Block(before, after, stride), _Block(after, after, 1)]
            before = after
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, shape.classes))


@dataclass(frozen=True)
class _WideResNet(Model):
    """A wide residual network of 28 layers: three groups of four blocks."""

    narrowest = 16
    usual = "imagenet32"
    factor: ClassVar[int]

    def build(self, shape: ImageShape) -> nn.Module:
        """The module with torch's own initialization."""
        self._require_size(shape, 4)
        before = self.units(16)
        layers: list[nn.Module] = [_convolution(shape.channels, before, 1)]
        for published, stride in ((16, 1), (32, 2), (64, 2)):
            after = self.units(published * self.factor)
            layers += [_PreactivationBlock(before, after, stride)]
            layers += [_PreactivationBlock(after, after, 1) for _ in range(3)]
            before = after
        layers += [nn.BatchNorm2d(before), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(before, shape.classes))


@dataclass(frozen=True)
class WideResNet28x5(_WideResNet, name="wrn-28-5"):
    """28 layers, five times as wide as usual: 9,450,424 parameters on ImageNet32."""

    factor = 5


@dataclass(frozen=True)
class WideResNet28x2(_WideResNet, name="wrn-28-2"):
    """28 layers, twice as wide as usual: 1,595,320 parameters on ImageNet32.

    Convolutions begin with He's values (normal, by the number of outputs), and batch norm has an eps of 1e-4.
    """

    factor = 2

    def build(self, shape: ImageShape) -> nn.Module:
        module = super().build(shape)
        for part in module.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(part, nn.BatchNorm2d):
                part.eps = 1e-4
        return module


class _Block(nn.Module):
    """Two convolutions with batch norm, and a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.convolution1 = _convolution(before, after, stride)
        self.norm1 = nn.BatchNorm2d(after)
        self.convolution2 = _convolution(after, after, 1)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, inputs: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.convolution1(inputs)))
        return F.relu(self.norm2(self.convolution2(inner)) + self.shortcut(inputs))


class _PreactivationBlock(nn.Module):
    """Batch norm and ReLU before each of two convolutions; a shortcut that changes the shape follows the first ReLU."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(before)
        self.convolution1 = _convolution(before, after, stride)
        self.norm2 = nn.BatchNorm2d(after)
        self.convolution2 = _convolution(after, after, 1)
        changes = stride != 1 or before != after
        self.shortcut = nn.Conv2d(before, after, 1, stride=stride, bias=False) if changes else None

    def forward(self, inputs: Tensor) -> Tensor:
        active = F.relu(self.norm1(inputs))
        shortcut = inputs if self.shortcut is None else self.shortcut(active)
        return self.convolution2(F.relu(self.norm2(self.convolution1(active)))) + shortcut  # type: ignore[no-any-return]


def _convolution(before: int, after: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
