"""Training data with random access, and the order in which a rank draws from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from offbeat.core.randomness import stream
from offbeat.core.validation import require
from offbeat.errors import ConfigurationError

Indices = npt.NDArray[np.int64]
Batch = tuple[Tensor, Tensor]


class Data(ABC):
    """Examples with random access, each with a target."""

    targets: Tensor

    @abstractmethod
    def take(self, indices: Tensor) -> Batch:
        """The examples with these indices as a batch for evaluation, without augmentation."""

    @abstractmethod
    def between(self, first: int, stop: int) -> Batch:
        """The examples [first, stop) as a batch for evaluation; `stop` may be beyond the end."""

    def subset(self, indices: Indices) -> Data:
        """The examples with these indices, in that order."""
        return Examples(*self.take(torch.from_numpy(indices)))

    def drawn(self, order: Order, first: int, stop: int) -> Batch:
        """The examples of the draws [first, stop) as a batch for training: a pure function of (seed, rank, draw)."""
        return self.take(order.take(first, stop))

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True, eq=False)
class Examples(Data):
    """Data in two tensors: example i is row i of both."""

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        require(
            self.inputs.dim() > 0 and self.targets.dim() > 0 and len(self.inputs) == len(self.targets),
            "inputs and targets must have one row per example, but have the shapes "
            f"{tuple(self.inputs.shape)} and {tuple(self.targets.shape)}",
        )
        require(len(self.inputs) > 0, "there are no examples in the data; give at least one")

    def take(self, indices: Tensor) -> Batch:
        return self.inputs[indices], self.targets[indices]

    def between(self, first: int, stop: int) -> Batch:
        return self.inputs[first:stop], self.targets[first:stop]

    @classmethod
    def of(cls, data: Any) -> Examples:
        """Examples from a pair of tensors or arrays, or from a map-style dataset of such pairs.

        Raises ConfigurationError for anything else.
        """
        if isinstance(data, cls):
            return data
        if isinstance(data, TensorDataset):
            data = data.tensors
        if isinstance(data, tuple) or (isinstance(data, list) and data and all(_is_array(item) for item in data)):
            return cls._of_pair(data)
        if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
            raise ConfigurationError(
                f"data must be a pair (inputs, targets) or a dataset with a length, but is {type(data).__name__}; "
                "an iterable dataset has no fixed order, so use `offbeat.join` with a loop of your own"
            )
        require(len(data) > 0, "there are no examples in the data; give at least one")
        try:
            return cls._of_pair(default_collate([data[i] for i in range(len(data))]))
        except (TypeError, RuntimeError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise ConfigurationError(
                f"the examples of {type(data).__name__} cannot be stacked into two tensors ({reason}); "
                "bring them to one shape with a transform"
            ) from None

    @classmethod
    def _of_pair(cls, pair: Any) -> Examples:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(_is_array(item) for item in pair):
            what = [type(item).__name__ for item in pair] if isinstance(pair, tuple | list) else type(pair).__name__
            raise ConfigurationError(f"data must be a pair of tensors or arrays (inputs, targets), but is {what}")
        inputs, targets = (_tensor(item) for item in pair)
        if isinstance(pair[1], np.ndarray) and is_whole(targets):
            # torch's losses accept class labels as int64 only.
            targets = targets.long()
        return cls(inputs, targets)


def data_of(data: Any) -> Data:
    """`data` itself if it is a `Data`, otherwise `Examples.of(data)`."""
    return data if isinstance(data, Data) else Examples.of(data)


def _is_array(item: Any) -> bool:
    return isinstance(item, Tensor | np.ndarray)


def is_whole(tensor: Tensor) -> bool:
    """Whether the dtype is an integer type, as for class labels."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _tensor(array: Any) -> Tensor:
    """A tensor itself, or a copy of an array, with float64 (NumPy's default) converted to torch's default dtype."""
    if isinstance(array, Tensor):
        return array
    try:
        tensor = torch.from_numpy(array.copy())
    except (TypeError, ValueError):
        raise ConfigurationError(f"an array of {array.dtype} cannot be trained on; give numbers") from None
    return tensor.to(torch.get_default_dtype()) if tensor.dtype == torch.float64 else tensor


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIXES = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)


class Order:
    """The order in which a rank draws its examples: a pure function of (seed, rank, draw).

    Draw d belongs to epoch d // n, and each epoch has its own permutation, so that any range can be repeated. Only the
    permutation of the latest epoch is cached, in the narrowest integer type, since a simulation has one per worker.

    indices: the examples of this rank
    seed: the seed of the run
    rank: the rank
    """

    def __init__(self, indices: Indices, seed: int, rank: int) -> None:
        self._indices = indices
        self._seed = seed
        self._rank = rank
        self._cached: tuple[int, npt.NDArray[Any]] | None = None
        self._key: np.uint64 | None = None

    def __len__(self) -> int:
        return len(self._indices)

    def take(self, first: int, stop: int) -> Tensor:
        """The indices of the examples of the draws [first, stop)."""
        size = len(self._indices)
        parts = []
        while first < stop:
            epoch, position = divmod(first, size)
            end = min(size, position + stop - first)
            parts.append(self._indices[self._permutation(epoch)[position:end]])
            first += end - position
        return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, dtype=np.int64))

    def random_bits(self, first: int, stop: int) -> npt.NDArray[np.uint64]:
        """64 random bits for each of the draws [first, stop), independent of earlier calls: splitmix64 of the draw."""
        if self._key is None:
            self._key = stream(self._seed, "chances", self._rank).integers(2**64, dtype=np.uint64)
        bits = np.arange(first, stop, dtype=np.uint64) * _GOLDEN + self._key
        for shift, factor in _MIXES:
            bits = (bits ^ (bits >> shift)) * factor
        return bits ^ (bits >> np.uint64(31))

    def _permutation(self, epoch: int) -> npt.NDArray[Any]:
        if self._cached is None or self._cached[0] != epoch:
            size = len(self._indices)
            permutation = stream(self._seed, "order", self._rank, epoch).permutation(size)
            self._cached = epoch, permutation.astype(np.min_scalar_type(size - 1))
        return self._cached[1]
