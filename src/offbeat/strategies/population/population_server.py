"""The hub of a population: it keeps the last report of every member, scores it, and answers each member on its own.

    LocalParameters arrive → counted as an update → scored: by validation loss if there are evaluations, else by the
    member's own training loss → compared with the scores of all members:
        far worse than the best, or not finite   → SnapshotRequest to the best; Replace with its snapshot
        otherwise                                → GlobalUpdate: the mean of its parameters and those of its sources,
                                                   or SourceGradients: the mean of the gradients of its sources

Members do not wait: each adds to the answer what it has learned meanwhile. The result is the member with the best
score. Reports from before a replacement are counted, and not scored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from offbeat.core.actions import Action, Evaluate, Report, Send
from offbeat.core.buffer_merge import mean_buffers
from offbeat.core.events import Evaluated, MessageArrived
from offbeat.core.flat import is_finite
from offbeat.core.messages import Buffers, Message
from offbeat.core.schedules import rate_at
from offbeat.core.strategy import NodeContext
from offbeat.records.schema import Contribution, Notice
from offbeat.strategies.local_training import Begin, GlobalUpdate, LocalParameters, LocalTraining, check_local
from offbeat.strategies.member_checks import MemberCheck
from offbeat.strategies.message_kinds import kept, unexpected
from offbeat.strategies.population.population_member import (
    GradientReport,
    Replace,
    Snapshot,
    SnapshotRequest,
    SourceGradients,
)
from offbeat.strategies.population.population_parts import Rates, Sources, rate_factor
from offbeat.strategies.server_node import HUB, ServerNode


@dataclass(frozen=True)
class MemberReport:
    """What a member has last sent."""

    parameters: Tensor
    buffers: Buffers
    exchange: int
    score: float
    incarnation: int
    replacements: int
    gradient: Tensor | None = None
    """The gradients since the report before, where those are sent."""


class PopulationServer(ServerNode):
    _scored: dict[int, MemberReport]
    """rank → its last report that has a score"""
    _being_scored: dict[int, MemberReport]
    """rank → its report that is being evaluated"""
    _queued: dict[int, MemberReport]
    """rank → a newer report that waits for that evaluation to end"""
    _scoring: dict[int, int]
    """version of an evaluation → rank; versions count down from -1, since those of the result count up"""
    _requests: int = 0
    """Evaluations requested to score reports."""
    _replacements: dict[int, int]
    """rank → how many times it has been replaced since it joined"""
    _diverged: dict[int, int]
    """rank → reports in a row without finite parameters"""
    _replacing: dict[int, int]
    """rank to be replaced → rank that was asked for a snapshot"""
    _answered: dict[int, dict[int, tuple[int, int]]]
    """rank → source → incarnation and exchange of the last of its gradients that this rank has been sent"""

    def __init__(
        self,
        context: NodeContext,
        training: LocalTraining,
        sources: Sources,
        preempt_above: float | None,
        rates: Rates,
        sends_gradients: bool,
    ) -> None:
        super().__init__(context, training.patience_seconds, training.hang_detector())
        self._training = training
        self._sources = sources
        self._preempt_above = preempt_above
        self._rates = rates
        self._sends_gradients = sends_gradients
        self._initial = context.parameters.clone()
        self._scored, self._being_scored, self._queued, self._scoring = {}, {}, {}, {}
        self._replacements, self._diverged, self._replacing, self._answered = {}, {}, {}, {}

    @property
    def _uses_validation(self) -> bool:
        """Whether scores are losses on validation data, or else training losses."""
        return self._context.evaluate is not None and self._context.has_validation

    # Members

    def _result(self) -> tuple[Tensor, Buffers]:
        best = self._best(self._scored)
        if best is None:
            return self._initial, self._context.buffers
        return self._scored[best].parameters, self._scored[best].buffers

    def _best(self, ranks: Iterable[int]) -> int | None:
        scores = {rank: self._scored[rank].score for rank in ranks if math.isfinite(self._scored[rank].score)}
        return min(scores, key=lambda rank: (scores[rank], rank)) if scores else None

    def _welcome(self, rank: int) -> Message:
        """Begin at the last report of this rank; the first time, with the member's own initial parameters."""
        report = self._queued.pop(rank, None) or self._being_scored.get(rank) or self._scored.get(rank)
        parameters = self._initial.new_empty(0) if report is None else report.parameters
        buffers = () if report is None else report.buffers
        progress = self._samples, len(self._live)
        return Begin(parameters, buffers, self._version, 0, *progress, **self._position(rank))

    def _set_timers(self, at: float) -> Iterable[Action]:
        """Discard evaluations under way: a process that continues from a checkpoint does not receive their results."""
        self._being_scored, self._queued, self._scoring, self._answered = {}, {}, {}, {}
        return ()

    def _worker_joined(self, rank: int) -> None:
        self._replacements[rank] = self._diverged[rank] = 0

    def _worker_lost(self, rank: int) -> None:
        self._replacing = {target: source for target, source in self._replacing.items() if rank not in (target, source)}

    # Reports

    def _message_arrived(self, event: MessageArrived) -> Iterable[Action]:
        match event.message:
            case Replace():
                raise unexpected(event, HUB)
            case Snapshot():
                self._check_snapshot(event, event.message)
                return self._snapshot_arrived(event.source, kept(event, Snapshot))
            case LocalParameters():
                self._check(event, event.message)
                return self._parameters_arrived(event.at, event.source, kept(event, LocalParameters))
            case _:
                raise unexpected(event, HUB)

    def _check(self, event: MessageArrived, message: LocalParameters) -> None:
        check, rank = MemberCheck(event, HUB), event.source
        check.require(self._started and rank in self._ledgers, "no work to do")
        check_local(check, message, self._initial.numel(), self._initial, self._stop_max(event.at, rank))
        if isinstance(message, GradientReport) and message.gradient.numel():
            check.vector("gradient", message.gradient, self._initial, self._initial.numel())
        check.buffers(message.buffers, self._context.buffers)
        limit = self._replacements[rank]
        check.require(0 <= message.replacements <= limit, f"{message.replacements} replacements, of {limit}")
        check.version(max((version for _, _, version in message.complete), default=0), self._version)
        self._check_draws(check, event, message.all_draws)

    def _check_snapshot(self, event: MessageArrived, message: Snapshot) -> None:
        check = MemberCheck(event, HUB)
        check.vector("copy", message.parameters, self._initial, self._initial.numel())
        check.buffers(message.buffers, self._context.buffers)

    def _parameters_arrived(self, at: float, rank: int, message: LocalParameters) -> Iterator[Action]:
        if self._is_stopping:
            yield from self._drop_after_stop(at, rank, message.all_draws)
            return
        for draws in message.nonfinite:
            yield from self._drop(at, rank, draws, "nonfinite")
        for draws in message.abandoned:
            yield from self._drop(at, rank, draws, "late")
        yield from self._count(at, rank, message)
        if self._has_enough():
            yield from self._stop(at)
        elif message.replacements == self._replacements[rank]:
            yield from self._report_arrived(at, rank, message)

    def _count(self, at: float, rank: int, message: LocalParameters) -> Iterator[Action]:
        """Count the samples of a report as an update."""
        parts = [Contribution(rank, first, stop, self._version - old) for first, stop, old in message.complete]
        if not parts:
            return
        for part in parts:
            self._ledgers[rank].add(part.first, part.stop)
        rate = rate_factor(self._rates, rank) * rate_at(self._training.optimizer.lr or 0.0, self._samples)
        yield from self._updated(at, 1, rate, parts)

    def _report_arrived(self, at: float, rank: int, message: LocalParameters) -> Iterator[Action]:
        if not message.samples or not is_finite(message.change):
            yield from self._nothing_finite(at, rank, message)
            return
        self._diverged[rank] = 0
        report = MemberReport(
            message.change,
            message.buffers,
            message.exchange,
            message.score,
            self._live[rank],
            message.replacements,
            _finite_gradient(message),
        )
        if not self._uses_validation:
            yield from self._score(rank, report)
        elif rank in self._being_scored:
            self._queued[rank] = report
        else:
            yield from self._request_score(rank, report)

    def _nothing_finite(self, at: float, rank: int, message: LocalParameters) -> Iterator[Action]:
        """Replace a member that has diverged. The run fails if all members have."""
        if message.nonfinite_in_a_row:
            self._diverged[rank] += 1
            yield from self._replace_if_worse(rank, math.inf)
        if all(self._diverged[other] >= self._training.nonfinite_max for other in self._live):
            self._failure = (
                f"every worker has sent {self._training.nonfinite_max} reports in a row without a finite gradient; "
                "lower the learning rate, or clip the gradient (clip_norm)"
            )
            yield from self._stop(at)
        else:
            yield self._acknowledge(rank, message.exchange)

    def _request_score(self, rank: int, report: MemberReport) -> Iterator[Action]:
        self._being_scored[rank] = report
        self._requests += 1
        self._scoring[-self._requests] = rank
        yield Evaluate(report.parameters, report.buffers, -self._requests, is_score=True)

    def _evaluated(self, event: Evaluated) -> Iterable[Action]:
        if event.version not in self._scoring:
            return super()._evaluated(event)
        return self._score_arrived(self._scoring.pop(event.version), event.loss)

    def _score_arrived(self, rank: int, loss: float) -> Iterator[Action]:
        score = loss if math.isfinite(loss) else math.inf
        yield from self._score(rank, replace(self._being_scored.pop(rank), score=score))
        if rank in self._queued and not self._is_stopping:
            yield from self._request_score(rank, self._queued.pop(rank))

    # Answers

    def _score(self, rank: int, report: MemberReport) -> Iterator[Action]:
        """Compare a report that has a score with those of the others, and answer its sender."""
        is_connected = self._live.get(rank) == report.incarnation
        if self._is_stopping or (is_connected and report.replacements != self._replacements[rank]):
            return  # too late, or from before a replacement
        self._scored[rank] = report
        if is_connected:
            yield from self._replace_if_worse(rank, report.score)
            yield self._acknowledge(rank, report.exchange) if rank in self._replacing else self._answer(rank, report)

    def _replace_if_worse(self, rank: int, score: float) -> Iterator[Action]:
        """Request a snapshot of the best member to replace this one, if its score is far worse."""
        reports = self._scored.items()
        best = self._best(other for other, report in reports if self._live.get(other) == report.incarnation)
        if self._preempt_above is None or best is None or best == rank or rank in self._replacing:
            return
        limit = max(0.0, self._scored[best].score) * self._preempt_above
        if score > limit > 0 or not math.isfinite(score):
            is_requested = best in self._replacing.values()
            self._replacing[rank] = best
            if not is_requested:
                yield Send(best, SnapshotRequest())

    def _acknowledge(self, rank: int, exchange: int) -> Send:
        """An update without values; a member without any answer skips exchanges."""
        return Send(rank, self._update_for(self._initial.new_empty(0), (), exchange))

    def _answer(self, rank: int, report: MemberReport) -> Send:
        scores = {other: self._scored[other].score for other in self._live if other in self._scored}
        sources = {other: self._scored[other] for other in self._sources.of(rank, scores)}
        gradients = self._new_gradients(rank, sources)
        if gradients:
            progress = self._version, report.exchange, self._samples, len(self._live)
            return Send(rank, SourceGradients(torch.stack(gradients).mean(0), *progress))
        if not sources or self._sends_gradients:
            return self._acknowledge(rank, report.exchange)
        averaged = [report, *sources.values()]
        mean = torch.zeros_like(report.parameters)
        for each in averaged:
            mean.add_(each.parameters, alpha=1.0 / len(averaged))
        buffers = mean_buffers([(each.buffers, 1) for each in averaged])
        return Send(rank, self._update_for(mean, buffers, report.exchange), supersedes="parameters")

    def _new_gradients(self, rank: int, sources: Mapping[int, MemberReport]) -> list[Tensor]:
        """The gradients that sources have last reported, without those that this member has been sent already."""
        answered = self._answered.setdefault(rank, {})
        gradients = []
        for source, report in sources.items():
            identity = report.incarnation, report.exchange
            if report.gradient is not None and answered.get(source) != identity:
                answered[source] = identity
                gradients.append(report.gradient)
        return gradients

    def _update_for(self, parameters: Tensor, buffers: Buffers, exchange: int) -> GlobalUpdate:
        return GlobalUpdate(parameters, buffers, self._version, 0, exchange, self._samples, len(self._live))

    def _snapshot_arrived(self, source: int, snapshot: Snapshot) -> Iterator[Action]:
        targets = sorted(rank for rank, requested in self._replacing.items() if requested == source)
        self._replacing = {rank: requested for rank, requested in self._replacing.items() if requested != source}
        if self._is_stopping or not is_finite(snapshot.parameters):
            return
        for rank in targets:
            self._replacements[rank] += 1
            self._queued.pop(rank, None)
            self._scored[rank] = replace(
                self._scored[source],
                exchange=-1,
                gradient=None,
                incarnation=self._live[rank],
                replacements=self._replacements[rank],
            )
            copied = {item.name: getattr(snapshot, item.name) for item in fields(snapshot)}
            yield Send(rank, Replace(**copied, replacements=self._replacements[rank], version=self._version))

    # Stop

    def _stop(self, at: float) -> Iterator[Action]:
        is_validated = self._uses_validation and self._best(self._scored) is not None
        if not self._is_stopping and not is_validated:  # no evaluation ended in time: use the training losses
            self._scored |= self._being_scored | self._queued
        best = self._best(self._scored)
        if not self._is_stopping and best is not None:
            of = "validation" if is_validated else "training"
            text = (
                f"the result is worker {best}'s: {of} loss {self._scored[best].score:.4g}, the best of "
                f"{len(self._scored)} in the population"
            )
            yield Report(Notice(at=at, rank=HUB, text=text))
        yield from super()._stop(at)


def _finite_gradient(message: LocalParameters) -> Tensor | None:
    """The gradient of a report; None if it has none, or one that is not finite."""
    is_usable = isinstance(message, GradientReport) and message.gradient.numel() and is_finite(message.gradient)
    return message.gradient if isinstance(message, GradientReport) and is_usable else None
