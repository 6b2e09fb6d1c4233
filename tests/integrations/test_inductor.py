"""`torch.compile` with its default backend, which needs a C++ compiler: the code that it makes trains in flat views."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import offbeat as ob

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # torch's own, when it imports inductor
]

Batch = tuple[Tensor, Tensor]

BATCH = 32
UPDATES = 12


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Any:
        return self.head(torch.relu(self.norm(self.convolution(inputs))).mean((2, 3)))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nothing is left of earlier runs; these tests share what takes longest, the headers."""
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(autouse=True)
def compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    found = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    assert found, "torch.compile needs a C++ compiler: apt-get install g++, or name yours in CXX"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def network() -> Network:
    torch.manual_seed(1)
    return Network()


@pytest.fixture(scope="module")
def data() -> Batch:
    random = torch.Generator().manual_seed(0)
    targets = torch.arange(UPDATES * BATCH) % 2
    return torch.randn(len(targets), 1, 6, 6, generator=random) + targets[:, None, None, None], targets


def plain(batches: Iterable[Batch]) -> Network:
    """Trained by a loop without offbeat, and without a compiler."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
    return net


def assert_equal(compiled: nn.Module, other: nn.Module) -> None:
    assert counters["inductor"], "nothing was compiled by inductor"
    for mine, theirs in zip(compiled.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("first", [True, False])
def test_a_model_compiled_before_or_after_join_trains_as_a_plain_one(first: bool, data: Batch) -> None:
    net = network()
    compiled = torch.compile(net)
    strategy = ob.FixedMinibatch(batch=BATCH, microbatch=BATCH, optimizer=ob.SGD(lr=0.05))
    batches: list[Batch] = []
    measured = []

    def evaluate(module: nn.Module) -> float:
        measured.append(float(F.cross_entropy(module(data[0]), data[1])))
        return measured[-1]

    given: Any = compiled if first else net
    with ob.join(given, strategy, until=UPDATES * BATCH, evaluate=evaluate) as run:
        for inputs, targets in run.batches(data):
            batches.append((inputs, targets))
            run.backward(F.cross_entropy(compiled(inputs), targets))
    assert run.summary.failure is None
    assert_equal(net, plain(batches))
    with torch.no_grad():
        assert measured[-1] == pytest.approx(float(F.cross_entropy(net.eval()(data[0]), data[1])), rel=1e-4)


@pytest.mark.parametrize("first", [True, False])
def test_a_model_compiled_before_or_after_async_data_parallel_trains_as_a_plain_one(first: bool, data: Batch) -> None:
    net = network()
    compiled = torch.compile(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    batches = list(zip(*(part.split(BATCH) for part in data), strict=True))
    given: Any = compiled if first else net
    with ob.AsyncDataParallel(given, optimizer) as peer:
        for inputs, targets in batches:
            optimizer.zero_grad()
            F.cross_entropy(compiled(inputs), targets).backward()
            peer.step()
    assert peer.summary.samples == UPDATES * BATCH
    assert_equal(net, plain(batches))


def test_a_compiled_model_trains_under_autocast(data: Batch) -> None:
    net = network()
    compiled = torch.compile(net)
    losses = []
    with ob.join(net, ob.FixedMinibatch(batch=BATCH, microbatch=BATCH, optimizer=ob.SGD(lr=0.1)), until=3_000) as run:
        for inputs, targets in run.batches(data):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(compiled(inputs), targets)
            run.backward(loss)
            losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}
