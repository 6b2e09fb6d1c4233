"""Convolutions one after the other: the models for MNIST and CIFAR-10 of the anytime studies, LeNet5, AllCNN."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from offbeat.core.configuration import option
from offbeat.core.validation import require
from offbeat.lab.workloads.models.model import ImageShape, Model


@dataclass(frozen=True)
class MnistCNN(Model, name="mnist-cnn"):
    """Two convolutions of 5×5, each with pooling, and a hidden layer of 1024: 3,274,634 parameters on MNIST."""

    narrowest = 32
    usual = "mnist"

    def build(self, shape: ImageShape) -> nn.Module:
        self._require_size(shape, 4)
        first, second, hidden = self.units(32), self.units(64), self.units(1024)
        return nn.Sequential(
            nn.Conv2d(shape.channels, first, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(second * (shape.height // 4) * (shape.width // 4), hidden),
            nn.ReLU(),
            nn.Linear(hidden, shape.classes),
        )


@dataclass(frozen=True)
class LeNet5(Model, name="lenet5"):
    """LeNet5 with ReLU and maxima: two convolutions without padding, and 120 and 84 hidden units."""

    narrowest = 6
    usual = "mnist"

    def build(self, shape: ImageShape) -> nn.Module:
        self._require_size(shape, 16)
        first, second, third, fourth = (self.units(count) for count in (6, 16, 120, 84))
        rows, columns = (((side - 4) // 2 - 4) // 2 for side in (shape.height, shape.width))
        return nn.Sequential(
            nn.Conv2d(shape.channels, first, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(second * rows * columns, third),
            nn.ReLU(),
            nn.Linear(third, fourth),
            nn.ReLU(),
            nn.Linear(fourth, shape.classes),
        )


@dataclass(frozen=True)
class CifarCNN(Model, name="cifar-cnn"):
    """Four convolutions and three hidden layers, all with batch norm: 4,607,178 parameters on CIFAR-10."""

    narrowest = 64
    usual = "cifar10"

    dropout: float = option(0.3, "share of hidden units that are left out at a time")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.dropout < 1, f"CifarCNN.dropout must be at least 0 and below 1, but is {self.dropout!r}")

    @property
    def channels_last(self) -> bool:
        """Not at the widths at which its 5×5 convolutions have more than 256 channels: there it is slower."""
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
    """Nine convolutions with batch norm, and nothing else but a mean: 1,681,268 parameters on CIFAR-10."""

    narrowest = 96
    usual = "cifar10"

    def build(self, shape: ImageShape) -> nn.Module:
        self._require_size(shape, 9)
        narrow, wide = self.units(96), self.units(192)
        layers: list[nn.Module] = []
        before = shape.channels
        for after, stride, padding in (
            (narrow, 1, 1),
            (narrow, 1, 1),
            (narrow, 2, 1),
            (wide, 1, 1),
            (wide, 1, 1),
            (wide, 2, 1),
            (wide, 1, 0),
            (wide, 1, 1),
            (shape.classes, 1, 1),
        ):
            convolution = nn.Conv2d(before, after, 3, stride=stride, padding=padding, bias=False)
            layers += [convolution, nn.BatchNorm2d(after), nn.ReLU()]
            before = after
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), _Scaled(0.125))


class _Scaled(nn.Module):
    """Outputs times a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.factor
