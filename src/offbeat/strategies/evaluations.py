"""Evaluations that a node has asked for: which versions are being measured, and when the next is due."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from offbeat.core.actions import Action, Evaluate, Report
from offbeat.core.events import Evaluated
from offbeat.core.messages import Buffers
from offbeat.core.strategy import Cadence, EverySeconds, EveryUpdates, State
from offbeat.records.schema import Evaluation

EVALUATIONS_MAX = 8
"""Evaluations under way at a time: each holds parameters of its own."""


class Evaluations:
    """For the rank that evaluates; where `cadence` is None, nobody does."""

    def __init__(self, rank: int, cadence: Cadence | None) -> None:
        self._rank = rank
        self._cadence = cadence
        self._last_at = 0.0
        self._last_version = -1
        self._under_way: dict[int, tuple[float, int]] = {}
        """version → (when it was made, samples in it)"""

    @property
    def under_way(self) -> bool:
        return bool(self._under_way)

    def due(self, at: float, version: int) -> bool:
        """Whether this version should be measured. Where updates are faster than that, a later one will do.

        By the clock one is measured at a time: where that takes longer than the interval, what is known stays fresh.
        """
        if isinstance(self._cadence, EveryUpdates):
            due = version - self._last_version >= self._cadence.updates
            return due and len(self._under_way) < EVALUATIONS_MAX
        due = isinstance(self._cadence, EverySeconds) and at - self._last_at >= self._cadence.seconds
        return due and not self._under_way

    def has_new(self, version: int) -> bool:
        """Whether there is anything to measure, due or not: not what was measured last."""
        return self._cadence is not None and version != self._last_version

    def begin(self, at: float, version: int, samples: int, values: tuple[Tensor, Buffers]) -> Iterator[Action]:
        """Measure these values, which nobody changes any more."""
        self._last_at, self._last_version = at, version
        self._under_way[version] = (at, samples)
        yield Evaluate(*values, version)

    def report(self, event: Evaluated) -> Iterator[Action]:
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
        """A process that goes on from a checkpoint gets no answer to what the one before it asked; it may ask again."""
        if self._under_way:
            self._last_version = -1
        self._under_way = {}

    def state(self) -> State:
        return {
            "last_at": self._last_at,
            "last_version": self._last_version,
            "under_way": {str(version): list(made) for version, made in self._under_way.items()},
        }

    def restore(self, state: State) -> None:
        self._last_at, self._last_version = state["last_at"], state["last_version"]
        self._under_way = {int(version): (at, samples) for version, (at, samples) in state["under_way"].items()}
