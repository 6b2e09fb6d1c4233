"""What has arrived for the next merge: one entry for each life of a learner, weighted by the samples it processed.

What a learner sends one after the other adds up. One that was lost and has come back began anew, from the hub's values:
what it learns then stands beside what it had sent before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.messages import Buffers
from offbeat.records.schema import Contribution
from offbeat.strategies.progress import Progress


@dataclass
class Entry:
    """All that one learner has sent since the last merge."""

    change: Tensor
    samples: int
    buffers: Buffers
    exchange: int
    messages: int = 1


class Collected:
    def __init__(self) -> None:
        self.entries: dict[tuple[int, int], Entry] = {}
        """(rank, incarnation) → what it sent"""
        self.contributions: list[Contribution] = []

    def add(self, rank: int, incarnation: int, message: Progress, version: int) -> None:
        """Collect a message that may be held on to."""
        self.contributions += [Contribution(rank, first, stop, version - at) for first, stop, at in message.complete]
        learner = (rank, incarnation)
        entry = self.entries.get(learner)
        if entry is None:
            self.entries[learner] = Entry(message.change, message.samples, message.buffers, message.exchange)
            return
        if entry.samples and message.samples:
            entry.change = entry.change + message.change
        elif message.samples:
            entry.change = message.change
        entry.samples += message.samples
        entry.buffers = message.buffers or entry.buffers
        entry.exchange = message.exchange
        entry.messages += 1

    def retire(self) -> None:
        """All of it was sent in former lives, whatever those are called that come now."""
        entries = enumerate(self.entries.items(), start=1)
        self.entries = {(rank, -number): entry for number, ((rank, _), entry) in entries}

    def older(self, versions: int) -> None:
        """So many versions have been made since, of other fragments."""
        self.contributions = [Contribution(c.rank, c.first, c.stop, c.staleness + versions) for c in self.contributions]

    @property
    def learners(self) -> set[int]:
        """Whose changes are in it."""
        return {rank for (rank, _), entry in self.entries.items() if entry.samples}

    @property
    def samples(self) -> int:
        """The weight of it all."""
        return sum(entry.samples for entry in self.entries.values())

    @property
    def messages(self) -> int:
        return sum(entry.messages for entry in self.entries.values())

    def mean(self) -> Tensor:
        """The mean change by samples, in the order of ranks, so that it does not depend on who was first."""
        total: Tensor | None = None
        for _, entry in sorted(self.entries.items()):
            if entry.samples:
                share = entry.samples / self.samples
                total = torch.mul(entry.change, share) if total is None else total.add_(entry.change, alpha=share)
        assert total is not None
        return total

    def buffers(self) -> list[tuple[Buffers, int]]:
        return [(entry.buffers, entry.samples) for _, entry in sorted(self.entries.items())]

    def state(self) -> dict[str, Any]:
        return {
            "entries": [
                {
                    "learner": list(learner),
                    "change": entry.change.clone(),
                    "samples": entry.samples,
                    "buffers": [buffer.clone() for buffer in entry.buffers],
                    "exchange": entry.exchange,
                    "messages": entry.messages,
                }
                for learner, entry in self.entries.items()
            ],
            "contributions": [[c.rank, c.first, c.stop, c.staleness] for c in self.contributions],
        }

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Collected:
        collected = cls()
        for packed in state["entries"]:
            rank, incarnation = packed["learner"]
            values = {name: value for name, value in packed.items() if name != "learner"}
            collected.entries[rank, incarnation] = Entry(**{**values, "buffers": tuple(packed["buffers"])})
        collected.contributions = [Contribution(*entry) for entry in state["contributions"]]
        return collected
