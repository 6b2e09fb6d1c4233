"""The part of a strategy with a replica per worker that chooses the initial parameters of each replica."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offbeat.core.configuration import Family
from offbeat.core.device_transfer import to_device
from offbeat.core.flat import Layout


class Initial(Family, ABC):
    """The initial parameters of the replicas."""

    @abstractmethod
    def parameters(self, given: Tensor, layout: Layout, random: np.random.Generator) -> Tensor:
        """The initial parameters of a replica, in a new tensor.

        given: the initial parameters of the model.
        layout: where its tensors are in the flat vector.
        random: the generator of the replica.
        """


@dataclass(frozen=True)
class Shuffled(Initial, name="shuffled"):
    """Different ones for each replica: the entries of every tensor of the model are permuted at random.

    Initial values of a tensor are usually independent and identically distributed, so a permutation is as good as a
    new initialization.
    """

    def parameters(self, given: Tensor, layout: Layout, random: np.random.Generator) -> Tensor:
        shuffled = given.clone()
        for slot in layout.parameters:
            order = torch.from_numpy(random.permutation(slot.stop - slot.start))
            shuffled[slot.start : slot.stop] = given[slot.start : slot.stop][to_device(order, given.device)]
        return shuffled


@dataclass(frozen=True)
class Same(Initial, name="same"):
    """Those of the model for all replicas."""

    def parameters(self, given: Tensor, layout: Layout, random: np.random.Generator) -> Tensor:
        return given.clone()
