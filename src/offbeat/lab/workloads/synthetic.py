"""Synthetic problems: a quadratic, linear regression, and classification of Gaussians by small networks.

The data is the same for every seed of a run.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offbeat.core.actions import Samples
from offbeat.core.examples import Examples
from offbeat.core.optimizers import SGD, Adam
from offbeat.core.randomness import stream
from offbeat.core.validation import check_types, require_field, require_not_negative, require_positive
from offbeat.core.workload import NamedWorkload, Target, Workload
from offbeat.lab.workloads.models import linear_layers, pooled_convolution

_DATA_SEED = 0
_CLASSES = 10
_SIDE = 10


class _Point(nn.Module):
    """A parameter vector without a model; the output is the vector itself, once per sample."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.point = nn.Parameter(torch.zeros(dimension))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.point.expand(len(inputs), -1)


@dataclass(frozen=True)
class Quadratic(NamedWorkload, name="quadratic"):
    """f_i(x) = ½ Σ_j a_j (x_j − x*_j)² + ξ_i·(x − x*), with Σ_i ξ_i = 0, so that the mean has its minimum at x*.

    Training starts at 0. The test loss is exactly f(x) − f(x*).
    """

    summary = "a noisy quadratic with a known optimum"
    paper = "the textbook case; here as the one whose golden values travel between machines"

    layers = "a point"

    dimension: int = 100
    """how many parameters"""
    condition: float = 10.0
    """largest curvature over smallest; the largest is 1"""
    noise: float = 1.0
    """standard deviation of each coordinate of a sample's gradient"""
    examples: int = 4096
    """how many training examples"""

    def __post_init__(self) -> None:
        check_types(self)
        require_positive(self, "dimension", "examples")
        require_not_negative(self, "noise")
        require_field(self, "condition", self.condition >= 1, f"must be 1 or more, but is {self.condition}")

    @property
    def optimum(self) -> Tensor:
        """x*, the minimum of the mean training loss and of the test loss."""
        return torch.from_numpy(stream(_DATA_SEED, "quadratic optimum").standard_normal(self.dimension)).float()

    @property
    def curvature(self) -> Tensor:
        """a, from 1/condition to 1 in equal ratios."""
        return torch.from_numpy(np.geomspace(1 / self.condition, 1.0, self.dimension)).float()

    def build(self) -> Workload:
        noise = stream(_DATA_SEED, "quadratic noise").normal(0.0, self.noise, (self.examples, self.dimension))
        noise -= noise.mean(axis=0)
        initial_loss = 0.5 * float((self.curvature * self.optimum**2).sum())
        return Workload(
            model=lambda: _Point(self.dimension),
            loss=functools.partial(_quadratic_losses, curvature=self.curvature, optimum=self.optimum),
            # Samples differ only in the noise, which the loss gets as the target.
            train=Examples(torch.empty(self.examples, 0), torch.from_numpy(noise).float()),
            test=Examples(torch.empty(1, 0), torch.zeros(1, self.dimension)),
            split=self.split,
            optimizer=SGD(lr=0.1),
            target=Target("loss", 0.01 * initial_loss),
            until=Samples(120_000),
            label=self.name,
        )


def _quadratic_losses(outputs: Tensor, noise: Tensor, curvature: Tensor, optimum: Tensor) -> Tensor:
    difference = outputs - optimum.to(outputs)
    return ((0.5 * curvature.to(outputs) * difference + noise) * difference).sum(1)


@dataclass(frozen=True)
class LinearRegression(NamedWorkload, name="linear"):
    """Least squares, ½(w·x + c − y)², with Gaussian inputs and a known optimum.

    Evaluation uses the training data.
    """

    summary = "linear regression with a known optimum"
    paper = "N. Ferdinand et al.: Anytime Minibatch, ICLR 2019 (there on synthetic data, too)"

    layers = "linear regression"

    dimension: int = 20
    """how many inputs"""
    noise: float = 0.1
    """standard deviation of the noise on the targets"""
    examples: int = 4096
    """how many training examples"""

    def __post_init__(self) -> None:
        check_types(self)
        require_positive(self, "dimension", "examples")
        require_not_negative(self, "noise")

    @property
    def optimum(self) -> Tensor:
        """The least-squares weights, followed by the intercept."""
        return torch.from_numpy(self._solve()[0]).float()

    @property
    def optimal_loss(self) -> float:
        """The mean loss at the optimum."""
        return self._solve()[1]

    def build(self) -> Workload:
        inputs, targets = self._data()
        data = Examples.of((inputs, targets))
        initial_loss = float(0.5 * np.mean(targets**2))
        return Workload(
            model=lambda: nn.Sequential(nn.Linear(self.dimension, 1), nn.Flatten(0)),
            loss=_half_squares,
            train=data,
            test=data,
            split=self.split,
            optimizer=SGD(lr=0.1),
            target=Target("loss", self.optimal_loss + 0.01 * initial_loss),
            until=Samples(60_000),
            label=self.name,
        )

    def _data(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        rng = stream(_DATA_SEED, "linear")
        weights, intercept = rng.standard_normal(self.dimension), rng.standard_normal()
        inputs = rng.standard_normal((self.examples, self.dimension))
        return inputs, inputs @ weights + intercept + rng.normal(0.0, self.noise, self.examples)

    def _solve(self) -> tuple[npt.NDArray[np.float64], float]:
        inputs, targets = self._data()
        design = np.column_stack([inputs, np.ones(self.examples)])
        solution = np.asarray(np.linalg.lstsq(design, targets)[0], dtype=np.float64)
        return solution, float(0.5 * np.mean((design @ solution - targets) ** 2))


def _half_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs - targets) ** 2


@dataclass(frozen=True)
class TwoGaussians(NamedWorkload, name="toy"):
    """Two Gaussians in R^10 around 1 and 9, classified with a hidden layer of 500.

    At the default noise the best possible accuracy is 0.98; at 1 the classes are separable.
    """

    summary = "two Gaussians in ten dimensions, one hidden layer of 500"
    paper = "the toy problem that anytime mini-batch studies test their code with"

    layers = "10-500-10"

    noise: float = 6.0
    """standard deviation of each coordinate; the means are 8 apart"""
    examples: int = 4096
    """how many training examples"""

    def __post_init__(self) -> None:
        check_types(self)
        require_positive(self, "noise", "examples")

    def build(self) -> Workload:
        return Workload(
            model=lambda: nn.Sequential(*linear_layers(10, 500, 10)),
            loss=functools.partial(F.cross_entropy, reduction="none"),
            train=self._data("toy train", self.examples),
            test=self._data("toy test", 2000),
            split=self.split,
            target=Target("accuracy", 0.95),
            until=Samples(60_000),
            label=self.name,
        )

    def _data(self, purpose: str, count: int) -> Examples:
        rng = stream(_DATA_SEED, purpose)
        labels = np.arange(count) % 2
        return Examples.of((1.0 + 8.0 * labels[:, None] + rng.normal(0.0, self.noise, (count, 10)), labels))


@dataclass(frozen=True)
class _TenGaussians(NamedWorkload):
    """Each class is a random point, its examples are that point plus noise. The best possible accuracy is 0.996."""

    paper = "a toy problem of anytime mini-batch studies; the data is made up here"

    noise: float = 2.0
    """standard deviation of each coordinate; the centres have one of 1"""
    examples: int = 4096
    """how many training examples"""

    def __post_init__(self) -> None:
        check_types(self)
        require_positive(self, "noise", "examples")

    @abstractmethod
    def _model(self) -> nn.Module:
        """A new classifier for inputs of 1×10×10."""

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
        return nn.Sequential(nn.Flatten(), *linear_layers(_SIDE**2, 500, 1000, 500, _CLASSES))


@dataclass(frozen=True)
class ToyConvolutional(_TenGaussians, name="toy-conv"):
    """Two convolutions of 5×5, each with pooling, for ten Gaussians seen as images of 10×10: 57,866 parameters.

    The layers are those of the original: 32 and 64 channels, sides of 10, 5 and 3, and no hidden layer after them.
    """

    summary = "ten Gaussians as images of 10×10, two convolutions of 5×5 with pooling"
    layers = "two convolutions of 5×5"

    def _model(self) -> nn.Module:
        return nn.Sequential(
            *pooled_convolution(1, 32, 5, padding=2, ceil_mode=True),
            *pooled_convolution(32, 64, 5, padding=2, ceil_mode=True),
            nn.Flatten(),
            nn.Linear(64 * 3 * 3, _CLASSES),
        )
