"""Runs of both engines with trackers: where the records of a run go besides its directory, tables and figures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from offbeat.core.workload import Workload
from offbeat.engine.experiment import Experiment
from offbeat.errors import OffbeatError
from offbeat.lab.workloads.text import bits_per_byte
from offbeat.launch.run_monitor import RunObserver
from offbeat.live.checkpoints import read_checkpoint
from offbeat.records.files import read_header, read_run
from offbeat.records.metrics import Summary, summarize
from offbeat.records.schema import AnyRecord, RunHeader
from offbeat.tracking.run_description import tracked_run
from offbeat.tracking.run_metrics import RunMetrics
from offbeat.tracking.sink import TrackingSink
from offbeat.tracking.tracker import Tracker
from offbeat.tracking.tracker_thread import Say


def sink_for(
    trackers: Sequence[Tracker],
    header: RunHeader,
    experiment: Experiment,
    workload: Workload,
    directory: Path | None,
    *,
    since: float | None = None,
    say: Say,
) -> TrackingSink:
    """A sink for the records of an experiment.

    trackers: what the sink feeds
    header: the header of the run
    experiment: what is run, resolved
    workload: its workload
    directory: the run directory; None if the run has none, or one that is removed at its end
    since: the time of the run at which it is resumed; None: a new run
    say: receives sentences for the user
    """
    losses = ("loss", "bits_per_byte") if workload.loss is bits_per_byte else ("loss",)
    run = tracked_run(header, experiment, directory, is_resumed=since is not None)
    return TrackingSink(trackers, run, RunMetrics(experiment.until, since, losses), say)


@contextlib.contextmanager
def open_sink(sink: TrackingSink, summarized: Callable[[], Summary]) -> Iterator[TrackingSink]:
    """Start the trackers of a run, and close them at its end.

    sink: feeds the trackers
    summarized: computes the summary of the run; without records it may raise
    """
    sink.start()
    failure: str | None = None
    try:
        yield sink
    except BaseException as error:
        failure = str(error) if isinstance(error, OffbeatError) else type(error).__name__
        raise
    finally:
        summary = None
        with contextlib.suppress(OffbeatError, OSError):
            summary = summarized()
        sink.close(summary, failure)


class TrackedObserver:
    """Passes the records of a live run on to its trackers, and everything to another observer."""

    def __init__(self, observer: RunObserver, sink: TrackingSink) -> None:
        self._observer, self._sink = observer, sink
        self.say, self.line = observer.say, observer.line

    def records(self, records: Sequence[AnyRecord]) -> None:
        self._observer.records(records)
        self._sink.records(records)


@contextlib.contextmanager
def track_live_run(
    trackers: Sequence[Tracker],
    experiment: Experiment,
    workload: Workload,
    directory: Path,
    *,
    is_kept: bool,
    resume: bool,
    observer: RunObserver,
) -> Iterator[RunObserver]:
    """The observer of a live run, which feeds its trackers, too.

    trackers: what follows the run
    experiment: what is run, resolved
    workload: its workload
    directory: the run directory, which has a header already
    is_kept: whether the directory remains after the run
    resume: whether the run is continued from its checkpoint
    observer: is called with records and output as well
    """
    if not trackers:
        yield observer
        return
    since = read_checkpoint(directory).elapsed_seconds if resume else None
    place = directory if is_kept else None
    sink = sink_for(trackers, read_header(directory), experiment, workload, place, since=since, say=observer.say)
    with open_sink(sink, lambda: summarize(read_run(directory))):
        yield TrackedObserver(observer, sink)
