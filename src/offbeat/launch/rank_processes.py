"""The local ranks of a run, each with its process, and what follows from all of them for the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from offbeat.launch.children import Child
from offbeat.launch.process_settings import hub_or_worker_name
from offbeat.launch.run_failure import with_article


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What a supervisor is told of ranks: each is a function of the rank, and called after a tick."""

    has_joined: Callable[[int], bool]
    """Whether a rank has ever joined the run."""
    rounds: Callable[[int], int] = lambda rank: 0
    """Rounds that a rank has computed."""
    is_required: Callable[[int], bool] = lambda rank: rank == 0
    """Whether the run ends with this rank."""
    name: Callable[[int], str] = hub_or_worker_name
    """What a rank is called in sentences."""


@dataclass
class RankProcess:
    """One rank: its process, or when it is started again."""

    rank: int
    child: Child | None = None
    incarnation: int = 0
    restarts: int = 0
    started_at: float = 0.0
    restart_at: float | None = None
    """When the next process is started; None where none is planned."""
    back_after: float | None = None
    """Set by a fault: seconds until the rank is started again."""
    is_fault: bool = False
    """Whether the process was killed on purpose, which does not count as a failure."""
    succeeded: bool = False
    """Whether the last process ended with exit code 0."""
    rounds: int = 0
    """Rounds that the rank had computed when its process was started."""

    @property
    def gone(self) -> bool:
        return self.child is None and self.restart_at is None


class RankProcesses:
    """All ranks that run here, rank 0 among them."""

    def __init__(self, ranks: Iterable[int], facts: RankFacts) -> None:
        self._ranks = {rank: RankProcess(rank) for rank in ranks}
        self._facts = facts
        if 0 not in self._ranks:
            raise ValueError("internal error: a supervisor needs rank 0 among its ranks")

    def __iter__(self) -> Iterator[RankProcess]:
        return iter(self._ranks.values())

    def __getitem__(self, rank: int) -> RankProcess:
        return self._ranks[rank]

    @property
    def ranks(self) -> list[int]:
        return list(self._ranks)

    @property
    def children(self) -> list[Child]:
        """The processes that run, or have ended since the last look."""
        return [process.child for process in self if process.child is not None]

    def name(self, rank: int) -> str:
        """A rank as the subject of a sentence."""
        return with_article(self._facts.name(rank))

    def is_required(self, process: RankProcess) -> bool:
        return self._facts.is_required(process.rank)

    def required_first(self) -> list[RankProcess]:
        return sorted(self, key=lambda process: not self.is_required(process))

    def has_only_peers(self) -> bool:
        """Whether no rank is required."""
        return not any(map(self.is_required, self))

    def are_workers_gone(self) -> bool:
        """Whether no rank is left that is not required."""
        return all(process.gone for process in self if not self.is_required(process))

    def deciding(self) -> list[RankProcess]:
        """Ranks with whose end the run is over: the required ones, or all."""
        return [process for process in self if self.is_required(process)] or list(self)

    def is_over(self) -> bool:
        return all(process.gone for process in self.deciding())

    def is_ending(self) -> bool:
        """Whether a peer has finished the run. Workers of a hub may end earlier."""
        return self.has_only_peers() and any(process.succeeded for process in self)

    def is_any_training(self) -> bool:
        return any(map(self._is_training, self))

    def _is_training(self, process: RankProcess) -> bool:
        """Whether this process takes part in the training. A restarted one does once it has computed."""
        has_computed = self._facts.rounds(process.rank) > process.rounds
        return process.child is not None and (process.incarnation == 1 or has_computed)

    def has_begun(self) -> bool:
        """Whether the run has begun: the first worker has joined."""
        return any(map(self._facts.has_joined, [rank for rank in self._ranks if rank] or [0]))
