"""What nodes share that update the parameters: versions and samples, evaluations, the end of the budget, records."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from offbeat.core.actions import Action, Budget, Report, Samples, Seconds, SetTimer
from offbeat.core.events import Evaluated
from offbeat.core.messages import Buffers
from offbeat.core.sample_ledger import Range
from offbeat.core.strategy import Node, NodeContext
from offbeat.records.schema import Contribution, Dropped, Reason, Update
from offbeat.strategies.evaluations import Evaluations
from offbeat.strategies.node_state import Stateful

NO_OPTIMIZER = "the strategy has no optimizer; give it one, for example optimizer=offbeat.SGD(lr=0.1)"


def samples_limit(until: Budget) -> int | None:
    """The number of samples after which a budget is used up; None: it ends by time alone."""
    return until.count if isinstance(until, Samples) else getattr(until, "samples_max", None)


class TrainingNode(Stateful, Node):
    """A node that makes updates."""

    _version: int = 0
    _samples: int = 0
    """Samples in all updates so far."""
    _evaluations: Evaluations
    _started: bool = False
    _began_at: float = 0.0
    _failure: str | None = None
    _finished: bool = False

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._evaluations = Evaluations(context.rank, context.evaluate)

    @abstractmethod
    def _result(self) -> tuple[Tensor, Buffers]:
        """The newest parameters and buffers, in tensors that are not changed any more."""

    @abstractmethod
    def _finish_if_done(self, at: float) -> Iterable[Action]:
        """Finish, unless training goes on or an evaluation is under way."""

    def _set_until_timer(self, at: float) -> Iterator[Action]:
        if isinstance(self._context.until, Seconds):
            yield SetTimer("until", max(0.0, self._began_at + self._context.until.seconds - at))

    def _has_enough(self) -> bool:
        """Whether the updates have used up the samples of the run."""
        limit = samples_limit(self._context.until)
        return limit is not None and self._samples >= limit

    def _updated(
        self, at: float, messages: int, learning_rate: float, contributions: Sequence[Contribution]
    ) -> Iterator[Action]:
        """Count an update that was made of these contributions, record it, and evaluate when that is due."""
        samples = sum(part.stop - part.first for part in contributions)
        self._version += 1
        self._samples += samples
        yield Report(
            Update(
                at=at,
                rank=self._context.rank,
                version=self._version,
                messages=messages,
                samples=samples,
                samples_total=self._samples,
                learning_rate=learning_rate,
                contributions=tuple(contributions),
            )
        )
        if self._evaluations.due(at, self._version):
            yield from self._evaluate(at)

    def _evaluate(self, at: float) -> Iterator[Action]:
        if self._evaluations.has_new(self._version):
            yield from self._evaluations.begin(at, self._version, self._samples, self._result())

    def _evaluated(self, event: Evaluated) -> Iterable[Action]:
        yield from self._evaluations.report(event)
        yield from self._finish_if_done(event.at)


def dropped(at: float, rank: int, draws: Range, staleness: int, reason: Reason) -> Report:
    """The record of samples of `rank` that are in no update."""
    return Report(Dropped(at=at, rank=rank, first=draws[0], stop=draws[1], staleness=staleness, reason=reason))
