"""`offbeat.AsyncDataParallel`: loops that step their own optimizer, with one peer, with several, and interrupted."""

from __future__ import annotations

import copy
import io
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import offbeat as ob
from offbeat.core.actions import Action
from offbeat.core.events import Event, StepReady
from offbeat.launch.listeners import open_listener
from offbeat.launch.rank_info import RankInfo, environment_of, hide_launcher
from offbeat.live.shards import shard_of
from offbeat.records.files import read_run
from offbeat.records.schema import Ended, Exchange, Round, Update, of_kind

WAIT_SECONDS = 500.0


@pytest.fixture(scope="module")
def data() -> TensorDataset:
    """Two clusters of points, linearly separable."""
    random = torch.Generator().manual_seed(0)
    targets = torch.arange(600) % 2
    inputs = torch.randn(600, 4, generator=random) + 2.0 * (2 * targets[:, None] - 1)
    return TensorDataset(inputs, targets)


def network(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def taught(model: nn.Module, optimizer: torch.optim.Optimizer, peer: ob.AsyncDataParallel, batch: Any) -> Tensor:
    """One step of the usual loop."""
    inputs, targets = batch
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    peer.step()
    return loss


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def rounds_of(peer: ob.AsyncDataParallel) -> list[Round]:
    return list(of_kind(peer.records, Round))


# One peer


def test_a_single_peer_trains_like_the_plain_loop(data: TensorDataset) -> None:
    """Without other peers, the parameters are those of the optimizer alone, up to rounding."""
    results = []
    for wrapped in (False, True):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        peer = ob.AsyncDataParallel(model, optimizer) if wrapped else None
        for _ in range(4):
            for x, y in DataLoader(data, batch_size=50):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                if peer is None:
                    optimizer.step()
                else:
                    peer.step()
            scheduler.step()
        if peer is not None:
            peer.close()
            assert (peer.rank, peer.processes) == (0, 1)
            assert (peer.summary.samples, peer.summary.updates, peer.summary.failure) == (2_400, 48, None)
        results.append(state_of(model))
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, msg=name)


def test_an_optimizer_created_afterwards_would_hold_the_same_parameters(data: TensorDataset) -> None:
    model = network()
    parameters = list(model.parameters())
    with ob.AsyncDataParallel(model, sgd(model)):
        assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
        assert all(parameter.grad is None for parameter in parameters)


def test_samples_are_those_of_forward_calls_in_training_mode(data: TensorDataset) -> None:
    model = network()
    optimizer = sgd(model)
    x, y = data[:30]
    with ob.AsyncDataParallel(model, optimizer) as peer:
        taught(model, optimizer, peer, (x, y))
        for part in (slice(0, 10), slice(10, 25)):  # gradients of two batches, one step
            F.cross_entropy(model(x[part]), y[part]).backward()
        with torch.no_grad():
            model(x)
        model.eval()
        model(x)
        model.train()
        peer.step()
        F.cross_entropy(model(x), y).backward()
        loss = F.cross_entropy(model(input=x), y)
        peer.step(samples=7, loss=loss)
    assert [(record.samples, record.draws, record.loss is None) for record in rounds_of(peer)] == [
        (30, (0, 30), True),
        (25, (30, 55), True),
        (7, (55, 62), False),
    ]
    assert rounds_of(peer)[-1].loss == pytest.approx(7 * float(loss.detach()))


def test_a_model_may_be_copied_and_saved_during_training(data: TensorDataset) -> None:
    model = network()
    optimizer = sgd(model)
    with ob.AsyncDataParallel(model, optimizer) as peer:
        twin = copy.deepcopy(model)
        torch.save(model, io.BytesIO())
        twin(data[:40][0])
        taught(model, optimizer, peer, data[:30])
    assert [record.samples for record in rounds_of(peer)] == [30]
    assert not model._forward_pre_hooks


def test_a_step_that_is_not_finite_is_undone(data: TensorDataset) -> None:
    model = network()
    optimizer = sgd(model)
    with ob.AsyncDataParallel(model, optimizer) as peer:
        taught(model, optimizer, peer, data[:30])
        before = state_of(model)
        model[0].weight.grad.fill_(math.nan)
        peer.step(samples=30)
        assert all(torch.equal(before[name], tensor) for name, tensor in state_of(model).items())
        taught(model, optimizer, peer, data[30:60])
    assert [record.finite for record in rounds_of(peer)] == [True, False, True]
    assert sum(record.samples for record in of_kind(peer.records, Update)) == 60
    assert all(bool(tensor.isfinite().all()) for tensor in state_of(model).values())


def test_steps_that_are_never_finite_fail_the_run_with_a_sentence(data: TensorDataset) -> None:
    model = network()
    optimizer = sgd(model, lr=math.nan)

    def loop() -> None:
        with ob.AsyncDataParallel(model, optimizer) as peer:
            for _ in range(50):
                taught(model, optimizer, peer, data[:30])

    with pytest.raises(ob.RunFailed, match="not finite"):
        loop()


def test_until_is_reached_by_repeated_passes_over_the_data(data: TensorDataset) -> None:
    model = network()
    optimizer = sgd(model)
    epochs = []

    class Sampler(DistributedSampler[Any]):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)
            super().set_epoch(epoch)

    with ob.AsyncDataParallel(model, optimizer, until=2_000) as peer:
        loader = DataLoader(data, batch_size=50, sampler=Sampler(data, peer.processes, peer.rank))
        for batch in peer.batches(loader):
            assert not peer.done
            taught(model, optimizer, peer, batch)
        assert peer.done
        after = state_of(model)
        peer.step()  # training has ended: nothing is counted or changed
        assert all(torch.equal(after[name], tensor) for name, tensor in state_of(model).items())
    assert epochs == [0, 1, 2, 3]
    assert peer.summary.samples == 2_000


def test_evaluation_runs_in_parallel_to_the_loop(data: TensorDataset) -> None:
    model = network()
    optimizer = sgd(model)
    evaluation = {"evaluate": lambda net: (0.25, 0.5), "every": ob.EveryUpdates(2)}
    with ob.AsyncDataParallel(model, optimizer, until=600, **evaluation) as peer:
        for batch in peer.batches(DataLoader(data, batch_size=50)):
            taught(model, optimizer, peer, batch)
    assert (peer.summary.loss, peer.summary.accuracy) == (0.25, 0.5)


def test_an_error_in_the_loop_is_raised_unchanged_and_leaves_no_thread(data: TensorDataset) -> None:
    model = network()
    with pytest.raises(ZeroDivisionError), ob.AsyncDataParallel(model, sgd(model)):
        raise ZeroDivisionError
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("offbeat rank")]


@dataclass(frozen=True)
class Interrupted(ob.Gossip):
    """SIGINT arrives while the node handles the third step."""

    def node(self, context: ob.nodes.NodeContext) -> ob.nodes.Node:
        node = super().node(context)
        handle, steps = node.handle, itertools.count(1)

        def interrupted(event: Event) -> Iterable[Action]:
            if isinstance(event, StepReady) and next(steps) == 3:
                signal.raise_signal(signal.SIGINT)
            return handle(event)

        node.handle = interrupted  # type: ignore[method-assign]
        return node


def test_ctrl_c_during_an_event_is_deferred_to_its_end(data: TensorDataset) -> None:
    model = network()
    optimizer = sgd(model)
    peer = ob.AsyncDataParallel(model, optimizer, strategy=Interrupted())

    def loop() -> None:
        with peer:
            while True:
                taught(model, optimizer, peer, data[:30])

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert peer.finish is not None
    assert len(list(of_kind(peer.records, Update))) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# Several peers: ranks as threads, with links over TCP as between processes


@pytest.fixture
def run_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[int], Any]], list[Any]]:
    """Run a loop on several ranks at once; returns their results, and raises the first error."""

    def run(processes: int, loop: Callable[[int], Any]) -> list[Any]:
        listener, address, credentials = open_listener(None, None)
        mine = threading.local()
        monkeypatch.setattr("offbeat.live.session_base.read_rank_info", lambda: mine.rank_info)
        results: dict[int, Any] = {}
        errors: list[BaseException] = []

        def be(rank: int) -> None:
            number = listener.detach() if rank == 0 else None
            mine.rank_info = RankInfo(rank, processes, address, credentials, number, launcher="torchrun")
            try:
                results[rank] = loop(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=be, args=(rank,), daemon=True) for rank in range(processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        if errors:
            raise errors[0]
        assert sorted(results) == list(range(processes)), "a rank is still waiting"
        return [results[rank] for rank in range(processes)]

    return run


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"graph": "exponential", "acid": True},
        {"graph": "complete", "partner": "first-available", "clock": "regular"},
        {"partner": "matchings", "rate": 2.0},
        {"strategy": ob.Gossip(rate=0.5)},
    ],
    ids=lambda settings: "-".join(map(str, settings)) or "default",
)
def test_the_final_models_of_all_peers_are_equal(settings: dict[str, Any], run_ranks: Any, data: TensorDataset) -> None:
    """They start with different models, see different data, take different numbers of steps, and end with one model."""
    firsts: dict[int, dict[str, Tensor]] = {}

    def loop(rank: int) -> tuple[dict[str, Tensor], ob.AsyncDataParallel]:
        model = network(seed=rank)
        optimizer = sgd(model)
        peer = ob.AsyncDataParallel(model, optimizer, **settings)
        firsts[rank] = state_of(model)
        for step in range(20 + 30 * rank):
            chosen = [(40 * step + 2 * place + rank) % 600 for place in range(20)]
            taught(model, optimizer, peer, data[chosen])
        peer.close()
        return state_of(model), peer

    models, peers = zip(*run_ranks(2, loop), strict=True)
    for name in models[0]:
        assert torch.equal(firsts[0][name], firsts[1][name]), name
        assert torch.equal(models[0][name], models[1][name]), name
    assert [len(rounds_of(peer)) for peer in peers] == [20, 50]
    exchanges = [record for peer in peers for record in of_kind(peer.records, Exchange)]
    assert any(record.outcome == "averaged" for record in exchanges)
    for peer in peers:
        assert peer.summary.failure is None


def test_a_peer_with_a_learning_rate_of_zero_follows_the_other(run_ranks: Any, data: TensorDataset) -> None:
    """Both step until the model of rank 1, whose learning rate is 0, has learned from rank 0."""
    arrived = threading.Event()

    def loop(rank: int) -> bool:
        model = network()
        optimizer = sgd(model, lr=0.1 if rank == 0 else 0.0)
        with ob.AsyncDataParallel(model, optimizer) as peer:
            first = model[0].weight.detach().clone()
            while not arrived.wait(0):
                taught(model, optimizer, peer, data[:30])
                if rank == 1 and not torch.equal(first, model[0].weight):
                    arrived.set()
        return not torch.equal(first, model[0].weight)

    assert run_ranks(2, loop) == [True, True]


def test_until_counts_the_samples_of_all_peers(run_ranks: Any, data: TensorDataset) -> None:
    def loop(rank: int) -> tuple[dict[str, Tensor], int]:
        model = network()
        optimizer = sgd(model)
        with ob.AsyncDataParallel(model, optimizer, until=ob.Samples(6_000)) as peer:
            sampler = DistributedSampler(data, peer.processes, peer.rank)
            for batch in peer.batches(DataLoader(data, batch_size=20, sampler=sampler)):
                taught(model, optimizer, peer, batch)
        return state_of(model), sum(record.samples for record in of_kind(peer.records, Update))

    (one, samples_one), (other, samples_other) = run_ranks(2, loop)
    assert samples_one + samples_other >= 6_000
    assert min(samples_one, samples_other) > 0
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_after_an_error_of_one_peer_the_other_continues(run_ranks: Any, data: TensorDataset) -> None:
    gone = threading.Event()

    def loop(rank: int) -> int:
        model = network()
        optimizer = sgd(model)
        try:
            with ob.AsyncDataParallel(model, optimizer) as peer:
                for step in range(40):
                    if rank == 1 and step == 5:
                        raise ZeroDivisionError
                    if step == 20:
                        assert gone.wait(WAIT_SECONDS)
                    taught(model, optimizer, peer, data[:30])
        except ZeroDivisionError:
            gone.set()
        return len(rounds_of(peer)) if rank == 0 else 0

    assert run_ranks(2, loop) == [40, 0]


def test_a_number_of_peers_that_the_graph_does_not_support_is_refused(run_ranks: Any) -> None:
    def loop(rank: int) -> None:
        model = network()
        ob.AsyncDataParallel(model, sgd(model), graph="exponential")

    with pytest.raises(ob.ConfigurationError, match="power of two"):
        run_ranks(3, loop)


# Strategies with a hub: rank 0 holds it beside its worker

HUB_STRATEGIES = [
    ob.LocalSGD(every=4),
    ob.DiLoCo(every=5),
    ob.DecoupledDiLoCo(every=6, fragments=3),
    ob.DelayedExchange(every=4, delay=2, send=ob.parts.Differences()),
    ob.DiLoCo(every=5, compression=ob.compression.Int8()),
    "delayed-exchange",
]


def linear(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(4, 2)


def batch_of(data: TensorDataset, rank: int, step: int, samples: int = 20) -> Any:
    return data[[(40 * step + 2 * place + rank) % 600 for place in range(samples)]]


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("strategy", HUB_STRATEGIES, ids=lambda given: getattr(given, "name", given))
def test_all_processes_compute_and_end_with_one_model(
    strategy: Any, processes: int, run_ranks: Any, data: TensorDataset
) -> None:
    """They begin with the model of rank 0 and take different numbers of steps, all of which are in the result."""
    firsts: dict[int, dict[str, Tensor]] = {}

    def loop(rank: int) -> tuple[dict[str, Tensor], ob.AsyncDataParallel]:
        model = network(seed=rank)
        optimizer = sgd(model)
        peer = ob.AsyncDataParallel(model, optimizer, strategy=strategy)
        firsts[rank] = state_of(model)
        assert (peer.rank, peer.processes) == (rank, processes)
        for step in range(11 + 12 * rank):
            taught(model, optimizer, peer, batch_of(data, rank, step))
        peer.close()
        return state_of(model), peer

    models, peers = zip(*run_ranks(processes, loop), strict=True)
    for model, first in zip(models, firsts.values(), strict=True):
        for name in models[0]:
            assert torch.equal(firsts[0][name], first[name]), name
            assert torch.equal(models[0][name], model[name]), name
            assert bool(model[name].isfinite().all())
    steps = [11 + 12 * rank for rank in range(processes)]
    samples = sum(record.samples for record in of_kind(peers[0].records, Update))
    assert samples == 20 * sum(steps)
    assert [peer.is_main for peer in peers] == [True] + [False] * (processes - 1)
    assert peers[0].summary.failure is None


def test_local_sgd_with_every_step_exchanged_is_synchronous_sgd(run_ranks: Any, data: TensorDataset) -> None:
    models = [linear(seed=rank) for rank in range(3)]  # threads share torch's generator

    def loop(rank: int) -> dict[str, Tensor]:
        model = models[rank]
        optimizer = sgd(model)
        with ob.AsyncDataParallel(model, optimizer, strategy=ob.LocalSGD(every=1)) as peer:
            for step in range(10):
                taught(model, optimizer, peer, batch_of(data, rank, step))
        return state_of(model)

    plain = linear(seed=0)
    optimizer = sgd(plain)
    for step in range(10):
        optimizer.zero_grad()
        for rank in range(3):
            inputs, targets = batch_of(data, rank, step)
            (F.cross_entropy(plain(inputs), targets) / 3).backward()
        optimizer.step()
    for result in run_ranks(3, loop):
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(result[name], tensor, msg=name)


@pytest.mark.parametrize("strategy", [ob.LocalSGD(every=1000), ob.LocalSteps(every=1000)], ids=["local-sgd", "parts"])
def test_what_was_learned_since_the_last_exchange_is_in_the_result(
    strategy: Any, run_ranks: Any, data: TensorDataset
) -> None:
    """Nothing is exchanged before the loops end; the result is the mean of the replicas by samples."""
    steps = [3, 6]
    models = [linear(seed=0) for _ in steps]

    def loop(rank: int) -> dict[str, Tensor]:
        model = models[rank]
        optimizer = sgd(model)
        with ob.AsyncDataParallel(model, optimizer, strategy=strategy) as peer:
            for step in range(steps[rank]):
                taught(model, optimizer, peer, batch_of(data, rank, step))
        return state_of(model)

    replicas = []
    for rank in range(2):
        model = linear(seed=0)
        optimizer = sgd(model)
        for step in range(steps[rank]):
            inputs, targets = batch_of(data, rank, step)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        replicas.append(state_of(model))
    for result in run_ranks(2, loop):
        for name, tensor in result.items():
            torch.testing.assert_close(tensor, (replicas[0][name] + 2 * replicas[1][name]) / 3, msg=name)


@pytest.mark.parametrize("strategy", [ob.DiLoCo(every=3), ob.DecoupledDiLoCo(every=6)], ids=["diloco", "decoupled"])
def test_until_counts_the_samples_of_all_workers(strategy: Any, run_ranks: Any, data: TensorDataset) -> None:
    def loop(rank: int) -> dict[str, Tensor]:
        model = network()
        optimizer = sgd(model)
        with ob.AsyncDataParallel(model, optimizer, strategy=strategy, until=ob.Samples(2_000)) as peer:
            for batch in peer.batches(DataLoader(peer.shard(data), batch_size=20)):
                taught(model, optimizer, peer, batch)
        if rank == 0:
            assert peer.summary.samples >= 2_000
        return state_of(model)

    one, other = run_ranks(2, loop)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_after_an_error_of_a_worker_the_run_goes_on(run_ranks: Any, data: TensorDataset) -> None:
    def loop(rank: int) -> int:
        model = network()
        optimizer = sgd(model)
        strategy = ob.DiLoCo(every=4, patience_seconds=5.0)
        try:
            with ob.AsyncDataParallel(model, optimizer, strategy=strategy) as peer:
                for step in range(20):
                    if rank == 1 and step == 6:
                        raise ZeroDivisionError
                    taught(model, optimizer, peer, batch_of(data, rank, step))
        except ZeroDivisionError:
            return 0
        return sum(record.samples for record in of_kind(peer.records, Update))

    samples, _ = run_ranks(2, loop)
    assert samples >= 20 * 20


# To continue in another run


@pytest.mark.parametrize(
    "strategy",
    [ob.DiLoCo(every=2), ob.LocalSGD(every=2)],
    ids=["diloco", "local-sgd"],
)
def test_a_run_that_is_saved_and_continued_ends_like_one_that_was_not(
    strategy: Any, run_ranks: Any, data: TensorDataset
) -> None:
    def train(rank: int, first: int, stop: int, saved: dict[str, Any] | None) -> dict[str, Any]:
        model = copy.deepcopy(initial)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if saved is not None:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        with ob.AsyncDataParallel(model, optimizer, strategy=strategy) as peer:
            if saved is not None:
                peer.load_state_dict(saved["peer"])
            for step in range(first, stop):
                taught(model, optimizer, peer, batch_of(data, rank, step))
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "peer": peer.state_dict()}
            file = io.BytesIO()
            torch.save(states, file)
        file.seek(0)
        loaded: dict[str, Any] = torch.load(file)
        loaded["result"] = state_of(model)
        loaded["samples"] = peer.summary.samples if rank == 0 else None
        return loaded

    initial = network()
    whole = run_ranks(2, lambda rank: train(rank, 0, 8, None))
    halves = run_ranks(2, lambda rank: train(rank, 0, 4, None))
    continued = run_ranks(2, lambda rank: train(rank, 4, 8, halves[rank]))
    for rank in range(2):
        for name, tensor in whole[rank]["result"].items():
            torch.testing.assert_close(continued[rank]["result"][name], tensor, msg=name)
    assert continued[0]["peer"]["hub"]["samples"] == whole[0]["peer"]["hub"]["samples"] == 320


def test_the_momentum_of_averaging_is_saved(data: TensorDataset) -> None:
    model = network()
    optimizer = sgd(model)
    with ob.AsyncDataParallel(model, optimizer, acid=True) as peer:
        state = peer.state_dict()
        state["extra"]["acid_offset"].fill_(0.5)
        peer.load_state_dict(state)
        assert torch.equal(peer.state_dict()["extra"]["acid_offset"], state["extra"]["acid_offset"])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda state: 3, "no state of a peer"),
        (lambda state: {}, "no state of a peer"),
        (lambda state: {**state, "strategy": "Gossip()"}, "of another strategy"),
        (lambda state: {**state, "rank": 1, "processes": 2}, "rank 1 of 2, and this is rank 0 of 1"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: Any, sentence: str) -> None:
    model = network()
    refused = pytest.raises(ob.ConfigurationError, match=sentence)
    with ob.AsyncDataParallel(model, sgd(model), strategy="diloco") as peer, refused:
        peer.load_state_dict(change(peer.state_dict()))


def test_a_state_is_loaded_before_the_first_step(data: TensorDataset) -> None:
    model = network()
    optimizer = sgd(model)
    with ob.AsyncDataParallel(model, optimizer, strategy="diloco") as peer:
        taught(model, optimizer, peer, data[:30])
        with pytest.raises(ob.ConfigurationError, match="before the first step"):
            peer.load_state_dict(peer.state_dict())


# For trainers: peer.optimizer and peer.shard


def test_the_optimizer_of_a_peer_is_a_torch_optimizer_whose_step_is_shared(data: TensorDataset) -> None:
    results = []
    for shared in (False, True):
        model = network()
        own = torch.optim.Adam(model.parameters(), lr=0.01)
        peer = ob.AsyncDataParallel(model, own) if shared else None
        optimizer = own if peer is None else peer.optimizer
        assert isinstance(optimizer, torch.optim.Optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        hooks: list[int] = []
        optimizer.register_step_post_hook(lambda *_, hooks=hooks: hooks.append(1))
        for step in range(12):

            def closure(step: int = step, model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                inputs, targets = batch_of(data, 0, step)
                loss = F.cross_entropy(model(inputs), targets)
                loss.backward()
                return loss

            if step % 2:
                assert float(optimizer.step(closure).detach()) > 0
            else:
                closure()
                optimizer.step()
            scheduler.step()
        assert len(hooks) == 12
        assert optimizer.param_groups is own.param_groups
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.param_groups is own.param_groups
        assert "Adam" in repr(optimizer)
        if peer is not None:
            assert peer.optimizer is optimizer
            peer.close()
            assert len(rounds_of(peer)) == 12
        results.append(state_of(model))
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, msg=name)


def test_a_trainer_does_not_see_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    assert hide_launcher(RankInfo(1, 2, launcher="offbeat")) == []
    assert os.environ["RANK"] == "1"
    hidden = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"]
    assert hide_launcher(RankInfo(1, 2, launcher="torchrun")) == hidden
    assert not set(hidden) & os.environ.keys()


def test_processes_that_torch_distributed_connects_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model = network()
    refused = pytest.raises(ob.ConfigurationError, match=r"take peer.optimizer before TrainingArguments")
    with ob.AsyncDataParallel(model, sgd(model)) as peer, refused:
        peer.optimizer  # noqa: B018


def test_a_model_that_ddp_calls_is_refused(monkeypatch: pytest.MonkeyPatch, data: TensorDataset) -> None:
    model = network()
    with ob.AsyncDataParallel(model, sgd(model)) as peer:
        monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", model)
        with pytest.raises(ob.ConfigurationError, match="called by DistributedDataParallel"):
            model(data[:4][0])
        monkeypatch.undo()
        model(data[:4][0])
        assert peer.rank == 0


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize("given", [list(range(10)), Numbers(), torch.arange(10), (torch.arange(10), torch.ones(10))])
def test_shards_are_disjoint_and_complete(given: Any) -> None:
    shards = [shard_of(given, index, 3) for index in range(3)]
    if isinstance(given, tuple):
        shards = [shard[0] for shard in shards]
    parts = [[int(item) for item in shard] for shard in shards]
    assert parts == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (DataLoader(list(range(4))), r"type DataLoader\(peer.shard\(dataset\), ...\)"),
        ([1, 2], "2 examples cannot be divided among 3 processes"),
        ((torch.ones(4), torch.ones(5)), r"different lengths, \[4, 5\]"),
        (3, "was given int"),
        ("text", "was given str"),
    ],
)
def test_what_cannot_be_divided_is_refused(given: Any, sentence: str) -> None:
    with pytest.raises(ob.ConfigurationError, match=sentence):
        shard_of(given, 0, 3)


# Wrong arguments raise one sentence


class Wrapped(nn.parallel.DistributedDataParallel):
    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def half(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(model.parameters())[:2], lr=0.1)


def more(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"model": "net"}, "the model must be"),
        ({"model": Wrapped(network())}, "leave that wrapper out, or pass model.module"),
        ({"optimizer": sgd(network())}, "holds none of the model's parameters"),
        ({"optimizer": half}, r"does not hold 4 of the model's 6 trainable parameters \(1.weight"),
        ({"optimizer": more}, "would not be averaged"),
        ({"optimizer": ob.SGD(lr=0.1)}, "the optimizer must be an object such as torch.optim.SGD"),
        ({"graph": "complete", "acid": True}, "complete graph"),
        ({"graph": "cylce"}, "did you mean 'cycle'"),
        ({"grahp": "cycle"}, "unknown argument of AsyncDataParallel 'grahp'; did you mean 'graph'"),
        ({"untill": 100}, "unknown argument of AsyncDataParallel 'untill'; did you mean 'until'"),
        ({"graph": ob.graphs.Cycle()}, "a name here"),
        ({"partner": "none"}, "unknown partner"),
        ({"clock": "cuckoo"}, "unknown exchange clock"),
        ({"rate": -1.0}, "rate"),
        ({"strategy": ob.FixedMinibatch(optimizer=ob.SGD(lr=0.1))}, r"FixedMinibatch needs gradients.*offbeat.join"),
        ({"strategy": ob.Serial(optimizer=ob.SGD(lr=0.1))}, "Serial needs gradients"),
        ({"strategy": ob.Population()}, "Population needs gradients"),
        ({"strategy": ob.Gossip(optimizer=ob.SGD(lr=0.1))}, "leave it out of the Gossip"),
        ({"strategy": ob.DiLoCo(inner=ob.AdamW())}, "leave it out of the DiLoCo"),
        ({"strategy": ob.LocalSGD(optimizer=ob.SGD(lr=0.1))}, "leave it out of the LocalSGD"),
        ({"strategy": ob.DelayedExchange()}, r"type offbeat.DelayedExchange\(send=offbeat.parts.Differences\(\)\)"),
        ({"strategy": ob.Gossip(), "acid": True}, "put the settings into the strategy"),
        ({"strategy": "gosip"}, "did you mean 'gossip'"),
        ({"strategy": "fmb"}, "FixedMinibatch needs gradients"),
        ({"strategy": 3}, "the strategy must be"),
        ({"until": 1.5}, "until"),
        ({"every": 3}, "every"),
    ],
)
def test_the_constructor_refuses_unusable_arguments(arguments: dict[str, Any], sentence: str) -> None:
    model = network()
    optimizer = arguments.pop("optimizer", sgd) if "optimizer" in arguments else sgd
    made = optimizer(model) if callable(optimizer) else optimizer
    with pytest.raises(ob.ConfigurationError, match=sentence):
        ob.AsyncDataParallel(arguments.pop("model", model), made, **arguments)


def test_a_run_cannot_be_resumed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OFFBEAT_RESUME", "1")
    model = network()
    with pytest.raises(ob.ConfigurationError, match=r"save them in the loop, with peer.state_dict\(\)"):
        ob.AsyncDataParallel(model, sgd(model), out=tmp_path)


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda peer, model: peer.step(lambda: 0.0), "takes no closure"),
        (lambda peer, model: peer.step(), r"type peer.step\(samples=len\(x\)\)"),
        (lambda peer, model: peer.step(samples=0), "whole number of samples"),
        (lambda peer, model: peer.step(samples="3"), "whole number of samples"),
        (lambda peer, model: peer.step(samples=3, loss=torch.zeros(3)), r"loss=loss.mean\(\)"),
        (lambda peer, model: peer.step(samples=3, loss="small"), "as one number"),
        (lambda peer, model: (model.double(), peer.step(samples=3)), "moved, converted"),
        (lambda peer, model: next(peer.batches([1])), "until="),
        (lambda peer, model: (peer.close(), peer.step(samples=3)), "after peer.close"),
    ],
)
def test_a_step_that_cannot_work_raises_one_sentence(act: Any, sentence: str) -> None:
    model = network()
    with pytest.raises(ob.ConfigurationError, match=sentence), ob.AsyncDataParallel(model, sgd(model)) as peer:
        act(peer, model)


@pytest.mark.parametrize("nothing", [[], [1]])
def test_a_pass_without_a_step_is_refused(nothing: list[int]) -> None:
    model = network()
    refused = pytest.raises(ob.ConfigurationError, match=r"without peer.step\(\)")
    with refused, ob.AsyncDataParallel(model, sgd(model), until=100) as peer:
        list(peer.batches(nothing))


# Processes that end early

SCRIPT = """
import sys
import torch, torch.nn.functional as F
import offbeat as ob
torch.set_num_threads(1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
peer = ob.AsyncDataParallel(model, optimizer)
does = sys.argv[1 + peer.rank]
for step in range(1_000_000_000):
    optimizer.zero_grad()
    F.cross_entropy(model(torch.randn(16, 4)), torch.randint(2, (16,))).backward()
    peer.step()
    if step == 20 and does != "goes on":
        break
    if step == 10:
        print("learning", flush=True)
if does == "waits":
    print("waiting", flush=True)
    peer.close()
if does == "fails":
    raise ZeroDivisionError
"""


@contextmanager
def scripts(directory: Path, *settings: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Start one process per argument, which selects the behaviour of its rank; all are killed afterwards."""
    path = directory / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    listener, address, credentials = open_listener(None, None)
    known = {name: value for name, value in os.environ.items() if not name.startswith("OFFBEAT_")}
    with ExitStack() as stack, listener:
        processes = []
        for rank in range(len(settings)):
            place = RankInfo(rank, len(settings), address, credentials, directory=directory / "run")
            handed = {"OFFBEAT_LISTENER": str(listener.fileno())} if rank == 0 else {}
            process = subprocess.Popen(
                [sys.executable, str(path), *settings],
                env={**known, "OMP_NUM_THREADS": "1", **environment_of(place), **handed},
                pass_fds=[listener.fileno()],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def ends_of(directory: Path) -> dict[int, str | None]:
    return {record.rank: record.failure for record in of_kind(read_run(directory / "run"), Ended)}


def wait_for_line(process: subprocess.Popen[str], line_text: str) -> None:
    """Wait until a process has printed this line."""
    assert process.stdout is not None
    assert any(line.strip() == line_text for line in process.stdout)


@pytest.mark.integration
def test_a_peer_leaves_in_order_after_ctrl_c_in_the_loop_or_while_waiting_and_the_others_continue(
    tmp_path: Path,
) -> None:
    with scripts(tmp_path, "goes on", "goes on", "waits") as processes:
        for process, line_text in zip(processes, ["learning", "learning", "waiting"], strict=True):
            wait_for_line(process, line_text)
        for process in reversed(processes):
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=WAIT_SECONDS)
            assert stderr.rstrip().endswith("KeyboardInterrupt")
    assert ends_of(tmp_path) == dict.fromkeys(range(3), "it was interrupted")


@pytest.mark.integration
def test_a_script_that_ends_without_close_does_not_block_the_others(tmp_path: Path) -> None:
    with scripts(tmp_path, "waits", "forgets", "fails") as (waits, forgets, fails):
        assert "rank 1 ended without peer.close()" in forgets.communicate(timeout=WAIT_SECONDS)[1]
        assert fails.communicate(timeout=WAIT_SECONDS)[1].rstrip().endswith("ZeroDivisionError")
        assert waits.communicate(timeout=WAIT_SECONDS)[1] == ""
    assert [process.returncode for process in (waits, forgets, fails)] == [0, 0, 1]
    assert ends_of(tmp_path) == {0: None, 1: "it was interrupted", 2: "ZeroDivisionError: "}


def test_optimizer_step_outside_of_peer_step_is_refused() -> None:
    """Its change would be lost silently; the likeliest mistake in a script that comes from DDP."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    peer = ob.AsyncDataParallel(model, optimizer)
    before = model.weight.detach().clone()
    model(torch.ones(4, 3)).sum().backward()
    with pytest.raises(ob.ConfigurationError, match=r"peer\.step\(\) calls it; leave your own call out"):
        optimizer.step()
    assert torch.equal(model.weight, before)
    peer.step()
    peer.close()
    optimizer.step()  # allowed again
