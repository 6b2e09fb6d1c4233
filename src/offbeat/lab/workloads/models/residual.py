"""Residual networks for small images: ResNet18 without its first pooling, and wide ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from offbeat.lab.workloads.models.model import ImageShape, Model


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
    """28 layers, twice as wide as usual: 1,595,320 parameters on ImageNet32."""

    factor = 2


class _Block(nn.Module):
    """Two convolutions with batch norm, and a way around them."""

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
    """The same with batch norm and ReLU before each convolution; where the shape changes, the way around is after."""

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
        around = inputs if self.shortcut is None else self.shortcut(active)
        return self.convolution2(F.relu(self.norm2(self.convolution1(active)))) + around  # type: ignore[no-any-return]


def _convolution(before: int, after: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
