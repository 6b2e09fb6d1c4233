"""Experiments from Python: simulate, compare, plans."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import offbeat as ob
from offbeat.engine.experiment import Experiment, RunSettings
from offbeat.lab.experiment_plan import Plan
from offbeat.records.files import read_run


def test_a_simulated_run_returns_the_trained_model() -> None:
    run = ob.simulate(
        ob.workloads.Digits(), ob.AsyncTimed(), ob.Cluster(straggle=ob.stragglers.NIAGARA), seed=1, workers=10
    )
    assert run.summary.accuracy is not None
    assert run.summary.accuracy > 0.9
    measured = ob.workloads.Digits().build().evaluate(run.model())
    assert measured[:2] == pytest.approx((run.summary.loss, run.summary.accuracy))
    assert measured.accuracy_top5 == run.summary.accuracy_top5 > run.summary.accuracy
    assert "target reached after" in repr(run)


def test_a_workload_without_a_name_can_be_compared_and_recorded(tmp_path: Path) -> None:
    inputs = torch.randn(400, 5, generator=torch.Generator().manual_seed(0))
    workload = ob.Workload(
        model=lambda: torch.nn.Linear(5, 3),
        loss=lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none"),
        train=(inputs, inputs[:, :3].argmax(1)),
        optimizer=ob.SGD(lr=0.5),
        target=ob.Target("accuracy", 0.9),
        until=ob.Samples(20_000),
        label="mine",
    )
    comparison = ob.compare(
        [ob.Experiment(workload, strategy, workers=4) for strategy in (ob.FixedMinibatch(batch=32), ob.AsyncFixed())],
        out=tmp_path,
    )
    assert [summary.strategy for summary in comparison.summaries] == ["fmb", "async-fmb"]
    assert all((summary.accuracy or 0) > 0.9 for summary in comparison.summaries)
    assert read_run(tmp_path / "fmb-seed0").header.experiment is None, "it holds functions, which have no name"


def test_a_plan_is_equal_after_a_roundtrip_through_plain_data(tmp_path: Path) -> None:
    text = """
        workload = {name = "digits-cnn", width = 8, split = "sharded"}
        workers = 4
        seeds = [3, 5]
        until = "9000"
        evaluate = "seconds:2"
        target = "loss:0.5"
        baseline = "slow"
        [cluster]
        straggle = "lognormal:0.3"
        factors = [1, 2]
        faults = ["crash:1:30:5", {name = "pause", rank = 2, at_seconds = 1, seconds = 2}]
        [[cluster.workers]]
        workers = [3]
        straggle = "niagara"
        link = {latency_seconds = 0.1}
        [[strategy]]
        name = "fmb"
        label = "slow"
        optimizer = {name = "sgd", lr = {name = "linear", start = 0.1, end = 0.0, samples = 9000}, momentum = 0.9}
        [[strategy]]
        name = "amb"
        seconds = 6.43
    """
    path = tmp_path / "plan.toml"
    path.write_text(text)
    plan = Plan.from_file(path)
    assert plan.labels == ("slow", "amb")
    assert plan.cluster.faults == (ob.faults.Crash(1, 30.0, 5.0), ob.faults.Pause(2, 1.0, 2.0))
    assert plan.cluster.speed(3).straggle == ob.stragglers.NIAGARA
    assert Plan.from_plain(plan.to_plain(), "again") == plan
    assert [(e.name, e.seed) for e in plan.experiments()] == [("slow", 3), ("amb", 3), ("slow", 5), ("amb", 5)]


def test_every_setting_of_a_plan_reaches_its_experiments() -> None:
    settings = {
        "cluster": ob.load_cluster("niagara"),
        "workers": 3,
        "until": ob.Seconds(5.0),
        "evaluate": None,
        "bytes_per_second": 1e6,
        "target": ob.Target("loss", 0.5),
        "batched": "off",
    }
    assert settings.keys() == {item.name for item in dataclasses.fields(RunSettings)}
    plan = Plan(workload=ob.workloads.Quadratic(), strategies=(ob.FixedMinibatch(),), seeds=(4,), **settings)
    (experiment,) = plan.experiments()
    assert {name: getattr(experiment, name) for name in settings} == settings
    assert (experiment.seed, experiment.name) == (4, "fmb")
    plain = experiment.to_plain()
    assert plain is not None
    again = Experiment.from_plain(plain)
    assert {name: getattr(again, name) for name in settings} == settings


def test_settings_of_an_experiment_are_named() -> None:
    with pytest.raises(TypeError, match="positional"):
        Experiment(ob.workloads.Quadratic(), ob.FixedMinibatch(), ob.Cluster())  # type: ignore[misc]


def test_an_experiment_that_was_written_before_a_setting_existed_is_read_with_its_default() -> None:
    plain = Experiment(ob.workloads.Quadratic(), ob.FixedMinibatch(), workers=2).to_plain()
    assert plain is not None
    del plain["target"]
    assert Experiment.from_plain(plain).target is None
    del plain["cluster"]
    with pytest.raises(KeyError, match="cluster"):
        Experiment.from_plain(plain)


def test_an_experiment_without_a_workload_cannot_be_simulated_or_written() -> None:
    experiment = Experiment(None, ob.FixedMinibatch(), until=100)
    assert experiment.to_plain() is None
    with pytest.raises(ob.ConfigurationError, match="the workload must be an object such as"):
        experiment.resolved()


def test_runs_without_evaluation_have_no_time_to_target() -> None:
    run = ob.simulate(ob.workloads.Quadratic(), ob.FixedMinibatch(), until=ob.Samples(5000), workers=2, evaluate=None)
    assert run.summary.seconds_to_target is None
    assert run.summary.updates == 10


def test_a_failed_run_has_a_summary_with_its_failure() -> None:
    cluster = ob.Cluster(faults=(ob.faults.Corrupt(1, 0.0, 1e9),))
    run = ob.simulate(ob.workloads.Quadratic(), ob.FixedMinibatch(), cluster, ob.Samples(90_000), workers=2)
    assert run.summary.failure is not None
    assert "worker 1" in run.summary.failure


def test_a_cluster_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ob.ConfigurationError, match="rank 7"):
        ob.simulate(
            ob.workloads.Quadratic(), ob.FixedMinibatch(), ob.Cluster(faults=(ob.faults.Crash(7, 1.0),)), workers=2
        )
    with pytest.raises(ob.ConfigurationError, match="workers must be a whole number of at least 1"):
        ob.simulate(ob.workloads.Quadratic(), ob.FixedMinibatch(), workers=0)


def test_a_batch_norm_model_with_single_samples_is_refused_in_a_sentence() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    data = torch.randn(50, 2)
    workload = ob.Workload(model, lambda out, y: (out.squeeze(1) - y).square(), (data, data.sum(1)))
    with pytest.raises(ob.ConfigurationError, match="needs at least 2 samples"):
        ob.simulate(workload, ob.FixedMinibatch(batch=4, microbatch=1), workers=1)
    # A last micro-batch of one sample joins the one before it.
    assert ob.simulate(workload, ob.FixedMinibatch(batch=9, microbatch=4), until=ob.Samples(90), workers=1).summary
