"""What must hold in every run, whatever the cluster does. Watched from outside, through records and actions.

- No sample is applied twice: the draws of contributions and of dropped messages never overlap.
- None is lost uncounted: what is accounted for is everything up to the last draw, without a gap, and all of it
  was really computed.
- Versions grow by one per update; no rank computes at an older version than before, unless that is its strategy;
  staleness is never negative and keeps to its bound.
- Updates that are undone are the last ones; their samples are accounted for anew.
- A gradient that is not finite is never applied, and the parameters stay finite.
- What was applied was computed: a contribution is one round, or several that follow one another, the oldest of which
  says how stale it is.
- Everyone who is alive finishes, with the same parameters and buffers, once the samples asked for have been applied;
  whoever sent Stop has heard Stopped from everyone it sent it to, or lost them.

Where every rank keeps a replica, what a peer has applied dies with it: a peer that comes back may repeat it, so that
samples are told apart by life, and each peer's total is what it knows of. Peers that lost sight of each other while
both were alive may end apart, and so may those who come back when the others have ended.
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
    """An invariant does not hold."""


def verify(holds: bool, sentence: str) -> None:
    if not holds:
        raise Violation(sentence)


class Invariants:
    """Watches one run: a writer of records and an observer of the simulation at once."""

    def __init__(self, strategy: Strategy) -> None:
        self.records: list[Record] = []
        self._replicas = strategy.is_decentralized
        self._allows_stale_compute = strategy.allows_stale_compute
        self._staleness_max = strategy.staleness_bound
        self._split = False
        """Whether two that were alive lost sight of each other."""
        self._accounted: dict[int, SampleLedger] = defaultdict(SampleLedger)
        self._computed: dict[tuple[int, int], list[Round]] = defaultdict(list)
        """(rank, first draw) → the rounds that began there, the last one first"""
        self._lost: set[int] = set()
        self._stopping: dict[int, set[int]] = defaultdict(set)
        self._covered: dict[int, int] = defaultdict(int)
        self._owed: dict[int, int] = defaultdict(int)
        """rank → how far it computed at versions that were not undone: so much has to be accounted for"""
        self._updates: list[Update] = []
        """Those that count, of runs where somebody may undo them."""
        self._undone_at = 0
        self._versions: dict[int, int] = defaultdict(int)
        self._computes_at: dict[tuple[int, int], int] = {}
        self._samples_total = 0

    # As a writer

    def write(self, record: Record) -> None:
        self.records.append(record)
        if isinstance(record, Round):
            self._computed[record.rank, record.draws[0]].insert(0, record)
            self._covered[record.rank] = max(self._covered[record.rank], record.draws[1])
            if record.version >= self._undone_at:
                self._owed[record.rank] = max(self._owed[record.rank], record.draws[1])
        elif isinstance(record, Update):
            self._updated(record)
            self._updates.append(record)
        elif isinstance(record, Undone):
            self._undo(record)
        elif isinstance(record, Dropped):
            self._account(record.rank, record.first, record.stop)
            verify(record.stop <= self._covered[record.rank], f"{record} was never computed")

    def _updated(self, update: Update) -> None:
        before = self._versions[update.rank]
        verify(update.version == before + 1, f"rank {update.rank} made version {update.version} after {before}")
        self._versions[update.rank] = update.version
        counted = sum(part.stop - part.first for part in update.contributions)
        verify(counted == update.samples, f"{update} says {update.samples} samples, but {counted} are in it")
        verify(update.samples > 0 or update.messages > 0, f"{update} has nothing in it")
        total = self._samples_total + update.samples
        counted = update.samples_total
        right = counted == total if not self._replicas else update.samples <= counted <= total
        verify(right, f"{update} makes {counted} samples of {total}")
        self._samples_total = total
        for part in update.contributions:
            self._account(part.rank, part.first, part.stop)
            rounds = self._rounds_of(part.rank, part.first, part.stop)
            if rounds is None:
                raise Violation(f"{part} was applied but never computed")
            verify(all(found.finite for found in rounds), f"{part} was applied although it is not finite")
            stale = update.version - 1 - min(found.version for found in rounds)
            verify(0 <= stale == part.staleness, f"{part} is {stale} versions older than what it was applied to")
            if self._staleness_max is not None:
                verify(part.staleness <= self._staleness_max, f"{part} is staler than {self._staleness_max}")

    def _undo(self, undone: Undone) -> None:
        """Take the last updates back; whatever was computed up to now may be computed again, or not."""
        before = self._versions[undone.rank]
        verify(undone.version == before + 1, f"rank {undone.rank} made version {undone.version} after {before}")
        self._versions[undone.rank] = self._undone_at = undone.version
        samples = 0
        while self._updates and self._updates[-1].version > undone.to_version:
            for part in self._updates.pop().contributions:
                self._accounted[part.rank].remove(part.first, part.stop)
                samples += part.stop - part.first
        verify(samples == undone.samples, f"{undone} undoes {samples} samples")
        self._samples_total -= samples
        verify(undone.samples_total == self._samples_total, f"{undone} leaves {self._samples_total} samples")
        self._owed.clear()

    def _rounds_of(self, rank: int, first: int, stop: int) -> list[Round] | None:
        """The rounds that make up these draws, one after the other."""
        if first == stop:
            return []
        for found in self._computed.get((rank, first), ()):
            rest = self._rounds_of(rank, found.draws[1], stop) if first < found.draws[1] <= stop else None
            if rest is not None:
                return [found, *rest]
        return None

    def _account(self, rank: int, first: int, stop: int) -> None:
        try:
            self._accounted[rank].add(first, stop)
        except ContractViolation as error:
            raise Violation(f"rank {rank}: {error}") from None

    # As an observer

    def before(self, simulation: Simulation, rank: int, event: Event) -> None:
        if isinstance(event, Started) and self._replicas:
            self._accounted[rank], self._covered[rank], self._versions[rank] = SampleLedger(), 0, 0
            self._owed[rank] = 0
            self._split |= any(process.finish is not None for process in simulation.processes)
        elif isinstance(event, PeerLost):
            self._split |= simulation.processes[event.peer].active
            if simulation.processes[event.peer].finish is None or event.peer in self._stopping[rank]:
                self._lost |= {rank, event.peer}  # not an orderly end
            self._stopping[rank].discard(event.peer)
        elif isinstance(event, MessageArrived) and isinstance(event.message, Stopped):
            self._stopping[rank].discard(event.source)

    def after(self, simulation: Simulation, rank: int, event: Event, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send) and isinstance(action.message, Stop):
                self._stopping[rank].add(action.to)
            if isinstance(action, Finish) and action.failure is None:
                waiting = self._stopping[rank]
                verify(not waiting, f"rank {rank} finished without having heard Stopped from {sorted(waiting)}")
            if isinstance(action, Compute) and not self._allows_stale_compute:
                key = (rank, simulation.processes[rank].life)
                before = self._computes_at.get(key, 0)
                verify(action.version >= before, f"rank {rank} computes at version {action.version} after {before}")
                self._computes_at[key] = action.version

    # At the end

    def ended(self, simulation: Simulation, outcome: SimulationResult) -> None:
        for rank, draws in sorted(self._accounted.items()):
            begin = draws.ranges[0][0] if draws.ranges and self._replicas else 0
            gaps = [gap for gap in draws.missing_below(draws.stop) if gap[0] >= begin]
            verify(not gaps, f"draws {gaps} of rank {rank} are not accounted for")
            if rank not in self._lost and outcome.failure is None:
                owed, end = self._owed[rank], self._covered[rank]
                right = owed <= draws.stop <= end
                verify(right, f"rank {rank} computed up to draw {owed}, {draws.stop} are accounted for")
        until = simulation.scenario.until
        if isinstance(until, Samples) and outcome.failure is None:
            verify(self._samples_total >= until.count, f"it ended after {self._samples_total} of {until.count} samples")
        results = [finish for _, finish in sorted(outcome.finishes.items()) if finish.failure is None]
        for result in results:
            verify(bool(torch.isfinite(result.parameters).all()), "the final parameters are not finite")
            first = results[0]
            same = result.version == first.version and torch.equal(result.parameters, first.parameters)
            same = same and all(map(torch.equal, result.buffers, first.buffers))
            same = same or (self._split and self._replicas)
            verify(same, f"ranks ended with different parameters, versions {result.version} and {results[0].version}")
