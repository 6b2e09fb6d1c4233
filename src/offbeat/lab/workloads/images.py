"""Real images by name. `offbeat data get NAME` fetches them; what they are like is known without."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from offbeat.core.actions import Samples
from offbeat.core.configuration import option
from offbeat.core.optimizers import Adam, Optimizer
from offbeat.core.validation import require, require_positive
from offbeat.core.workload import NamedWorkload, Size, Target, Workload
from offbeat.lab.data import CATALOGUE, Part, load
from offbeat.lab.workloads.augmentation import Normalisation
from offbeat.lab.workloads.models import CifarCNN, ImageShape, MnistCNN, Model, ResNet18, WideResNet28x5
from offbeat.lab.workloads.pictures import Pictures, balanced

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

    def _pictures(self, part: Part, count: int | None, what: str, augment: bool) -> Pictures:
        held = len(part.labels)
        require(
            count is None or count <= held,
            f"{self.name} has {held} {what} examples, but {count} were asked for; leave that out for all of them",
        )
        labels = np.array(part.labels, dtype=np.int64)
        chosen = None if count is None or count == held else balanced(labels, count)
        return Pictures(
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
