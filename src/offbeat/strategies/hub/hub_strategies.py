"""The parameter-server algorithms: each is a choice of parts of `Hub`, with flat fields of its own.

name           worker computes             hub updates                                  worker afterwards
fmb            `batch` samples             when all workers have sent                   waits
amb            until a time limit          when all workers have sent                   waits
async-fmb      `batch` samples             when `messages` have arrived                 continues
async-timed    until a time limit          every `hub_seconds`                          continues
apam           `batch` samples             on each gradient, by AMSGrad                 waits for the answer to its own
sync-amsgrad   its share of `batch`        when all workers have sent, by AMSGrad       waits
k-of-n         `batch` samples             when the first k workers have sent           waits
restart        `batch` samples             when all workers have sent; a loss resets    waits
                                           all to a checkpoint
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from offbeat.core.actions import Samples, Seconds
from offbeat.core.optimizers import AMSGrad, Optimizer
from offbeat.core.randomness import stream
from offbeat.core.strategy import Node, NodeContext
from offbeat.core.validation import check_types, require, require_positive
from offbeat.strategies.hub.hub_parts import AllWorkers, Distinct, Every, HubSettings, Messages, Share, TargetBatch
from offbeat.strategies.hub.hub_server import HubServer
from offbeat.strategies.hub.hub_worker import HubWorker
from offbeat.strategies.hub.restart_server import RestartServer
from offbeat.strategies.server_node import HUB, ServerStrategy, shared_fields
from offbeat.strategies.training_node import NO_OPTIMIZER


@dataclass(frozen=True)
class Hub(HubSettings):
    """A parameter server composed from parts. Rank 0 is the hub, all other ranks compute."""

    summary: ClassVar[str] = "one hub and its workers, composed from parts"

    def node(self, context: NodeContext) -> Node:
        if context.rank != HUB:
            return HubWorker(self, context)
        require(self.optimizer is not None, NO_OPTIMIZER)
        return HubServer(self, context) if self.checkpoint_interval_seconds is None else RestartServer(self, context)


USUAL_PERIOD_SECONDS = 2.0
USUAL_SAMPLES = 512 / 5.65
"""Samples that a worker computes in that period at the speed that published studies of stragglers measured."""


@dataclass(frozen=True)
class HubStrategy(ServerStrategy):
    """A parameter-server algorithm by name."""

    microbatch: int = 16
    """samples per forward and backward call"""
    optimizer: Optimizer | None = None
    """how the hub updates; none: the one that suits the workload"""
    nonfinite_max: int = 5
    """gradients in a row from one worker that may be NaN or infinite before the run fails"""
    patience_seconds: float = 60.0
    """seconds that hub and workers wait for each other before the run fails"""

    @abstractmethod
    def hub(self, workers: int) -> Hub:
        """The composition of parts for a number of workers."""

    def __post_init__(self) -> None:
        check_types(self)
        if hasattr(self, "batch"):  # checked here, since the parts have it under another name
            require_positive(self, "batch")
        self.hub(workers=1)  # raises what its parts raise

    def composed(self, **parts: Any) -> Hub:
        """A composition of these parts, and of the fields that `Hub` has under the same name."""
        return Hub(**shared_fields(self, Hub), **parts)

    @property
    def staleness_bound(self) -> int | None:
        return self.hub(workers=1).staleness_bound

    def node(self, context: NodeContext) -> Node:
        return self.hub(workers=len(context.members) - 1).node(context)


@dataclass(frozen=True)
class AsynchronousHubStrategy(HubStrategy):
    """An algorithm whose gradients can be stale."""

    staleness_max: int | None = None
    """updates; gradients staler than this are dropped and counted"""
    damping: float = 1.0
    """exponent p of the factor ((1+free)/(1+staleness))^p on rate and momentum of stale gradients; 0: as published"""
    staleness_free: int | None = None
    """updates of staleness that are not damped; none: 1 for Adam and the like, 0 for SGD and for momentum"""
    in_flight_max: int = 2
    """messages a worker may have on the way before it waits for its link"""


@dataclass(frozen=True)
class FixedMinibatch(HubStrategy, name="fmb"):
    """Fixed mini-batch: all workers compute the same number of samples, and wait for the slowest."""

    summary: ClassVar[str] = "synchronous, a fixed batch per worker; all wait for the slowest (the baseline)"
    paper: ClassVar[str] = "Dekel et al., JMLR 2012 (distributed mini-batches)"
    figure_style: ClassVar[int | None] = 0

    batch: int = 256
    """samples each worker computes per update"""

    def hub(self, workers: int) -> Hub:
        return self.composed(compute=Samples(self.batch), collect=AllWorkers(), waits=True)


@dataclass(frozen=True)
class AnytimeMinibatch(HubStrategy, name="amb"):
    """Anytime mini-batch: all workers compute for the same time; each sends what it has computed by then."""

    summary: ClassVar[str] = "synchronous, a time limit per worker; slow workers contribute less, none waits long"
    paper: ClassVar[str] = "Ferdinand et al., ICLR 2019"
    figure_style: ClassVar[int | None] = 1

    batch: int = 256
    """samples per update and worker that the time limit is adjusted to, where seconds is none"""
    seconds: float | None = None
    """seconds each worker computes per update; none: adjusted to the batch"""
    samples_max: int | None = None
    """samples a worker computes at the most per update; none: 4 × batch"""

    def hub(self, workers: int) -> Hub:
        require_positive(self, "batch", "seconds", "samples_max")
        cap = self.samples_max or 4 * self.batch
        if self.seconds is not None:
            return self.composed(compute=Seconds(self.seconds, samples_max=cap), collect=AllWorkers(), waits=True)
        target = TargetBatch(samples=workers * self.batch, first=min(self.batch, cap), samples_max=cap)
        return self.composed(compute=target, collect=AllWorkers(), waits=True)


@dataclass(frozen=True)
class AsyncFixed(AsynchronousHubStrategy, name="async-fmb"):
    """K-batch asynchronous: workers do not wait; the hub updates when K messages have arrived."""

    summary: ClassVar[str] = "asynchronous, a fixed batch per message; the hub updates on every K-th message"
    paper: ClassVar[str] = "Dutta et al., AISTATS 2018 (K-batch async SGD)"
    figure_style: ClassVar[int | None] = 3

    batch: int = 64
    """samples per message"""
    messages: int | None = None
    """messages per update; none: as many as there are workers"""

    def hub(self, workers: int) -> Hub:
        return self.composed(compute=Samples(self.batch), collect=Messages(self.messages), waits=False)


@dataclass(frozen=True)
class AsyncTimed(AsynchronousHubStrategy, name="async-timed"):
    """AMB with delayed gradients: workers send and the hub updates at fixed intervals; workers do not wait."""

    summary: ClassVar[str] = "asynchronous, workers and hub each have a fixed interval of their own"
    paper: ClassVar[str] = "Al-Lawati, Adikari, Draper, IEEE JSAIT 2021 (AMB-DG)"
    figure_style: ClassVar[int | None] = 2

    worker_seconds: float | None = None
    """seconds a worker computes per message; none: as long as 90 samples usually take"""
    hub_seconds: float | None = None
    """seconds between updates; none: as long as 90 samples usually take"""
    samples_max: int | None = 1024
    """samples a worker computes at the most per message; none: no limit"""

    def hub(self, workers: int) -> Hub:
        require_positive(self, "worker_seconds", "hub_seconds", "samples_max")
        compute = Seconds(self.worker_seconds or USUAL_PERIOD_SECONDS, samples_max=self.samples_max)
        return self.composed(compute=compute, collect=Every(self.hub_seconds or USUAL_PERIOD_SECONDS), waits=False)

    def with_default_timing(self, seconds_per_sample: float) -> Self:
        period = USUAL_SAMPLES * seconds_per_sample
        return dataclasses.replace(
            self, worker_seconds=self.worker_seconds or period, hub_seconds=self.hub_seconds or period
        )


@dataclass(frozen=True)
class AsyncAdaptive(AsynchronousHubStrategy, name="apam"):
    """APAM: the hub applies each gradient as it arrives, by AMSGrad, and sends new parameters to its sender alone."""

    summary: ClassVar[str] = "asynchronous AMSGrad; an update per gradient, each worker waits for its own answer only"
    paper: ClassVar[str] = "Xu et al., 2020, arXiv:2002.09095 (APAM)"
    figure_style: ClassVar[int | None] = 4

    batch: int = 64
    """samples per message"""

    def hub(self, workers: int) -> Hub:
        return self.composed(compute=Samples(self.batch), collect=Messages(1), waits=True)

    def with_default_optimizer(self, optimizer: Optimizer) -> Self:
        return super().with_default_optimizer(AMSGrad.like(optimizer))


@dataclass(frozen=True)
class SyncAdaptive(HubStrategy, name="sync-amsgrad"):
    """Synchronous AMSGrad: one batch, split among the workers."""

    summary: ClassVar[str] = "synchronous AMSGrad; one batch split among all workers (APAM's baseline)"
    paper: ClassVar[str] = "Xu et al., 2020, arXiv:2002.09095 (baseline)"
    figure_style: ClassVar[int | None] = 5

    batch: int = 640
    """samples per update over all workers"""

    def hub(self, workers: int) -> Hub:
        return self.composed(compute=Share(self.batch), collect=AllWorkers(), waits=True)

    def with_default_optimizer(self, optimizer: Optimizer) -> Self:
        return super().with_default_optimizer(AMSGrad.like(optimizer))


@dataclass(frozen=True)
class BackupWorkers(HubStrategy, name="k-of-n"):
    """Backup workers: the hub updates with the first k gradients of a version, and drops later ones."""

    summary: ClassVar[str] = "synchronous, but only the first k of n workers count; late gradients are dropped"
    paper: ClassVar[str] = "Chen et al., 2016, arXiv:1604.00981 (backup workers)"
    figure_style: ClassVar[int | None] = 6

    batch: int = 256
    """samples each worker computes per update"""
    k: int | None = None
    """workers whose gradients make an update; none: 0.8 of them"""

    def hub(self, workers: int) -> Hub:
        require_positive(self, "k")
        first = self.k or max(1, math.ceil(0.8 * workers))
        return self.composed(compute=Samples(self.batch), collect=Distinct(first), waits=True)

    def processes(self, workers: int) -> int:
        require(
            self.k is None or self.k <= workers,
            f"k-of-n cannot wait for the first k = {self.k} of {workers} workers; give a smaller k or more workers",
        )
        return super().processes(workers)


@dataclass(frozen=True)
class RestartFromCheckpoint(HubStrategy, name="restart"):
    """Plain synchronous training: a lost worker halts all, until it has joined again and all restart at a checkpoint.

    The hub waits `patience_seconds` for lost workers, and continues without them after that. These checkpoints are
    copies in the memory of the hub, apart from those that a live run writes to disk.
    """

    summary: ClassVar[str] = "synchronous, and a lost worker halts all: they wait for it and restart at a checkpoint"
    paper: ClassVar[str] = "common practice; the baseline under failures"
    figure_style: ClassVar[int | None] = 9

    batch: int = 256
    """samples each worker computes per update"""
    checkpoint_interval_seconds: float = 60.0
    """seconds of training between two checkpoints in memory"""

    def hub(self, workers: int) -> Hub:
        return self.composed(compute=Samples(self.batch), collect=AllWorkers(), waits=True)

    @classmethod
    def random_settings(cls, seed: int, workers: int) -> dict[str, Any]:
        return {"checkpoint_interval_seconds": float(10 ** stream(seed, "fuzz restart").uniform(-3, 1))}
