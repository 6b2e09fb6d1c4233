"""Runs by label, and how each label looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from offbeat.lab.plots.looks import Look, looks
from offbeat.records.files import RunRecords


@dataclass(frozen=True)
class Groups:
    """Runs under their labels, in order of first appearance, and how each label looks."""

    runs: dict[str, list[RunRecords]]
    looks: dict[str, Look]

    @classmethod
    def of(cls, runs: Sequence[RunRecords]) -> Self:
        groups: dict[str, list[RunRecords]] = {}
        for run in runs:
            groups.setdefault(run.header.label, []).append(run)
        names = {label: name for label, group in groups.items() if (name := _strategy(group[0]))}
        return cls(groups, looks(groups, names))

    @property
    def all(self) -> list[RunRecords]:
        return [run for group in self.runs.values() for run in group]

    def one_of_each(self) -> dict[str, RunRecords]:
        """One run of each label, of the same seed where one is common to all of them."""
        seeds = [{run.header.seed for run in group} for group in self.runs.values()]
        seed = min(set.intersection(*seeds), default=None) if seeds else None
        return {
            label: next((run for run in group if run.header.seed == seed), group[0])
            for label, group in self.runs.items()
        }


def _strategy(run: RunRecords) -> str | None:
    """The short name of the strategy that was run, where the run knows it."""
    strategy = (run.header.experiment or {}).get("strategy")
    name = strategy.get("name") if isinstance(strategy, dict) else None
    return name if isinstance(name, str) else None
