"""The switch of a population: keeps what every member last sent, scores it, and answers each member on its own.

    Progress (parameters) arrives → counted as an update → scored: held-out loss where it is measured, else the
    member's own training loss → from one look at all scores:
        much worse than the best, or not finite   → the best is asked for all it is made of, and takes its place
        otherwise                                 → Merged: the mean of its parameters and those of its sources

Nobody waits: a member lays the answer under what it has learned meanwhile. The result is the member with the best
score. What a member sent before it took another's place is counted, and not looked at any more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from offbeat.core.actions import Action, Evaluate, Report, Send
from offbeat.core.events import Evaluated, MessageArrived
from offbeat.core.flat import is_finite, merge_buffers
from offbeat.core.messages import Buffers, Message
from offbeat.core.schedules import rate_at
from offbeat.core.strategy import NodeContext, State
from offbeat.records.schema import Contribution, Notice, Update
from offbeat.strategies.local_training import Begin, GlobalUpdate, LocalParameters, LocalTraining
from offbeat.strategies.population.population_member import Replace, Snapshot, SnapshotRequest
from offbeat.strategies.population.population_parts import Rates, Sources, rate_factor
from offbeat.strategies.server_node import HUB, ServerNode


@dataclass(frozen=True)
class MemberReport:
    """What a member was when it last reported."""

    parameters: Tensor
    buffers: Buffers
    exchange: int
    score: float
    incarnation: int
    takeovers: int

    def state(self) -> dict[str, Any]:
        return {
            "parameters": self.parameters.clone(),
            "buffers": [buffer.clone() for buffer in self.buffers],
            "exchange": self.exchange,
            "score": self.score,
            "incarnation": self.incarnation,
            "takeovers": self.takeovers,
        }

    @classmethod
    def restored(cls, state: dict[str, Any]) -> MemberReport:
        return cls(**{**state, "buffers": tuple(state["buffers"])})


class PopulationServer(ServerNode):
    def __init__(
        self,
        context: NodeContext,
        training: LocalTraining,
        sources: Sources,
        preempt_above: float | None,
        rates: Rates,
    ) -> None:
        super().__init__(context, training.patience_seconds)
        self._training = training
        self._sources = sources
        self._preempt_above = preempt_above
        self._rates = rates
        self._initial = context.parameters.clone()
        self._standings: dict[int, MemberReport] = {}
        """rank → its last report that has a score"""
        self._unscored: dict[int, MemberReport] = {}
        """rank → its report that is being scored"""
        self._queued: dict[int, MemberReport] = {}
        """rank → a newer one that came meanwhile"""
        self._scoring: dict[int, int] = {}
        """number of an evaluation → the rank it is of; they count down from -1, since others have versions"""
        self._asked = 0
        self._takeovers: dict[int, int] = {}
        self._blown_up: dict[int, int] = {}
        """rank → how many reports in a row had nothing finite in them"""
        self._failing: dict[int, int] = {}
        """rank that should take over → the rank that was asked to lend"""

    # Members

    def _result(self) -> tuple[Tensor, Buffers]:
        best = self._best(self._standings)
        if best is None:
            return self._initial, self._setup.buffers
        return self._standings[best].parameters, self._standings[best].buffers

    def _best(self, ranks: Iterable[int]) -> int | None:
        scores = {rank: self._standings[rank].score for rank in ranks if math.isfinite(self._standings[rank].score)}
        return min(scores, key=lambda rank: (scores[rank], rank)) if scores else None

    def _welcome(self, rank: int) -> Message:
        """Go on where your last report was; the first time, with what you have yourself."""
        known = self._queued.pop(rank, None) or self._unscored.get(rank) or self._standings.get(rank)
        parameters = self._initial.new_empty(0) if known is None else known.parameters
        buffers = () if known is None else known.buffers
        draw, done = self._position(rank)
        return Begin(parameters, buffers, self._version, 0, self._samples, len(self._live), draw, done)

    def _set_timers(self, at: float) -> Iterable[Action]:
        """A process that goes on from a checkpoint gets no score for what the one before it had measured."""
        self._unscored, self._queued, self._scoring = {}, {}, {}
        return ()

    def _came(self, rank: int) -> None:
        self._takeovers[rank] = self._blown_up[rank] = 0

    def _forget(self, rank: int) -> None:
        self._failing = {failing: lender for failing, lender in self._failing.items() if rank not in (failing, lender)}

    # Reports

    def _received(self, event: MessageArrived) -> Iterator[Action]:
        if isinstance(event.message, Snapshot):
            yield from self._lent(event.source, cast(Snapshot, event.keep()))
            return
        rank, message = event.source, cast(LocalParameters, event.keep())
        if self._awaited is not None:
            complete = ((first, stop) for first, stop, _ in message.complete)
            for draws in (*complete, *message.broken, *message.abandoned):
                yield from self._too_late(event.at, rank, draws)
            return
        for draws in message.broken:
            yield from self._drop(event.at, rank, draws, "nonfinite")
        for draws in message.abandoned:
            yield from self._drop(event.at, rank, draws, "late")
        yield from self._update(event.at, rank, message)
        if self._has_enough():
            yield from self._stop(event.at)
        elif message.takeovers == self._takeovers[rank]:
            yield from self._reported(event.at, rank, message)

    def _update(self, at: float, rank: int, message: LocalParameters) -> Iterator[Action]:
        parts = tuple(Contribution(rank, first, stop, self._version - old) for first, stop, old in message.complete)
        if not parts:
            return
        for part in parts:
            self._draws[rank].add(part.first, part.stop)
        samples = sum(part.stop - part.first for part in parts)
        rate = rate_factor(self._rates, rank) * rate_at(self._training.optimizer.lr or 0.0, self._samples)
        self._version += 1
        self._samples += samples
        yield Report(
            Update(
                at=at,
                rank=HUB,
                version=self._version,
                messages=1,
                samples=samples,
                samples_total=self._samples,
                learning_rate=rate,
                contributions=parts,
            )
        )
        if self._evaluations.due(at, self._version):
            yield from self._evaluate(at)

    def _reported(self, at: float, rank: int, message: LocalParameters) -> Iterator[Action]:
        if not message.samples or not is_finite(message.change):
            yield from self._nothing_finite(at, rank, message)
            return
        self._blown_up[rank] = 0
        standing = MemberReport(
            message.change,
            message.buffers,
            message.exchange,
            message.score,
            self._live[rank],
            message.takeovers,
        )
        if self._setup.evaluate is None:
            yield from self._scored(at, rank, standing)
        elif rank in self._unscored:
            self._queued[rank] = standing
        else:
            yield from self._measure(rank, standing)

    def _nothing_finite(self, at: float, rank: int, message: LocalParameters) -> Iterator[Action]:
        """A member has blown up, and has no parameters to look at. Where all have, nobody is left to rescue them."""
        if message.broken_in_a_row:
            self._blown_up[rank] += 1
            yield from self._rescue(rank, math.inf)
        if all(self._blown_up[other] >= self._training.nonfinite_max for other in self._live):
            self._failure = (
                f"every worker has sent {self._training.nonfinite_max} reports in a row without a finite gradient; "
                "lower the learning rate, or clip the gradient (clip_norm)"
            )
            yield from self._stop(at)
        else:
            yield self._acknowledge(rank, message.exchange)

    def _measure(self, rank: int, standing: MemberReport) -> Iterator[Action]:
        self._unscored[rank] = standing
        self._asked += 1
        self._scoring[-self._asked] = rank
        yield Evaluate(standing.parameters, standing.buffers, -self._asked)

    def _evaluated(self, event: Evaluated) -> Iterable[Action]:
        if event.version not in self._scoring:
            return super()._evaluated(event)
        return self._measured(event.at, self._scoring.pop(event.version), event.loss)

    def _measured(self, at: float, rank: int, loss: float) -> Iterator[Action]:
        unscored = self._unscored.pop(rank)
        score = loss if math.isfinite(loss) else math.inf
        yield from self._scored(at, rank, replace(unscored, score=score))
        if rank in self._queued and self._awaited is None:
            yield from self._measure(rank, self._queued.pop(rank))

    # Answers

    def _scored(self, at: float, rank: int, standing: MemberReport) -> Iterator[Action]:
        here = self._live.get(rank) == standing.incarnation
        if self._awaited is not None or (here and standing.takeovers != self._takeovers[rank]):
            return  # it comes too late, or is of what the member was before it took another's place
        self._standings[rank] = standing
        if here:
            yield from self._rescue(rank, standing.score)
            yield self._acknowledge(rank, standing.exchange) if rank in self._failing else self._answer(rank, standing)

    def _rescue(self, rank: int, score: float) -> Iterator[Action]:
        """Let a member that does far worse than the best take its place."""
        here = [other for other, life in self._live.items() if self._has_reported(other, life)]
        best = self._best(here)
        if self._preempt_above is None or best is None or best == rank or rank in self._failing:
            return
        highest = max(0.0, self._standings[best].score) * self._preempt_above
        if score > highest > 0 or not math.isfinite(score):
            asked_before = best in self._failing.values()
            self._failing[rank] = best
            if not asked_before:
                yield Send(best, SnapshotRequest())

    def _has_reported(self, rank: int, life: int) -> bool:
        return rank in self._standings and self._standings[rank].incarnation == life

    def _acknowledge(self, rank: int, exchange: int) -> Send:
        """Nothing new; without an answer a member would think that the hub does not keep up."""
        nothing = self._initial.new_empty(0)
        return Send(rank, GlobalUpdate(nothing, (), self._version, 0, exchange, self._samples, len(self._live)))

    def _answer(self, rank: int, standing: MemberReport) -> Send:
        scores = {other: self._standings[other].score for other in self._live if other in self._standings}
        sources = [self._standings[other] for other in self._sources.of(rank, scores)]
        if not sources:
            return self._acknowledge(rank, standing.exchange)
        everyone = [standing, *sources]
        mean = torch.zeros_like(standing.parameters)
        for each in everyone:
            mean.add_(each.parameters, alpha=1.0 / len(everyone))
        buffers = merge_buffers([(each.buffers, 1) for each in everyone])
        merged = GlobalUpdate(mean, buffers, self._version, 0, standing.exchange, self._samples, len(self._live))
        return Send(rank, merged, supersedes="parameters")

    def _lent(self, lender: int, lent: Snapshot) -> Iterator[Action]:
        failing = sorted(rank for rank, asked in self._failing.items() if asked == lender)
        self._failing = {rank: asked for rank, asked in self._failing.items() if asked != lender}
        if self._awaited is not None or not is_finite(lent.parameters):
            return
        for rank in failing:
            self._takeovers[rank] += 1
            self._queued.pop(rank, None)
            self._standings[rank] = replace(
                self._standings[lender],
                exchange=-1,
                incarnation=self._live[rank],
                takeovers=self._takeovers[rank],
            )
            takeover = Replace(
                lent.parameters,
                lent.buffers,
                lent.state,
                lent.shape,
                lent.settings,
                self._takeovers[rank],
                self._version,
            )
            yield Send(rank, takeover)

    # Stop

    def _stop(self, at: float) -> Iterator[Action]:
        held_out = self._setup.evaluate is not None and self._best(self._standings) is not None
        if self._awaited is None and not held_out:  # none was measured in time: what they say themselves has to do
            self._standings |= self._unscored | self._queued
        best = self._best(self._standings)
        if self._awaited is None and best is not None:
            of = "held-out" if held_out else "training"
            text = (
                f"the result is worker {best}'s: {of} loss {self._standings[best].score:.4g}, the best of "
                f"{len(self._standings)} in the population"
            )
            yield Report(Notice(at=at, rank=HUB, text=text))
        yield from super()._stop(at)

    # State

    def state(self) -> State:
        groups = {"standings": self._standings, "unscored": self._unscored, "queued": self._queued}
        return {
            **super().state(),
            **{
                name: {str(rank): standing.state() for rank, standing in group.items()}
                for name, group in groups.items()
            },
            "scoring": {str(number): rank for number, rank in self._scoring.items()},
            "asked": self._asked,
            "takeovers": {str(rank): count for rank, count in self._takeovers.items()},
            "blown_up": {str(rank): count for rank, count in self._blown_up.items()},
            "failing": {str(rank): lender for rank, lender in self._failing.items()},
        }

    def restore(self, state: State) -> None:
        super().restore(state)
        groups = {"standings": self._standings, "unscored": self._unscored, "queued": self._queued}
        for name, group in groups.items():
            group.update({int(rank): MemberReport.restored(packed) for rank, packed in state[name].items()})
        self._scoring = {int(number): rank for number, rank in state["scoring"].items()}
        self._asked = state["asked"]
        self._takeovers = {int(rank): count for rank, count in state["takeovers"].items()}
        self._blown_up = {int(rank): count for rank, count in state["blown_up"].items()}
        self._failing = {int(rank): lender for rank, lender in state["failing"].items()}
