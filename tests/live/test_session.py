"""`offbeat.join` in one process: hub and worker over loopback, around a user's training loop."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accounts import check_accounts, check_traffic
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import offbeat as ob
from offbeat.live.session import Session
from offbeat.records.files import rank_file, read_run
from offbeat.records.schema import Dropped, Evaluation, Notice, Round, Update, of_kind

SGD = ob.SGD(lr=0.1)
STRATEGIES = [
    ob.FixedMinibatch(batch=64, optimizer=SGD),
    ob.AnytimeMinibatch(batch=64, samples_max=64, optimizer=SGD),
    ob.AsyncFixed(batch=64, optimizer=SGD),
    ob.AsyncTimed(worker_seconds=0.02, hub_seconds=0.02, samples_max=64, optimizer=SGD),
    ob.AsyncAdaptive(batch=64, optimizer=ob.AMSGrad(lr=0.01)),
    ob.SyncAdaptive(batch=64, optimizer=ob.AMSGrad(lr=0.01)),
    ob.BackupWorkers(batch=64, optimizer=SGD),
    ob.Hub(optimizer=SGD),
]


@pytest.fixture(scope="module")
def data() -> TensorDataset:
    """Two clusters of points, linearly separable."""
    random = torch.Generator().manual_seed(0)
    targets = torch.arange(600) % 2
    inputs = torch.randn(600, 4, generator=random) + 2.0 * (2 * targets[:, None] - 1)
    return TensorDataset(inputs, targets)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 2)


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    inputs, targets = data.tensors
    return float((model(inputs).argmax(1) == targets).double().mean())


def trained(net: nn.Module, strategy: ob.Strategy, data: object, body: Any = None, **arguments: Any) -> Session:
    """The usual loop; `body` handles a micro-batch."""
    with ob.join(net, strategy, **arguments) as run:
        for x, y in run.batches(data):
            if body is None:
                run.backward(F.cross_entropy(net(x), y, reduction="none"))
            else:
                body(run, net, x, y)
    return run


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name or "hub")
def test_every_strategy_trains_in_a_process_of_its_own(strategy: ob.Strategy, data: TensorDataset) -> None:
    net = model()
    with ob.join(net, strategy, until=ob.Samples(6_000), evaluate=lambda m: (0.0, accuracy(m, data))) as run:
        for x, y in run.batches(data):
            run.backward(F.cross_entropy(net(x), y, reduction="none"))
    assert run.summary.failure is None
    assert run.summary.samples >= 6_000
    assert accuracy(net, data) > 0.95
    assert run.summary.accuracy == pytest.approx(accuracy(net, data))  # the last evaluation is of the final parameters


@pytest.mark.parametrize("compression", [None, ob.compression.BFloat16()])
def test_every_sample_is_accounted_for(compression: ob.compression.Compression | None, data: TensorDataset) -> None:
    net = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 2))  # large enough to be compressed at all
    with ob.join(net, dataclasses.replace(STRATEGIES[2], compression=compression), until=3_000) as run:
        for x, y in run.batches(data):
            run.backward(F.cross_entropy(net(x), y, reduction="none"))
    records = run.records.records
    computed = sum(record.samples for record in records if isinstance(record, Round))
    applied = sum(record.samples for record in records if isinstance(record, Update))
    dropped = sum(record.stop - record.first for record in records if isinstance(record, Dropped))
    assert computed == applied + dropped
    assert applied == run.summary.samples
    check_traffic(run.records)
    assert run.summary.traffic["Gradient"].messages >= sum(isinstance(record, Update) for record in records)
    assert run.summary.bytes_received
    gradients = run.summary.traffic["Gradient"]
    assert (gradients.bytes < gradients.bytes_uncompressed) == (compression is not None)


def test_records_beyond_their_limit_are_aggregated_and_still_account_for_every_sample(
    data: TensorDataset, tmp_path: Path
) -> None:
    net, bytes_max = model(), 20_000
    strategy = ob.AsyncFixed(batch=4, optimizer=SGD)
    run = trained(net, strategy, data, until=4_000, out=tmp_path / "run", records_max_bytes=bytes_max)
    check_accounts(run.records)
    check_traffic(run.records)
    notices = [record.text for record in of_kind(run.records, Notice)]
    assert len([text for text in notices if "records_max_bytes" in text]) == 2, "one for the hub, one for the worker"
    updates, rounds = list(of_kind(run.records, Update)), list(of_kind(run.records, Round))
    assert run.summary.updates == sum(update.updates for update in updates) >= 1_000 > 2 * len(updates)
    assert sum(record.rounds for record in rounds) >= 1_000 > 2 * len(rounds)
    assert run.summary.samples >= 4_000
    for rank in (0, 1):
        assert rank_file(tmp_path / "run", rank).stat().st_size < 3 * bytes_max


def test_break_ends_in_order_and_the_model_holds_the_result(data: TensorDataset) -> None:
    net = model()
    before = [parameter.clone() for parameter in net.parameters()]
    with ob.join(net, STRATEGIES[0], until=1_000_000) as run:
        for step, (x, y) in enumerate(run.batches(data)):
            run.backward(F.cross_entropy(net(x), y, reduction="none"))
            if step == 40:
                break
    assert run.summary.failure is None
    assert 0 < run.summary.samples < 41 * 16
    assert any(not torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))


def test_an_error_in_the_loop_is_raised_unchanged_and_leaves_no_thread(data: TensorDataset) -> None:
    def body(run: Session, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trained(model(), STRATEGIES[0], data, body, until=1_000_000)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("offbeat rank")]


def test_batches_of_a_data_loader_are_sliced_to_the_size_the_strategy_asks_for(data: TensorDataset) -> None:
    net = model()
    loader = DataLoader(data, batch_size=50, shuffle=True)
    seen = []
    with ob.join(net, ob.FixedMinibatch(batch=64, microbatch=32, optimizer=SGD), until=640) as run:
        for x, y in run.batches(loader):
            seen.append(len(y))
            run.backward(F.cross_entropy(net(x), y, reduction="none"))
    updates = [record for record in run.records.records if isinstance(record, Update)]
    assert [update.samples for update in updates] == [64] * 10
    assert max(seen) <= 32
    assert run.summary.samples == 640


def test_the_end_of_an_iterator_ends_the_loop(data: TensorDataset) -> None:
    net = model()
    inputs, targets = data.tensors
    batches = ((inputs[i : i + 16], targets[i : i + 16]) for i in range(0, 160, 16))
    with ob.join(net, ob.AsyncFixed(batch=16, optimizer=SGD), until=1_000_000) as run:
        for x, y in run.batches(batches):
            run.backward(F.cross_entropy(net(x), y, reduction="none"))
    assert run.summary.failure is None
    assert run.summary.samples == 160


class Squares(Dataset[tuple[torch.Tensor, int]]):
    """A dataset that computes its samples on access."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((4,), float(index % 2)), index % 2


def test_a_dataset_is_drawn_in_the_order_of_seed_and_rank() -> None:
    orders = []
    for _ in range(2):
        net, drawn = model(), []
        with ob.join(net, ob.FixedMinibatch(batch=20, microbatch=10, optimizer=SGD), until=100, seed=3) as run:
            for x, y in run.batches(Squares()):
                drawn.append(y.tolist())
                run.backward(F.cross_entropy(net(x), y, reduction="none"))
        orders.append(drawn)
    assert orders[0] == orders[1]
    assert len(orders[0]) == 10


@pytest.mark.parametrize(("reduced", "said"), [("sum", "sum"), ("mean", "mean"), ("mean", None), ("none", None)])
def test_a_scalar_loss_is_the_mean_unless_its_reduction_is_given(reduced: str, said: Any, data: TensorDataset) -> None:
    results = []
    for kind, reduction in (("none", "none"), (reduced, said)):
        net = model()
        with ob.join(net, ob.FixedMinibatch(batch=64, optimizer=SGD), until=640, seed=1) as run:
            for x, y in run.batches(data):
                run.backward(F.cross_entropy(net(x), y, reduction=kind), reduction=reduction)
        results.append([parameter.detach().clone() for parameter in net.parameters()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


WEIGHTED = [
    ob.FixedMinibatch(batch=64, microbatch=16, optimizer=SGD),
    ob.LocalSGD(batch=64, microbatch=16, optimizer=SGD, every=1),
    ob.Serial(batch=64, microbatch=16, optimizer=SGD),
]


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("strategy", WEIGHTED, ids=lambda strategy: strategy.name)
def test_weights_are_what_an_update_divides_by(strategy: Any, per_sample: bool, data: TensorDataset) -> None:
    """As in a loop over whole batches whose mean is over tokens: an example has as many as its label plus one."""
    net, seen = model(), []
    with ob.join(net, strategy, until=256, seed=1) as run:
        for x, y in run.batches(data):
            seen.append((x.clone(), y.clone()))
            losses, tokens = F.cross_entropy(net(x), y, reduction="none"), y + 1.0
            if per_sample:
                run.backward(losses, weight=tokens)
            elif len(seen) % 2:
                run.backward((losses * tokens).sum() / tokens.sum(), weight=float(tokens.sum()))
            else:
                run.backward((losses * tokens).sum(), reduction="sum", weight=tokens.sum())
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    means = []
    for step in range(4):
        x, y = (torch.cat(parts) for parts in zip(*seen[4 * step : 4 * step + 4], strict=True))
        optimizer.zero_grad()
        loss = (F.cross_entropy(plain(x), y, reduction="none") * (y + 1)).sum() / (y + 1).sum()
        loss.backward()
        optimizer.step()
        means.append(loss.item())
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    rounds = [record for record in run.records.records if isinstance(record, Round)]
    assert [record.loss / record.samples for record in rounds] == pytest.approx(means, rel=1e-4)
    assert run.summary.samples == 256


def test_a_micro_batch_without_a_weight_counts_its_samples_among_weighted_ones(data: TensorDataset) -> None:
    results = []
    for given in (False, True):
        net = model()
        with ob.join(net, WEIGHTED[0], until=256, seed=1) as run:
            for step, (x, y) in enumerate(run.batches(data)):
                weight = len(x) if given or step % 4 == 2 else None
                run.backward(F.cross_entropy(net(x), y), weight=weight)
        results.append(net.weight.detach().clone())
    torch.testing.assert_close(*results)


def test_zero_grad_in_the_loop_does_no_harm(data: TensorDataset) -> None:
    results = []
    for zeroes in (False, True):
        net = model()
        with ob.join(net, ob.FixedMinibatch(batch=64, optimizer=SGD), until=640) as run:
            for x, y in run.batches(data):
                if zeroes:
                    net.zero_grad()
                run.backward(F.cross_entropy(net(x), y, reduction="none"))
        results.append(net.weight.detach().clone())
    assert torch.equal(*results)


def test_evaluation_never_waits_for_the_loop_and_never_counts_as_an_update(data: TensorDataset) -> None:
    net = model()
    with ob.join(
        net, STRATEGIES[0], until=2_000, evaluate=lambda m: {"loss": 1.5, "accuracy": 0.5}, every=ob.EveryUpdates(5)
    ) as run:
        for x, y in run.batches(data):
            run.backward(F.cross_entropy(net(x), y, reduction="none"))
    evaluations = [record for record in run.records.records if isinstance(record, Evaluation)]
    assert evaluations[0].version == 0
    assert evaluations[-1].version == run.summary.updates
    assert {(record.loss, record.accuracy) for record in evaluations} == {(1.5, 0.5)}


def losses_of(net: nn.Module, x: torch.Tensor, y: torch.Tensor, reduction: str = "none") -> torch.Tensor:
    return F.cross_entropy(net(x), y, reduction=reduction)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (lambda run, net, x, y: run.backward(losses_of(net, x, y, "mean"), reduction="none"), "one loss per sample"),
        (lambda run, net, x, y: run.backward(losses_of(net, x, y), reduction="median"), "reduction must be"),
        (lambda run, net, x, y: run.backward(losses_of(net, x, y, "mean"), weight=0), "greater than 0"),
        (lambda run, net, x, y: run.backward(losses_of(net, x, y, "mean"), weight=float("nan")), "greater than 0"),
        (lambda run, net, x, y: run.backward(losses_of(net, x, y, "mean"), weight="many"), "greater than 0"),
        (lambda run, net, x, y: run.backward(losses_of(net, x, y), weight=7), "one weight per sample"),
        (lambda run, net, x, y: run.backward(losses_of(net, x, y), weight=torch.ones(3, 3)), "a tensor of shape"),
        (lambda run, net, x, y: run.backward(losses_of(net, x, y), weight=-(y + 1.0)), "with negative ones"),
        (lambda run, net, x, y: run.backward(losses_of(net, x, y)[:, None]), "average what belongs to one sample"),
        (lambda run, net, x, y: run.backward(losses_of(net, x, y), reduction="sum"), "leave reduction out"),
        (lambda run, net, x, y: run.backward(losses_of(net, x, y), samples=999), "count samples, not tokens"),
        (lambda run, net, x, y: run.backward(3.0), "takes the tensor of losses"),
        (lambda run, net, x, y: None, "call run.backward"),
        (lambda run, net, x, y: [run.backward(losses_of(net, x, y)) for _ in range(2)], "call it once"),
    ],
)
def test_a_loop_that_cannot_work_raises_one_sentence(body: object, sentence: str, data: TensorDataset) -> None:
    with pytest.raises(ob.ConfigurationError, match=sentence):
        trained(model(), STRATEGIES[0], data, body, until=1_000)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"until": None}, "until"),
        ({"until": 1.5}, "until"),
        ({"model": "net"}, "the model"),
        ({"strategy": "fmb"}, "the strategy"),
        ({"strategy": ob.FixedMinibatch()}, "optimizer"),
        ({"every": 3}, "every"),
        ({"resume": True}, "out="),
    ],
)
def test_join_refuses_what_it_cannot_use(arguments: dict[str, object], sentence: str) -> None:
    usual: dict[str, object] = {"model": model(), "strategy": STRATEGIES[0], "until": 100}
    with pytest.raises(ob.ConfigurationError, match=sentence):
        ob.join(**{**usual, **arguments})  # type: ignore[arg-type]


def test_a_run_directory_is_not_overwritten(data: TensorDataset, tmp_path: Path) -> None:
    trained(model(), STRATEGIES[0], data, until=100, out=tmp_path / "run")
    before = read_run(tmp_path / "run")
    with pytest.raises(ob.ConfigurationError, match="holds a run already; name another directory, or continue"):
        trained(model(), STRATEGIES[0], data, until=100, out=tmp_path / "run")
    assert read_run(tmp_path / "run") == before


@pytest.mark.parametrize("nothing", [[], 3, {}, torch.zeros(0, 4)])
def test_empty_data_is_refused(nothing: object) -> None:
    with pytest.raises(ob.ConfigurationError):
        trained(model(), STRATEGIES[0], nothing, until=100)


def test_a_loss_that_is_not_finite_ends_the_run_with_a_sentence(data: TensorDataset) -> None:
    def body(run: Session, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        run.backward(losses_of(net, x, y) * float("nan"))

    with pytest.raises(ob.RunFailed, match="not finite"):
        trained(model(), STRATEGIES[2], data, body, until=10_000)


def test_an_evaluation_that_returns_nonsense_fails_the_run_with_a_sentence(data: TensorDataset) -> None:
    with pytest.raises(ob.RunFailed, match="evaluate must return"):
        trained(model(), STRATEGIES[0], data, until=1_000_000, evaluate=lambda m: "good")


def test_a_strategy_without_a_hub_trains_on_real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    from token_ring import TokenRing

    run = ob.train(ob.workloads.Quadratic(), TokenRing(), ob.Samples(2_000), workers=3)
    assert run.summary.failure is None
    assert run.summary.samples >= 2_000
    assert {record.rank for record in run.records.records if isinstance(record, Round)} == {0, 1, 2}


def test_delayed_messages_still_count_after_their_sender_has_left(data: TensorDataset) -> None:
    net = model()
    slow = ob.Cluster(link=ob.Link(latency_seconds=0.1))
    with ob.join(net, ob.AsyncFixed(batch=16, optimizer=SGD), until=1_000_000, cluster=slow) as run:
        for step, (x, y) in enumerate(run.batches(data)):
            run.backward(losses_of(net, x, y))
            if step == 20:
                break
    assert run.summary.failure is None
    assert run.summary.samples > 0


@pytest.mark.slow
def test_fresh_interpreters_train_like_forked_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where forking is impossible, a fresh process reads everything from the run directory."""
    monkeypatch.setattr("offbeat.lab.live_runs._can_fork", lambda experiment: False)
    run = ob.train(ob.workloads.Quadratic(), ob.FixedMinibatch(batch=32), ob.Samples(640), workers=1)
    assert run.summary.failure is None
    assert run.summary.samples == 640
