"""Simulations several at a time: the same bytes as one at a time, and what happens when one of them fails."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import offbeat as ob
from offbeat.errors import ConfigurationError, RunFailed
from offbeat.lab import parallel_simulations
from offbeat.lab.compared_runs import simulate_all
from offbeat.lab.parallel_simulations import ProcessKilled, SimulationTask, jobs_for, run_simulations
from offbeat.lab.simulated_runs import record_bytes
from offbeat.launch.children import Child, start_forked
from offbeat.records.schema import RunRecords
from offbeat.tracking.tracker import TrackedRun, Tracker

QUICK: dict[str, Any] = {"workers": 3, "until": ob.Samples(400)}


def experiments(seeds: Sequence[int] = (0, 1)) -> list[ob.Experiment]:
    return [
        ob.Experiment(ob.workloads.Quadratic(), strategy, seed=seed, **QUICK)
        for seed in seeds
        for strategy in (ob.FixedMinibatch(batch=8), ob.AsyncFixed(batch=8), ob.Gossip(batch=8))
    ]


@dataclass
class Watched:
    """An observer that remembers what it was told."""

    ends: list[tuple[int, RunRecords]] = dataclasses.field(default_factory=list)
    shares: list[tuple[int, float, str]] = dataclasses.field(default_factory=list)
    said: list[str] = dataclasses.field(default_factory=list)

    def share(self, index: int, share: float, label: str) -> None:
        self.shares.append((index, share, label))

    def ended(self, index: int, records: RunRecords) -> None:
        self.ends.append((index, records))

    def say(self, sentence: str) -> None:
        self.said.append(sentence)


def own(model: Callable[[], torch.nn.Module]) -> ob.Experiment:
    """An experiment whose workload has no name."""
    data = torch.randn(40, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(40)
    workload = ob.Workload(model=model, loss=lambda given, wanted: (given[:, 0] - wanted) ** 2, train=data)
    return ob.Experiment(workload, ob.FixedMinibatch(batch=4, optimizer=ob.SGD(lr=0.01)), label="own", **QUICK)


def linear() -> torch.nn.Module:
    return torch.nn.Linear(2, 1)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    """The copies that are started."""
    children: list[Child] = []

    def start(*rest: Any, **named: Any) -> Child:
        children.append(start_forked(*rest, **named))
        return children[-1]

    monkeypatch.setattr(parallel_simulations, "start_forked", start)
    return children


@pytest.mark.parametrize("kept", [True, False])
def test_two_at_a_time_write_the_same_bytes_as_one_at_a_time(tmp_path: Path, kept: bool) -> None:
    places = [tmp_path / str(jobs) if kept else None for jobs in (1, 2)]
    one, two = (simulate_all(experiments(), place, jobs=jobs) for jobs, place in zip((1, 2), places, strict=True))
    assert [record_bytes(run.records) for run in one] == [record_bytes(run.records) for run in two]
    assert [run.header for run in one] == [run.header for run in two]
    assert [run.directory is None for run in two] == [not kept] * 6
    files = [
        {path.relative_to(place): path.read_bytes() for path in place.rglob("*") if path.is_file()}
        for place in places
        if place is not None
    ]
    assert not kept or (files[0] == files[1] and len(files[0]) == 18)


def test_results_are_in_the_order_of_the_tasks_and_each_end_is_reported_once() -> None:
    watched, given = Watched(), experiments()
    runs = run_simulations([SimulationTask(one, None) for one in given], 2, watched)
    assert [(run.header.label, run.header.seed) for run in runs] == [(one.name, one.seed) for one in given]
    assert sorted(index for index, _ in watched.ends) == list(range(6))
    assert all(0.0 <= share <= 1.0 for _, share, _ in watched.shares)


def test_a_workload_without_a_name_is_simulated_in_copies_too() -> None:
    first, second = simulate_all([own(linear), own(linear)], jobs=2)
    assert record_bytes(first.records) == record_bytes(second.records)


def test_a_wrong_experiment_is_the_sentence_that_it_is_alone(capfd: pytest.CaptureFixture[str]) -> None:
    sentences = []
    for jobs in (1, 2):
        with pytest.raises(ConfigurationError) as raised:
            simulate_all([own(lambda: torch.nn.Linear(3, 1)), *experiments()], jobs=jobs)
        sentences.append(str(raised.value))
    assert sentences[0] == sentences[1]
    assert "the model or the loss failed on its first batch" in sentences[0]
    assert capfd.readouterr().err == ""


def test_a_mistake_in_a_copy_is_shown_and_named(capfd: pytest.CaptureFixture[str]) -> None:
    class Mistaken(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return {}["nothing"]  # type: ignore[no-any-return]

    with pytest.raises(RunFailed, match=r"own, seed 0, met a mistake, shown above: KeyError: 'nothing'"):
        simulate_all([own(lambda: Mistaken(2, 1)), own(linear)], jobs=2)
    assert "Traceback" in capfd.readouterr().err


def test_a_killed_copy_ends_the_others_and_is_named(started: list[Child]) -> None:
    def killed() -> torch.nn.Module:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return linear()

    here = os.getpid()
    long = dataclasses.replace(experiments()[0], until=ob.Samples(10**9))
    with pytest.raises(ProcessKilled, match="the process that simulated own, seed 0 was killed, for want of memory"):
        simulate_all([own(killed), long], jobs=2)
    assert_no_copies(started)


def assert_no_copies(started: list[Child]) -> None:
    assert started
    for child in started:
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)


def test_an_interrupt_ends_all_copies(started: list[Child]) -> None:
    class Interrupting(Watched):
        def share(self, index: int, share: float, label: str) -> None:
            raise KeyboardInterrupt

    long = [dataclasses.replace(one, until=ob.Samples(10**9)) for one in experiments([0])]
    with pytest.raises(KeyboardInterrupt):
        run_simulations([SimulationTask(one, None) for one in long], 2, Interrupting())
    assert_no_copies(started)


def test_jobs_are_a_whole_number_and_no_more_than_there_are_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [SimulationTask(one, None) for one in experiments()]
    monkeypatch.setattr(parallel_simulations, "cores", lambda: 4)
    assert [jobs_for(jobs, tasks) for jobs in (None, 1, 3, 100)] == [4, 1, 3, 6]
    assert jobs_for(None, []) == 1
    for wrong in (0, -1, 2.5, True, "two"):
        with pytest.raises(ConfigurationError, match="jobs is how many simulations run at a time, at least 1, but is"):
            jobs_for(wrong, tasks)  # type: ignore[arg-type]
    monkeypatch.setattr(parallel_simulations, "can_fork_to_differentiate", lambda: False)
    assert jobs_for(3, tasks) == 1


def test_a_tracker_that_is_an_object_is_fed_in_this_process() -> None:
    class Counting(Tracker):
        def __init__(self) -> None:
            self.started: list[int] = []

        def start(self, run: TrackedRun) -> str | None:
            self.started.append(os.getpid())
            return None

        def log(self, step: int, values: Mapping[str, float]) -> None: ...

    tracker = Counting()
    simulate_all(experiments(), jobs=2, track=tracker)
    assert tracker.started == [os.getpid()] * 6
