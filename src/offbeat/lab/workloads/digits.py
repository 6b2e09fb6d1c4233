"""Handwritten digits from scikit-learn: 1,797 images of 8×8 pixels, without a download."""

from __future__ import annotations

import functools
import importlib.util
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch.nn.functional as F
from torch import nn

from offbeat.core.actions import Samples
from offbeat.core.examples import Examples
from offbeat.core.randomness import stream
from offbeat.core.validation import check_types, require_positive
from offbeat.core.workload import NamedWorkload, Size, Target, Workload
from offbeat.errors import MissingDependency
from offbeat.lab.workloads.models import linear_layers, small_cnn

_CLASSES, _SIDE = 10, 8
_TRAIN, _TEST = 1438, 359


@dataclass(frozen=True)
class _DigitsWorkload(NamedWorkload):
    """The digits with one of several models."""

    paper = "E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998"
    until: ClassVar[Samples] = Samples(160_000)

    @abstractmethod
    def _model(self) -> nn.Module:
        """A new model for inputs of 1×8×8."""

    def build(self) -> Workload:
        train, test = _load()
        return Workload(
            model=self._model,
            loss=functools.partial(F.cross_entropy, reduction="none"),
            train=train,
            test=test,
            split=self.split,
            target=Target("accuracy", 0.9),
            until=self.until,
            label=self.name,
        )

    def size(self) -> Size:
        parameters = sum(parameter.numel() for parameter in self._model().parameters())
        return Size(self.layers, parameters, _TRAIN, _TEST, _CLASSES)


@dataclass(frozen=True)
class Digits(_DigitsWorkload, name="digits"):
    """One hidden layer; small enough to simulate hundreds of workers in seconds."""

    summary = "scikit-learn's 8×8 digits, one hidden layer"
    layers = "one hidden layer"

    hidden: int = 64
    """width of the hidden layer"""

    def __post_init__(self) -> None:
        check_types(self)
        require_positive(self, "hidden")

    def _model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), *linear_layers(_SIDE**2, self.hidden, _CLASSES))


@dataclass(frozen=True)
class DigitsCNN(_DigitsWorkload, name="digits-cnn"):
    """Two convolutions and a linear layer; computing costs more than sending."""

    summary = "scikit-learn's 8×8 digits, two convolutions"
    layers = "two convolutions"

    width: int = 16
    """channels of the first convolution; the second has twice as many"""

    def __post_init__(self) -> None:
        check_types(self)
        require_positive(self, "width")

    def _model(self) -> nn.Module:
        return small_cnn(_SIDE, self.width, _CLASSES)


@dataclass(frozen=True)
class DigitsLogistic(_DigitsWorkload, name="digits-logistic"):
    """Multinomial logistic regression: convex, 650 parameters, for thousands of simulated workers."""

    summary = "scikit-learn's 8×8 digits, logistic regression"
    layers = "logistic regression"
    until = Samples(320_000)

    def _model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(_SIDE**2, _CLASSES))


def _read_table() -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """One row per image: 64 pixels from 0 to 16, and the label.

    The file is read without importing scikit-learn, since that takes over a second in every process.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.submodule_search_locations is None:
        raise MissingDependency("the digits workload", "scikit-learn", "digits")
    path = Path(spec.submodule_search_locations[0], "datasets/data/digits.csv.gz")
    if path.is_file():
        return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits  # a release that keeps the file elsewhere

    data, labels = load_digits(return_X_y=True)
    return np.column_stack([data, labels])


@functools.cache
def _load() -> tuple[Examples, Examples]:
    """Training and test examples. A fifth of every class is held out, the same for every seed."""
    table = _read_table()
    images = (table[:, :-1] / 16.0).astype(np.float32).reshape(-1, 1, _SIDE, _SIDE)
    labels = table[:, -1].astype(np.int64)
    held_out = np.zeros(len(labels), dtype=bool)
    for label in range(_CLASSES):
        members = stream(0, "digits test", label).permutation(np.flatnonzero(labels == label))
        held_out[members[: round(len(members) / 5)]] = True
    return (
        Examples.of((images[~held_out], labels[~held_out])),
        Examples.of((images[held_out], labels[held_out])),
    )
