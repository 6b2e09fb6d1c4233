"""Merging the buffers of models that several ranks train at once: above all the running statistics of batch norm.

One micro-batch moves a running statistic by B ← (1 − m)·B + m·(statistic of the micro-batch), m being the momentum of
the layer. What j micro-batches add to a value B₀ is independent of it:

    contribution   C = B′ − (1 − m)^j · B₀
    merge          B ← Σ p_i [C_i + (1 − m)^{j_i} · B],   p_i the share of part i in the samples

So a rank sends its contribution and j, and not its values: the mean of values that began at stale ones would follow the
data w times too slowly with w asynchronous workers. For a single part the merge is exactly what serial training does,
and the result is a mean of statistics with positive weights, so that a variance stays positive.

A layer with `momentum=None` has the mean over all micro-batches so far. Its contribution is the mean over the new ones,
and parts are weighted by their numbers of micro-batches.

j is the increment of the counter `num_batches_tracked` of the layer; these increments are added up. Other buffers are
merged by their mean (floating point) or maximum (integers), since how a module computes them is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from offbeat.core.device_transfer import to_device
from offbeat.core.messages import Buffers
from offbeat.errors import ContractViolation


@dataclass(frozen=True)
class RunningStatistics:
    """Where the running mean, running variance and counter of a batch-norm layer are in the flat buffers."""

    vector: int
    """Index of the flat vector of mean and variance."""
    ranges: tuple[tuple[int, int], ...]
    """First element and one past the last, of each."""
    counter_vector: int
    """Index of the flat vector of the counter."""
    counter: int
    momentum: float | None
    """Weight of a micro-batch; None: all micro-batches have equal weight."""


def batch_norm_layers(module: nn.Module) -> dict[str, _BatchNorm]:
    """The batch-norm layers of a module that track statistics, by name."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)}
    return {name: layer for name, layer in layers.items() if layer.num_batches_tracked is not None}


def is_averaged(buffer: Tensor) -> bool:
    """Whether a buffer is merged by its mean; integers and booleans are merged by their maximum."""
    return buffer.is_floating_point() or buffer.is_complex()


def mean_buffers(parts: Sequence[tuple[Buffers, float]]) -> Buffers:
    """Means of buffers with these weights, and maxima of integers, in new tensors. Parts of weight 0 are ignored.

    For models that are averaged, as parameters are; raises ContractViolation if there is nothing to merge.
    """
    counted = [(buffers, weight) for buffers, weight in parts if weight > 0]
    if not counted:
        raise ContractViolation("no part has a weight above 0; merge only what was computed")
    merged = tuple(flat.clone() for flat in counted[0][0])
    total = counted[0][1]
    for buffers, weight in counted[1:]:
        total += weight
        for mean, flat in zip(merged, buffers, strict=True):
            if is_averaged(flat):
                mean.lerp_(flat, weight / total)  # a running mean, so that equal buffers stay equal to the last bit
            else:
                torch.maximum(mean, flat, out=mean)
    return merged


class BufferMerge:
    """The merge rules for the buffers of one model. Results are new tensors."""

    def __init__(self, statistics: Sequence[RunningStatistics]) -> None:
        """`statistics` is `Layout.statistics`."""
        self._statistics = statistics
        self._elements: dict[tuple[int, int, torch.device], _Elements] = {}
        self._counter_index: dict[tuple[int, torch.device], Tensor] = {}

    def contribution(self, before: Buffers, after: Buffers) -> Buffers:
        """What micro-batches have added to the buffers `before`, which they turned into `after`."""
        result = tuple(buffer.clone() for buffer in after)
        for vector, elements in self._vectors(before):
            began, batches = self._counters(before, elements), self._counters(after, elements)
            batches = batches - began
            kept = elements.kept(began, batches)
            values = result[vector][elements.index]
            values = values - kept * before[vector][elements.index]
            has_mean = elements.cumulative & (batches > 0)
            result[vector][elements.index] = torch.where(has_mean, values / (1 - kept), values)
        for vector, index in self._counter_positions(before):
            result[vector][index] -= before[vector][index]
        return result

    def merge(self, current: Buffers, parts: Sequence[tuple[Buffers, int]]) -> Buffers:
        """The buffers after adding contributions, each with its number of samples.

        Parts without buffers or samples are ignored; `current` itself is returned if there are no others.
        """
        counted = [(contribution, samples) for contribution, samples in parts if contribution and samples > 0]
        if not counted:
            return current
        merged = mean_buffers([(self._applied(current, contribution), samples) for contribution, samples in counted])
        for vector, elements in self._vectors(current):
            if bool(elements.cumulative.any()):
                means = self._mean_over_batches(
                    current, [contribution for contribution, _ in counted], vector, elements
                )
                index = elements.index[elements.cumulative]
                merged[vector][index] = means[elements.cumulative].to(merged[vector].dtype)
        for vector, index in self._counter_positions(current):
            batches = [contribution[vector][index] for contribution, _ in counted]
            merged[vector][index] = current[vector][index] + sum(batches)
        for mine, old in zip(merged, current, strict=True):
            if not is_averaged(mine):
                torch.maximum(mine, old, out=mine)  # a counter never decreases, even if all parts are stale
        return merged

    def rebase(self, before: Buffers, after: Buffers, base: Buffers) -> Buffers:
        """What micro-batches made of `before`, as if they had begun with `base`.

        Other floating-point buffers change by the same difference, and do not fall below both `base` and `after`: they
        may be variances, which must stay positive.
        """
        merged = self.merge(base, [(self.contribution(before, after), 1)])
        moved = [_moved(*four) for four in zip(merged, before, after, base, strict=True)]
        for vector, elements in self._vectors(base):
            moved[vector][elements.index] = merged[vector][elements.index]
        return tuple(moved)

    def chain(self, first: Buffers, second: Buffers) -> Buffers:
        """The contribution of the micro-batches of two contributions, one after the other."""
        result = tuple(buffer.clone() for buffer in second)
        for vector, elements in self._vectors(first):
            earlier, later = self._counters(first, elements), self._counters(second, elements)
            decayed = elements.decay**later * first[vector][elements.index] + second[vector][elements.index]
            weighted = earlier * first[vector][elements.index] + later * second[vector][elements.index]
            mean = weighted / (earlier + later).clamp(min=1)
            result[vector][elements.index] = torch.where(elements.cumulative, mean, decayed).to(result[vector].dtype)
        for vector, index in self._counter_positions(first):
            result[vector][index] += first[vector][index]
        return result

    def _applied(self, current: Buffers, contribution: Buffers) -> Buffers:
        """One contribution on top of the current buffers; layers with equal weights are left to `merge`."""
        result = tuple(buffer.clone() for buffer in contribution)
        for vector, elements in self._vectors(current):
            batches = self._counters(contribution, elements)
            kept = elements.decay**batches * current[vector][elements.index]
            result[vector][elements.index] = contribution[vector][elements.index] + kept
        return result

    def _mean_over_batches(
        self, current: Buffers, contributions: Sequence[Buffers], vector: int, elements: _Elements
    ) -> Tensor:
        batches = self._counters(current, elements)
        total = current[vector][elements.index].double() * batches
        for contribution in contributions:
            added = self._counters(contribution, elements)
            total += contribution[vector][elements.index].double() * added
            batches = batches + added
        return torch.where(batches > 0, total / batches.clamp(min=1), current[vector][elements.index])

    def _vectors(self, buffers: Buffers) -> list[tuple[int, _Elements]]:
        """The flat vectors that hold statistics, and which of their elements are statistics."""
        vectors = dict.fromkeys((layer.vector, layer.counter_vector) for layer in self._statistics)
        found = []
        for vector, counter_vector in vectors:
            key = vector, counter_vector, buffers[vector].device
            if key not in self._elements:
                self._elements[key] = _Elements(self._statistics, vector, counter_vector, buffers[vector])
            found.append((vector, self._elements[key]))
        return found

    def _counter_positions(self, buffers: Buffers) -> list[tuple[int, Tensor]]:
        """The flat vectors that hold counters, and which of their elements are counters."""
        vectors = dict.fromkeys(layer.counter_vector for layer in self._statistics)
        return [(vector, self._positions(vector, buffers[vector].device)) for vector in vectors]

    def _positions(self, vector: int, device: torch.device) -> Tensor:
        if (vector, device) not in self._counter_index:
            counters = [layer.counter for layer in self._statistics if layer.counter_vector == vector]
            self._counter_index[vector, device] = torch.tensor(counters, device=device)
        return self._counter_index[vector, device]

    def _counters(self, buffers: Buffers, elements: _Elements) -> Tensor:
        """The counter of the layer of each element."""
        return buffers[elements.counter_vector][elements.counter_index]


def _moved(merged: Tensor, before: Tensor, after: Tensor, base: Tensor) -> Tensor:
    if not is_averaged(base):
        return merged
    moved = base + (after - before)
    return moved if base.is_complex() else torch.maximum(moved, torch.minimum(base, after))


class _Elements:
    """The elements of one flat vector that are running statistics, with what their layers say about each."""

    def __init__(self, statistics: Sequence[RunningStatistics], vector: int, counter_vector: int, like: Tensor) -> None:
        index: list[Tensor] = []
        counters: list[int] = []
        momenta: list[float] = []
        cumulative: list[bool] = []
        for layer in statistics:
            if (layer.vector, layer.counter_vector) != (vector, counter_vector):
                continue
            for first, stop in layer.ranges:
                index.append(torch.arange(first, stop))
                counters += [layer.counter] * (stop - first)
                momenta += [layer.momentum or 0.0] * (stop - first)
                cumulative += [layer.momentum is None] * (stop - first)
        self.counter_vector = counter_vector
        self.index = to_device(torch.cat(index), like.device)
        self.counter_index = torch.tensor(counters, device=like.device)
        self.decay = 1.0 - torch.tensor(momenta, dtype=like.dtype, device=like.device)
        """1 − m; 1 where there is no momentum."""
        self.cumulative = torch.tensor(cumulative, device=like.device)

    def kept(self, began: Tensor, batches: Tensor) -> Tensor:
        """The share of the old value in the new one, after `batches` micro-batches on top of `began`."""
        share = began.to(self.decay.dtype) / (began + batches).clamp(min=1)
        share = torch.where(batches > 0, share, 1.0)
        return torch.where(self.cumulative, share, self.decay**batches)
