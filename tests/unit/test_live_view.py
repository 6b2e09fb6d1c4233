"""The state of a live run, computed from records, and how it is shown."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from made_records import a_round, a_small_run, a_traffic, an_update
from rich.console import Console

from offbeat.cli.live_view import LINE_SECONDS, LineWatcher, RunWatcher, render_run, watch_run
from offbeat.cli.run_state import RECENT_SECONDS, RunState
from offbeat.engine.experiment import Experiment
from offbeat.lab.workloads.synthetic import Quadratic
from offbeat.launch.process_settings import hub_or_worker_name, rank_names
from offbeat.records.schema import Evaluation, Membership, Notice
from offbeat.strategies.hub.hub_strategies import FixedMinibatch

HUB = hub_or_worker_name


def state() -> RunState:
    made = RunState([1, 2])
    made.add(a_small_run().records)
    return made


def drawn(made: RunState, title: str = "fmb, seed 0", target: str | None = None) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(render_run(title, target, HUB, made))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def joined(at: float, peer: int, incarnation: int = 0, there: bool = True, rank: int = 0) -> Membership:
    return Membership(at=at, rank=rank, peer=peer, incarnation=incarnation, joined=there)


# The state


def test_a_run_is_described_by_a_few_facts() -> None:
    assert state().facts() == [
        "8 s",
        "version 1",
        "40 samples",
        "4 a second",
        "train loss 0.1",
        "test loss 0",
        "accuracy 1.000",
    ]


def test_before_the_first_record_there_are_three_facts() -> None:
    assert RunState([1]).facts() == ["0 s", "version 0", "0 samples"]


def test_each_worker_has_its_seconds_its_staleness_and_its_starts() -> None:
    first, second = state().workers.values()
    assert (first.compute_seconds, first.idle_seconds, first.samples, first.starts) == (4.0, 0.0, 20, 1)
    assert (second.compute_seconds, second.idle_seconds, second.idle_share, second.starts) == (2.0, 2.0, 0.5, 2)
    assert (first.staleness_mean, second.staleness_mean) == (0.0, 3.0)
    assert second.summary_line() == (
        "20 samples in 2 rounds, compute 2.0 s, idle 2.0 s, send 0.0 s, staleness 3.0, 2 starts"
    )


def test_the_state_of_a_worker() -> None:
    made = RunState([1])
    states = [made.workers[1].state]
    for record in (
        joined(0.0, 1),
        a_round(1, 0.0, 2.0),
        a_round(1, 3.9, 0.1, idle=1.9),
        a_round(1, 9.9, 0.1, idle=5.9),
        joined(12.0, 1, there=False),
        joined(13.0, 1, 1),
    ):
        made.add([record])
        states.append(made.workers[1].state)
    assert states == ["expected", "joined", "computing", "computing", "waiting", "lost", "waiting"]


def test_rates_are_those_of_the_last_seconds() -> None:
    made = RunState([1])
    made.add([a_round(1, 0.0, 1.0), an_update(1.0, 1000, (1, 0, 1000, 0))])
    made.add([a_round(1, 99.0, 1.0), an_update(100.0, 1010, (1, 1000, 1010, 0))])
    assert made.samples_per_second == made.computed_per_second(made.workers[1]) == 10 / RECENT_SECONDS


def test_bytes_per_second_are_summed_over_ranks_with_recent_traffic() -> None:
    made = RunState([1, 2])
    assert made.bytes_per_second is None
    made.add([a_traffic(1.0, rank=1, since=0.5, Gradient=1000)])
    assert made.bytes_per_second == 2000
    made.add([a_traffic(float(at), rank=1, since=0.5, Gradient=100 * at) for at in range(90, 101)])
    made.add([a_traffic(100.0, rank=2, since=98.0, Gradient=4000), a_traffic(99.0, rank=0, Parameters=990)])
    assert made.bytes_per_second == pytest.approx(100 + 2000 + 10)
    assert "2.11 kB sent a second" in made.facts()
    made.add([a_traffic(200.0, rank=0, Parameters=2000)])
    assert made.bytes_per_second == pytest.approx(10)


def test_workers_that_were_not_expected_are_shown_and_the_hub_is_not() -> None:
    made = RunState([1])
    made.add([joined(0.0, 0, rank=1), joined(1.0, 7)])
    assert sorted(made.workers) == [1, 7]


def test_a_late_evaluation_does_not_replace_a_newer_one() -> None:
    made = RunState()
    later, earlier = (Evaluation(at, 0, version, 0, 1.0 / version, None) for at, version in ((2.0, 2), (1.0, 1)))
    made.add([later, earlier])
    assert made.evaluation is later


# What is shown


def test_the_table_has_a_row_for_each_worker() -> None:
    shown = drawn(state(), target="accuracy 0.9")
    assert "fmb, seed 0 (target: accuracy 0.9)" in shown
    assert "8 s · version 1 · 40 samples" in shown
    rows = [line.split() for line in shown.splitlines() if line.startswith("worker")]
    assert rows == [
        ["worker", "1", "computing", "20", "2", "0.0", "0%", "4.0", "0.0", "0.0", "1"],
        ["worker", "2", "waiting", "20", "2", "3.0", "50%", "2.0", "2.0", "0.0", "2"],
    ]


def test_the_table_can_be_drawn_before_a_worker_has_joined() -> None:
    assert "expected" in drawn(RunState([1, 2]))


def test_without_a_terminal_there_is_a_line_every_few_seconds_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    lines = LineWatcher("fmb, seed 0", HUB, RunState([1]))
    for at in (1.0, LINE_SECONDS - 0.1, LINE_SECONDS + 0.1, LINE_SECONDS + 0.2, 2 * LINE_SECONDS):
        lines.records([an_update(at, 10, (1, 0, 10, 0))])
    said = capsys.readouterr().err.splitlines()
    assert [line.split(",")[1] for line in said] == [" seed 0: 5 s", " seed 0: 10 s"]


def test_the_last_lines_describe_each_worker(capsys: pytest.CaptureFixture[str]) -> None:
    lines = LineWatcher("fmb, seed 0", HUB, RunState([1, 2]))
    lines.records(a_small_run().records)
    capsys.readouterr()
    lines.ended()
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("fmb, seed 0: 8 s, version 1, 40 samples")
    assert said[1] == "  worker 1: 20 samples in 2 rounds, compute 4.0 s, idle 0.0 s, send 0.0 s, staleness 0.0"
    assert len(said) == 3


def test_a_loss_and_a_return_are_said_once_as_rank_0_sees_them(capsys: pytest.CaptureFixture[str]) -> None:
    lines = LineWatcher("fmb, seed 0", HUB, RunState([1, 2]))
    for at, rank, joined in ((0.1, 0, True), (1.0, 0, False), (1.1, 0, False), (2.0, 2, True), (3.0, 0, True)):
        lines.records([Membership(at=at, rank=rank, peer=1, incarnation=0, joined=joined)])
    said = capsys.readouterr().err.splitlines()
    assert said == ["offbeat: fmb, seed 0: worker 1 is lost", "offbeat: fmb, seed 0: worker 1 has joined again"]


def test_notices_are_printed_and_the_output_of_processes_is_labelled(capsys: pytest.CaptureFixture[str]) -> None:
    lines = LineWatcher("fmb, seed 0", HUB, RunState([1]))
    lines.records([Notice(1.0, 0, "raise samples_max")])
    lines.say("worker 1 was killed by SIGKILL")
    lines.line(1, "Traceback (most recent call last):")
    lines.line(0, "a warning")
    lines.line(0, "offbeat: shared memory is not available here")
    assert capsys.readouterr().err.splitlines() == [
        "offbeat: fmb, seed 0: raise samples_max",
        "offbeat: worker 1 was killed by SIGKILL",
        "[worker 1] Traceback (most recent call last):",
        "[hub] a warning",
        "[hub] offbeat: shared memory is not available here",
    ]


def test_a_quiet_watcher_prints_problems_only(capsys: pytest.CaptureFixture[str]) -> None:
    with watch_run(EXPERIMENT, quiet=True) as watcher:
        watcher.records(a_small_run().records)
    assert isinstance(watcher, RunWatcher)
    assert capsys.readouterr().err == ""


def test_ranks_that_all_compute_are_called_peers() -> None:
    @dataclass(frozen=True)
    class Peers(FixedMinibatch):
        def computes(self, rank: int) -> bool:
            return True

    assert [rank_names(Peers())(rank) for rank in range(2)] == ["peer 0", "peer 1"]
    assert [rank_names(FixedMinibatch())(rank) for rank in range(2)] == ["hub", "worker 1"]


def test_peers_have_no_common_version_and_their_samples_are_summed() -> None:
    made = RunState([0, 1])
    update = an_update(1.0, 10, (0, 0, 10, 0))
    assert made.facts()[1] == "version 0"
    made.add([update, msgspec.structs.replace(update, rank=1, samples_total=12)])
    assert made.facts()[1:3] == ["2 updates", "20 samples"]


def test_a_restarted_rank_sees_all_others_join_and_only_its_own_start_is_counted() -> None:
    made = RunState([0, 1, 2])
    made.add([joined(0.0, 1, rank=rank) for rank in (0, 2)])
    made.add([joined(1.0, 1, there=False, rank=rank) for rank in (0, 2)])
    made.add([joined(2.0, 1, 1, rank=rank) for rank in (0, 2)])
    made.add([joined(2.0, peer, 1, rank=1) for peer in (0, 2)])
    assert [worker.starts for _, worker in sorted(made.workers.items())] == [1, 2, 1]


EXPERIMENT = Experiment(Quadratic(), FixedMinibatch(), workers=2)


def test_on_a_terminal_messages_appear_above_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal: Any = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with watch_run(EXPERIMENT, quiet=False, position="[2/4]") as watcher:
        watcher.records(a_small_run().records)
        watcher.say("worker 1 was killed by SIGKILL")
        watcher.line(2, "[brackets] are kept")
    shown = terminal.getvalue()
    assert "[2/4] fmb, seed 0, on quadratic" in shown
    assert "offbeat: worker 1 was killed by SIGKILL" in shown
    assert "[worker 2] [brackets] are kept" in shown
    assert "samples/s" in shown
