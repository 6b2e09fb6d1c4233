"""Serial training and artificial delay against plain loops, and compared with other strategies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scenes import play
from torch import Tensor, nn

import offbeat as ob
from offbeat.cli import main
from offbeat.core.actions import Cancel, Evaluate, Finish
from offbeat.core.events import Evaluated, GradientReady, Leave, Started
from offbeat.core.examples import Order
from offbeat.core.optimizers import AMSGrad
from offbeat.core.randomness import stream
from offbeat.core.strategy import EveryUpdates, Node, NodeContext
from offbeat.engine.gradient_computer import GradientComputer, GradientRequest
from offbeat.lab.live_runs import workers_for_processes
from offbeat.records.schema import Dropped, Evaluation, Round, Update
from offbeat.strategies.serial import ArtificialDelay, Serial
from offbeat.testing import check_strategy

BATCH = 20
SEED = 3


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def with_batch_norm() -> ob.Workload:
    data = torch.randn(200, 6, generator=torch.Generator().manual_seed(1))
    labels = (data[:, 0] > 0).long()
    return ob.Workload(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)),
        loss=lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, reduction="none"),
        train=(data, labels),
        test=(data[:50], labels[:50]),
    )


WORKLOADS = {"quadratic": ob.workloads.Quadratic(dimension=8, examples=256).build, "batch norm": with_batch_norm}


def plain_loop(
    workload: ob.Workload, optimizer: ob.nodes.Optimizer, steps: int, delay: int
) -> tuple[Tensor, list[int]]:
    """The algorithm written plainly: all iterates in a list, and the gradient at one of the last ones."""
    computing = GradientComputer(workload, SEED)
    parameters = computing.flat.parameters.clone()
    buffers = tuple(buffer.clone() for buffer in computing.flat.buffers)
    stepper = optimizer.build(parameters, computing.flat.layout)
    order = Order(np.arange(len(workload.train)), SEED, 0)
    random = stream(SEED, "node", 0, 0)
    iterates, delays = [parameters.clone()], []
    for step in range(steps):
        delays.append(int(random.integers(min(delay, step + 1))))
        batches = GradientRequest(order, step * BATCH, BATCH, 16, (SEED, 0))
        computed = computing.gradient(iterates[step - delays[-1]], buffers, batches)
        buffers = computed.buffers
        stepper.step(computed.gradient / BATCH, step * BATCH)
        iterates.append(parameters.clone())
    return parameters, delays


def hand_written_amsgrad(workload: ob.Workload, config: AMSGrad, steps: int) -> Tensor:
    """Serial AMSGrad on an ordinary module with torch's own optimizer."""
    torch.manual_seed(0)
    model = workload.initial_model(SEED)
    assert isinstance(config.lr, float)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr, amsgrad=True, fused=True)
    order = Order(np.arange(len(workload.train)), SEED, 0)
    for step in range(steps):
        optimizer.param_groups[0]["eps"] = config.eps / (1.0 - config.betas[1] ** (step + 1)) ** 0.5
        optimizer.zero_grad()
        batch = workload.train.take(order.take(step * BATCH, (step + 1) * BATCH))
        workload.losses(model, batch).sum().backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= BATCH
        optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@pytest.mark.parametrize("kind", WORKLOADS)
@pytest.mark.parametrize("delay", [1, 2, 7, 1000])
def test_artificial_delay_equals_a_plain_loop_bit_for_bit(kind: str, delay: int) -> None:
    workload, optimizer = WORKLOADS[kind](), AMSGrad(lr=0.02)
    strategy = ArtificialDelay(delay=delay, batch=BATCH, optimizer=optimizer)
    scene = play(strategy, workload, until=ob.Samples(40 * BATCH), seed=SEED, checked=False)
    expected, delays = plain_loop(workload, optimizer, 40, delay)
    assert torch.equal(scene.outcome.finishes[0].parameters, expected)
    assert [update.contributions[0].staleness for update in scene.of(Update)] == delays
    assert max(delays) > 0 or delay == 1


def test_without_delay_it_equals_torchs_amsgrad() -> None:
    workload, optimizer = WORKLOADS["quadratic"](), AMSGrad(lr=0.02)
    strategy = ArtificialDelay(batch=BATCH, microbatch=BATCH, optimizer=optimizer)
    scene = play(strategy, workload, until=ob.Samples(40 * BATCH), seed=SEED)
    assert torch.equal(scene.outcome.finishes[0].parameters, hand_written_amsgrad(workload, optimizer, 40))


def test_without_delay_it_equals_serial_with_the_same_optimizer() -> None:
    one, other = (
        play(kind(batch=BATCH, optimizer=AMSGrad(lr=0.02)), seed=SEED).outcome for kind in (Serial, ArtificialDelay)
    )
    assert torch.equal(one.finishes[0].parameters, other.finishes[0].parameters)


@pytest.mark.slow
def test_delays_are_uniform_and_independent_of_the_data_order() -> None:
    scene = play(ArtificialDelay(delay=5, batch=1, microbatch=1), until=ob.Samples(4000), checked=False)
    drawn = [update.contributions[0].staleness for update in scene.of(Update)]
    counts = np.bincount(drawn[5:], minlength=5)
    assert counts.min() > 0.16 * len(drawn)
    assert counts.max() < 0.24 * len(drawn)
    plain = play(ArtificialDelay(batch=1, microbatch=1), until=ob.Samples(4000), checked=False)
    assert [r.draws for r in plain.of(Round)] == [r.draws for r in scene.of(Round)]


def test_the_default_optimizer_is_amsgrad_with_the_rate_of_the_workload() -> None:
    assert ArtificialDelay().with_default_optimizer(ob.SGD(lr=0.3)).optimizer == AMSGrad(lr=0.3)
    assert ArtificialDelay(optimizer=ob.SGD(lr=0.1)).with_default_optimizer(ob.Adam()).optimizer == ob.SGD(lr=0.1)
    assert Serial().with_default_optimizer(ob.SGD(lr=0.3)).optimizer == ob.SGD(lr=0.3)


@pytest.mark.parametrize("strategy", [Serial(batch=BATCH), ArtificialDelay(batch=BATCH, delay=6)])
def test_it_lowers_the_loss(strategy: Serial) -> None:
    losses = [
        record.loss for record in play(strategy, evaluate=EveryUpdates(), until=ob.Samples(20_000)).of(Evaluation)
    ]
    assert losses[0] is not None
    assert losses[-1] is not None
    assert losses[-1] < 0.2 * losses[0]


def test_it_ends_by_time_and_evaluates_by_its_cadence() -> None:
    cluster = ob.Cluster(seconds_per_sample=0.01)
    strategy = ArtificialDelay(batch=BATCH, delay=3)
    scene = play(strategy, cluster=cluster, until=ob.Seconds(1.9), evaluate=EveryUpdates(4))
    updates = scene.of(Update)
    assert [len(updates), scene.outcome.seconds] == [9, pytest.approx(2.0, abs=0.11)]
    assert [evaluation.version for evaluation in scene.of(Evaluation)] == [0, 4, 8, 9]
    assert [dropped.reason for dropped in scene.of(Dropped)] == ["stopped"]


def test_gradients_that_are_not_finite_are_dropped_and_too_many_fail_the_run() -> None:
    cluster = ob.Cluster(seconds_per_sample=0.01, faults=(ob.faults.Corrupt(0, 0.5, 0.5),))
    scene = play(ArtificialDelay(batch=BATCH, delay=3), cluster=cluster, until=ob.Samples(400))
    assert scene.outcome.failure is None
    assert {dropped.reason for dropped in scene.of(Dropped)} == {"nonfinite"}
    assert bool(torch.isfinite(scene.outcome.finishes[0].parameters).all())
    corrupt = ob.Cluster(seconds_per_sample=0.01, faults=(ob.faults.Corrupt(0, 0.5, 50.0),))
    failed = play(ArtificialDelay(batch=BATCH, nonfinite_max=3), cluster=corrupt, until=ob.Samples(400))
    assert failed.outcome.failure is not None
    assert failed.outcome.failure.startswith("3 gradients in a row were not finite; ")


@pytest.mark.slow
def test_delays_beyond_those_of_the_fuzz_keep_the_contract() -> None:
    assert check_strategy(ArtificialDelay(delay=3), seeds=range(1000, 1020)) == 20
    assert check_strategy(Serial(), seeds=range(1000, 1010)) == 10


def node_of(strategy: Serial, members: int = 1, evaluate: EveryUpdates | None = None) -> Node:
    computing = GradientComputer(WORKLOADS["quadratic"](), 0)
    flat = computing.flat
    return strategy.node(
        NodeContext(0, tuple(range(members)), flat.layout, flat.parameters.clone(), (), stream(0, "node", 0, 0),
              ob.Samples(1000), evaluate)
    )  # fmt: skip


def test_a_node_restored_in_a_new_process_repeats_the_step_under_way() -> None:
    strategy = ArtificialDelay(delay=50, batch=4, optimizer=ob.SGD(lr=0.1))
    node = node_of(strategy)
    (request,) = (action for action in node.handle(Started(0.0)) if hasattr(action, "draw"))  # type: ignore[attr-defined]
    for step in range(30):
        gradient = torch.full_like(request.parameters, 4.0 * (step + 1))
        draws = (request.draw, request.draw + 4)
        event = GradientReady(float(step), gradient, 4, 1.0, (), request.version, draws, 1.0, 0.0, True)
        (request,) = (action for action in node.handle(event) if hasattr(action, "draw"))  # type: ignore[attr-defined]
    again = node_of(strategy)
    again.restore(node.state())  # type: ignore[attr-defined]
    (repeated,) = again.handle(Started(99.0))  # type: ignore[attr-defined]
    assert (repeated.version, repeated.draw) == (request.version, request.draw)
    assert repeated.version < 30
    assert torch.equal(repeated.parameters, request.parameters)


def test_a_result_whose_evaluation_was_cut_off_is_evaluated_again_in_a_new_process() -> None:
    strategy = ob.Serial(batch=4, optimizer=ob.SGD(lr=0.1))
    node = node_of(strategy, evaluate=ob.EveryUpdates())
    list(node.handle(Started(0.0)))
    list(node.handle(Evaluated(0.1, 0, 1.0, None)))
    (request,) = (action for action in node.handle(Leave(1.0)) if isinstance(action, Evaluate | Cancel))
    assert isinstance(request, Cancel)  # version 0 has been evaluated
    again = node_of(strategy, evaluate=ob.EveryUpdates())
    again.restore(node.state())
    (finish,) = again.handle(Started(2.0))
    assert isinstance(finish, Finish)

    node = node_of(strategy, evaluate=ob.EveryUpdates())
    list(node.handle(Started(0.0)))  # requests an evaluation of version 0
    list(node.handle(Leave(1.0)))
    again = node_of(strategy, evaluate=ob.EveryUpdates())
    again.restore(node.state())
    (evaluate,) = again.handle(Started(2.0))
    assert isinstance(evaluate, Evaluate)
    assert any(isinstance(action, Finish) for action in again.handle(Evaluated(3.0, 0, 1.0, None)))


def test_the_state_holds_the_tensors_of_iterates_without_a_copy() -> None:
    node = node_of(ArtificialDelay(delay=3, batch=4, optimizer=ob.SGD(lr=0.1)))
    first, second = node.state()["iterates"], node.state()["iterates"]  # type: ignore[attr-defined]
    assert [a is b for a, b in zip(first, second, strict=True)] == [True]


# Compared with others


def test_it_is_one_process_whatever_the_number_of_workers() -> None:
    run = ob.simulate(ob.workloads.Quadratic(), ArtificialDelay(delay=4), workers=7, until=1000)
    assert (run.summary.workers, run.records.header.workers) == (1, 1)
    assert {record.rank for record in run.records.records if isinstance(record, Round)} == {0}
    comparison = ob.compare(
        [ob.Experiment(ob.workloads.Quadratic(), s, workers=3, until=500) for s in (Serial(), ob.AsyncFixed())]
    )
    assert [summary.workers for summary in comparison.summaries] == [1, 3]


def test_it_is_as_fast_as_the_first_worker_of_the_cluster() -> None:
    cluster = ob.Cluster(factors=(2.0, 1.0, 1.0))
    slow, plain = (
        ob.simulate(ob.workloads.Quadratic(), Serial(), c, workers=3, until=1000).summary.seconds
        for c in (cluster, None)
    )
    assert slow == pytest.approx(2.0 * plain)


def test_faults_of_workers_that_it_does_not_have_have_no_effect() -> None:
    elsewhere = ob.Cluster(
        faults=(ob.faults.Crash(2, 0.1), ob.faults.Partition((1, 2), 0.1, 5.0), ob.faults.Corrupt(2, 0.0, 9.0))
    )
    with_faults, plain = (
        ob.simulate(ob.workloads.Quadratic(), Serial(), c, workers=3, until=1000).records.records
        for c in (elsewhere, None)
    )
    assert with_faults == plain
    with pytest.raises(ob.ConfigurationError, match="names rank 3, but there are 3 processes"):
        ob.simulate(
            ob.workloads.Quadratic(), Serial(), ob.Cluster(faults=(ob.faults.Crash(3, 0.1),)), workers=3, until=1000
        )


def test_a_crash_loses_everything_and_training_begins_again() -> None:
    cluster = ob.Cluster(seconds_per_sample=0.01, faults=(ob.faults.Crash(0, 5.0, back_after_seconds=1.0),))
    scene = play(Serial(batch=BATCH), cluster=cluster, until=ob.Samples(1000))
    versions = [update.version for update in scene.of(Update)]
    assert versions == [*range(1, 25), *range(1, 51)]
    assert scene.outcome.seconds == pytest.approx(16.0)


def test_workers_that_are_not_used_are_reported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    common = ["--until", "500", "--no-report", "--quiet"]
    assert main(["simulate", "quadratic", "artificial-delay", "--workers", "5", *common]) == 0
    assert capsys.readouterr().err == "offbeat: artificial-delay trains in one process, so the 5 workers are not used\n"
    assert main(["simulate", "quadratic", "artificial-delay", "serial", *common]) == 0
    assert main(["simulate", "quadratic", "serial", "fmb", "--workers", "5", *common]) == 0
    assert capsys.readouterr().err == ""


def test_more_processes_than_one_are_refused() -> None:
    with pytest.raises(ob.ConfigurationError, match="serial trains in one process, but 3 were started; start one"):
        node_of(Serial(), members=3)
    assert workers_for_processes(Serial(), 1) == 1
    with pytest.raises(ob.ConfigurationError, match="serial trains in 1 process, but 3 were started; start fewer"):
        workers_for_processes(Serial(), 3)
    with pytest.raises(ob.ConfigurationError, match="1 process cannot train with fmb, which needs 2 or more"):
        workers_for_processes(ob.FixedMinibatch(), 1)


def test_bad_settings_are_refused_in_a_sentence() -> None:
    with pytest.raises(ob.ConfigurationError, match=r"ArtificialDelay\.delay must be greater than 0, but is 0"):
        ArtificialDelay(delay=0)
    with pytest.raises(ob.ConfigurationError, match="artificial-delay has no optimizer; give it one"):
        play(WithoutDefault(batch=4))


class WithoutDefault(ArtificialDelay):
    def with_default_optimizer(self, optimizer: ob.nodes.Optimizer) -> WithoutDefault:
        return self


# Live


def test_a_user_loop_trains_serially() -> None:
    model = nn.Linear(4, 1)
    data = torch.randn(64, 4), torch.zeros(64, 1)
    strategy = ArtificialDelay(delay=3, batch=8, optimizer=AMSGrad(lr=0.05))
    with ob.join(model, strategy, until=ob.Samples(800)) as run:
        for x, y in run.batches(data):
            run.backward((model(x) - y).square().mean(1))
    assert (run.processes, run.rank, run.summary.samples) == (1, 0, 800)
    assert run.summary.staleness_max is not None
    assert run.summary.staleness_max <= 2


def test_a_live_run_is_one_process_and_agrees_with_the_simulation(tmp_path: Path) -> None:
    workload, strategy = ob.workloads.Quadratic(dimension=8, examples=256), ArtificialDelay(delay=4, batch=16)
    live = ob.train(workload, strategy, ob.Samples(1600), workers=3, seed=5, out=tmp_path / "run")
    simulated = ob.simulate(workload, strategy, until=ob.Samples(1600), seed=5)
    assert [path.name for path in (tmp_path / "run").glob("records-*.jsonl")] == ["records-0.jsonl"]
    stale = [
        [update.contributions for update in run.records.records if isinstance(update, Update)]
        for run in (live, simulated)
    ]
    assert stale[0] == stale[1]
    assert live.finish is not None
    assert simulated.finish is not None
    assert torch.allclose(live.finish.parameters, simulated.finish.parameters, rtol=1e-4, atol=1e-6)
