"""What users do to the forward pass: autocast, `torch.compile`, gradient checkpointing, inside `join` and
`AsyncDataParallel`, whose parameters, gradients and buffers are views of flat vectors.

`aot_eager` compiles forward and backward as inductor does, up to the code; that is in tests/integrations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import offbeat as ob
from offbeat.core.flat import layout_of
from offbeat.errors import ConfigurationError

Call = Callable[[Tensor], Tensor]
Batch = tuple[Tensor, Tensor]

BATCH = 32
UPDATES = 12
LR = 0.05


class Network(nn.Module):
    """Not nn.Sequential, of which `compile` in place compiles nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Any:
        return self.head(torch.relu(self.norm(self.first(inputs))))


class Checkpointed(nn.Module):
    """Its first block is computed again in the backward pass."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.block, self.head = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2)
        self.use_reentrant = use_reentrant

    def forward(self, inputs: Tensor) -> Any:
        return self.head(checkpoint(self.block, self.first(inputs), use_reentrant=self.use_reentrant))


@pytest.fixture(scope="module")
def data() -> Batch:
    """Two clusters of points, linearly separable."""
    random = torch.Generator().manual_seed(0)
    targets = torch.arange(600) % 2
    return torch.randn(600, 4, generator=random) + 2.0 * (2 * targets[:, None] - 1), targets


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def network() -> Network:
    torch.manual_seed(1)
    return Network()


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def graphs_compiled() -> int:
    return int(counters["stats"]["unique_graphs"])


@dataclass
class Loop:
    """The loops that are compared: each trains `net` by calling `call`, the forward pass in the context `around`."""

    net: nn.Module
    call: Call | None = None
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    batches: list[Batch] = field(default_factory=list)

    def loss(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        with self.around():
            return F.cross_entropy((self.net if self.call is None else self.call)(inputs), targets)

    def joined(self, data: Batch, microbatch: int = BATCH, **arguments: Any) -> Loop:
        strategy = ob.FixedMinibatch(batch=BATCH, microbatch=microbatch, optimizer=ob.SGD(lr=LR))
        with ob.join(self.net, strategy, until=UPDATES * BATCH, **arguments) as run:
            for batch in run.batches(data):
                self.batches.append(batch)
                run.backward(self.loss(batch))
        assert run.summary.failure is None
        return self

    def shared(self, data: Batch) -> Loop:
        """A single peer of gossip, whose own optimizer steps."""
        optimizer = torch.optim.SGD(self.net.parameters(), lr=LR)
        with ob.AsyncDataParallel(self.net, optimizer) as peer:
            for first in range(0, UPDATES * BATCH, BATCH):
                self.batches.append((data[0][first : first + BATCH], data[1][first : first + BATCH]))
                optimizer.zero_grad()
                self.loss(self.batches[-1]).backward()
                peer.step()
        return self

    def plain(self, batches: list[Batch]) -> Loop:
        """The loop without offbeat, over the same batches."""
        optimizer = torch.optim.SGD(self.net.parameters(), lr=LR)
        for batch in batches:
            optimizer.zero_grad()
            self.loss(batch).backward()
            optimizer.step()
        return self

    def assert_equals(self, other: Loop) -> None:
        for mine, theirs in zip(self.net.state_dict().values(), other.net.state_dict().values(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def trained(loop: Loop, kind: str, data: Batch) -> Loop:
    return loop.joined(data) if kind == "join" else loop.shared(data)


KINDS = pytest.mark.parametrize("kind", ["join", "AsyncDataParallel"])


# Autocast


@KINDS
def test_autocast_trains_as_in_a_plain_loop(kind: str, data: Batch) -> None:
    loop = trained(Loop(network(), around=autocast), kind, data)
    loop.assert_equals(Loop(network(), around=autocast).plain(loop.batches))


def test_gradients_of_autocast_are_added_up_in_the_float32_views(data: Batch) -> None:
    net = network()
    seen = set()
    with ob.join(net, ob.FixedMinibatch(batch=BATCH, optimizer=ob.SGD(lr=LR)), until=BATCH) as run:
        for inputs, targets in run.batches(data):
            with autocast():
                outputs = net(inputs)
                run.backward(F.cross_entropy(outputs, targets))
            assert outputs.dtype is torch.bfloat16
            gradients = [parameter.grad for parameter in net.parameters()]
            seen |= {(one.dtype, one.untyped_storage().data_ptr()) for one in gradients if one is not None}
    assert [dtype for dtype, _ in seen] == [torch.float32]


@KINDS
def test_a_loop_inside_autocast_computes_with_the_newest_parameters(kind: str, data: Batch) -> None:
    """Autocast keeps its copies of parameters until its block ends; here it is around all of the training."""
    with autocast():
        loop = trained(Loop(network()), kind, data)
    loop.assert_equals(Loop(network(), around=autocast).plain(loop.batches))


# Gradient checkpointing


@KINDS
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_trains_as_in_a_plain_loop(kind: str, use_reentrant: bool, data: Batch) -> None:
    nets = []
    for _ in range(2):
        torch.manual_seed(1)
        nets.append(Checkpointed(use_reentrant))
    loop = trained(Loop(nets[0]), kind, data)
    loop.assert_equals(Loop(nets[1]).plain(loop.batches))


# Compilation


def compiled_before(net: Network) -> Loop:
    """The compiled module is what offbeat is given."""
    compiled = torch.compile(net, backend="aot_eager")
    return Loop(compiled, compiled)  # type: ignore[arg-type]


def compiled_after(net: Network) -> Loop:
    """The plain module is given, and the loop calls the compiled one, whose first call comes later."""
    return Loop(net, torch.compile(net, backend="aot_eager"))


def compiled_in_place(net: Network) -> Loop:
    net.compile(backend="aot_eager")
    return Loop(net)


def compiled_in_part(net: Network) -> Loop:
    net.head = torch.compile(net.head, backend="aot_eager")  # type: ignore[assignment]
    return Loop(net)


@KINDS
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch itself reads it, of inputs of a part
@pytest.mark.parametrize("compiled", [compiled_before, compiled_after, compiled_in_place, compiled_in_part])
def test_a_compiled_model_trains_as_a_plain_one(kind: str, compiled: Callable[[Network], Loop], data: Batch) -> None:
    loop = trained(compiled(network()), kind, data)
    assert 1 <= graphs_compiled() <= 2  # and not one for each of the updates
    loop.assert_equals(Loop(network()).plain(loop.batches))


def test_rounds_of_several_sizes_are_compiled_for_a_few_of_them(data: Batch) -> None:
    loop = compiled_before(network()).joined(data, microbatch=7)  # micro-batches of 7 samples, and one of 4
    assert {len(inputs) for inputs, _ in loop.batches} == {7, 4}
    assert graphs_compiled() == 2


def test_autocast_inside_a_compiled_loop_trains_as_a_plain_one(data: Batch) -> None:
    net = network()
    loop = Loop(net, torch.compile(net, backend="aot_eager"), autocast).joined(data)
    loop.assert_equals(Loop(network(), around=autocast).plain(loop.batches))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("compiled", [compiled_before, compiled_in_part])
def test_evaluation_is_of_a_plain_copy_that_has_the_newest_values(
    compiled: Callable[[Network], Loop], data: Batch
) -> None:
    measured: list[tuple[bool, float]] = []

    def evaluate(module: nn.Module) -> float:
        loss = float(F.cross_entropy(module(data[0]), data[1]))
        measured.append((any("_orig_mod" in part._modules for part in module.modules()), loss))
        return loss

    loop = compiled(network()).joined(data, evaluate=evaluate)
    loop.net.eval()
    with torch.no_grad():
        assert measured[-1] == (False, pytest.approx(float(loop.loss(data)), rel=1e-5))


def test_samples_are_counted_without_compiling_for_each_number_of_them(data: Batch) -> None:
    """Several calls of the model for each step: the number that was counted before differs from call to call."""
    net = network()
    call = torch.compile(net, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    compiled = set()
    with ob.AsyncDataParallel(net, optimizer) as peer:
        for _ in range(3):
            optimizer.zero_grad()
            for first in range(0, 160, 16):
                F.cross_entropy(call(data[0][first : first + 16]), data[1][first : first + 16]).backward()
                compiled.add(graphs_compiled())
            peer.step()
    assert peer.summary.samples == 3 * 160
    assert len(compiled) == 1  # all of it at the first call


def test_compiled_and_plain_models_can_exchange_parameters() -> None:
    """Names are those of the plain module, so that ranks agree and checkpoints of either resume the other."""
    plain, whole, part = network(), torch.compile(network(), backend="aot_eager"), network()
    part.norm = torch.compile(part.norm, backend="aot_eager")  # type: ignore[assignment]
    assert isinstance(whole, nn.Module)
    prints = {layout_of(module).fingerprint() for module in (plain, whole, part)}
    assert len(prints) == 1
    assert layout_of(part).statistics == layout_of(plain).statistics != ()


def test_optimizers_by_name_know_the_parameters_of_a_compiled_model(data: Batch) -> None:
    net = network()
    compiled = torch.compile(net, backend="aot_eager")
    by_name = {"first.*": torch.optim.SGD, "*": torch.optim.AdamW}
    with ob.join(compiled, ob.FixedMinibatch(batch=BATCH, optimizer=by_name), until=BATCH) as run:  # type: ignore[arg-type]
        for inputs, targets in run.batches(data):
            run.backward(F.cross_entropy(net(inputs), targets))
    assert run.summary.samples == BATCH


# Gradient scaling


def test_a_loss_scaled_for_float16_is_refused(data: Batch) -> None:
    net, scaler = network(), torch.amp.GradScaler("cpu")
    with ob.join(net, ob.FixedMinibatch(batch=BATCH, optimizer=ob.SGD(lr=LR)), until=BATCH) as run:
        for inputs, targets in run.batches(data):
            loss = F.cross_entropy(net(inputs), targets)
            with pytest.raises(ConfigurationError, match=r"GradScaler has multiplied by 65536.*torch\.bfloat16"):
                run.backward(scaler.scale(loss))
            run.backward(loss)


def test_a_loss_with_a_weight_of_the_users_own_is_not_taken_for_a_scaled_one(data: Batch) -> None:
    net = network()
    strategy = ob.FixedMinibatch(batch=BATCH, microbatch=BATCH, optimizer=ob.SGD(lr=1e-6))
    with ob.join(net, strategy, until=3 * BATCH) as run:
        weights = iter([2048.0, torch.tensor(3000.0), torch.tensor(0.5)])
        for inputs, targets in run.batches(data):
            run.backward(F.cross_entropy(net(inputs), targets) * next(weights))
    assert run.summary.samples == 3 * BATCH


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_steps_the_optimizer_of_a_peer(fused: bool, data: Batch) -> None:
    """It divides the gradients by its scale itself, since a fused optimizer of the user's would not see the scale."""
    results = []
    for is_shared in (False, True):
        net, scaler = network(), torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD(net.parameters(), lr=LR, fused=fused)
        peer = ob.AsyncDataParallel(net, optimizer) if is_shared else None
        stepped = optimizer if peer is None else peer.optimizer
        for first in range(0, UPDATES * BATCH, BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(data[0][first : first + BATCH]), data[1][first : first + BATCH])
            scaler.scale(loss).backward()
            scaler.step(stepped)
            scaler.update()
        if peer is not None:
            peer.close()
        results.append(net.state_dict())
    for plain, shared in zip(*(result.values() for result in results), strict=True):
        torch.testing.assert_close(plain, shared, rtol=1e-4, atol=1e-6)
