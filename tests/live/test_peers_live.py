"""Gossip on real processes, over TCP and MPI: killed, interrupted and restarted peers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accounts import check_traffic, processes_of
from test_faults_live import UpdateTrigger
from test_mpi_live import OFFBEAT, ended, mpirun, ranks_of, running, slow_cluster, wait_for

import offbeat as ob
from offbeat.core.actions import Action, Finish, Report
from offbeat.core.events import Event, PeerLost, Started
from offbeat.core.sample_ledger import SampleLedger
from offbeat.core.strategy import Node
from offbeat.engine.experiment import Experiment
from offbeat.lab.live_runs import train_experiment
from offbeat.lab.run_results import read_result
from offbeat.live.clock import Clock
from offbeat.live.node_runner import NodeRunner
from offbeat.live.runner_options import RunnerOptions
from offbeat.records.files import MemoryWriter, read_run
from offbeat.records.metrics import summarize
from offbeat.records.schema import Dropped, Evaluation, Notice, RunRecords, Update, of_kind
from offbeat.strategies.gossip.peer import Peer
from offbeat.transports.loopback import Loopback
from offbeat.transports.remote_records import RemoteRecordWriter

SCRIPT = """
import sys, zlib
import torch
import torch.nn.functional as F
import offbeat as ob

torch.set_num_threads(1)
inputs = torch.randn(2000, 20, generator=torch.Generator().manual_seed(0))
labels = (inputs[:, 0] + inputs[:, 1] > 0).long()
model = torch.nn.Linear(20, 2)
strategy = ob.Gossip(graph=ob.graphs.Cycle(), momentum=ob.parts.Acid(), optimizer=ob.SGD(lr=0.1))
with ob.join(model, strategy, until=ob.Samples(20_000)) as run:
    for x, y in run.batches((inputs, labels)):
        run.backward(F.cross_entropy(model(x), y, reduction="none"))
values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
with open(f"model-{run.rank}", "w") as file:
    right = (model(inputs).argmax(1) == labels).float().mean().item()
    file.write(f"{zlib.crc32(values.numpy().tobytes())} {right > 0.9} {run.is_main}")
"""


@dataclass(frozen=True)
class UntilRankIsBack(ob.Gossip, name=""):
    """Gossip that trains until rank `back` has restarted, too: how long that takes depends on the machine."""

    back: int = 0

    def node(self, context: ob.nodes.NodeContext) -> Node:
        node = super().node(context)
        assert isinstance(node, Peer)
        is_goal_reached, rank = node._training.is_goal_reached, context.rank

        def with_rank_back() -> bool:
            return is_goal_reached() and (rank == self.back or node._view.live.get(self.back, 0) > 0)

        node._training.is_goal_reached = with_rank_back  # type: ignore[method-assign]
        return node


del ob.Strategy.members[""]  # other tests iterate over all strategies


def experiment(strategy: ob.Strategy, samples: int, faults: tuple[ob.faults.Crash, ...] = ()) -> Experiment:
    """A run that is slow enough on any machine to be disturbed in its middle."""
    slow = ob.stragglers.WorkerOverride(tuple(range(4)), seconds_per_call=0.004)
    cluster = ob.Cluster(workers=(slow,), faults=faults, silence_seconds=2.0)
    until, evaluate = ob.Samples(samples), ob.EverySeconds(0.3)
    return Experiment(ob.workloads.Digits(), strategy, cluster=cluster, workers=4, until=until, evaluate=evaluate)


def check_peers(run: RunRecords, samples: int) -> None:
    """Check that no sample of a peer was applied twice, and that the sample goal was reached."""
    ledgers: dict[int, SampleLedger] = {}
    applied = 0
    for update in of_kind(run, Update):
        (part,) = update.contributions
        assert (part.rank, part.stop - part.first) == (update.rank, update.samples)
        ledgers.setdefault(part.rank, SampleLedger()).add(part.first, part.stop)
        applied += update.samples
    for dropped in of_kind(run, Dropped):
        assert dropped.reason == "stopped"
    assert applied >= samples
    summary = summarize(run)
    assert (summary.failure, summary.samples) == (None, applied)
    assert summary.accuracy is not None
    assert summary.accuracy >= 0.9


def options(rank: int, **settings: Any) -> RunnerOptions:
    return RunnerOptions(rank=rank, clock=Clock(), is_peer=(1 - rank).__eq__, **settings)


def test_peers_train_and_the_command_prints_a_summary(tmp_path: Path) -> None:
    settings = ["digits", "gossip", "--graph", "cycle", "--acid", "--workers", "4", "--until", "30000"]
    command = [*OFFBEAT, "train", *settings, "--json", "--no-report", "--out", "runs"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(done.stdout)["runs"]
    assert (run["workers"], run["failure"], run["lost_peers"]) == (4, None, 0)
    assert run["accuracy"] >= 0.9
    assert 0 < run["bytes_to_target"] <= run["bytes_sent"]
    assert sum(flow["bytes"] for flow in run["traffic"].values()) == run["bytes_sent"]
    check_peers(read_run(tmp_path / "runs/gossip-seed0"), 30_000)
    check_traffic(read_run(tmp_path / "runs/gossip-seed0"))


@pytest.mark.integration
def test_peers_of_a_script_end_with_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [*OFFBEAT, "launch", "-n", "3", "--quiet", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    models = [(tmp_path / f"model-{rank}").read_text().split() for rank in range(3)]
    assert len({checksum for checksum, _, _ in models}) == 1
    assert [right for _, right, _ in models] == ["True"] * 3
    assert [main for _, _, main in models] == ["True", "False", "False"]


@pytest.mark.parametrize("rank", [2, 0])
def test_a_killed_peer_comes_back_and_the_others_do_not_wait(rank: int, tmp_path: Path) -> None:
    trigger = UpdateTrigger(tmp_path / "run", 40, lambda it: it.signal(rank, signal.SIGKILL))
    run = train_experiment(experiment(UntilRankIsBack(batch=32, back=rank), 15_000), tmp_path / "run", observer=trigger)
    assert trigger.notices == [f"peer {rank} was killed by SIGKILL; it is started again (1 of 3)"]
    assert (run.summary.failure, run.summary.lost_peers, run.summary.rejoined_peers) == (None, 1, 1)
    assert run.summary.samples >= 15_000
    assert run.summary.accuracy is not None
    assert run.summary.accuracy >= 0.9
    assert run.finish is not None
    assert not processes_of(os.getpid())


def test_without_rank_0_the_others_finish_and_keep_the_result(tmp_path: Path) -> None:
    trigger = UpdateTrigger(tmp_path / "run", 40, lambda it: it.signal(0, signal.SIGKILL))
    planned, live = experiment(ob.Gossip(batch=32), 10_000), ob.LiveOptions(restarts=0)
    run = train_experiment(planned, tmp_path / "run", live, trigger)
    assert trigger.notices == ["peer 0 was killed by SIGKILL, and it is not started again"]
    assert (run.summary.failure, run.summary.lost_peers, run.summary.rejoined_peers) == (None, 1, 0)
    assert run.summary.samples >= 10_000
    last = list(of_kind(run.records, Evaluation))[-1]
    assert last.rank == 1
    assert read_result(tmp_path / "run") is not None
    with pytest.raises(ob.ConfigurationError, match="has ended already"):
        train_experiment(planned, tmp_path / "run", live, resume=True)


def test_an_interrupted_run_is_resumed_from_the_checkpoint_of_rank_0(tmp_path: Path) -> None:
    trigger = UpdateTrigger(tmp_path / "run", 60, lambda it: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        train_experiment(experiment(ob.GossipAcid(batch=32), 1_000_000), tmp_path / "run", observer=trigger)
    assert not processes_of(os.getpid())
    before = summarize(read_run(tmp_path / "run"))
    assert before.failure == "it was interrupted"
    assert before.samples < 20_000
    run = train_experiment(experiment(ob.GossipAcid(batch=32), 20_000), tmp_path / "run", resume=True)
    assert run.summary.failure is None
    assert run.summary.samples >= 20_000
    assert run.summary.accuracy is not None
    assert run.summary.accuracy >= 0.9
    versions = [update.version for update in of_kind(run.records, Update) if update.rank == 0]
    assert versions == list(range(1, len(versions) + 1))


class EndsWithItsPeer(Node):
    """Records its start, and finishes when its peer is lost."""

    def handle(self, event: Event) -> Iterator[Action]:
        if isinstance(event, Started):
            yield Report(Notice(event.at, 1, "started"))
        elif isinstance(event, PeerLost):
            yield Finish(torch.zeros(1), (), 0)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("returned", [False, True])
def test_a_rank_that_comes_back_while_all_others_end_does_not_start_alone(returned: bool) -> None:
    loopback = Loopback({0: [1], 1: [0]})
    other, mine = loopback.transport(0), loopback.transport(1)
    runner = NodeRunner(EndsWithItsPeer(), mine, options(1, writer=MemoryWriter(), is_rejoining=returned))
    runner.start()
    other.close()
    try:
        assert runner.wait(30)
        assert runner.failure == (
            "rank 1 came back when the other ranks were ending, or were lost as well" if returned else None
        )
    finally:
        runner.close()


def test_records_from_before_the_clock_is_set_get_the_time_of_the_run() -> None:
    loopback = Loopback({0: [1], 1: [0]})
    mine, writer = loopback.transport(1), MemoryWriter()
    mine.elapsed_at_join = (1000.0, time.monotonic())
    runner = NodeRunner(EndsWithItsPeer(), mine, options(1, writer=writer))
    runner.start()
    assert writer.records == []
    loopback.transport(0).close()
    try:
        assert runner.wait(30)
        (record,) = writer.records
        assert 999.0 <= record.at <= runner.clock.now()
    finally:
        runner.close()


def test_a_second_record_keeper_gets_all_records_if_it_has_none() -> None:
    for whole in (False, True):
        writer = RemoteRecordWriter(MemoryWriter(), whole)
        writer.write(Notice(1.0, 1, "first"))
        assert len(list(writer.drain(0))) == 1
        assert list(writer.drain(0)) == []
        writer.write(Notice(2.0, 1, "second"))
        (journal,) = writer.drain(2)
        assert len(journal.lines) == (2 if whole else 1)
        assert list(writer.drain(2)) == []


@pytest.mark.integration
def test_peers_over_mpi_continue_when_rank_0_is_killed_in_the_second_run(tmp_path: Path) -> None:
    command = [*OFFBEAT, "train", "digits", "gossip", "--acid", "--batch", "32", "--until", "6000", "--seeds", "2"]
    slow = ["--cluster", slow_cluster(tmp_path, 4), "--json", "--quiet", "--no-report", "--out", "runs"]
    first, second = (tmp_path / f"runs/gossip-seed{seed}" for seed in (0, 1))
    records = second / "records-0.jsonl"
    with running([*mpirun(4), *command, *slow], tmp_path) as process:
        wait_for(lambda: records.exists() and records.read_bytes().count(b'"update"') >= 15, process)
        os.kill(ranks_of(process.pid)[0], signal.SIGKILL)
        code, printed, errors = ended(process)
    assert code == 0, errors
    whole = summarize(read_run(first))
    assert (whole.failure, whole.lost_peers, whole.workers) == (None, 0, 4)
    assert {update.rank for update in of_kind(read_run(first), Update)} == {0, 1, 2, 3}
    (run,) = json.loads(printed)["runs"]
    assert (run["seed"], run["failure"], run["lost_peers"]) == (1, None, 1)
    assert (run["samples"], run["updates"]) == (summarize(read_run(second)).samples, len(updates_of(second)))
    assert {update.rank for update in updates_of(second)} == {0, 1, 2, 3}
    for each in (first, second):
        assert summarize(read_run(each)).samples >= 6_000
        assert read_result(each) is not None
    (sentence,) = [line for line in errors.splitlines() if line.startswith("offbeat: ")]
    assert sentence.startswith("offbeat: rank 1 on ")
    assert sentence.endswith(": rank 0 was lost; these results are from the records of this rank")


def updates_of(run: Path) -> list[Update]:
    return list(of_kind(read_run(run), Update))
