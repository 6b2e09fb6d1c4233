"""Two more toy problems: ten Gaussians in a hundred dimensions, for a deep network and for a convolutional one."""

from __future__ import annotations

import functools
from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F
from torch import nn

from offbeat.core.actions import Samples
from offbeat.core.configuration import option
from offbeat.core.examples import Examples
from offbeat.core.optimizers import Adam
from offbeat.core.randomness import stream
from offbeat.core.validation import require_positive
from offbeat.core.workload import NamedWorkload, Target, Workload

_DATA_SEED = 0
_CLASSES = 10
_SIDE = 10


@dataclass(frozen=True)
class _TenGaussians(NamedWorkload):
    """Each class is a random point, its examples are that point under noise. The best possible accuracy is 0.996."""

    paper = "a toy problem of anytime mini-batch studies; the data is made up here"

    noise: float = option(2.0, "standard deviation of each coordinate; the centres have one of 1")
    examples: int = option(4096, "how many training examples")

    def __post_init__(self) -> None:
        require_positive(self, "noise", "examples")

    @abstractmethod
    def _model(self) -> nn.Module:
        """What tells the classes apart, given 1×10×10."""

    def build(self) -> Workload:
        return Workload(
            model=self._model,
            loss=functools.partial(F.cross_entropy, reduction="none"),
            train=self._data("gaussians train", self.examples),
            test=self._data("gaussians test", 2000),
            split=self.split,
            optimizer=Adam(lr=1e-3),
            target=Target("accuracy", 0.9),
            until=Samples(60_000),
            label=self.name,
        )

    def _data(self, purpose: str, count: int) -> Examples:
        centres = stream(_DATA_SEED, "gaussians").standard_normal((_CLASSES, 1, _SIDE, _SIDE))
        labels = np.arange(count) % _CLASSES
        noise = stream(_DATA_SEED, purpose).normal(0.0, self.noise, (count, 1, _SIDE, _SIDE))
        return Examples.of((centres[labels] + noise, labels))


@dataclass(frozen=True)
class ToyDeep(_TenGaussians, name="toy-fc"):
    """Three hidden layers of 500, 1000 and 500, for ten Gaussians in a hundred dimensions."""

    summary = "ten Gaussians in a hundred dimensions, three hidden layers"
    layers = "100-500-1000-500-10"

    def _model(self) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(_SIDE * _SIDE, 500),
            nn.ReLU(),
            nn.Linear(500, 1000),
            nn.ReLU(),
            nn.Linear(1000, 500),
            nn.ReLU(),
            nn.Linear(500, _CLASSES),
        )


@dataclass(frozen=True)
class ToyConvolutional(_TenGaussians, name="toy-conv"):
    """Two convolutions of 3×3, for ten Gaussians seen as images of 10×10."""

    summary = "ten Gaussians as images of 10×10, two convolutions"
    layers = "two convolutions"

    def _model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * (_SIDE // 2) ** 2, _CLASSES),
        )
