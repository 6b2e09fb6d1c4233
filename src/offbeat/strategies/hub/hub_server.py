"""The node of the hub in parameter-server strategies: it collects gradients, updates the parameters and sends them out.

    a gradient arrives → it is accounted for → dropped or collected → an update, if one is due → Parameters to workers

The hub holds the master values, which are float32 where the model is bfloat16 or float16; gradients and parameters
travel in the dtype of the model.

Invariants: the version grows by one per update; one copy of the parameters is made per version, and all messages of
that version share it. How workers join and how the run ends is in `server_node.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import ClassVar

import torch
from torch import Tensor

from offbeat.core.actions import Action, Report, Samples, Send, SetTimer
from offbeat.core.buffer_merge import BufferMerge
from offbeat.core.events import MessageArrived, TimerFired
from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Buffers, Message
from offbeat.core.optimizers import Stepper
from offbeat.core.strategy import NodeContext
from offbeat.records.schema import Contribution, Notice, Reason
from offbeat.strategies.divergence import DivergenceWatch
from offbeat.strategies.hang_detection import HangDetector
from offbeat.strategies.hub.damping import free_staleness, gradient_weight
from offbeat.strategies.hub.hub_parts import CollectStatus, Every, HubSettings, Share, TargetBatch
from offbeat.strategies.hub.hub_worker import Gradient, Parameters, Welcome
from offbeat.strategies.hub.pending_gradients import PendingGradients
from offbeat.strategies.hub.work_sizing import Effort, ShareSizing, TargetBatchSizing, WorkSizing
from offbeat.strategies.member_checks import MemberCheck
from offbeat.strategies.message_kinds import unexpected
from offbeat.strategies.server_node import HUB, ServerNode, nonfinite_failure
from offbeat.strategies.training_node import dropped, samples_limit

UPDATES_BEFORE_NOTICE = 20
DAMPING_NOTICED = 0.25
"""A smaller factor on the learning rate is reported, after so many updates."""
ROUND_TRIPS_FEW = 100
"""In runs with fewer round trips, synchronous strategies were ahead on MNIST (docs/staleness.md)."""


class HubServer(ServerNode):
    timers: ClassVar[tuple[str, ...]] = ("update",)
    caches = ("_copies", "_snapshot", "_sum_memory")

    _parameters: Tensor
    _buffers: Buffers
    _optimizer: Stepper
    _reported: set[int]
    """Live workers from which a message has arrived since the last update."""
    _idle: set[int]
    """Workers that wait for new parameters."""
    _nonfinite_in_a_row: dict[int, int]
    _collected: PendingGradients
    _sizing: WorkSizing
    _update_due: float = 0.0
    _divergence: DivergenceWatch
    _damping_noticed: bool = False

    def __init__(self, config: HubSettings, context: NodeContext) -> None:
        super().__init__(context, config.patience_seconds, HangDetector(config.hang_factor, config.hang_seconds))
        self._config = config
        self._parameters = context.parameters.clone()
        self._buffers = context.buffers
        self._buffer_merge = BufferMerge(context.layout.statistics)
        self._copies = Pool()
        self._snapshot: Tensor | None = None
        """The copy of the newest parameters that all messages of this version share, once there is one."""
        assert config.optimizer is not None, "Strategy.with_default_optimizer sets it"
        self._optimizer = config.optimizer.build(self._parameters, context.layout)
        free = config.staleness_free
        self._staleness_free = free_staleness(self._optimizer) if free is None else free
        self._reported, self._idle, self._nonfinite_in_a_row = set(), set(), {}
        self._sum_memory = torch.empty_like(self._parameters)
        self._collected = self._nothing_collected()
        self._sizing = _sizing(config)
        self._samples_max = _samples_max(config)
        self._divergence = DivergenceWatch()

    def _nothing_collected(self) -> PendingGradients:
        return PendingGradients(self._config.collect.in_rank_order, self._sum_memory)

    # Members

    def _result(self) -> tuple[Tensor, Buffers]:
        if self._snapshot is None:
            self._snapshot = self._copies.copy(self._parameters, self._context.layout.dtype)
        return self._snapshot, self._buffers

    def _set_timers(self, at: float) -> Iterator[Action]:
        if isinstance(self._config.collect, Every):
            self._update_due = at + self._config.collect.seconds
            yield SetTimer("update", self._config.collect.seconds)

    def _worker_joined(self, rank: int) -> None:
        self._nonfinite_in_a_row[rank] = 0

    def _members_changed(self) -> None:
        self._sizing.members_changed(self._live)

    def _welcome(self, rank: int) -> Message:
        budget = self._sizing.budget(rank, self._live)
        return Welcome(*self._result(), self._version, budget, **self._position(rank))

    def _worker_lost(self, rank: int) -> None:
        self._idle.discard(rank)
        self._reported.discard(rank)

    def _continue_without(self, at: float) -> Iterable[Action]:
        return self._update_if_ready(at)

    def _take_unused(self) -> list[Contribution]:
        unused, self._collected = self._collected.contributions, self._nothing_collected()
        return unused

    # Train

    def _message_arrived(self, event: MessageArrived) -> Iterable[Action]:
        match event.message:
            case Gradient() as message:
                self._check(event, message)
                return self._gradient_arrived(event, message)
            case _:
                raise unexpected(event, HUB)

    def _round_samples_max(self) -> int | None:
        return self._samples_max

    def _check(self, event: MessageArrived, message: Gradient) -> None:
        check, rank = MemberCheck(event, HUB), event.source
        check.require(self._started and rank in self._ledgers, "no work to do")
        numel = self._parameters.numel() if message.finite else 0
        check.vector("gradient", message.gradient, self._parameters, numel, self._context.layout.dtype)
        check.buffers(message.buffers, self._buffers)
        check.version(message.version, self._version)
        check.number("seconds", message.seconds)
        check.number("weight", message.divisor)
        if message.weight is not None and not message.weight > 0:
            check.refuse(f"a weight of {message.weight}")
        first, stop = message.draws
        if stop - first != message.samples:
            check.refuse(f"{message.samples} samples for draws {first} to {stop}")
        limit = self._round_samples_max()
        if limit is not None and message.samples > limit:
            check.refuse(f"{message.samples} samples, where {limit} were due")
        self._check_draws(check, event, [message.draws])
        if message.finite:
            if not math.isfinite(message.loss):
                check.refuse(f"a loss of {message.loss}, which is said to be finite")
            check.finite("gradient", message.gradient)

    def _gradient_arrived(self, event: MessageArrived, message: Gradient) -> Iterator[Action]:
        rank = event.source
        if self._is_stopping:
            yield from self._drop_after_stop(event.at, rank, [message.draws])
            return
        staleness = self._version - message.version
        self._ledgers[rank].add(*message.draws)
        reason = self._reason_to_drop(message, staleness)
        if reason is not None:
            yield dropped(event.at, rank, message.draws, staleness, reason)
        self._count_nonfinite(rank, message.finite)
        if self._failure is not None:
            yield from self._stop(event.at)
        elif reason in ("stale", "late") and self._config.waits:
            yield self._answer(rank)
        elif reason is None or reason == "nonfinite":
            self._collect(rank, event, message, staleness)
            yield from self._update_if_ready(event.at)

    def _reason_to_drop(self, message: Gradient, staleness: int) -> Reason | None:
        if self._config.collect.current_only and staleness > 0:
            return "late"
        if self._config.staleness_max is not None and staleness > self._config.staleness_max:
            return "stale"
        return None if message.finite else "nonfinite"

    def _count_nonfinite(self, rank: int, finite: bool) -> None:
        self._nonfinite_in_a_row[rank] = 0 if finite else self._nonfinite_in_a_row[rank] + 1
        if self._nonfinite_in_a_row[rank] >= self._config.nonfinite_max:
            self._failure = nonfinite_failure(rank, self._config.nonfinite_max)

    def _collect(self, rank: int, event: MessageArrived, message: Gradient, staleness: int) -> None:
        self._reported.add(rank)
        if self._config.waits:
            self._idle.add(rank)
        if message.finite:
            self._collected.add(rank, event, message, staleness, self._weight(message, staleness))
        else:
            self._collected.count(rank, Effort(message.samples, message.seconds))

    def _weight(self, message: Gradient, staleness: int) -> float:
        expected = self._config.collect.expected_staleness(len(self._live))
        is_initial = message.version == 0
        return gradient_weight(self._config.damping, self._staleness_free, staleness, expected, is_initial)

    def _update_if_ready(self, at: float) -> Iterator[Action]:
        status = CollectStatus(len(self._live), len(self._reported), self._collected.messages)
        if not self._is_stopping and self._config.collect.ready(status):
            yield from self._update(at)

    def _timer_fired(self, event: TimerFired) -> Iterator[Action]:
        """Make the update of `Every`."""
        assert isinstance(self._config.collect, Every)
        if self._is_stopping:
            return
        while self._update_due <= event.at:
            self._update_due += self._config.collect.seconds
        yield SetTimer("update", self._update_due - event.at)
        if self._collected.messages:
            yield from self._update(event.at)

    def _update(self, at: float) -> Iterator[Action]:
        collected, self._collected = self._collected, self._nothing_collected()
        self._reported.clear()
        self._sizing.observe(collected.efforts, self._live)
        if collected.samples:
            rate = self._optimizer.step(collected.mean(), self._samples, collected.damping)
            self._buffers = self._buffer_merge.merge(self._buffers, collected.buffers)
            self._snapshot = None
            yield from self._updated(at, len(collected.contributions), rate, collected.contributions)
            yield from self._notices(at, collected)
            self._check_parameters(self._parameters)
        if self._has_enough() or self._failure is not None:
            yield from self._stop(at)
        else:
            yield from self._answers()

    def _notices(self, at: float, collected: PendingGradients) -> Iterator[Action]:
        """Report, each once, that training diverges, and that staleness has reduced the learning rate to a fraction."""
        if self._divergence.observe(collected.loss, collected.staleness):
            text = self._divergence.sentence(_advice(self._config))
            yield Report(Notice(at=at, rank=HUB, text=text))
        if self._version >= UPDATES_BEFORE_NOTICE and collected.damping < DAMPING_NOTICED and not self._damping_noticed:
            self._damping_noticed = True
            yield Report(Notice(at=at, rank=HUB, text=self._damping_sentence(collected)))

    def _damping_sentence(self, newest: PendingGradients) -> str:
        text = (
            f"gradients are {self._divergence.staleness:.3g} updates stale on average, so the learning rate is reduced "
            f"to {newest.damping:.2g} of its value; larger batches, or local steps (local-sgd, diloco), reduce "
            "staleness; if the loss falls smoothly, try the whole rate (--damping 0)"
        )
        limit = samples_limit(self._context.until)
        # By the newest staleness: the average still has the first gradients in it, which are fresher.
        round_trips = None if limit is None else limit * self._version / self._samples / (1.0 + newest.staleness)
        if round_trips is None or round_trips >= ROUND_TRIPS_FEW:
            return text
        return (
            f"{text}; parameters and gradients will be exchanged only about {round_trips:.2g} times in the whole run, "
            "and with so few round trips fmb or amb may learn more in the same time"
        )

    def _answers(self) -> Iterator[Action]:
        message = None
        for rank in sorted(self._idle if self._config.waits else self._live):
            message = self._parameters_for(rank, message)
            yield Send(rank, message, supersedes="parameters")
        self._idle.clear()

    def _answer(self, rank: int) -> Send:
        return Send(rank, self._parameters_for(rank), supersedes="parameters")

    def _parameters_for(self, rank: int, previous: Parameters | None = None) -> Parameters:
        """The newest parameters for a worker: the message of the worker before if its budget is the same."""
        budget = self._sizing.budget(rank, self._live)
        if previous is not None and previous.budget == budget:
            return previous
        return Parameters(*self._result(), self._version, budget)


def _advice(config: HubSettings) -> str:
    """What to type where training diverges."""
    if config.waits and config.collect.synchronous:
        return "lower the learning rate (--lr)"
    if config.damping < 1:
        return "damp stale gradients (--damping 1), or lower the learning rate (--lr)"
    return "lower the learning rate (--lr), or drop the stalest gradients (--staleness-max)"


def _samples_max(config: HubSettings) -> int | None:
    """The most samples of a round; None: unlimited."""
    match config.compute:
        case Samples(count=count) | Share(samples=count):
            return count
        case TargetBatch(first=first, samples_max=samples_max):
            return max(first, samples_max)
        case budget:
            return getattr(budget, "samples_max", None)


def _sizing(config: HubSettings) -> WorkSizing:
    if isinstance(config.compute, TargetBatch):
        return TargetBatchSizing(config.compute, config.microbatch)
    if isinstance(config.compute, Share):
        return ShareSizing(config.compute)
    return WorkSizing(config.compute)
