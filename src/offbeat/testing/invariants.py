"""What must hold in every run, whatever the cluster does. Watched from outside, through records and actions.

- No sample is applied twice: the draws of contributions and of dropped messages never overlap.
- None is lost uncounted: what is accounted for is everything up to the last draw, without a gap, and all of it
  was really computed.
- Versions grow by one per update; no rank computes at an older version than before; staleness is never negative
  and keeps to its bound.
- A gradient that is not finite is never applied, and the parameters stay finite.
- Everyone who is alive finishes, with the same parameters, once the samples asked for have been applied.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from offbeat.actions import Action, Compute, Record, Samples
from offbeat.draws import Draws
from offbeat.engines.simulated import Outcome, Simulation
from offbeat.errors import ContractViolation
from offbeat.events import Event
from offbeat.records.schema import Dropped, Round, Update


class Violation(ContractViolation):
    """An invariant does not hold."""


def demand(holds: bool, sentence: str) -> None:
    if not holds:
        raise Violation(sentence)


class Invariants:
    """Watches one run: a writer of records and an observer of the simulation at once."""

    def __init__(self, staleness_max: int | None = None) -> None:
        self.records: list[Record] = []
        self._staleness_max = staleness_max
        self._accounted: dict[int, Draws] = defaultdict(Draws)
        self._computed: dict[tuple[int, int, int], bool] = {}
        self._covered: dict[int, int] = defaultdict(int)
        self._versions: dict[int, int] = defaultdict(int)
        self._computes_at: dict[tuple[int, int], int] = {}
        self._samples_total = 0

    # As a writer

    def write(self, record: Record) -> None:
        self.records.append(record)
        if isinstance(record, Round):
            self._computed[record.rank, *record.draws] = record.finite
            self._covered[record.rank] = max(self._covered[record.rank], record.draws[1])
        elif isinstance(record, Update):
            self._updated(record)
        elif isinstance(record, Dropped):
            self._account(record.rank, record.first, record.stop)
            demand(record.stop <= self._covered[record.rank], f"{record} was never computed")

    def _updated(self, update: Update) -> None:
        before = self._versions[update.rank]
        demand(update.version == before + 1, f"rank {update.rank} made version {update.version} after {before}")
        self._versions[update.rank] = update.version
        counted = sum(part.stop - part.first for part in update.contributions)
        demand(counted == update.samples > 0, f"{update} says {update.samples} samples, but {counted} are in it")
        demand(update.samples_total > self._samples_total, f"{update} does not add to the samples of the run")
        self._samples_total = update.samples_total
        for part in update.contributions:
            self._account(part.rank, part.first, part.stop)
            finite = self._computed.get((part.rank, part.first, part.stop))
            demand(finite is not None, f"{part} was applied but never computed")
            demand(finite is True, f"{part} was applied although it is not finite")
            demand(part.staleness >= 0, f"{part} is newer than what it was applied to")
            if self._staleness_max is not None:
                demand(part.staleness <= self._staleness_max, f"{part} is staler than {self._staleness_max}")

    def _account(self, rank: int, first: int, stop: int) -> None:
        try:
            self._accounted[rank].add(first, stop)
        except ContractViolation as error:
            raise Violation(f"rank {rank}: {error}") from None

    # As an observer

    def before(self, simulation: Simulation, rank: int, event: Event) -> None:
        """Nothing to watch before an event."""

    def after(self, simulation: Simulation, rank: int, event: Event, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Compute):
                key = (rank, simulation.processes[rank].life)
                before = self._computes_at.get(key, 0)
                demand(action.version >= before, f"rank {rank} computes at version {action.version} after {before}")
                self._computes_at[key] = action.version

    # At the end

    def ended(self, simulation: Simulation, outcome: Outcome) -> None:
        for rank, draws in sorted(self._accounted.items()):
            gaps = list(draws.missing_below(draws.stop))
            demand(not gaps, f"draws {gaps} of rank {rank} are not accounted for")
        until = simulation.scenario.until
        if isinstance(until, Samples) and outcome.failure is None:
            demand(self._samples_total >= until.count, f"it ended after {self._samples_total} of {until.count} samples")
        results = [finish for _, finish in sorted(outcome.finishes.items()) if finish.failure is None]
        for result in results:
            demand(bool(torch.isfinite(result.parameters).all()), "the final parameters are not finite")
            same = result.version == results[0].version and torch.equal(result.parameters, results[0].parameters)
            demand(same, f"ranks ended with different parameters, versions {result.version} and {results[0].version}")
