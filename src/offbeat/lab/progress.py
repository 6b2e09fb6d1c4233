"""Progress of commands and functions: a bar on a terminal or in a notebook, lines elsewhere, nothing if quiet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

from offbeat.lab.notebook_bar import NotebookBar, in_notebook

if TYPE_CHECKING:
    from rich import progress as bars

    from offbeat.records.metrics import Summary

StepLine = Callable[[str, float, float | None], str]
"""Formats a step that begins: its text, the amount done and the total."""


class Bar(Protocol):
    """A bar that can be drawn again. Only the thread that created it may call it."""

    def update(self, text: str, done: float, total: float | None) -> None: ...
    def part(self, index: int, text: str, share: float | None) -> None: ...
    def say(self, sentence: str) -> None: ...


class TerminalBar:
    """A bar of rich: a new total starts a new one, parts are bars below it, and sentences are printed above it."""

    def __init__(self, bar: bars.Progress) -> None:
        self._bar = bar
        self._task: bars.TaskID | None = None
        self._total: float | None = None
        self._parts: dict[int, bars.TaskID] = {}

    def update(self, text: str, done: float, total: float | None) -> None:
        if self._task is not None and total != self._total:
            self._bar.remove_task(self._task)
            self._task = None
        if self._task is None:
            self._task, self._total = self._bar.add_task(text, total=total), total
        self._bar.update(self._task, description=text, completed=done)

    def part(self, index: int, text: str, share: float | None) -> None:
        """Show how much of something that runs beside others is done; None: it has ended."""
        if share is None:
            if index in self._parts:
                self._bar.remove_task(self._parts.pop(index))
            return
        if index not in self._parts:
            self._parts[index] = self._bar.add_task(f"  {text}", total=1.0)
        self._bar.update(self._parts[index], completed=share)

    def say(self, sentence: str) -> None:
        self._bar.console.print(f"offbeat: {sentence}", markup=False, highlight=False, soft_wrap=True)


class Progress:
    """The progress of a command. Only the thread that created it may call it.

    Args:
        bar: the bar to draw; none where there is neither a terminal nor a notebook.
        step_line: where there is no bar, the line to print when a step begins; none prints no line.
        quiet: print the sentences of `say` only.
    """

    def __init__(self, bar: Bar | None = None, step_line: StepLine | None = None, quiet: bool = False) -> None:
        self._bar, self._step_line, self._quiet = bar, step_line, quiet
        self._text = ""

    def step(self, text: str, done: float, total: float | None = 1.0) -> None:
        """Show a step: its text, and how much of the total is done. A new total starts a new bar."""
        begins, self._text = text != self._text, text
        if self._bar is not None:
            self._bar.update(text, done, total)
        elif begins and self._step_line is not None:
            self.line(self._step_line(text, done, total))

    def part(self, index: int, text: str, share: float | None) -> None:
        """Show a bar of one of several things that run at a time, where there are bars; None: it has ended."""
        if self._bar is not None:
            self._bar.part(index, text, share)

    def line(self, text: str) -> None:
        """Print a line, unless a bar shows the same."""
        if self._bar is None and not self._quiet:
            print(text, file=sys.stderr, flush=True)

    def say(self, sentence: str) -> None:
        """Print a sentence, above the bar where there is one."""
        if self._bar is None:
            print(f"offbeat: {sentence}", file=sys.stderr)
        else:
            self._bar.say(sentence)


@contextmanager
def show_progress(
    quiet: bool = False, *, step_line: StepLine | None = None, in_bytes: bool = False
) -> Iterator[Progress]:
    """Progress in a notebook, or else on standard error: a bar on a terminal, lines elsewhere.

    Args:
        quiet: print the sentences of `Progress.say` only.
        step_line: without a bar, the line to print when a step begins; none prints no line.
        in_bytes: steps count bytes, and the bar of a terminal shows their number; otherwise it shows a percentage.
    """
    if not quiet and in_notebook():
        with NotebookBar() as notebook_bar:
            yield Progress(notebook_bar)
        return
    if quiet or not sys.stderr.isatty():
        yield Progress(None, step_line, quiet)
        return
    from rich import progress as bars

    columns = (
        bars.TextColumn("{task.description:<24}"),
        bars.BarColumn(),
        bars.DownloadColumn() if in_bytes else bars.TaskProgressColumn(),
        bars.TimeRemainingColumn(elapsed_when_finished=True),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield Progress(TerminalBar(bar))


class RunProgress:
    """Progress of a known number of runs; a run that is under way counts by the share of it that is done.

    progress: where it is shown
    runs: how many runs there are
    at_a_time: how many of them run at a time; several have a bar each
    """

    def __init__(self, progress: Progress, runs: int, at_a_time: int = 1) -> None:
        self._progress, self._runs, self._at_a_time, self._ended = progress, runs, at_a_time, 0
        self._shares: dict[int, float] = {}

    def share(self, index: int, share: float, label: str | None = None) -> None:
        """Set the share, from 0 to 1, of a run that is done; `label` names the run."""
        self._shares[index] = share
        if self._at_a_time > 1:
            self._progress.part(index, label or f"run {index + 1}", share)
            label = None
        elif label is not None and self._runs > 1:
            label = f"{label} ({self._ended + 1} of {self._runs})"
        self._show(label)

    def ended(self, index: int, summary: Summary) -> None:
        """Count a run as ended, and print its result."""
        self._ended += 1
        self._shares.pop(index, None)
        self._progress.part(index, "", None)
        result = f"{summary.strategy}, seed {summary.seed}: {_result(summary)}"
        self._show(result if self._runs == 1 else None)
        self._progress.line(f"[{self._ended}/{self._runs}] {result}")

    def _show(self, text: str | None = None) -> None:
        done = self._ended + sum(self._shares.values())
        self._progress.step(text or f"{self._ended} of {self._runs} runs", done, float(self._runs))


def _result(summary: Summary) -> str:
    if summary.failure is not None:
        return "failed"
    if summary.seconds_to_target is not None:
        return f"target reached after {summary.seconds_to_target:.1f} s"
    return f"{summary.samples:,} samples in {summary.seconds:.1f} s"
