"""Invariants of every run, on any cluster; checked from outside, through records and actions.

- No sample is applied twice: the draws of contributions and of dropped messages never overlap.
- No sample is lost silently: the accounted draws have no gap up to the last one, and all of them were computed.
- Versions grow by one per update; no rank computes at an older version than before, unless its strategy allows it;
  staleness is not negative and within its bound.
- Only the last updates are undone; their samples are accounted for again.
- A gradient that is not finite is never applied, and the parameters stay finite.
- What is applied was computed: a contribution is one round, or several consecutive ones, the oldest of which determines
  its staleness.
- All live ranks finish, with equal parameters and buffers, once the requested samples have been applied; a rank that
  sent `Stop` has got `Stopped` from each receiver, or lost it.

In a decentralized run, the updates of a peer are lost when it crashes, and it may repeat them after a restart: samples
are counted per life of a peer, and each peer counts the total that it knows of. Peers that lost their link while both
were alive may end with different parameters, and so may a peer that restarts when the others have finished.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from offbeat.core.actions import Action, Compute, Finish, Record, Samples, Send
from offbeat.core.events import Event, MessageArrived, PeerLost, Started
from offbeat.core.messages import Stop, Stopped
from offbeat.core.sample_ledger import SampleLedger
from offbeat.core.strategy import Strategy
from offbeat.errors import ContractViolation
from offbeat.records.schema import Dropped, Round, Undone, Update
from offbeat.simulation.simulator import Simulation, SimulationResult


class Violation(ContractViolation):
    """An invariant or a conformance check was violated."""


def verify(condition: bool, message: str) -> None:
    """Raise `Violation` unless the condition holds."""
    if not condition:
        raise Violation(message)


class Invariants:
    """Checks one run: it is both the record writer and the observer of the simulation."""

    def __init__(self, strategy: Strategy) -> None:
        self.records: list[Record] = []
        self._is_decentralized = strategy.is_decentralized
        self._allows_stale_compute = strategy.allows_stale_compute
        self._staleness_max = strategy.staleness_bound
        self._may_diverge = False
        """Whether peers may end with different parameters, see above."""
        self._accounted: dict[int, SampleLedger] = defaultdict(SampleLedger)
        self._computed: dict[tuple[int, int], list[Round]] = defaultdict(list)
        """(rank, first draw) → the rounds that started there, newest first"""
        self._lost: set[int] = set()
        self._stopping: dict[int, set[int]] = defaultdict(set)
        self._computed_up_to: dict[int, int] = defaultdict(int)
        self._must_account: dict[int, int] = defaultdict(int)
        """rank → the draw up to which it computed at versions that were not undone"""
        self._updates: list[Update] = []
        """The updates that have not been undone."""
        self._undone_at = 0
        self._versions: dict[int, int] = defaultdict(int)
        self._computes_at: dict[tuple[int, int], int] = {}
        self._samples_total = 0

    # Record writer

    def write(self, record: Record) -> None:
        self.records.append(record)
        if isinstance(record, Round):
            self._computed[record.rank, record.draws[0]].insert(0, record)
            self._computed_up_to[record.rank] = max(self._computed_up_to[record.rank], record.draws[1])
            if record.version >= self._undone_at:
                self._must_account[record.rank] = max(self._must_account[record.rank], record.draws[1])
        elif isinstance(record, Update):
            self._check_update(record)
            self._updates.append(record)
        elif isinstance(record, Undone):
            self._undo(record)
        elif isinstance(record, Dropped):
            self._account(record.rank, record.first, record.stop)
            verify(record.stop <= self._computed_up_to[record.rank], f"{record} was never computed")

    def _check_update(self, update: Update) -> None:
        self._advance_version(update.rank, update.version)
        contributed = sum(part.stop - part.first for part in update.contributions)
        verify(contributed == update.samples, f"{update} has {update.samples} samples, but {contributed} contributed")
        verify(update.samples > 0 or update.messages > 0, f"{update} has nothing in it")
        total = self._samples_total + update.samples
        least = update.samples if self._is_decentralized else total
        verify(least <= update.samples_total <= total, f"{update} counts {update.samples_total} samples of {total}")
        self._samples_total = total
        for part in update.contributions:
            self._account(part.rank, part.first, part.stop)
            rounds = self._rounds_of(part.rank, part.first, part.stop)
            if rounds is None:
                raise Violation(f"{part} was applied but never computed")
            verify(all(round_.finite for round_ in rounds), f"{part} was applied although it is not finite")
            stale = update.version - 1 - min(round_.version for round_ in rounds)
            verify(0 <= stale == part.staleness, f"{part} is {stale} versions older than what it was applied to")
            if self._staleness_max is not None:
                verify(part.staleness <= self._staleness_max, f"{part} is staler than {self._staleness_max}")

    def _undo(self, undone: Undone) -> None:
        """Remove the last updates; the samples computed up to now may be computed again, or not."""
        self._advance_version(undone.rank, undone.version)
        self._undone_at = undone.version
        samples = 0
        while self._updates and self._updates[-1].version > undone.to_version:
            for part in self._updates.pop().contributions:
                self._accounted[part.rank].remove(part.first, part.stop)
                samples += part.stop - part.first
        verify(samples == undone.samples, f"{undone} undoes {samples} samples")
        self._samples_total -= samples
        verify(undone.samples_total == self._samples_total, f"{undone} leaves {self._samples_total} samples")
        self._must_account.clear()

    def _advance_version(self, rank: int, version: int) -> None:
        before = self._versions[rank]
        verify(version == before + 1, f"rank {rank} made version {version} after {before}")
        self._versions[rank] = version

    def _rounds_of(self, rank: int, first: int, stop: int) -> list[Round] | None:
        """The consecutive rounds that make up these draws; None if there are none."""
        if first == stop:
            return []
        for round_ in self._computed.get((rank, first), ()):
            rest = self._rounds_of(rank, round_.draws[1], stop) if first < round_.draws[1] <= stop else None
            if rest is not None:
                return [round_, *rest]
        return None

    def _account(self, rank: int, first: int, stop: int) -> None:
        try:
            self._accounted[rank].add(first, stop)
        except ContractViolation as error:
            raise Violation(f"rank {rank}: {error}") from None

    # Observer

    def before(self, simulation: Simulation, rank: int, event: Event) -> None:
        if isinstance(event, Started) and self._is_decentralized:
            self._accounted[rank], self._computed_up_to[rank], self._versions[rank] = SampleLedger(), 0, 0
            self._must_account[rank] = 0
            self._may_diverge |= any(process.finish is not None for process in simulation.processes)
        elif isinstance(event, PeerLost):
            self._may_diverge |= simulation.processes[event.peer].active
            if simulation.processes[event.peer].finish is None or event.peer in self._stopping[rank]:
                self._lost |= {rank, event.peer}  # a crash or a partition, not an orderly end
            self._stopping[rank].discard(event.peer)
        elif isinstance(event, MessageArrived) and isinstance(event.message, Stopped):
            self._stopping[rank].discard(event.source)

    def after(self, simulation: Simulation, rank: int, event: Event, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send) and isinstance(action.message, Stop):
                self._stopping[rank].add(action.to)
            if isinstance(action, Finish) and action.failure is None:
                unconfirmed = self._stopping[rank]
                verify(not unconfirmed, f"rank {rank} finished without Stopped from {sorted(unconfirmed)}")
            if isinstance(action, Compute) and not self._allows_stale_compute:
                key = (rank, simulation.processes[rank].life)
                before = self._computes_at.get(key, 0)
                verify(action.version >= before, f"rank {rank} computes at version {action.version} after {before}")
                self._computes_at[key] = action.version

    # End of the run

    def check_end(self, simulation: Simulation, outcome: SimulationResult) -> None:
        for rank, draws in sorted(self._accounted.items()):
            first_draw = draws.ranges[0][0] if draws.ranges and self._is_decentralized else 0
            gaps = [gap for gap in draws.missing_below(draws.stop) if gap[0] >= first_draw]
            verify(not gaps, f"draws {gaps} of rank {rank} are not accounted for")
            if rank not in self._lost and outcome.failure is None:
                required, computed = self._must_account[rank], self._computed_up_to[rank]
                is_consistent = required <= draws.stop <= computed
                verify(is_consistent, f"rank {rank} computed up to draw {required}, {draws.stop} are accounted for")
        until = simulation.experiment.until
        if isinstance(until, Samples) and outcome.failure is None:
            verify(self._samples_total >= until.count, f"it ended after {self._samples_total} of {until.count} samples")
        results = [finish for _, finish in sorted(outcome.finishes.items()) if finish.failure is None]
        for result in results:
            verify(bool(torch.isfinite(result.parameters).all()), "the final parameters are not finite")
            first = results[0]
            is_equal = result.version == first.version and torch.equal(result.parameters, first.parameters)
            is_equal = is_equal and all(map(torch.equal, result.buffers, first.buffers))
            is_equal = is_equal or (self._may_diverge and self._is_decentralized)
            verify(
                is_equal, f"ranks ended with different parameters, versions {result.version} and {results[0].version}"
            )
