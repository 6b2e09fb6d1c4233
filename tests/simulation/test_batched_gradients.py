"""Gradients of several workers in one call: the same up to rounding, by a fixed rule, and otherwise one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import offbeat as ob
from offbeat.core.actions import Record
from offbeat.core.examples import Order
from offbeat.engine import batching
from offbeat.engine.batched_gradients import BatchedGradients, RoundInputs
from offbeat.engine.batching import choose_batching, try_batching
from offbeat.engine.gradient_computer import GradientComputer, GradientRequest
from offbeat.lab.simulated_runs import record_bytes, simulate_experiment
from offbeat.records.files import MemoryWriter, read_run
from offbeat.records.schema import Notice, Round, of_kind
from offbeat.simulation.simulator import Simulation
from offbeat.testing import check_case, draw_case

SMALL = {
    "quadratic": ob.workloads.Quadratic(dimension=20, examples=64),
    "linear": ob.workloads.LinearRegression(examples=64),
    "digits": ob.workloads.Digits(hidden=8),
    "digits-cnn": ob.workloads.DigitsCNN(width=2),
    "digits-logistic": ob.workloads.DigitsLogistic(),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("at", ["the same", "their own"])
def test_gradients_of_several_rounds_are_those_of_single_ones(name: str, at: str) -> None:
    workload = SMALL[name].build()
    computer = GradientComputer(workload, 0)
    start = computer.flat.parameters.detach().clone()
    vectors = [start + (0.01 * rank if at == "their own" else 0.0) for rank in range(4)]
    orders = [Order(np.arange(len(workload.train)), 0, rank) for rank in range(4)]
    rounds = [RoundInputs(vector, order, 5, 12) for vector, order in zip(vectors, orders, strict=True)]
    together = BatchedGradients(workload, computer.flat).compute(rounds)
    for one, result in zip(rounds, together, strict=True):
        single = computer.gradient(one.parameters, (), GradientRequest(one.order, 5, 7, 7, (0, 0)))
        torch.testing.assert_close(result.gradient, single.gradient, rtol=1e-4, atol=1e-5)
        assert result.loss == pytest.approx(single.loss, rel=1e-4, abs=1e-5)
        assert result.finite


def test_augmented_data_is_drawn_by_each_rank_for_itself() -> None:
    class Shifted(ob.workloads.Examples):
        def drawn(self, order: Order, first: int, stop: int) -> tuple[Tensor, Tensor]:
            inputs, targets = super().drawn(order, first, stop)
            bits = torch.from_numpy((order.random_bits(first, stop) % np.uint64(3)).astype(np.float32))
            return inputs + bits[:, None, None, None], targets

    digits = SMALL["digits-logistic"].build()
    workload = dataclasses.replace(digits, train=Shifted(digits.train.inputs, digits.train.targets))
    computer = GradientComputer(workload, 0)
    orders = [Order(np.arange(100), 0, rank) for rank in range(3)]
    start = computer.flat.parameters.detach().clone()
    together = BatchedGradients(workload, computer.flat).compute([RoundInputs(start, order, 0, 9) for order in orders])
    for order, result in zip(orders, together, strict=True):
        single = computer.gradient(start, (), GradientRequest(order, 0, 9, 9, (0, 0)))
        torch.testing.assert_close(result.gradient, single.gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted(ob.Strategy.members))
def test_a_run_is_the_same_but_for_rounding(name: str) -> None:
    on, off = (rounds_of(name, batched) for batched in ("on", "off"))
    assert [outline(record) for record in on] == [outline(record) for record in off]
    assert [record.loss for record in on] == pytest.approx([record.loss for record in off], rel=1e-3)


def rounds_of(name: str, batched: str) -> list[Round]:
    run = ob.simulate(
        SMALL["digits-logistic"],
        ob.Strategy.members[name](),
        ob.Cluster(straggle=ob.stragglers.Lognormal(0.5), faults=(ob.faults.Crash(2, 0.02, back_after_seconds=0.05),)),
        ob.Samples(1500),
        workers=6,
        evaluate=None,
        batched=batched,  # type: ignore[arg-type]
    )
    assert run.records.header.batched is (batched == "on" and name not in IN_ONE_PROCESS)
    return list(of_kind(run.records, Round))


IN_ONE_PROCESS = ("serial", "artificial-delay")


def outline(record: Round) -> tuple[float, int, int, tuple[int, int]]:
    return record.at, record.rank, record.samples, record.draws


def test_one_call_is_made_for_all_rounds_that_are_outstanding(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = sizes_of_calls(monkeypatch)
    ob.simulate(SMALL["digits-logistic"], ob.FixedMinibatch(batch=16), until=ob.Samples(960), workers=6, batched="on")
    assert sizes == [6] * 10


def sizes_of_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rounds each call of `BatchedGradients` is about; filled as calls are made."""
    sizes: list[int] = []
    compute = BatchedGradients.compute

    def counted(self: BatchedGradients, rounds: list[RoundInputs]) -> object:
        sizes.append(len(rounds))
        return compute(self, rounds)

    monkeypatch.setattr(BatchedGradients, "compute", counted)
    return sizes


def test_rounds_of_different_sizes_are_not_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = sizes_of_calls(monkeypatch)
    strategy = ob.AnytimeMinibatch(seconds=0.5, samples_max=64, microbatch=4)
    cluster = ob.Cluster(factors=(1, 1, 1, 2, 2, 2))
    run = ob.simulate(SMALL["digits-logistic"], strategy, cluster, ob.Samples(600), workers=6, batched="on")
    assert len({record.samples for record in of_kind(run.records, Round)}) > 1
    assert set(sizes) == {3}


def test_canceled_rounds_report_what_was_done() -> None:
    on, off = (
        ob.simulate(
            SMALL["digits-logistic"],
            ob.BackupWorkers(batch=32, microbatch=4, k=4),
            ob.Cluster(straggle=ob.stragglers.Lognormal(1.0)),
            ob.Samples(2000),
            workers=6,
            batched=batched,  # type: ignore[arg-type]
        )
        for batched in ("on", "off")
    )
    assert [outline(record) for record in of_kind(on.records, Round)] == [
        outline(record) for record in of_kind(off.records, Round)
    ]


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    def written(out: str) -> bytes:
        cluster = ob.Cluster(straggle=ob.stragglers.NIAGARA)
        digits = SMALL["digits"]
        ob.simulate(digits, ob.AsyncFixed(), cluster, ob.Samples(3000), workers=8, batched="on", out=tmp_path / out)
        return b"".join(path.read_bytes() for path in sorted((tmp_path / out).iterdir()))

    assert written("first") == written("again")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["async-fmb", "k-of-n", "gossip", "local-sgd", "amb"])
def test_random_faults_keep_the_invariants(name: str, seed: int) -> None:
    case = draw_case(ob.Strategy.members[name](), seed)
    check_case(dataclasses.replace(case, experiment=dataclasses.replace(case.experiment, workers=5, batched="on")))


# What is not computed together


class Items(nn.Module):
    """Looks at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.linear(inputs.flatten(1))
        return outputs if float(outputs.detach().sum()) > 0 else 2 * outputs


def with_model(model: Callable[[], nn.Module]) -> ob.Workload:
    return dataclasses.replace(SMALL["digits-logistic"].build(), model=model)


def linear(*parts: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10), *parts)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (linear(nn.BatchNorm1d(10)), "has batch norm"),
        (linear(nn.BatchNorm1d(10, track_running_stats=False)), "has batch norm"),
        (linear(nn.Dropout()), "is refused by torch.vmap (vmap: called random operation"),
        (Items, "is refused by torch.vmap (vmap: It looks like you're"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).bfloat16(), "has parameters of type bfloat16"),
    ],
)
def test_a_model_that_cannot_be_batched_is_computed_one_by_one_with_a_notice(
    model: Callable[[], nn.Module], reason: str
) -> None:
    workload = with_model(model)
    if "bfloat16" in reason:
        workload = dataclasses.replace(
            workload,
            train=(workload.train.inputs.bfloat16(), workload.train.targets),
            test=(workload.test.inputs.bfloat16(), workload.test.targets),
        )
    run = ob.simulate(workload, ob.FixedMinibatch(batch=8), until=ob.Samples(200), workers=batching.WORKERS_MIN)
    texts = [notice.text for notice in of_kind(run.records, Notice)]
    assert len(texts) == 1
    assert texts[0].startswith("gradients of several workers are not computed together, which takes longer: the model")
    assert reason in texts[0]
    assert run.records.header.batched is False


def test_nothing_is_tried_where_nothing_is_gained() -> None:
    workload = with_model(linear(nn.Dropout()))
    for batched, workers in (("off", batching.WORKERS_MIN), ("auto", 2)):
        run = ob.simulate(
            workload,
            ob.FixedMinibatch(batch=8),
            until=ob.Samples(100),
            workers=workers,
            batched=batched,  # type: ignore[arg-type]
        )
        assert not list(of_kind(run.records, Notice))


def test_the_rule_knows_the_work_of_a_round_and_the_number_of_workers() -> None:
    small, large = SMALL["digits"].build(), ob.workloads.DigitsCNN(width=128).build()
    assert choose_batching(small, "auto", 16).samples_max >= 64
    assert choose_batching(small, "auto", batching.WORKERS_MIN - 1).samples_max == 0
    assert choose_batching(large, "auto", 16).samples_max < 16
    assert choose_batching(large, "on", 2).samples_max >= 1024
    assert try_batching(large).flops_per_sample > 100 * try_batching(small).flops_per_sample


def test_large_models_are_computed_in_smaller_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = SMALL["digits-logistic"].build()
    monkeypatch.setattr(batching, "GROUP_ELEMENTS_MAX", 5 * 650)
    assert choose_batching(workload, "on", 16).group_max == 5
    monkeypatch.setattr(batching, "GROUP_ELEMENTS_MAX", 650)
    assert choose_batching(workload, "on", 16).group_max == 0


def test_the_choice_is_part_of_the_experiment(tmp_path: Path) -> None:
    experiment = ob.Experiment(
        SMALL["digits-logistic"],
        ob.AsyncFixed(batch=16),
        workers=batching.WORKERS_MIN,
        until=ob.Samples(640),
        batched="off",
    )
    simulate_experiment(experiment, tmp_path / "off")
    header = read_run(tmp_path / "off").header
    assert header.experiment is not None
    assert header.experiment["batched"] == "off"
    assert header.batched is False
    assert ob.Experiment.from_plain(header.experiment).batched == "off"
    simulate_experiment(dataclasses.replace(experiment, batched="auto"), tmp_path / "auto")
    header = read_run(tmp_path / "auto").header
    assert header.experiment is not None
    assert "batched" not in header.experiment
    assert header.batched is True


def test_a_wrong_choice_is_one_sentence() -> None:
    with pytest.raises(ob.ConfigurationError, match='batched must be "auto", "on" or "off", but is True'):
        ob.Experiment(SMALL["digits"], ob.AsyncFixed(), batched=True)  # type: ignore[arg-type]


def records_of(experiment: ob.Experiment) -> list[Record]:
    writer = MemoryWriter()
    Simulation(experiment, writer).run()
    return writer.records


def test_few_workers_have_the_same_bytes_as_without_batching() -> None:
    experiment = ob.Experiment(SMALL["digits"], ob.AsyncFixed(optimizer=ob.Adam()), workers=3, until=ob.Samples(900))
    off = dataclasses.replace(experiment, batched="off")
    assert record_bytes(records_of(experiment)) == record_bytes(records_of(off))
