"""Models in bfloat16: updates are applied to float32 values, where plain training loses the small ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import offbeat as ob
from offbeat.core.actions import Send
from offbeat.core.events import GradientReady, MessageArrived, PeerJoined, Started
from offbeat.core.flat import FlatModule
from offbeat.core.strategy import Strategy
from offbeat.engine.gradient_accumulator import GradientAccumulator
from offbeat.records.schema import RunRecords
from offbeat.records.traffic import sent_by_kind
from offbeat.strategies.hub.hub_worker import Gradient, Parameters, Welcome

LR = 1e-3
UPDATES = 400


class Scale(nn.Module):
    """Weights of 1, which should become 0. In bfloat16 the next number below 1 is 1 − 1/256."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel, dtype=dtype))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.weight


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    """Its gradient is the weight."""
    return 0.5 * (outputs - targets[:, None]).square().sum(1)


def workload(dtype: torch.dtype = torch.bfloat16, numel: int = 4, samples: int = 4 * UPDATES) -> ob.Workload:
    return ob.Workload(
        model=lambda: Scale(numel, dtype),
        loss=half_square,
        train=(torch.ones(64, numel, dtype=dtype), torch.zeros(64, dtype=dtype)),
        optimizer=ob.SGD(lr=LR),
        until=ob.Samples(samples),
    )


def weight_of(run: ob.Run) -> float:
    model = run.model()
    assert isinstance(model, Scale)
    return float(model.weight.detach().mean())


def test_a_plain_loop_loses_small_updates() -> None:
    """The reason for all of this: 1 − 0.001 is 1 in bfloat16."""
    model = Scale(4, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(UPDATES):
        optimizer.zero_grad()
        half_square(
            model(torch.ones(4, 4, dtype=torch.bfloat16)), torch.zeros(4, dtype=torch.bfloat16)
        ).mean().backward()
        optimizer.step()
    assert torch.equal(model.weight, torch.ones(4, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", ["fmb", "amb", "k-of-n", "restart", "serial", "gossip", "gossip-acid", "local-sgd"])
def test_small_updates_add_up(name: str) -> None:
    """As much as in float32. Peers of gossip make fewer updates each, of the same samples."""
    weights = []
    for dtype in (torch.bfloat16, torch.float32):
        strategy = Strategy.members[name]()
        batch = {"batch": 4} if hasattr(strategy, "batch") else {}
        strategy = dataclasses.replace(strategy, optimizer=ob.SGD(lr=LR), **batch)  # type: ignore[call-arg]
        run = ob.simulate(workload(dtype, samples=2000), strategy, workers=1 if name == "serial" else 2, seed=0)
        assert next(run.model().parameters()).dtype is dtype
        weights.append(weight_of(run))
    assert weights[0] < 0.95
    assert weights[0] == pytest.approx(weights[1], rel=0.01)


def test_stale_gradients_are_weighed_and_added_up_in_float32() -> None:
    strategy = ob.AsyncFixed(batch=4, optimizer=ob.Adam(lr=1e-4))
    runs = [ob.simulate(workload(dtype), strategy, workers=4, seed=0) for dtype in (torch.bfloat16, torch.float32)]
    assert weight_of(runs[0]) == pytest.approx(weight_of(runs[1]), rel=0.01) != 1.0


def test_gradients_and_parameters_of_a_hub_travel_as_bfloat16() -> None:
    numel = 10_000
    flows = []
    for dtype in (torch.bfloat16, torch.float32):
        run = ob.simulate(workload(dtype, numel, samples=200), ob.FixedMinibatch(batch=4), workers=2, seed=0)
        flows.append(sent_by_kind(run.records))
    for kind in ("Gradient", "Parameters"):
        low, full = (flow[kind] for flow in flows)
        assert low.messages == full.messages
        assert full.bytes - low.bytes == full.messages * numel * 2


@pytest.mark.parametrize("compression", ["int8", "top-k:0.05"])
def test_compression_saves_bytes_of_bfloat16_too(compression: str) -> None:
    numel = 10_000
    kinds: dict[str, Any] = {"int8": ob.compression.Int8(), "top-k:0.05": ob.compression.TopK(0.05)}
    sent = []
    for chosen in (None, kinds[compression]):
        strategy = ob.FixedMinibatch(batch=4, optimizer=ob.SGD(lr=LR), compression=chosen)
        run = ob.simulate(workload(torch.bfloat16, numel, samples=400), strategy, workers=2, seed=0)
        sent.append(sum(flow.bytes for flow in sent_by_kind(run.records).values()))
        assert weight_of(run) < 1.0
    assert sent[1] < 0.75 * sent[0]


# The parts


def context_for(rank: int, dtype: torch.dtype = torch.bfloat16) -> ob.nodes.NodeContext:
    flat = FlatModule(Scale(2, dtype))
    parameters, buffers = flat.initial_values()
    random = np.random.default_rng(0)
    return ob.nodes.NodeContext(rank, (0, 1), flat.layout, parameters, buffers, random, ob.Samples(10**6), None)


def hub() -> ob.nodes.Node:
    config = ob.Hub(compute=ob.Samples(4), collect=ob.parts.Messages(1), waits=True, optimizer=ob.SGD(lr=LR))
    return config.node(context_for(0))


def arrives(message: Any) -> MessageArrived:
    return MessageArrived(1.0, 1, message, lambda: message)


def gradient(version: int, dtype: torch.dtype = torch.bfloat16) -> Gradient:
    draws = (4 * version, 4 * version + 4)
    return Gradient(torch.full((2,), 4.0, dtype=dtype), (), 4, 0.0, version, draws, 1.0, True)


def sent_vectors(actions: Any) -> list[Tensor]:
    messages = [action.message for action in actions if isinstance(action, Send)]
    return [message.parameters for message in messages if isinstance(message, Welcome | Parameters)]


def test_the_state_of_a_hub_has_the_float32_values_and_a_hub_continues_from_it() -> None:
    first, second = hub(), hub()
    list(first.handle(Started(0.0)))
    vectors = sent_vectors(first.handle(PeerJoined(0.0, 1, 0)))
    for version in range(3):
        vectors += sent_vectors(first.handle(arrives(gradient(version))))
    assert {vector.dtype for vector in vectors} == {torch.bfloat16}
    state = first.state()
    assert state["parameters"].dtype is torch.float32
    assert state["parameters"].tolist() == pytest.approx([1.0 - 3 * LR] * 2)
    second.restore(state)
    assert torch.equal(second.state()["parameters"], state["parameters"])


def test_micro_batches_are_added_up_in_float32() -> None:
    """In bfloat16 a sum of ones ends at 256."""
    flat = FlatModule(Scale(2, torch.bfloat16))
    accumulator = GradientAccumulator(flat)
    for _ in range(2):  # the second round begins at zero
        accumulator.begin(0, 1, 0)
        for _ in range(1000):
            accumulator.add(flat.module(torch.ones(2, dtype=torch.bfloat16)).sum())
        result = accumulator.end()
        assert result.gradient.tolist() == [1000.0, 1000.0]


@pytest.mark.parametrize(("value", "is_sent"), [(60_000.0, True), (70_000.0, False)])
def test_a_sum_that_float16_cannot_hold_counts_as_not_finite(value: float, is_sent: bool) -> None:
    worker = ob.Hub(optimizer=ob.SGD(lr=LR)).node(context_for(1, torch.float16))
    list(worker.handle(Started(0.0)))
    welcome = Welcome(torch.ones(2, dtype=torch.float16), (), 0, ob.Samples(4), 0, ())
    list(worker.handle(MessageArrived(0.0, 0, welcome, lambda: welcome)))
    event = GradientReady(1.0, torch.full((2,), value), 4, 0.0, (), 0, (0, 4), 1.0, 0.0, True)
    sent = [action.message for action in worker.handle(event) if isinstance(action, Send)]
    assert isinstance(sent[0], Gradient)
    assert (sent[0].finite, sent[0].gradient.numel()) == ((True, 2) if is_sent else (False, 0))
    assert sent[0].gradient.dtype is torch.float16


# Live


def test_a_joined_loop_trains_a_bfloat16_model_by_float32_values() -> None:
    model = Scale(1_000, torch.bfloat16)
    inputs, targets = torch.ones(64, 1_000, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.bfloat16)
    strategy = ob.FixedMinibatch(batch=4, microbatch=2, optimizer=ob.SGD(lr=LR))
    with ob.join(model, strategy, until=4 * UPDATES) as run:
        for x, y in run.batches((inputs, targets)):
            run.backward(half_square(model(x), y))
            assert model.weight.grad is not None
            assert model.weight.grad.dtype is torch.bfloat16
    assert model.weight.dtype is torch.bfloat16
    assert float(model.weight.detach().mean()) == pytest.approx((1 - LR) ** UPDATES, rel=0.01)
    records: RunRecords = run.records
    gradients = sent_by_kind(records)["Gradient"]
    assert gradients.bytes == gradients.messages * (1024 + 2 * 1_000)


def test_a_peer_that_steps_a_bfloat16_model_itself_trains_like_the_plain_loop() -> None:
    results = []
    for is_shared in (False, True):
        model = Scale(4, torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        peer = ob.AsyncDataParallel(model, optimizer) if is_shared else None
        for _ in range(20):
            optimizer.zero_grad()
            half_square(
                model(torch.ones(4, 4, dtype=torch.bfloat16)), torch.zeros(4, dtype=torch.bfloat16)
            ).mean().backward()
            if peer is None:
                optimizer.step()
            else:
                peer.step()
        if peer is not None:
            peer.close()
        results.append(model.weight.detach().clone())
    assert torch.equal(*results)
    assert float(results[0].mean()) < 0.5


@pytest.mark.parametrize("fused", [None, True])
def test_an_optimizer_that_has_stepped_the_bfloat16_model_goes_on_in_float32(fused: bool | None) -> None:
    model = Scale(4, torch.bfloat16)
    inputs, targets = torch.ones(64, 4, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=fused)
    half_square(model(inputs), targets).mean().backward()
    optimizer.step()
    with ob.join(model, ob.FixedMinibatch(batch=4, optimizer=optimizer), until=400) as run:  # type: ignore[arg-type]
        for x, y in run.batches((inputs, targets)):
            run.backward(half_square(model(x), y))
    assert run.summary.failure is None
    assert float(model.weight.detach().mean()) == pytest.approx(1 - 100 * LR, rel=0.05)
