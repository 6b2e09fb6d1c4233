"""Copies between host and device; in place of a GPU there are tensors that say they are on one, and counted waits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.core import device_transfer
from offbeat.core.compression import Int8
from offbeat.core.device_transfer import on_device, state_to_device, to_device, to_host, wait_for_device
from offbeat.core.memory_pool import Pool
from offbeat.live.state_file import load, save
from offbeat.strategies.hub.hub_worker import Gradient
from offbeat.transports.wire import encode

SOURCE = Path(device_transfer.__file__).parents[1]
META = torch.device("meta")


class OnGpu(Tensor):
    """A tensor whose memory is the host's, but that says it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


def on_gpu(*values: float) -> Tensor:
    return torch.tensor(values).as_subclass(OnGpu)


class Stream:
    """The order of copies and waits, and the pinned memory that was lent."""

    def __init__(self) -> None:
        self.waits = 0
        self.lent: list[Tensor] = []

    def pinned_like(self, tensor: Tensor) -> Tensor:
        self.lent.append(torch.full(tuple(tensor.shape), -1.0, dtype=tensor.dtype))
        return self.lent[-1]

    def wait(self, tensor: Tensor) -> None:
        assert tensor.device.type == "cuda"
        self.waits += 1


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    monkeypatch.setattr(device_transfer, "pinned_like", stream.pinned_like)
    monkeypatch.setattr(device_transfer, "wait_for_device", stream.wait)
    return stream


def test_a_tensor_in_host_memory_is_not_copied(stream: Stream) -> None:
    tensor = torch.ones(3)
    assert to_host(tensor) is tensor
    assert to_device(tensor, torch.device("cpu")) is tensor
    wait_for_device(tensor)
    assert (stream.waits, stream.lent) == (0, [])


def test_a_tensor_on_a_gpu_is_copied_through_pinned_memory_and_waited_for(stream: Stream) -> None:
    copied = to_host(on_gpu(1.0, 2.0))
    assert copied is stream.lent[0]
    assert copied.tolist() == [1.0, 2.0]
    assert stream.waits == 1


def test_a_device_without_pinned_memory_is_copied_from_in_the_plain_way(stream: Stream) -> None:
    class OnOther(Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("mps")

    assert to_host(torch.ones(2).as_subclass(OnOther)).tolist() == [1.0, 1.0]
    assert (stream.waits, stream.lent) == (0, [])


def test_tensors_move_to_the_device_that_is_named() -> None:
    """`meta` is the one device beside the host that every machine has; its tensors have no values."""
    assert to_device(torch.ones(2), META).device == META
    batch = torch.ones(2), torch.zeros(2)
    assert on_device(batch, torch.device("cpu")) is batch
    assert {part.device for part in on_device(batch, META)} == {META}
    wait_for_device(torch.ones(2, device=META))  # there is nothing to wait for


def test_a_state_moves_as_a_whole() -> None:
    """A checkpoint is read into host memory, and continued from on the device of the model."""
    state = {"parameters": torch.ones(2), "version": 3, "held": [(1, torch.ones(1)), [None, "text"]]}
    moved = state_to_device(state, META)
    assert moved["parameters"].device == moved["held"][0][1].device == META
    assert (moved["version"], moved["held"][0][0], moved["held"][1]) == (3, 1, [None, "text"])


def test_a_message_from_a_gpu_is_staged_when_it_is_encoded(stream: Stream) -> None:
    parts = encode(Gradient(on_gpu(1.0, 2.0), (), 1, 0.0, 0, (0, 1), 0.0, True), checksum=False)
    assert stream.waits == len(stream.lent) == 1
    assert parts is not None


def test_a_checkpoint_of_values_on_a_gpu_is_staged(stream: Stream, tmp_path: Path) -> None:
    save(tmp_path / "state.offbeat", {"parameters": on_gpu(1.0, 2.0)})
    assert load(tmp_path / "state.offbeat")["parameters"].tolist() == [1.0, 2.0]
    assert stream.waits == 1


def test_compression_of_values_on_a_gpu_is_staged(stream: Stream) -> None:
    Int8().roundtrip(on_gpu(1.0, 2.0), Pool())
    assert stream.waits == 1


def test_no_other_file_moves_tensors_or_waits_for_a_device() -> None:
    copies = re.compile(r"\.cpu\(|\.cuda\(|pin_memory|non_blocking|(?<!module)\.to\([^)]*device")
    waits = re.compile(r"torch\.(cuda|accelerator)\.\w*stream|synchronize\(\)")
    found: list[Any] = []
    for path in sorted(SOURCE.rglob("*.py")):
        if path.name == "device_transfer.py":
            continue
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if copies.search(line) or waits.search(line):
                found.append(f"{path.relative_to(SOURCE)}:{number}: {line.strip()}")
    assert found == []
