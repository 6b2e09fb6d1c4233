"""Handwritten digits that ship inside scikit-learn: real, 1,797 images of 8×8 pixels, no download."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F
from torch import nn

from offbeat.core.actions import Samples
from offbeat.core.configuration import option
from offbeat.core.examples import Examples
from offbeat.core.randomness import stream
from offbeat.core.validation import require_positive
from offbeat.core.workload import NamedWorkload, Size, Target, Workload
from offbeat.errors import MissingDependency

_PAPER = "E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998"
_CLASSES = 10
_TRAIN, _TEST = 1438, 359
_UNTIL = Samples(160_000)


@dataclass(frozen=True)
class Digits(NamedWorkload, name="digits"):
    """One hidden layer: the default workload, small enough to simulate hundreds of workers in seconds."""

    summary = "scikit-learn's 8×8 digits, one hidden layer"
    paper = _PAPER

    layers = "one hidden layer"

    hidden: int = option(64, "width of the hidden layer")

    def __post_init__(self) -> None:
        require_positive(self, "hidden")

    def build(self) -> Workload:
        return _workload(self, self._model)

    def size(self) -> Size:
        return _size(self, self._model())

    def _model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, self.hidden), nn.ReLU(), nn.Linear(self.hidden, _CLASSES))


@dataclass(frozen=True)
class DigitsCNN(NamedWorkload, name="digits-cnn"):
    """A convolution, pooling, a second convolution, one layer: where computing costs more than sending."""

    summary = "scikit-learn's 8×8 digits, two convolutions"
    paper = _PAPER

    layers = "two convolutions"

    width: int = option(16, "channels of the first convolution; the second has twice as many")

    def __post_init__(self) -> None:
        require_positive(self, "width")

    def build(self) -> Workload:
        return _workload(self, self._model)

    def size(self) -> Size:
        return _size(self, self._model())

    def _model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, self.width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(self.width, 2 * self.width, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * self.width * 4 * 4, _CLASSES),
        )


@dataclass(frozen=True)
class DigitsLogistic(NamedWorkload, name="digits-logistic"):
    """Multinomial logistic regression: convex, 650 parameters, for thousands of workers."""

    summary = "scikit-learn's 8×8 digits, logistic regression"
    paper = _PAPER

    layers = "logistic regression"

    def size(self) -> Size:
        return _size(self, self._model())

    def build(self) -> Workload:
        return _workload(self, self._model, until=Samples(320_000))

    def _model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, _CLASSES))


def _size(named: NamedWorkload, model: nn.Module) -> Size:
    return Size(named.layers, sum(parameter.numel() for parameter in model.parameters()), _TRAIN, _TEST, _CLASSES)


def _workload(named: NamedWorkload, model: Callable[[], nn.Module], until: Samples = _UNTIL) -> Workload:
    train, test = _load()
    return Workload(
        model=model,
        loss=functools.partial(F.cross_entropy, reduction="none"),
        train=train,
        test=test,
        split=named.split,
        target=Target("accuracy", 0.9),
        until=until,
        label=named.name,
    )


@functools.cache
def _load() -> tuple[Examples, Examples]:
    """Training and test examples: a fifth of every class is held out, the same fifth whatever the seed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingDependency("the digits workload", "scikit-learn", "digits") from None
    data = load_digits()
    images = (data.images / 16.0).astype(np.float32)[:, None]
    labels = data.target.astype(np.int64)
    held_out = np.zeros(len(labels), dtype=bool)
    for label in range(_CLASSES):
        members = stream(0, "digits test", label).permutation(np.flatnonzero(labels == label))
        held_out[members[: round(len(members) / 5)]] = True
    return (
        Examples.of((images[~held_out], labels[~held_out])),
        Examples.of((images[held_out], labels[held_out])),
    )
