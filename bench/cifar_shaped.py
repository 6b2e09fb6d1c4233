"""What the live benchmarks train, and how they start a process of their own that is not ours.

A CNN of 0.2 M parameters on made-up images of 3×32×32, from a fixed seed: each class has a colour and a smooth pattern,
and each image is that under noise. Model and data are in channels_last format, which is faster for the plain loop, DDP
and offbeat alike. All of them draw their data in the same order, by (seed, rank, draw).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offbeat as ob
from offbeat.core.examples import Examples, Order
from offbeat.records.schema import Round, Update

BATCH = 32
CLASSES = 10
EXAMPLES = 4096
SEED = 0
RATE = 5e-4
BUSY_LOAD = 0.5

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Step:
    """Samples of one rank that were applied, and when, in seconds by whichever clock all ranks of a run share."""

    at: float
    samples: int
    rank: int


@dataclass(frozen=True)
class Loss:
    """The sum of the losses of some samples, and when it was known."""

    at: float
    samples: int
    total: float


@dataclass(frozen=True)
class Trace:
    """What one contestant did in one run, or one rank of it."""

    began: float
    steps: tuple[Step, ...]
    losses: tuple[Loss, ...]

    @property
    def rate(self) -> float:
        """Samples applied per second of the steady state: from the first step to the last, after the first."""
        ordered = sorted(self.steps, key=lambda step: step.at)
        return sum(step.samples for step in ordered[1:]) / (ordered[-1].at - ordered[0].at)

    @classmethod
    def merged(cls, traces: Iterable[Trace]) -> Trace:
        """Of all ranks together."""
        parts = list(traces)
        return cls(
            min(part.began for part in parts),
            tuple(step for part in parts for step in part.steps),
            tuple(loss for part in parts for loss in part.losses),
        )

    @classmethod
    def of(cls, run: ob.Run) -> Trace:
        """Of a run of ours: what went into its updates, and what its workers said of their losses."""
        updates = [record for record in run.records.records if isinstance(record, Update)]
        rounds = [record for record in run.records.records if isinstance(record, Round)]
        return cls(
            min(record.start for record in rounds),
            tuple(Step(update.at, c.stop - c.first, c.rank) for update in updates for c in update.contributions),
            tuple(Loss(r.at, r.samples, r.loss) for r in rounds if r.loss is not None),
        )


@functools.cache
def workload() -> ob.Workload:
    """The same for every contestant."""
    return ob.Workload(
        model=model,
        loss=functools.partial(F.cross_entropy, reduction="none"),
        train=_images(),
        optimizer=ob.Adam(lr=RATE),
        label="cifar-shaped",
    )


def prepare() -> None:
    """Do once, in the process that others are forked from, whatever takes long the first time in each of them."""
    torch.set_num_threads(1)
    trained = workload().initial_model(SEED)
    _optimizer(trained)  # torch imports its compiler for this
    load = os.getloadavg()[0]
    if load > BUSY_LOAD:
        print(f"the machine has a load of {load:.1f} already; ratios of wall time will say little", file=sys.stderr)


def _optimizer(trained: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(trained.parameters(), lr=RATE, fused=True)


def model() -> nn.Module:
    """Four convolutions and a linear layer, one step of which takes about 30 ms of one core."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 48), (48, 96)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(96, 160, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    head = nn.Linear(160, CLASSES)
    nn.init.zeros_(head.weight)  # so that the first steps, which are stale in asynchronous runs, are gentle for all
    return nn.Sequential(*layers, head).to(memory_format=torch.channels_last)


def _images() -> Examples:
    random = np.random.default_rng(SEED)
    labels = random.integers(0, CLASSES, EXAMPLES)
    colours = torch.from_numpy(random.standard_normal((CLASSES, 3, 1, 1)))
    coarse = torch.from_numpy(random.standard_normal((CLASSES, 3, 4, 4)))
    patterns = colours + 0.5 * F.interpolate(coarse, size=(32, 32), mode="bilinear", align_corners=False)
    images = 0.5 * (patterns.numpy()[labels] + random.standard_normal((EXAMPLES, 3, 32, 32)))
    inputs = torch.from_numpy(images).float().to(memory_format=torch.channels_last)
    return Examples(inputs, torch.from_numpy(labels))


def batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The micro-batches of a rank, without end."""
    examples = workload().train
    order = Order(np.arange(len(examples)), SEED, rank)
    for first in range(0, sys.maxsize, BATCH):
        yield examples.take(order.take(first, first + BATCH))


def plain_loop(
    rank: int,
    goes_on: Callable[[int], bool],
    step_seconds: float = 0.0,
    around: Callable[[nn.Module], nn.Module] | None = None,
) -> Trace:
    """An ordinary training loop, each step `step_seconds` slower than it is; `around` wraps the model, as DDP does."""
    trained = workload().initial_model(SEED)
    wrapped = around(trained) if around else trained
    optimizer = _optimizer(trained)
    steps: list[Step] = []
    losses: list[Loss] = []
    began = time.monotonic()
    for number, (inputs, targets) in enumerate(batches(rank)):
        if not goes_on(number):
            break
        optimizer.zero_grad()
        loss = workload().loss(wrapped(inputs), targets).mean()
        loss.backward()
        if step_seconds:
            time.sleep(step_seconds)
        optimizer.step()
        now = time.monotonic()
        steps.append(Step(now, BATCH, rank))
        losses.append(Loss(now, BATCH, float(loss.detach()) * BATCH))
    return Trace(began, tuple(steps), tuple(losses))


def in_processes(work: Callable[..., Any], count: int, *arguments: Any, limit_seconds: float = 120.0) -> list[Any]:
    """What `work(rank, *arguments)` returns in each of `count` processes; none of them outlives this one."""
    context = multiprocessing.get_context("fork")
    ends = [context.Pipe(duplex=False) for _ in range(count)]
    children = [
        context.Process(target=_child, args=(end, os.getpid(), work, rank, *arguments), daemon=True)
        for rank, (_, end) in enumerate(ends)
    ]
    try:
        for child, (_, end) in zip(children, ends, strict=True):
            child.start()
            end.close()
        until = time.monotonic() + limit_seconds
        return [_result(mine, until) for mine, _ in ends]
    finally:
        for child in children:
            if child.pid is not None:
                child.join(5.0 if sys.exc_info()[0] is None else 0.0)
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                child.join()


def _result(mine: Connection, until: float) -> Any:
    if not mine.poll(max(0.0, until - time.monotonic())):
        raise TimeoutError("a process of the benchmark did not end in time")
    return mine.recv()


def _child(end: Connection, parent: int, work: Callable[..., Any], rank: int, *arguments: Any) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() == parent:
        torch.set_num_threads(1)
        end.send(work(rank, *arguments))
