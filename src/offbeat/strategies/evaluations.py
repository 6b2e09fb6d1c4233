"""Evaluations that a node has requested: which versions are being evaluated, and when the next evaluation is due."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from offbeat.core.actions import Action, Evaluate, Report
from offbeat.core.events import Evaluated
from offbeat.core.messages import Buffers
from offbeat.core.strategy import Cadence, EverySeconds, EveryUpdates
from offbeat.records.schema import Evaluation
from offbeat.strategies.node_state import Stateful

EVALUATIONS_MAX = 8
"""Most evaluations under way at a time, since each holds a copy of the parameters."""


class Evaluations(Stateful):
    """The evaluations of one rank.

    rank: the rank that evaluates, for the record.
    cadence: how often to evaluate; None: never.
    """

    _last_at: float = 0.0
    _last_version: int = -1
    _under_way: dict[int, tuple[float, int]]
    """version → time of the request, samples that the version was trained on"""

    def __init__(self, rank: int, cadence: Cadence | None) -> None:
        self._rank = rank
        self._cadence = cadence
        self._under_way = {}

    @property
    def under_way(self) -> bool:
        """Whether a requested evaluation has not ended yet."""
        return bool(self._under_way)

    def due(self, at: float, version: int) -> bool:
        """Whether `version` should be evaluated now. A version that is passed over is not evaluated later.

        With `EverySeconds` there is one evaluation at a time, so that slow evaluations do not queue up.
        """
        if isinstance(self._cadence, EveryUpdates):
            due = version - self._last_version >= self._cadence.updates
            return due and len(self._under_way) < EVALUATIONS_MAX
        due = isinstance(self._cadence, EverySeconds) and at - self._last_at >= self._cadence.seconds
        return due and not self._under_way

    def has_new(self, version: int) -> bool:
        """Whether this rank evaluates at all, and `version` is not the one that it evaluated last."""
        return self._cadence is not None and version != self._last_version

    def begin(self, at: float, version: int, samples: int, values: tuple[Tensor, Buffers]) -> Iterator[Action]:
        """Evaluate parameters and buffers, which must not be changed afterwards.

        samples: samples that `version` was trained on, for the record.
        """
        self._last_at, self._last_version = at, version
        self._under_way[version] = (at, samples)
        yield Evaluate(*values, version)

    def report(self, event: Evaluated) -> Iterator[Action]:
        """The record of an evaluation that has ended, at the time of its request; nothing if that was discarded."""
        if event.version not in self._under_way:
            return
        at, samples = self._under_way.pop(event.version)
        yield Report(
            Evaluation(
                at=at,
                rank=self._rank,
                version=event.version,
                samples_total=samples,
                loss=event.loss,
                accuracy=event.accuracy,
                accuracy_top5=event.accuracy_top5,
            )
        )

    def reset(self) -> None:
        """Discard requests of the process that wrote the checkpoint; the same version may be requested again."""
        if self._under_way:
            self._last_version = -1
        self._under_way = {}
