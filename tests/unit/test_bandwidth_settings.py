"""Budgets and the size of a cluster, as they are typed: flags, files, Python; and bandwidth as it is induced."""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path
from typing import Any

import pytest

import offbeat as ob
from offbeat.cli import flags, main
from offbeat.cli.plans import plan_from_file, plan_of
from offbeat.cli.train_command import read_plan
from offbeat.cluster.presets import PRESETS
from offbeat.core.configuration import to_plain
from offbeat.engine.experiment import DEFAULT_WORKERS, Experiment
from offbeat.lab.experiment_plan import Plan
from offbeat.launch.rank_info import RankInfo
from offbeat.live.injected_delay import InjectedDelay

WORDS = ["quadratic", "fmb"]


def given(argv: dict[str, str]) -> flags.FlagValues:
    values: dict[str, str | None] = {flag.attribute: None for flag in flags.live_flags()}
    names = {flag.name: flag.attribute for flag in flags.live_flags()}
    return flags.read_flags(
        types.SimpleNamespace(**values | {names[name]: text for name, text in argv.items()}), flags.live_flags()
    )


def workers(**argv: str) -> int:
    return plan_of(WORDS, given({f"--{name}": text for name, text in argv.items()})).worker_count


# How many workers


def test_a_cluster_that_has_a_size_says_how_many_workers_there_are() -> None:
    assert workers() == DEFAULT_WORKERS
    assert workers(cluster="thin") == DEFAULT_WORKERS
    assert workers(cluster="pc-star") == workers(cluster="pc-star-slow") == 8
    assert workers(cluster="pc-star", workers="3") == 3


def test_in_a_live_run_it_comes_before_the_number_of_cores_but_not_before_a_launcher() -> None:
    told = given({"--cluster": "pc-star"})
    alone = RankInfo(0, 1, None)
    assert alone.alone
    assert read_plan(WORDS, told, alone).workers == 8
    assert read_plan(WORDS, given({}), alone).workers == flags.live_defaults()["workers"]
    assert read_plan(WORDS, told, RankInfo(0, 4, None, launcher="mpirun", transport="mpi")).workers == 3


def test_in_an_experiment_file_what_the_file_says_counts(tmp_path: Path) -> None:
    def plan(text: str, **argv: str) -> Plan:
        (tmp_path / "plan.toml").write_text(f'workload = "quadratic"\nstrategy = "fmb"\n{text}')
        return plan_from_file(str(tmp_path / "plan.toml"), given({f"--{name}": value for name, value in argv.items()}))

    assert plan("").workers == DEFAULT_WORKERS
    assert plan('cluster = "pc-star"').workers == 8
    assert plan("cluster = {size = 3}").workers == 3
    assert plan('cluster = "pc-star"\nworkers = 5').workers == 5
    assert plan("workers = 5", cluster="pc-star").workers == 5
    assert plan("", cluster="pc-star").workers == 8
    assert plan("workers = 5", cluster="pc-star", workers="2").workers == 2


def test_in_python_as_well() -> None:
    star = ob.load_cluster("pc-star")
    assert Experiment(ob.workloads.Quadratic(), ob.FixedMinibatch()).workers == DEFAULT_WORKERS
    assert Experiment(ob.workloads.Quadratic(), ob.FixedMinibatch(), cluster=star).workers == 8
    assert Plan(workload=ob.workloads.Quadratic(), strategies=(ob.FixedMinibatch(),), cluster=star).workers == 8
    run = ob.simulate(ob.workloads.Quadratic(), ob.FixedMinibatch(), star, ob.Samples(2000))
    assert run.summary.workers == 8
    assert (
        ob.simulate(ob.workloads.Quadratic(), ob.FixedMinibatch(), star, ob.Samples(2000), workers=2).summary.workers
        == 2
    )


@pytest.mark.parametrize("size", [0, -1, 1.5])
def test_a_size_that_cannot_be(size: Any) -> None:
    with pytest.raises(ob.ConfigurationError, match=r"Cluster\.size must be"):
        ob.Cluster(size=size)


def test_the_stars_are_what_they_are_called(capsys: pytest.CaptureFixture[str]) -> None:
    star, slow = PRESETS["pc-star"], PRESETS["pc-star-slow"]
    assert star.link.bytes_per_second == 1e9
    assert dataclasses.replace(slow, factors=()) == star
    assert [slow.speed(worker).seconds_per_sample / star.speed(worker).seconds_per_sample for worker in range(8)] == [
        *[4.0],
        *[1.0] * 7,
    ]
    assert main(["clusters"]) == 0
    assert "eight workers" in capsys.readouterr().out


# The budget


def test_the_budget_goes_from_the_command_line_to_the_experiment() -> None:
    made = plan_of(WORDS, given({"--bytes-per-second": "1e6"}))
    assert made.bytes_per_second == 1e6
    (experiment,) = made.experiments()
    assert experiment.bytes_per_second == 1e6
    assert Plan.from_plain(made.to_plain(), "plan") == made
    plain = experiment.to_plain()
    assert plain is not None
    assert Experiment.from_plain(json.loads(json.dumps(plain))).bytes_per_second == 1e6


def test_an_experiment_without_a_budget_is_written_as_it_always_was() -> None:
    plain = Experiment(ob.workloads.Quadratic(), ob.FixedMinibatch()).to_plain()
    assert plain is not None
    assert "bytes_per_second" not in plain
    assert "size" not in to_plain(ob.Cluster())
    assert Experiment.from_plain(plain).bytes_per_second is None


@pytest.mark.parametrize("command", ["simulate", "train"])
@pytest.mark.parametrize(("text", "sentence"), [("0", "1 or more"), ("-1", "1 or more"), ("much", "a number")])
def test_a_bad_budget_is_one_sentence(
    command: str, text: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *WORDS, f"--bytes-per-second={text}"]) == 2
    errors = capsys.readouterr().err
    assert len(errors.strip().splitlines()) == 1
    assert sentence in errors


def test_the_flag_says_what_is_limited() -> None:
    for known in (flags.all_flags(), flags.live_flags(), flags.file_flags()):
        (flag,) = [flag for flag in known if flag.name == "--bytes-per-second"]
        assert "bytes per second, for each link and direction" in flag.text


def test_a_command_with_a_budget_tells_what_was_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "quadratic", "async-fmb", "--workers", "2", "--until", "4000", "--no-report", "--quiet"]
    budget = ["--bytes-per-second", "500"]
    assert main([*words, *budget, "--out", str(tmp_path / "a")]) == 0
    assert "limit:   async-fmb used " in capsys.readouterr().out
    assert main([*words, *budget, "--out", str(tmp_path / "b"), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert 0 < run["budget_used_mean"] <= run["budget_used"] <= 1 + 1e-9
    assert main([*words, "--out", str(tmp_path / "c")]) == 0
    assert "budget:" not in capsys.readouterr().out
    assert main(["replay", str(tmp_path / "a" / "async-fmb-seed0")]) == 0


# Bandwidth that is induced


def test_all_sources_share_the_card_of_the_receiver() -> None:
    cluster = ob.Cluster(link=ob.Link(latency_seconds=0.5, bytes_per_second=100.0))
    hub = InjectedDelay.of(cluster, {1: 0, 2: 1}, 0, [1, 2], seed=0)
    assert [hub.delay(source, 100, now=0.0) for source in (1, 2, 1)] == [1.5, 2.5, 3.5]
    assert hub.delay(2, 100, now=10.0) == 1.5


def test_a_slow_source_does_not_keep_a_fast_receiver_busy() -> None:
    slow = (ob.stragglers.WorkerOverride((0, 1), link=ob.Link(bytes_per_second=100.0)),)
    hub = InjectedDelay.of(
        ob.Cluster(link=ob.Link(bytes_per_second=1000.0), workers=slow), {1: 0, 2: 1}, 0, [1, 2], seed=0
    )
    assert [hub.delay(source, 100, now=0.0) for source in (1, 2)] == [1.0, 1.0]
    assert hub.delay(1, 100, now=0.0) == 2.0


def test_without_a_limit_nothing_is_held_up() -> None:
    hub = InjectedDelay.of(ob.Cluster(), {1: 0, 2: 1}, 0, [1, 2], seed=0)
    assert [hub.delay(source, 10**9, now=1.0) for source in (1, 2, 1)] == [0.0, 0.0, 0.0]
