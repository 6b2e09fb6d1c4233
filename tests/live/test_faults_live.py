"""Real processes that are killed, stopped and restarted."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from accounts import check_accounts, check_traffic, processes_of

import offbeat as ob
from offbeat.core.strategy import Node
from offbeat.engine.experiment import Experiment
from offbeat.lab.live_runs import train_experiment
from offbeat.records.files import read_run
from offbeat.records.metrics import summarize
from offbeat.records.schema import AnyRecord, Evaluation, Membership, Update, of_kind
from offbeat.strategies.server_node import ServerNode


def until_back(node: Node, rank: int) -> Node:
    """A hub that trains until this worker has rejoined, however long that takes."""
    if isinstance(node, ServerNode):
        has_enough = node._has_enough
        node._has_enough = lambda: has_enough() and node._live.get(rank, 0) > 0  # type: ignore[method-assign]
    return node


@dataclass(frozen=True)
class PatientAsync(ob.AsyncFixed):
    back: int = 0

    def node(self, context: ob.nodes.NodeContext) -> Node:
        return until_back(super().node(context), self.back)


@dataclass(frozen=True)
class PatientFMB(ob.FixedMinibatch):
    back: int = 0

    def node(self, context: ob.nodes.NodeContext) -> Node:
        return until_back(super().node(context), self.back)


@dataclass(frozen=True)
class PatientDiLoCo(ob.DecoupledDiLoCo):
    back: int = 0

    def node(self, context: ob.nodes.NodeContext) -> Node:
        return until_back(super().node(context), self.back)


@dataclass(frozen=True)
class PatientPopulation(ob.Population):
    back: int = 0

    def node(self, context: ob.nodes.NodeContext) -> Node:
        return until_back(super().node(context), self.back)


PATIENT = pytest.mark.parametrize("strategy", [PatientAsync, PatientFMB], ids=["async-fmb", "fmb"])


class UpdateTrigger:
    """An observer that calls a function after a number of updates."""

    def __init__(self, directory: Path, updates: int, act: Callable[[UpdateTrigger], None]) -> None:
        self.directory = directory
        self.notices: list[str] = []
        self.lines: list[str] = []
        self.seen: list[AnyRecord] = []
        self._updates = updates
        self._act: Callable[[UpdateTrigger], None] | None = act

    def records(self, records: Sequence[AnyRecord]) -> None:
        self.seen.extend(records)
        made = sum(isinstance(record, Update) for record in self.seen)
        if self._act is not None and made >= self._updates:
            act, self._act = self._act, None
            act(self)

    def say(self, sentence: str) -> None:
        self.notices.append(sentence)

    def line(self, rank: int, text: str) -> None:
        self.lines.append(f"{rank}: {text}")

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(processes_of(os.getpid())[rank], number)


def experiment(
    strategy: ob.Strategy,
    workers: int,
    samples: int,
    faults: tuple[ob.faults.Crash, ...] = (),
    silence_seconds: float = 10.0,
) -> Experiment:
    """A run slow enough to be disturbed in its middle on any machine.

    The silence after which a peer counts as lost is the default of the library: under load, all workers of a run have
    been seen to stand still for a second after their first round, and with a limit of one second they were lost for it.
    """
    slow = ob.stragglers.WorkerOverride(tuple(range(workers)), seconds_per_call=0.004)
    cluster = ob.Cluster(workers=(slow,), faults=faults, silence_seconds=silence_seconds)
    until, evaluate = ob.Samples(samples), ob.EverySeconds(0.3)
    return Experiment(ob.workloads.Digits(), strategy, cluster=cluster, workers=workers, until=until, evaluate=evaluate)


KILLED = [
    pytest.param(PatientAsync(batch=32, back=2), marks=pytest.mark.slow),
    PatientFMB(batch=32, back=2),
    PatientDiLoCo(batch=32, every=8, back=2),
    pytest.param(PatientPopulation(batch=32, every=8, back=2), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("strategy", KILLED, ids=["async-fmb", "fmb", "decoupled-diloco", "population"])
def test_a_killed_worker_is_restarted_and_no_sample_is_lost(strategy: ob.Strategy, tmp_path: Path) -> None:
    trigger = UpdateTrigger(tmp_path / "run", 20, lambda it: it.signal(2, signal.SIGKILL))
    run = train_experiment(experiment(strategy, 4, 30_000), tmp_path / "run", observer=trigger)
    assert run.summary.failure is None
    assert (run.summary.lost_peers, run.summary.rejoined_peers) == (1, 1)
    assert run.summary.accuracy is not None
    assert run.summary.accuracy >= 0.9
    assert run.summary.seconds_to_target is not None
    check_accounts(run.records)
    check_traffic(run.records)
    assert run.summary.bytes_to_target is not None
    assert 0 < run.summary.bytes_to_target < sum(flow.bytes for flow in run.summary.traffic.values())
    assert any("worker 2 was killed by SIGKILL" in sentence for sentence in trigger.notices)


@PATIENT
def test_a_stopped_worker_is_lost_and_rejoins_when_it_resumes(
    strategy: type[PatientAsync | PatientFMB], tmp_path: Path
) -> None:
    """It is resumed only after further updates, so the run cannot have waited for it."""
    stopped = threading.Event()

    def stop(trigger: UpdateTrigger) -> None:
        trigger.signal(1, signal.SIGSTOP)
        stopped.set()

    trigger = UpdateTrigger(tmp_path / "run", 20, stop)
    seen_at_loss: list[int] = []

    def records(new: Sequence[AnyRecord]) -> None:
        UpdateTrigger.records(trigger, new)
        lost = any(isinstance(record, Membership) and not record.joined for record in trigger.seen)
        made = sum(isinstance(record, Update) for record in trigger.seen)
        if lost and not seen_at_loss:
            seen_at_loss.append(made)
        if stopped.is_set() and seen_at_loss and made >= seen_at_loss[0] + 20:
            stopped.clear()
            trigger.signal(1, signal.SIGCONT)

    trigger.records = records  # type: ignore[method-assign]
    run = train_experiment(
        experiment(strategy(batch=32, back=1), 2, 10_000, silence_seconds=3.0), tmp_path / "run", observer=trigger
    )
    assert run.summary.failure is None
    assert (run.summary.lost_peers, run.summary.rejoined_peers) == (1, 1)
    check_accounts(run.records)
    membership = [(record.peer, record.joined) for record in of_kind(run.records, Membership)]
    assert membership.count((1, True)) == 2


def test_a_killed_hub_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    planned = experiment(ob.AsyncFixed(batch=32), 2, 20_000)
    live = ob.LiveOptions(checkpoint_seconds=0.2)
    trigger = UpdateTrigger(directory, 60, lambda it: it.signal(0, signal.SIGKILL))
    with pytest.raises(ob.RunFailed, match="the hub was killed by SIGKILL"):
        train_experiment(planned, directory, live, trigger)
    assert not processes_of(os.getpid())
    before = summarize(read_run(directory))
    assert 0 < before.samples < 20_000

    run = train_experiment(planned, directory, live, resume=True)
    assert run.summary.failure is None
    assert run.summary.samples >= 20_000
    assert run.summary.accuracy is not None
    assert run.summary.accuracy >= 0.9
    check_accounts(run.records)
    check_traffic(run.records)
    evaluated = [record.version for record in of_kind(run.records, Evaluation)]
    assert evaluated == sorted(evaluated)
    with pytest.raises(ob.ConfigurationError, match="has ended already"):
        train_experiment(planned, directory, live, resume=True)


def test_a_run_that_is_going_on_cannot_be_resumed(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    planned = experiment(ob.AsyncFixed(batch=32), 2, 6_000)
    refused: list[str] = []

    def resume(trigger: UpdateTrigger) -> None:
        for again in ((planned, directory, ob.LiveOptions(), None, True), (planned, directory)):
            with pytest.raises(ob.ConfigurationError) as error:
                train_experiment(*again)
            refused.append(str(error.value))

    run = train_experiment(planned, directory, observer=UpdateTrigger(directory, 20, resume))
    assert run.summary.failure is None
    check_accounts(run.records)
    assert [sentence.partition(";")[0] for sentence in refused] == [
        f"the run in {directory} is still going on",
        f"{directory} holds a run already",
    ]


def test_injected_faults_are_those_of_the_experiment(tmp_path: Path) -> None:
    crash = ob.faults.Crash(1, at_seconds=0.5, back_after_seconds=0.2)
    run = train_experiment(experiment(PatientAsync(batch=32, back=1), 3, 5_000, (crash,)), tmp_path / "run")
    assert (run.summary.lost_peers, run.summary.rejoined_peers) == (1, 1)
    check_accounts(run.records)


def test_no_process_is_left_behind(tmp_path: Path) -> None:
    train_experiment(experiment(ob.FixedMinibatch(batch=32), 2, 2_000), tmp_path / "run")
    assert not processes_of(os.getpid())
