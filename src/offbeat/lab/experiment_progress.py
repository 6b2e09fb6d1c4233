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
from offbeat.lab.progress import Progress, RunProgress, show_progress
from offbeat.records.metrics import summarize
from offbeat.records.schema import AnyRecord, RunRecords, Update
from offbeat.tracking.sink import print_sentence


class ExperimentProgress(RunProgress):
    """Progress of experiments that run one after the other, by their records."""

    def on_record(self, experiment: Experiment, record: Record) -> None:
        """Advance by a record of the experiment that runs."""
        if isinstance(record, Update):
            self.share(0, share_done(experiment, record), f"{experiment.name}, seed {experiment.seed}")

    def on_end(self, run: RunRecords) -> None:
        """Count an experiment as ended."""
        self.ended(0, summarize(run))


class PlanProgress:
    """Shows the progress of simulations, as the observer of `run_simulations`; nothing without `shown`."""

    def __init__(self, shown: RunProgress | None) -> None:
        self._shown = shown

    def share(self, index: int, share: float, label: str) -> None:
        if self._shown is not None:
            self._shown.share(index, share, label)

    def ended(self, index: int, records: RunRecords) -> None:
        if self._shown is not None:
            self._shown.ended(index, summarize(records))

    def say(self, sentence: str) -> None:
        print_sentence(sentence)


@contextmanager
def show_experiments(progress: bool | None, runs: int) -> Iterator[ExperimentProgress | None]:
    """The progress of runs one after the other, by their records; None if none is shown.

    progress: whether to show it; None: in a notebook only
    runs: how many runs there are
    """
    with _shown(progress) as shown:
        yield None if shown is None else ExperimentProgress(shown, runs)


@contextmanager
def show_runs(progress: bool | None, runs: int, at_a_time: int) -> Iterator[RunProgress | None]:
    """The progress of runs of which several may run `at_a_time`; otherwise as `show_experiments`."""
    with _shown(progress) as shown:
        yield None if shown is None else RunProgress(shown, runs, at_a_time)


@contextmanager
def _shown(progress: bool | None) -> Iterator[Progress | None]:
    require(
        progress is None or isinstance(progress, bool),
        f"progress is True, False or None, which is: in notebooks only; but {quoted(progress)} was given",
    )
    if not (in_notebook() if progress is None else progress):
        yield None
        return
    with show_progress() as shown:
        yield shown


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
