"""The hub of plain synchronous training: when a worker is lost, nobody goes on without it.

    a worker is lost   parameters, buffers and optimizer go back to the last checkpoint; nobody is answered any more
    all are back       Welcome to everybody, at the checkpoint; one more loss in the meantime prolongs the wait
    patience ends      Welcome to those who are there

A checkpoint is a copy in memory, made after the first update that comes `checkpoint_interval_seconds` after the last
checkpoint, or after training went on. Updates since then are undone: their samples are drawn again, as are those of
gradients that were on the way. What was dropped stays dropped. The version after going back is a new one, so that
versions never repeat, and whatever was computed before is known by its older version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from offbeat.core.actions import Action, ClearTimer, Report, Send, SetTimer
from offbeat.core.events import MessageArrived, PeerLost, TimerFired
from offbeat.core.messages import Buffers
from offbeat.core.strategy import NodeContext, State
from offbeat.records.schema import Contribution, Undone
from offbeat.strategies.hub.hub_parts import HubSettings
from offbeat.strategies.hub.hub_server import HubServer
from offbeat.strategies.hub.hub_worker import Gradient
from offbeat.strategies.server_node import HUB

ROUNDING = 1.0 - 1e-9
"""So much of an interval is one: sums of times are not exact, and an update that is due must not wait for the next."""


@dataclass
class _Checkpoint:
    """What the hub goes back to."""

    at: float
    version: int
    samples: int
    parameters: Tensor
    buffers: Buffers
    optimizer: dict[str, Any]


class RestartServer(HubServer):
    timers = (*HubServer.timers, "missing")

    def __init__(self, config: HubSettings, context: NodeContext) -> None:
        super().__init__(config, context)
        assert config.checkpoint_interval_seconds is not None
        self._interval_seconds = config.checkpoint_interval_seconds
        self._checkpoint = self._made_checkpoint(0.0)
        self._since: list[Contribution] = []
        """What is in the updates since the checkpoint."""
        self._halted = False
        self._missing: set[int] = set()
        """While halted: who is waited for."""

    # Checkpoints

    def _made_checkpoint(self, at: float) -> _Checkpoint:
        optimizer = self._stepper.state()
        return _Checkpoint(at, self._version, self._samples, self._parameters.clone(), self._buffers, optimizer)

    def _begin(self, at: float) -> Iterator[Action]:
        self._checkpoint.at = at
        yield from super()._begin(at)

    def _update(self, at: float) -> Iterator[Action]:
        self._since += self._collected.contributions
        yield from super()._update(at)
        if at - self._checkpoint.at >= self._interval_seconds * ROUNDING:
            self._checkpoint = self._made_checkpoint(at)
            self._since = []

    # Halt

    def _lost(self, event: PeerLost) -> Iterator[Action]:
        """Somebody is gone who did not say goodbye: everybody stops."""
        rank = event.peer
        falls = self._started and self._awaited is None and rank in self._live and rank not in self._left
        was_halted, self._halted = self._halted, self._halted or falls
        yield from super()._lost(event)
        if falls:
            yield from self._wait_for(event.at, [rank], go_back=not was_halted)

    def _resume(self, at: float) -> Iterator[Action]:
        ranks = sorted(self._live)
        was_halted, self._halted = self._halted, self._awaited is None
        yield from super()._resume(at)
        if self._halted:
            yield from self._wait_for(at, ranks, go_back=not was_halted)

    def _wait_for(self, at: float, ranks: Iterable[int], go_back: bool) -> Iterator[Action]:
        self._missing.update(ranks)
        if go_back:
            yield self._go_back(at)
        yield SetTimer("missing", self._patience_seconds)

    def _go_back(self, at: float) -> Report:
        undone = sum(found.stop - found.first for found in self._since)
        for found in (*self._since, *self._discard()):
            self._draws[found.rank].remove(found.first, found.stop)
        self._since = []
        self._reported.clear()
        self._idle.clear()
        back = self._checkpoint
        self._parameters.copy_(back.parameters)
        self._buffers = back.buffers
        self._stepper.restore(back.optimizer)
        self._snapshot = self._copies.copy(self._parameters)
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

    # Go on

    def _admit(self, at: float, rank: int) -> Iterator[Action]:
        self._missing.discard(rank)
        if not self._halted:
            yield from super()._admit(at, rank)
        elif not self._missing:
            yield from self._go_on(at)

    def _fired(self, event: TimerFired) -> Iterator[Action]:
        if event.name != "missing":
            yield from super()._fired(event)
        elif self._awaited is None:
            self._missing.clear()
            if self._live:
                yield from self._go_on(event.at)

    def _go_on(self, at: float) -> Iterator[Action]:
        self._halted = False
        self._checkpoint.at = at
        yield ClearTimer("missing")
        for rank in sorted(self._live):
            yield Send(rank, self._welcome(rank))

    # Train

    def _received(self, event: MessageArrived) -> Iterator[Action]:
        message = cast(Gradient, event.message)
        if message.version >= self._version:  # else of what was undone, and computed again
            yield from super()._received(event)

    def _update_if_ready(self, at: float) -> Iterator[Action]:
        if not self._halted:
            yield from super()._update_if_ready(at)

    # State

    def state(self) -> State:
        kept = self._checkpoint
        return {
            **super().state(),
            "checkpoint": {
                "at": kept.at,
                "version": kept.version,
                "samples": kept.samples,
                "parameters": kept.parameters.clone(),
                "buffers": [buffer.clone() for buffer in kept.buffers],
                "optimizer": kept.optimizer,
            },
            "since": [[found.rank, found.first, found.stop, found.staleness] for found in self._since],
            "halted": self._halted,
            "missing": sorted(self._missing),
        }

    def restore(self, state: State) -> None:
        super().restore(state)
        kept = state["checkpoint"]
        self._checkpoint = _Checkpoint(**{**kept, "buffers": tuple(kept["buffers"])})
        self._since = [Contribution(*entry) for entry in state["since"]]
        self._halted = state["halted"]
        self._missing = set(state["missing"])
