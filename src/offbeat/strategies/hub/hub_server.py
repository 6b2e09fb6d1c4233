"""The gradients that wait for the next update.

Where an update waits for everybody they are held and summed in the order of ranks, so that the result does not
depend on who was first. Otherwise each is added as it arrives, and nothing is held.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from offbeat.core.actions import Action, Report, Send, SetTimer
from offbeat.core.events import MessageArrived, TimerFired
from offbeat.core.flat import renewed_buffers
from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Buffers, Message
from offbeat.core.strategy import NodeContext, State
from offbeat.records.schema import Contribution, Reason, Update
from offbeat.strategies.hub.hub_parts import CollectStatus, Every, HubSettings, Share, TargetBatch
from offbeat.strategies.hub.hub_worker import Gradient, Parameters, Welcome
from offbeat.strategies.hub.work_sizing import Effort, ShareSizing, TargetBatchSizing, WorkSizing
from offbeat.strategies.server_node import HUB, ServerNode, dropped


class PendingGradients:
    def __init__(self, in_rank_order: bool, memory: Tensor) -> None:
        """`memory` is where the sum is made; whoever lends it leaves it alone until `mean` has been used."""
        self._in_rank_order = in_rank_order
        self._memory = memory
        self._held: list[tuple[int, float, Tensor]] = []
        self._total: Tensor | None = None
        self._buffers: list[tuple[int, Buffers, int]] = []
        self.contributions: list[Contribution] = []
        self.efforts: dict[int, Effort] = {}
        """rank → what it did since the last update"""
        self.messages = 0

    def add(self, rank: int, event: MessageArrived, message: Gradient, staleness: int, weight: float) -> None:
        """Collect a gradient: `g = Σ weight · G / Σ samples`."""
        if self._in_rank_order:
            kept = event.keep()
            assert isinstance(kept, Gradient)
            self._held.append((rank, weight, kept.gradient))
        else:
            self._add(message.gradient, weight)
        if message.buffers:
            self._buffers.append((rank, tuple(buffer.clone() for buffer in message.buffers), message.samples))
        self.contributions.append(Contribution(rank, *message.draws, staleness))
        self.note(rank, Effort(message.samples, message.seconds))

    def _add(self, gradient: Tensor, weight: float) -> None:
        if self._total is None:
            self._total = torch.mul(gradient, weight, out=self._memory)
        else:
            self._total.add_(gradient, alpha=weight)

    def note(self, rank: int, effort: Effort) -> None:
        """Count a message, whether or not there was anything to add."""
        before = self.efforts.get(rank, Effort(0, 0.0))
        self.efforts[rank] = Effort(before.samples + effort.samples, before.seconds + effort.seconds)
        self.messages += 1

    @property
    def samples(self) -> int:
        return sum(contribution.stop - contribution.first for contribution in self.contributions)

    def mean(self) -> Tensor:
        """The weighted sum over the number of samples. Ends the collection."""
        for _, weight, gradient in sorted(self._held, key=lambda held: held[0]):
            self._add(gradient, weight)
        if self._in_rank_order:
            self.contributions.sort(key=lambda contribution: contribution.rank)
            self._buffers.sort(key=lambda entry: entry[0])
        assert self._total is not None
        return self._total.div_(self.samples)

    def merged_buffers(self, before: Buffers) -> Buffers:
        """Averaged by samples, where any came."""
        return renewed_buffers(before, [(buffers, samples) for _, buffers, samples in self._buffers])

    def state(self) -> dict[str, Any]:
        return {
            "held": [[rank, weight, gradient.clone()] for rank, weight, gradient in self._held],
            "total": None if self._total is None else self._total.clone(),
            "buffers": [[rank, [b.clone() for b in buffers], samples] for rank, buffers, samples in self._buffers],
            "contributions": [[c.rank, c.first, c.stop, c.staleness] for c in self.contributions],
            "efforts": {str(rank): [effort.samples, effort.seconds] for rank, effort in self.efforts.items()},
            "messages": self.messages,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._held = [(rank, weight, gradient) for rank, weight, gradient in state["held"]]
        self._total = state["total"]
        self._buffers = [(rank, tuple(buffers), samples) for rank, buffers, samples in state["buffers"]]
        self.contributions = [Contribution(*entry) for entry in state["contributions"]]
        self.efforts = {int(rank): Effort(*effort) for rank, effort in state["efforts"].items()}
        self.messages = state["messages"]


# The hub: collects gradients, updates, and hands out parameters.
#
# A gradient arrives → it is counted, dropped or collected → perhaps an update → answers. How it gathers its workers and
# ends the run stands in `centre.py`.
#
# Invariants: versions grow by one per update; one copy of the parameters is made per version, and all messages of that
# version share it.


class HubServer(ServerNode):
    timers: ClassVar[tuple[str, ...]] = ("update",)

    def __init__(self, config: HubSettings, context: NodeContext) -> None:
        super().__init__(context, config.patience_seconds)
        self._config = config
        self._parameters = context.parameters.clone()
        self._buffers = context.buffers
        self._copies = Pool()
        self._snapshot = self._parameters.clone()
        assert config.optimizer is not None, "Strategy.suited fills it in"
        self._stepper = config.optimizer.build(self._parameters, context.layout)
        self._reported: set[int] = set()
        """Live workers that have reported since the last update."""
        self._idle: set[int] = set()
        """Workers that wait for an answer."""
        self._nonfinite_in_a_row: dict[int, int] = {}
        self._sum = torch.empty_like(self._parameters)
        """Where gradients are added up: one at a time, so one is enough."""
        self._collected = PendingGradients(config.collect.in_rank_order, self._sum)
        self._sizing = _sizing(config)
        self._update_due = 0.0

    # Members

    def _result(self) -> tuple[Tensor, Buffers]:
        return self._snapshot, self._buffers

    def _set_timers(self, at: float) -> Iterator[Action]:
        if isinstance(self._config.collect, Every):
            self._update_due = at + self._config.collect.seconds
            yield SetTimer("update", self._config.collect.seconds)

    def _came(self, rank: int) -> None:
        self._nonfinite_in_a_row[rank] = 0

    def _members_changed(self) -> None:
        self._sizing.members_changed(self._live)

    def _welcome(self, rank: int) -> Message:
        budget = self._sizing.budget(rank, self._live)
        return Welcome(self._snapshot, self._buffers, self._version, budget, *self._position(rank))

    def _forget(self, rank: int) -> None:
        self._idle.discard(rank)
        self._reported.discard(rank)

    def _went(self, at: float) -> Iterable[Action]:
        return self._update_if_ready(at)

    def _discard(self) -> list[Contribution]:
        unused = self._collected.contributions
        self._collected = PendingGradients(self._config.collect.in_rank_order, self._sum)
        return unused

    # Train

    def _received(self, event: MessageArrived) -> Iterator[Action]:
        rank, message = event.source, event.message
        assert isinstance(message, Gradient)
        if self._awaited is not None:
            yield from self._too_late(event.at, rank, message.draws)
            return
        staleness = self._version - message.version
        self._draws[rank].add(*message.draws)
        reason = self._reason_to_drop(message, staleness)
        if reason is not None:
            yield Report(dropped(event.at, rank, message.draws, staleness, reason))
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
            self._failure = (
                f"worker {rank} reported {self._config.nonfinite_max} gradients in a row that were not finite; "
                "lower the learning rate, clip the gradient (clip_norm), or look at that worker's data"
            )

    def _collect(self, rank: int, event: MessageArrived, message: Gradient, staleness: int) -> None:
        self._reported.add(rank)
        if self._config.waits:
            self._idle.add(rank)
        if message.finite:
            weight = (1.0 + staleness) ** -self._config.damping
            self._collected.add(rank, event, message, staleness, weight)
        else:
            self._collected.note(rank, Effort(message.samples, message.seconds))

    def _update_if_ready(self, at: float) -> Iterator[Action]:
        status = CollectStatus(len(self._live), len(self._reported), self._collected.messages)
        if self._awaited is None and self._config.collect.ready(status):
            yield from self._update(at)

    def _fired(self, event: TimerFired) -> Iterator[Action]:
        """It is time for the next update."""
        assert isinstance(self._config.collect, Every)
        if self._awaited is not None:
            return
        at = event.at
        while self._update_due <= at:
            self._update_due += self._config.collect.seconds
        yield SetTimer("update", self._update_due - at)
        if self._collected.messages:
            yield from self._update(at)

    def _update(self, at: float) -> Iterator[Action]:
        collected, self._collected = self._collected, PendingGradients(self._config.collect.in_rank_order, self._sum)
        self._reported.clear()
        self._sizing.observe(collected.efforts, self._live)
        if collected.samples:
            rate = self._stepper.step(collected.mean(), self._samples)
            self._buffers = collected.merged_buffers(self._buffers)
            self._snapshot = self._copies.copy(self._parameters)
            self._version += 1
            self._samples += collected.samples
            yield Report(
                Update(
                    at=at,
                    rank=HUB,
                    version=self._version,
                    messages=len(collected.contributions),
                    samples=collected.samples,
                    samples_total=self._samples,
                    learning_rate=rate,
                    contributions=tuple(collected.contributions),
                )
            )
            if self._evaluations.due(at, self._version):
                yield from self._evaluate(at)
        if self._has_enough():
            yield from self._stop(at)
        else:
            yield from self._answers()

    def _answers(self) -> Iterator[Action]:
        to = self._idle if self._config.waits else self._live
        for rank in sorted(to):
            yield self._answer(rank)
        self._idle.clear()

    def _answer(self, rank: int) -> Send:
        budget = self._sizing.budget(rank, self._live)
        message = Parameters(self._snapshot, self._buffers, self._version, budget)
        return Send(rank, message, supersedes="parameters")

    # State

    def state(self) -> State:
        return {
            **super().state(),
            "parameters": self._parameters.clone(),
            "buffers": [buffer.clone() for buffer in self._buffers],
            "optimizer": self._stepper.state(),
            "reported": sorted(self._reported),
            "idle": sorted(self._idle),
            "nonfinite_in_a_row": {str(rank): count for rank, count in self._nonfinite_in_a_row.items()},
            "collected": self._collected.state(),
            "pacing": self._sizing.state(),
            "update_due": self._update_due,
        }

    def restore(self, state: State) -> None:
        super().restore(state)
        self._parameters.copy_(state["parameters"])
        self._snapshot = self._parameters.clone()
        self._buffers = tuple(state["buffers"])
        self._stepper.restore(state["optimizer"])
        self._reported = set(state["reported"])
        self._idle = set(state["idle"])
        self._nonfinite_in_a_row = {int(rank): count for rank, count in state["nonfinite_in_a_row"].items()}
        self._collected.restore(state["collected"])
        self._sizing.restore(state["pacing"])
        self._update_due = state["update_due"]


def _sizing(config: HubSettings) -> WorkSizing:
    if isinstance(config.compute, TargetBatch):
        return TargetBatchSizing(config.compute, config.microbatch)
    if isinstance(config.compute, Share):
        return ShareSizing(config.compute)
    return WorkSizing(config.compute)
