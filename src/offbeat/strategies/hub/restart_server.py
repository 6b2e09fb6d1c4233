"""The hub of plain synchronous training, which does not continue without a lost worker.

    a worker is lost   parameters, buffers and optimizer are reset to the last checkpoint; training halts
    all are back       Welcome to all workers, at the checkpoint; a further loss in the meantime prolongs the wait
    patience ends      Welcome to the workers that are connected

A checkpoint is a copy in memory, made after the first update that is `checkpoint_interval_seconds` later than the last
checkpoint or restart. Updates since then are undone: their samples are drawn again, as are those of gradients that were
in flight. Dropped samples stay dropped. The version after a restart is a new one, so that versions never repeat, and
gradients from before the restart are recognized by their older version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from offbeat.core.actions import Action, ClearTimer, Report, Send, SetTimer
from offbeat.core.events import MessageArrived, PeerLost, TimerFired
from offbeat.core.messages import Buffers
from offbeat.core.strategy import NodeContext
from offbeat.records.schema import Contribution, Undone
from offbeat.strategies.hub.hub_parts import HubSettings
from offbeat.strategies.hub.hub_server import HubServer
from offbeat.strategies.hub.hub_worker import Gradient
from offbeat.strategies.server_node import HUB

ROUNDING = 1.0 - 1e-9
"""Factor on the checkpoint interval: sums of times are rounded, and a checkpoint that is due must not be postponed."""


@dataclass
class RestartPoint:
    """A checkpoint in memory."""

    at: float
    version: int
    samples: int
    parameters: Tensor
    buffers: Buffers
    optimizer: dict[str, Any]


class RestartServer(HubServer):
    timers = (*HubServer.timers, "missing")

    _checkpoint: RestartPoint
    _since: list[Contribution]
    """Contributions to the updates since the checkpoint."""
    _halted: bool = False
    _missing: set[int]
    """While training is halted: the lost workers that have not joined again."""

    def __init__(self, config: HubSettings, context: NodeContext) -> None:
        super().__init__(config, context)
        assert config.checkpoint_interval_seconds is not None
        self._interval_seconds = config.checkpoint_interval_seconds
        self._checkpoint = self._new_checkpoint(0.0)
        self._since, self._missing = [], set()

    # Checkpoints

    def _new_checkpoint(self, at: float) -> RestartPoint:
        optimizer = self._optimizer.state()
        return RestartPoint(at, self._version, self._samples, self._parameters.clone(), self._buffers, optimizer)

    def _begin(self, at: float) -> Iterator[Action]:
        self._checkpoint.at = at
        yield from super()._begin(at)

    def _update(self, at: float) -> Iterator[Action]:
        self._since += self._collected.contributions
        yield from super()._update(at)
        if at - self._checkpoint.at >= self._interval_seconds * ROUNDING:
            self._checkpoint = self._new_checkpoint(at)
            self._since = []

    # Halt

    def _lost(self, event: PeerLost) -> Iterator[Action]:
        """Halt when a worker is lost that has not left on its own."""
        rank = event.peer
        halts = self._started and not self._is_stopping and rank in self._live and rank not in self._left
        was_halted, self._halted = self._halted, self._halted or halts
        yield from super()._lost(event)
        if halts:
            yield from self._wait_for(event.at, [rank], go_back=not was_halted)

    def _resume(self, at: float) -> Iterator[Action]:
        ranks = sorted(self._live)
        was_halted, self._halted = self._halted, not self._is_stopping
        yield from super()._resume(at)
        if self._halted:
            yield from self._wait_for(at, ranks, go_back=not was_halted)

    def _wait_for(self, at: float, ranks: Iterable[int], go_back: bool) -> Iterator[Action]:
        self._missing.update(ranks)
        if go_back:
            yield self._go_back(at)
        yield SetTimer("missing", self._patience_seconds)

    def _go_back(self, at: float) -> Report:
        """Reset everything to the checkpoint, under a new version."""
        undone = sum(part.stop - part.first for part in self._since)
        for part in (*self._since, *self._take_unused()):
            self._ledgers[part.rank].remove(part.first, part.stop)
        self._since = []
        self._reported.clear()
        self._idle.clear()
        back = self._checkpoint
        self._parameters.copy_(back.parameters)
        self._buffers = back.buffers
        self._optimizer.restore(back.optimizer)
        self._snapshot = None
        self._version, self._samples = self._version + 1, back.samples
        to_version, back.version = back.version, self._version
        return Report(
            Undone(
                at=at,
                rank=HUB,
                version=self._version,
                to_version=to_version,
                samples=undone,
                samples_total=self._samples,
            )
        )

    # Continue

    def _admit(self, at: float, rank: int) -> Iterator[Action]:
        self._missing.discard(rank)
        if not self._halted:
            yield from super()._admit(at, rank)
        elif not self._missing:
            yield from self._continue(at)

    def _timer_fired(self, event: TimerFired) -> Iterator[Action]:
        if event.name != "missing":
            yield from super()._timer_fired(event)
        elif not self._is_stopping:
            self._missing.clear()
            if self._live:
                yield from self._continue(event.at)

    def _continue(self, at: float) -> Iterator[Action]:
        self._halted = False
        self._checkpoint.at = at
        yield ClearTimer("missing")
        for rank in sorted(self._live):
            yield Send(rank, self._welcome(rank))

    # Train

    def _gradient_arrived(self, event: MessageArrived, message: Gradient) -> Iterator[Action]:
        if message.version >= self._version:  # an older one was undone, and its samples are computed again
            yield from super()._gradient_arrived(event, message)

    def _update_if_ready(self, at: float) -> Iterator[Action]:
        if not self._halted:
            yield from super()._update_if_ready(at)
