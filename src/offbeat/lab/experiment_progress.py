"""Progress of `simulate`, `compare` and `train`: shown in notebooks, and elsewhere when it is asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from offbeat.core.actions import Record
from offbeat.core.validation import require
from offbeat.engine.experiment import Experiment, share_done
from offbeat.errors import quoted
from offbeat.lab.notebook_bar import in_notebook
from offbeat.lab.progress import RunProgress, show_progress
from offbeat.records.metrics import summarize
from offbeat.records.schema import AnyRecord, RunRecords, Update


class ExperimentProgress(RunProgress):
    """Progress of experiments that run one after the other."""

    def on_record(self, experiment: Experiment, record: Record) -> None:
        """Advance by a record of the experiment that runs."""
        if isinstance(record, Update):
            self.share(0, share_done(experiment, record), f"{experiment.name}, seed {experiment.seed}")

    def on_end(self, run: RunRecords) -> None:
        """Count an experiment as ended."""
        self.ended(0, summarize(run))


@contextmanager
def show_experiments(progress: bool | None, runs: int) -> Iterator[ExperimentProgress | None]:
    """The progress of a number of runs; None if none is shown.

    progress: whether to show it; None: in a notebook only
    runs: how many runs there are
    """
    require(
        progress is None or isinstance(progress, bool),
        f"progress is True, False or None, which is: in notebooks only; but {quoted(progress)} was given",
    )
    if not (in_notebook() if progress is None else progress):
        yield None
        return
    with show_progress() as shown:
        yield ExperimentProgress(shown, runs)


class StderrObserver:
    """Prints to standard error what ranks print, and what happens to their processes; shows progress if there is any.

    experiment: the live run
    progress: what shows its progress; None: nothing
    """

    def __init__(self, experiment: Experiment, progress: ExperimentProgress | None = None) -> None:
        self._experiment, self._progress = experiment, progress

    def records(self, records: Sequence[AnyRecord]) -> None:
        updates = [record for record in records if isinstance(record, Update)]
        if self._progress is not None and updates:
            self._progress.on_record(self._experiment, max(updates, key=lambda update: update.samples_total))

    def say(self, sentence: str) -> None:
        print(f"offbeat: {sentence}", file=sys.stderr)

    def line(self, rank: int, text: str) -> None:
        print(f"[rank {rank}] {text}", file=sys.stderr)
