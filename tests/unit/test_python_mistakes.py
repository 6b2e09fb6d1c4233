"""Common mistakes from Python: each raises one sentence, never an error from deep inside, and never hangs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import offbeat as ob

DATA = torch.randn(40, 4), torch.randint(0, 3, (40,))


def simulate(workload: Any = None, strategy: Any = None, cluster: Any = None, **settings: Any) -> ob.Run:
    settings = {"until": ob.Samples(64), "workers": 2, **settings}
    return ob.simulate(
        workload or ob.workloads.Quadratic(), strategy or ob.FixedMinibatch(batch=8), cluster, **settings
    )


def mine(**changes: Any) -> ob.Workload:
    fields: dict[str, Any] = {
        "model": lambda: torch.nn.Linear(4, 3),
        "loss": lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none"),
        "train": DATA,
    }
    return ob.Workload(**{**fields, **changes})


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a text for a workload": (
        lambda: simulate("digits"),
        r"workload must be an object such as offbeat.workloads.Digits\(\)",
    ),
    "a text for the model of a workload": (
        lambda: ob.workloads.Mnist(model="lenet5"),  # type: ignore[arg-type]
        r"Mnist.model must be a Model.*but is 'lenet5'",
    ),
    "a text for a width": (lambda: ob.models.LeNet5(width="1"), r"LeNet5.width must be a number"),  # type: ignore[arg-type]
    "a class for a workload": (lambda: simulate(ob.workloads.Digits), r"the class Digits; type Digits\(\)"),
    "a class for a strategy": (lambda: simulate(strategy=ob.AsyncTimed), r"type AsyncTimed\(\)"),
    "a text for a strategy": (lambda: simulate(strategy="fmb"), "strategy must be an object"),
    "a text for a cluster": (lambda: simulate(cluster="niagara"), "cluster must be an object"),
    "stragglers for a cluster": (lambda: simulate(cluster=ob.stragglers.NIAGARA), "cluster must be an object"),
    "a text for stragglers": (lambda: ob.Cluster(straggle="niagara"), "Cluster.straggle must be a Straggle"),
    "a number for a link": (lambda: ob.Cluster(link=1e6), "Cluster.link must be a Link"),
    "one fault, no tuple": (lambda: ob.Cluster(faults=ob.faults.Crash(1, 1.0)), "Cluster.faults must be a tuple"),
    "one factor, no tuple": (lambda: ob.Cluster(factors=2.0), "Cluster.factors must be a tuple of a number"),
    "workers in a cluster": (lambda: ob.Cluster(workers=4), "Cluster.workers must be a tuple"),
    "no time to compute": (lambda: ob.Cluster(seconds_per_sample=0.0), "cannot be simulated"),
    "a text for an optimizer": (lambda: ob.FixedMinibatch(optimizer="sgd"), "optimizer must be an Optimizer or None"),
    "a class for an optimizer": (lambda: mine(optimizer=ob.SGD), "Workload.optimizer must be an object"),
    "no samples": (lambda: ob.FixedMinibatch(batch=0), "FixedMinibatch.batch must be greater than 0, but is 0"),
    "half a sample": (lambda: ob.FixedMinibatch(batch=16.5), "batch must be a whole number"),
    "a share where a number is meant": (lambda: ob.BackupWorkers(k=0.8), "k must be a whole number or None"),
    "workers as text": (lambda: simulate(workers="2"), "workers must be a whole number of at least 1"),
    "a negative seed": (lambda: simulate(seed=-1), "seed must be a whole number of at least 0"),
    "until zero samples": (lambda: simulate(until=0), "count must be greater than 0"),
    "until as an unknown text": (lambda: simulate(until="someday"), "neither a number of samples"),
    "a number for evaluate": (lambda: simulate(evaluate=5), "evaluate must be an object"),
    "a number for a target": (lambda: mine(target=0.9), "Workload.target must be an object"),
    "strategies to compare": (lambda: ob.compare([ob.FixedMinibatch()]), "what is compared must be an object"),
    "a file to compare": (lambda: ob.compare("x.toml"), "compare takes a list of offbeat.Experiment objects"),
    "no loss": (lambda: mine(loss=None), "Workload.loss must be a function"),
    "a mean loss": (lambda: simulate(mine(loss=F.cross_entropy)), "one loss per sample"),
    "another dtype": (
        lambda: simulate(mine(model=lambda: torch.nn.Linear(4, 3).double())),
        "failed on its first batch",
    ),
    "another width": (lambda: simulate(mine(model=lambda: torch.nn.Linear(5, 3))), "failed on its first batch"),
    "labels out of range": (lambda: simulate(mine(train=(DATA[0], DATA[1] + 3))), "failed on its first batch"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_one_sentence(mistake: str) -> None:
    make, sentence = MISTAKES[mistake]
    with pytest.raises(ob.ConfigurationError, match=sentence) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_until_may_be_a_number_or_a_text() -> None:
    assert simulate(until=64).summary.samples == 64
    assert simulate(until="1s", evaluate=None).summary.seconds >= 1.0
    assert simulate(until=ob.Seconds(1000.0, samples_max=64)).summary.samples == 64


def test_numpy_numbers_are_numbers() -> None:
    assert simulate(strategy=ob.FixedMinibatch(batch=np.int64(8)), workers=np.int64(2)).summary.samples == 64


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    simulate(out=tmp_path / "run")
    with pytest.raises(ob.ConfigurationError, match="holds a run already"):
        simulate(out=tmp_path / "run")


def test_experiments_of_one_name_get_different_directories(tmp_path: Path) -> None:
    plan = [
        ob.Experiment(ob.workloads.Quadratic(), ob.FixedMinibatch(batch=b), workers=2, until=ob.Samples(64))
        for b in (8, 16)
    ]
    comparison = ob.compare(plan, out=tmp_path)
    assert comparison.strategies == ["fmb", "fmb-2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fmb-2-seed0", "fmb-seed0"]


def test_a_failed_run_shows_its_failure_and_has_no_model() -> None:
    run = simulate(cluster=ob.Cluster(faults=(ob.faults.Corrupt(1, 0.0, 1e9),)), until=ob.Samples(10_000))
    assert "failed: worker 1 reported 5 gradients in a row" in repr(run)
    with pytest.raises(ob.RunFailed, match="worker 1"):
        run.model()


def test_micro_batches_of_batch_norm_without_statistics_are_not_merged() -> None:
    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.BatchNorm1d(4, track_running_stats=False), torch.nn.Linear(4, 3))

    def losses(microbatch: int) -> float | None:
        strategy = ob.FixedMinibatch(batch=32, microbatch=microbatch)
        return simulate(mine(model=model), strategy, until=ob.Samples(640)).summary.loss

    assert losses(4) != losses(32)


def test_batch_norm_on_single_samples_is_refused_whatever_its_error_says() -> None:
    class Norm(torch.nn.BatchNorm1d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if len(input) == 1:
                raise ValueError("another wording")
            return super().forward(input)

    def model() -> torch.nn.Module:
        return torch.nn.Sequential(Norm(4), torch.nn.Linear(4, 3))

    with pytest.raises(ob.ConfigurationError, match="batch norm, which needs at least 2 samples at a time"):
        simulate(mine(model=model), ob.FixedMinibatch(batch=4, microbatch=1))
