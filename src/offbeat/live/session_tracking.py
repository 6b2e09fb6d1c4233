"""Trackers of a training loop of the user's own: its records are read by a thread while the run goes on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from offbeat.core.actions import Record
from offbeat.errors import OffbeatError
from offbeat.launch.rank_info import RankInfo
from offbeat.live.local_ranks import LocalRanks
from offbeat.records.files import MemoryWriter, Tail
from offbeat.records.metrics import Summary
from offbeat.tracking.named_trackers import Track, checked_trackers, trackers_of
from offbeat.tracking.run_description import tracked_run
from offbeat.tracking.run_metrics import RunMetrics
from offbeat.tracking.sink import TrackingSink
from offbeat.tracking.tracker import Tracker

POLL_SECONDS = 0.25


class RecordSource(Protocol):
    """Where the records of a run are read while it goes on."""

    def poll(self) -> Sequence[Record]: ...


class MemoryTail:
    """Reads new records from memory, while other threads append to them."""

    def __init__(self, memory: MemoryWriter) -> None:
        self._memory, self._position = memory, 0

    def poll(self) -> Sequence[Record]:
        """The new records, in the order in which they were written."""
        records = self._memory.records[self._position :]
        self._position += len(records)
        return records


def session_trackers(track: Track, rank_info: RankInfo) -> list[Tracker]:
    """The trackers that this process feeds: all in the process of rank 0, none in the others.

    track: what the user has given; raises `ConfigurationError` if it cannot be used.
    rank_info: the rank of this process.
    """
    if rank_info.alone or rank_info.rank == 0:
        return checked_trackers(track)
    trackers_of(track)  # a name that does not exist is refused everywhere
    return []


class SessionTracking:
    """Feeds the records of a run to trackers.

    trackers: what the records are fed to.
    ranks: the ranks of this process.
    """

    def __init__(self, trackers: Sequence[Tracker], ranks: LocalRanks) -> None:
        self._trackers, self._ranks = trackers, ranks
        self._sink: TrackingSink | None = None
        self._source: RecordSource = MemoryTail(ranks.memory)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="offbeat tracking", daemon=True)

    def start(self) -> None:
        """Start the trackers; raises `ConfigurationError` if one of them refuses the run."""
        if not self._trackers:
            return
        ranks = self._ranks
        directory, header, experiment = ranks.rank_info.directory, ranks.header(), ranks.experiment
        was_begun = ranks.checkpoint is not None or ranks.rank_info.incarnation > 0
        since = ranks.clock.now() if was_begun else None
        if directory is not None:
            self._source = Tail(directory)
        run = tracked_run(header, experiment, directory, is_resumed=was_begun)
        sink = TrackingSink(self._trackers, run, RunMetrics(experiment.until, since))
        sink.start()
        self._sink = sink
        self._thread.start()

    def close(self, summarized: Callable[[], Summary], error: BaseException | None) -> None:
        """Close the trackers after the end of the run; waits for them, for a limited time.

        summarized: computes the summary of the run.
        error: what has ended the loop; None if it has ended by itself.
        """
        if self._sink is None:
            return
        self._ended.set()
        self._thread.join()
        sink, self._sink = self._sink, None
        sink.records(self._source.poll())
        summary = None
        with contextlib.suppress(OffbeatError):
            summary = summarized()
        sink.close(summary, None if error is None else f"{type(error).__name__}: {error}")

    def _poll(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            assert self._sink is not None
            self._sink.records(self._source.poll())
