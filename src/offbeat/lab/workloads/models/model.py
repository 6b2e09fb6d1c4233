"""The contract of models for images, and how they are made narrower."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from offbeat.core.configuration import Family, option
from offbeat.core.validation import require, require_positive


@dataclass(frozen=True)
class ImageShape:
    """What a model is given: images of so many channels, rows and columns, each of one of so many classes."""

    channels: int
    height: int
    width: int
    classes: int


@dataclass(frozen=True)
class Model(Family, ABC):
    """A model for images. The object is the configuration; `build` makes the module for the images at hand."""

    narrowest: ClassVar[int]
    """Units of the narrowest layer at width 1."""

    usual: ClassVar[str]
    """The data set that it is mostly trained on."""

    width: float = option(1.0, "scale on channels and hidden units; 1 is the model as published")

    def __post_init__(self) -> None:
        require_positive(self, "width")
        self.units(self.narrowest)

    @property
    def channels_last(self) -> bool:
        """Whether weights and batches lie in memory pixel by pixel: for most models that is quicker on a CPU."""
        return True

    @abstractmethod
    def build(self, shape: ImageShape) -> nn.Module:
        """The module, with values drawn from torch's default generator."""

    def units(self, published: int) -> int:
        """So many channels or hidden units at this width."""
        scaled = round(published * self.width)
        require(
            scaled > 0,
            f"{self.name} with width {self.width:g} has a layer of {published} that becomes one of 0; "
            f"a width of {1 / published:.3g} leaves it one unit",
        )
        return scaled

    def parameters(self, shape: ImageShape) -> int:
        """How many parameters it trains on such images; nothing is allocated."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build(shape).parameters())

    def _require_size(self, shape: ImageShape, least: int) -> None:
        require(
            min(shape.height, shape.width) >= least,
            f"{self.name} needs images of at least {least}×{least} pixels, but these are {shape.height}×{shape.width}",
        )
