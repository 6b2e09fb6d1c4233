"""Progress of `simulate`, `compare` and `train` from Python: in notebooks by itself, elsewhere on request."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

import offbeat as ob
from offbeat.lab import notebook_bar
from offbeat.lab.experiment_progress import ExperimentProgress, StderrObserver
from offbeat.lab.notebook_bar import NotebookBar, in_notebook
from offbeat.lab.progress import Progress, show_progress
from offbeat.records.schema import Update

QUICK: dict[str, Any] = {"workers": 2, "until": ob.Samples(160)}


class Display:
    """What a notebook would show, as IPython's display and the handle that it returns."""

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def __call__(self, value: Any, display_id: bool) -> Display:
        assert display_id
        self.update(value)
        return self

    def update(self, value: Any) -> None:
        self.shown.append(value)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Display:
    """A process that looks like the kernel of a notebook, with a clock that stands still."""
    display = Display()
    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    return display


def run_quickly(**changed: Any) -> ob.Run:
    return ob.simulate(ob.workloads.Quadratic(), ob.FixedMinibatch(batch=8), **QUICK, **changed)


def test_a_script_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run_quickly()
    ob.compare([ob.Experiment(ob.workloads.Quadratic(), ob.FixedMinibatch(batch=8), **QUICK)])
    assert capsys.readouterr() == ("", "")


def test_a_script_that_asks_for_progress_has_a_line_for_each_run(capsys: pytest.CaptureFixture[str]) -> None:
    experiments = [
        ob.Experiment(ob.workloads.Quadratic(), strategy, **QUICK)
        for strategy in (ob.FixedMinibatch(batch=8), ob.AsyncFixed(batch=8))
    ]
    ob.compare(experiments, progress=True)
    lines = [line.split(": ")[0] for line in capsys.readouterr().err.splitlines()]
    fmb_first = ["[1/2] fmb, seed 0", "[2/2] async-fmb, seed 0"]
    assert lines in (fmb_first, ["[1/2] async-fmb, seed 0", "[2/2] fmb, seed 0"]), "in the order of their ends"


def test_progress_changes_no_record() -> None:
    assert run_quickly(progress=True).records == run_quickly(progress=False).records


def test_a_notebook_shows_a_bar_and_then_the_result(notebook: Display, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook_bar, "REDRAW_SECONDS", 0.0)
    run_quickly()
    *bars, last = notebook.shown
    assert "<progress " in bars[0]._repr_html_()
    assert ' value="0.500"' in " ".join(bar._repr_html_() for bar in bars)
    assert last._repr_html_() is None
    assert repr(last).startswith("fmb, seed 0: ")


def test_a_notebook_is_sent_no_more_than_a_few_drawings_a_second(notebook: Display) -> None:
    with NotebookBar() as bar:
        for step in range(10_000):
            bar.update("many", step, 1e4)
    assert len(notebook.shown) < 1000
    assert repr(notebook.shown[-1]) == "many"


def test_a_notebook_shows_nothing_where_it_is_not_wanted(notebook: Display) -> None:
    run_quickly(progress=False)
    with show_progress(quiet=True) as progress:
        progress.step("hidden", 0.5)
    assert notebook.shown == []


def test_a_run_that_is_interrupted_says_where_it_stopped(notebook: Display) -> None:
    def interrupt() -> None:
        with show_progress() as progress:
            progress.step("fmb, seed 0", 0.5)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert repr(notebook.shown[-1]) == "stopped: fmb, seed 0"


def test_the_text_of_a_bar_is_escaped_and_sentences_are_printed(
    notebook: Display, capsys: pytest.CaptureFixture[str]
) -> None:
    with show_progress() as progress:
        progress.step("<b>", 1.0, None)
        progress.say("rank 1 is lost")
    assert notebook.shown[0]._repr_html_().endswith("></progress> &lt;b&gt;")
    assert capsys.readouterr().err == "offbeat: rank 1 is lost\n"


def test_ipython_in_a_terminal_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace()))
    assert not in_notebook()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))
    assert not in_notebook()


def test_an_answer_that_is_neither_yes_nor_no_is_refused() -> None:
    with pytest.raises(ob.ConfigurationError, match="progress is True, False or None"):
        run_quickly(progress="bar")


def test_a_live_run_advances_by_its_updates(capsys: pytest.CaptureFixture[str]) -> None:
    steps: list[tuple[str, float]] = []

    class Recorder(Progress):
        def step(self, text: str, done: float, total: float | None = 1.0) -> None:
            steps.append((text, done))

    experiment = ob.Experiment(ob.workloads.Quadratic(), ob.FixedMinibatch(), until=ob.Samples(200))
    observer = StderrObserver(experiment, ExperimentProgress(Recorder(), 1))
    observer.records([Update(1.0, 0, 1, 1, 50, 50, 0.1, ()), Update(2.0, 0, 2, 1, 50, 100, 0.1, ())])
    observer.records([])
    observer.line(1, "hello")
    assert steps == [("fmb, seed 0", 0.5)]
    assert capsys.readouterr().err == "[rank 1] hello\n"


def test_live_training_from_python_prints_its_result_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    ob.train(ob.workloads.Quadratic(), ob.FixedMinibatch(batch=8), workers=2, until=ob.Samples(160), progress=True)
    assert capsys.readouterr().err.splitlines()[-1].startswith("[1/1] fmb, seed 0: ")
