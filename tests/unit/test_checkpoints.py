"""Checkpoints: round trips, atomic writes, and one-sentence errors for files that cannot be used."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import offbeat as ob
from offbeat.core.flat import layout_of
from offbeat.core.run_identity import RunIdentity
from offbeat.errors import ConfigurationError, ContractViolation, RunFailed
from offbeat.live import checkpoints
from offbeat.live.checkpoints import (
    Checkpoint,
    CheckpointWriter,
    checkpoint_files,
    checkpoint_path,
    has_checkpoint,
    older_path,
    read_checkpoint,
)
from offbeat.live.clock import Clock
from offbeat.live.state_file import DTYPES, HEAD, MAGIC, PARTIAL, VERSION, load, save
from offbeat.records.files import RankWriter
from offbeat.strategies.node_state import Stateful

LIST, TUPLE, DICT, TENSOR, BIG = range(5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return checkpoint_path(tmp_path)


def forged(tree: Any, payload: bytes = b"", payload_bytes: int | None = None, version: int = VERSION) -> bytes:
    """A file with a valid digest and arbitrary content."""
    encoded = msgspec.msgpack.encode(tree)
    size = len(payload) if payload_bytes is None else payload_bytes
    body = HEAD.pack(MAGIC, version, len(encoded), size) + encoded + payload
    return body + hashlib.sha256(body).digest()


def through(path: Path, value: Any) -> Any:
    save(path, value)
    return load(path)


# Round trips


@pytest.mark.parametrize("name", sorted(set(DTYPES) - {"complex32"}))  # torch warns whenever one is created
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 0, 3), (1, 2, 1, 3)])
def test_tensors_of_every_dtype_and_shape_round_trip_byte_for_byte(
    path: Path, name: str, shape: tuple[int, ...]
) -> None:
    numel = int(np.prod(shape))
    raw = torch.arange(numel * DTYPES[name].itemsize, dtype=torch.uint8)
    if name == "bool":
        raw %= 2
    tensor = raw.view(DTYPES[name]).view(shape)
    back = through(path, {"tensor": tensor})["tensor"]
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back.reshape(-1).view(torch.uint8), raw)


def test_a_tensor_keeps_its_order_in_memory(path: Path) -> None:
    """Fused optimizers need a momentum to have the strides of its parameter."""
    tensor = torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last)
    turned = torch.randn(7, 2).t()
    for back, given in zip(through(path, [tensor, turned]), [tensor, turned], strict=True):
        assert back.stride() == given.stride()
        assert torch.equal(back, given)


def test_views_are_saved_as_their_own_elements(path: Path) -> None:
    whole = torch.arange(12.0)
    pair = torch.tensor([1 + 2j, 3 - 4j])
    given = [
        whole[::3],
        whole[4:7],
        whole[5:6:2],
        whole[0:0:2],
        torch.tensor(2.0).expand(3, 2),
        pair.conj(),
        pair.conj().imag,
        whole.view(3, 4).t(),
    ]
    for back, tensor in zip(through(path, given), given, strict=True):
        assert torch.equal(back, tensor)
        assert not back.is_conj()
    parameter = torch.nn.Parameter(torch.ones(2))
    back = through(path, parameter)
    assert (type(back), back.requires_grad) == (torch.Tensor, False)


def test_each_loaded_tensor_has_its_own_writable_memory(path: Path) -> None:
    tensor = torch.zeros(3)
    first, second = through(path, [tensor, tensor])
    first += 1
    assert (first.tolist(), second.tolist(), tensor.tolist()) == ([1.0] * 3, [0.0] * 3, [0.0] * 3)


def test_plain_values_round_trip(path: Path) -> None:
    value = {
        "none": None,
        "truth": [True, False, 1, 0],
        "numbers": (0, -1, 2**63, -(2**63), 2**64, -(2**127), 0.1, float("inf"), -0.0),
        "text": "Grüße, 世界",
        "bytes": b"\x00\xff",
        "nested": [[], (), {}, [[(1,)]], {"": {}}],
        7: {(1, "a"): "a tuple as key", None: 1, True: 2},
    }
    back = through(path, value)
    assert back == value
    assert repr(back) == repr(value), "tuples are tuples, truths are truths, and the order is kept"


def test_numpy_numbers_become_plain_and_its_generators_continue(path: Path) -> None:
    generator = np.random.default_rng(3)
    generator.random(5)
    back = through(path, {"rate": np.float64(0.1), "generator": generator.bit_generator.state})
    assert type(back["rate"]) is float
    other = np.random.default_rng(0)
    other.bit_generator.state = back["generator"]
    assert other.random() == generator.random()


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"a": [0, {1, 2}]}, r"state\['a'\]\[1\] is a set, which a checkpoint cannot hold"),
        ({"a": object()}, r"state\['a'\] is a object"),
        ({(0, torch.ones(1)): 1}, r"a key of state\[1\] is a torch.strided tensor"),
        ([torch.ones(2).to_sparse()], r"state\[0\] is a torch.sparse_coo tensor of torch.float32"),
        (["\ud800"], "cannot be written as UTF-8"),
    ],
)
def test_an_unsupported_value_is_named_and_nothing_is_written(path: Path, state: Any, sentence: str) -> None:
    with pytest.raises(ContractViolation, match=sentence):
        save(path, state)
    assert list(path.parent.iterdir()) == []


def test_a_restored_optimizer_continues_bit_for_bit(path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Conv2d(4, 2, 3))
    layout = layout_of(module.to(memory_format=torch.channels_last))
    parameters = torch.randn(layout.numel)
    stepper = ob.AMSGrad(lr=0.01).build(parameters, layout)
    gradients = [torch.randn(layout.numel) for _ in range(4)]
    for samples, gradient in enumerate(gradients[:2]):
        stepper.step(gradient, samples)
    save(path, {"parameters": parameters, "optimizer": stepper.state()})
    state = load(path)
    other = ob.AMSGrad(lr=0.01).build(state["parameters"], layout)
    other.restore(state["optimizer"])
    for samples, gradient in enumerate(gradients[2:], start=2):
        stepper.step(gradient.clone(), samples)
        other.step(gradient.clone(), samples)
    assert torch.equal(state["parameters"], parameters)


# Atomic writes


@contextmanager
def files_no_longer_than(nbytes: int) -> Any:
    """The system refuses to write more, as a full disk does; Python ignores SIGXFSZ."""
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_sentence_and_the_old_checkpoint_stays(path: Path) -> None:
    save(path, "old")
    with files_no_longer_than(1_000_000), pytest.raises(RunFailed) as failure:
        save(path, torch.zeros(1_000_000))
    assert str(failure.value) == (
        f"cannot write the checkpoint {path} (File too large); make room there, or name another place with --out"
    )
    assert load(path) == "old"
    assert checkpoint_files(path.parent) == [path]


def test_a_process_that_ends_while_it_writes_leaves_the_old_checkpoint(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(path, "old")

    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(path, "new")
    assert load(path) == "old"
    assert checkpoint_files(path.parent) == [path]


def test_the_file_is_synced_before_it_is_renamed_and_the_directory_afterwards(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def logged(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def tell(*given: Any) -> Any:
            kind = "directory" if name == "fsync" and os.path.isdir(f"/proc/self/fd/{given[0]}") else "file"
            done.append(f"{name} {kind}")
            return call(*given)

        return tell

    monkeypatch.setattr(os, "fsync", logged("fsync", fsync))
    monkeypatch.setattr(os, "replace", logged("replace", replace))
    save(path, "new")
    assert done == ["fsync file", "replace file", "fsync directory"]


def test_a_partial_file_is_overwritten(path: Path) -> None:
    partial = path.with_name(path.name + PARTIAL)
    partial.write_bytes(b"x" * 10_000)
    assert checkpoint_files(path.parent) == [path.with_name(partial.name)]
    assert through(path, "new") == "new"
    assert checkpoint_files(path.parent) == [path]


def test_threads_that_save_at_once_do_not_mix(path: Path) -> None:
    states = [torch.full((300_000,), float(number)) for number in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda state: save(path, state), states))
    back = load(path)
    assert any(torch.equal(back, state) for state in states)
    assert checkpoint_files(path.parent) == [path]


# Files that are no checkpoints


def test_a_file_that_is_truncated_anywhere_is_refused(path: Path) -> None:
    save(path, {"a": torch.arange(5), "b": "text"})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        expected = "is not a checkpoint of offbeat" if length < len(MAGIC) else "is cut off or corrupt"
        with pytest.raises(ConfigurationError, match=expected):
            load(path)
    path.write_bytes(whole + b"\x00")
    with pytest.raises(ConfigurationError, match="is cut off or corrupt"):
        load(path)


def test_a_flipped_bit_anywhere_is_detected(path: Path) -> None:
    save(path, {"a": torch.arange(5), "b": "text"})
    whole = path.read_bytes()
    for index in range(len(whole)):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :])
        with pytest.raises(ConfigurationError):
            load(path)


def test_other_files_and_versions_are_one_sentence(path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be read \(No such file or directory\); name the directory"):
        load(path)
    path.write_text("a letter")
    with pytest.raises(ConfigurationError, match="is not a checkpoint of offbeat; name one"):
        load(path)
    path.write_bytes(forged("x", version=9))
    with pytest.raises(
        ConfigurationError, match=f"was written in version 9, and this version of offbeat reads {VERSION}"
    ):
        load(path)


@pytest.mark.parametrize(
    "raw",
    [
        forged([TENSOR, "float32", [1 << 40], [0]]),
        forged([TENSOR, "float32", [1 << 40], [0]], payload_bytes=1 << 42),
        forged([TENSOR, "float32", [1 << 62, 1 << 62], [0, 1]], b"1234"),
        forged([TENSOR, "float32", [-1], [0]], b"1234"),
        forged([TENSOR, "float32", [True], [0]], b"1234"),
        forged([TENSOR, "float32", ["1"], [0]], b"1234"),
        forged([TENSOR, "float32", [1], [1]], b"1234"),
        forged([TENSOR, "float32", [1], []], b"1234"),
        forged([TENSOR, "float32", [1, 1], [0, 0]], b"1234"),
        forged([TENSOR, "float32", [1], ["0"]], b"1234"),
        forged([TENSOR, "qint8", [4], [0]], b"1234"),
        forged([TENSOR, "load", [4], [0]], b"1234"),
        forged([TENSOR, "uint8", [0, 1 << 62, 1 << 62], [0, 1, 2]]),
        forged([TENSOR, "uint8", [0] + [3] * 200, list(range(201))]),
        forged([TENSOR, "uint8", [3], [0]], b"1234"),
        forged([LIST], b"1234"),
        forged([LIST, [TENSOR, "uint8", [3], [0]], [TENSOR, "uint8", [3], [0]]], b"1234"),
        forged([DICT, 1]),
        forged([DICT, [LIST], 1]),
        forged([BIG, "nonsense"]),
        forged([99]),
        forged([]),
        forged({"a": 1}),
        forged(msgspec.msgpack.Ext(5, b"")),
        HEAD.pack(MAGIC, VERSION, 1 << 63, 1 << 63) + bytes(64),
        HEAD.pack(MAGIC, VERSION, 2, 0) + b"\xc1\xc1" + bytes(32),
    ],
    ids=lambda raw: hashlib.sha256(raw).hexdigest()[:8],
)
def test_a_file_with_false_sizes_is_refused_before_memory_is_allocated(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    with pytest.raises(ConfigurationError, match="is cut off or corrupt; restore it from a copy, or start anew"):
        load(path)


def test_a_file_that_is_nested_too_deeply_is_refused(path: Path) -> None:
    encoded = b"\x92\x00" * 100_000 + b"\xc0"
    body = HEAD.pack(MAGIC, VERSION, len(encoded), 0) + encoded
    path.write_bytes(body + hashlib.sha256(body).digest())
    with pytest.raises(ConfigurationError, match="is cut off or corrupt"):
        load(path)


# The checkpoint of a run


def a_checkpoint(**changed: Any) -> Checkpoint:
    known: dict[str, Any] = {
        "model": "abc",
        "strategy": "fmb",
        "elapsed_seconds": 12.5,
        "records_position": 100,
        "resumes": 1,
        "node": {"parameters": torch.arange(3.0), "draws": {"1": [(0, 5)]}},
    }
    return Checkpoint(**{**known, **changed})


def test_the_checkpoint_of_a_run_round_trips(path: Path) -> None:
    a_checkpoint().save(path)
    back, given = vars(Checkpoint.load(path)), vars(a_checkpoint())
    assert torch.equal(back["node"].pop("parameters"), given["node"].pop("parameters"))
    assert back == given


@pytest.mark.parametrize(
    "changed", [{"resumes": "often"}, {"records_position": -1}, {"elapsed_seconds": None}, {"node": []}]
)
def test_a_file_without_a_checkpoint_is_one_sentence(path: Path, changed: dict[str, Any]) -> None:
    save(path, {**vars(a_checkpoint()), **changed})
    with pytest.raises(
        ConfigurationError, match=r"checkpoint-0.offbeat does not hold a run of this version of offbeat"
    ):
        Checkpoint.load(path)
    save(path, [1, 2])
    with pytest.raises(ConfigurationError, match="does not hold a run"):
        Checkpoint.load(path)


def test_a_checkpoint_of_another_model_or_strategy_is_one_sentence() -> None:
    a_checkpoint().check_fits(RunIdentity("abc", "fmb"))
    with pytest.raises(
        ConfigurationError, match=r"of another model \(fingerprint abc, this one has xyz\); resume with"
    ):
        a_checkpoint().check_fits(RunIdentity("xyz", "fmb"))
    with pytest.raises(ConfigurationError, match="of the strategy fmb, and this run's is amb; resume with"):
        a_checkpoint().check_fits(RunIdentity("abc", "amb"))


def test_the_state_of_another_version_is_one_sentence() -> None:
    class Counter(Stateful):
        _count: int = 0

    node, device = Counter(), torch.device("cpu")
    a_checkpoint(node={"count": 3}).restore(node, device)  # type: ignore[arg-type]
    assert node._count == 3
    with pytest.raises(ConfigurationError, match=r"state of another version of offbeat \(KeyError: 'count'\); resume"):
        a_checkpoint(node={"number": 3}).restore(node, device)  # type: ignore[arg-type]


def test_the_last_three_checkpoints_are_kept(path: Path) -> None:
    for elapsed in range(5):
        a_checkpoint(elapsed_seconds=float(elapsed)).save(path)
    assert [file.name for file in checkpoint_files(path.parent)] == [
        "checkpoint-0.1.offbeat",
        "checkpoint-0.2.offbeat",
        "checkpoint-0.offbeat",
    ]
    assert [Checkpoint.load(older_path(path, age)).elapsed_seconds for age in range(3)] == [4.0, 3.0, 2.0]


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    path: Path, damaged: int, caplog: pytest.LogCaptureFixture
) -> None:
    for elapsed in range(5):
        a_checkpoint(elapsed_seconds=float(elapsed)).save(path)
    for age in range(damaged):
        older = older_path(path, age)
        older.write_bytes(older.read_bytes()[:-1])
    assert read_checkpoint(path.parent).elapsed_seconds == 4.0 - damaged
    (record,) = caplog.records
    assert "checkpoint-0.offbeat is cut off or corrupt" in record.message
    assert f"continues from an older checkpoint, checkpoint-0.{damaged}.offbeat" in record.message


def test_if_all_are_damaged_the_newest_is_named(path: Path) -> None:
    for _ in range(3):
        a_checkpoint().save(path)
    for age in range(3):
        older_path(path, age).unlink()
        older_path(path, age).write_bytes(b"offbeat!")
    assert has_checkpoint(path.parent)
    with pytest.raises(ConfigurationError, match=r"checkpoint-0\.offbeat is cut off or corrupt"):
        read_checkpoint(path.parent)


def test_a_checkpoint_that_cannot_be_written_leaves_all_older_ones_as_they_are(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for elapsed in range(3):
        a_checkpoint(elapsed_seconds=float(elapsed)).save(path)
    monkeypatch.setattr(os, "fsync", lambda file: full())
    for _ in range(5):
        with pytest.raises(RunFailed, match="No space left on device"):
            a_checkpoint(elapsed_seconds=9.0).save(path)
    assert [Checkpoint.load(older_path(path, age)).elapsed_seconds for age in range(3)] == [2.0, 1.0, 0.0]
    assert len(checkpoint_files(path.parent)) == 3


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class FakeRunner:
    """A node whose state is given."""

    def __init__(self, node: dict[str, Any]) -> None:
        self.node = node
        self.ended = False
        self.failure: BaseException | None = None
        self.clock = Clock(0.0)

    def inspect(self, read: Callable[[Any], None]) -> None:
        read(self)

    def state(self) -> dict[str, Any]:
        return self.node

    def fail(self, error: BaseException) -> None:
        self.failure = error


@pytest.fixture
def writer_of(path: Path) -> Iterator[Callable[[FakeRunner], CheckpointWriter]]:
    with RankWriter(path.parent, 0) as records:

        def make(runner: FakeRunner) -> CheckpointWriter:
            known: Any = {"seconds": 60.0, "identity": RunIdentity("abc", "fmb"), "resumes": 0}
            return CheckpointWriter(path, runner, records, **known)  # type: ignore[arg-type]

        yield make


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_state_that_is_not_finite_is_never_written(
    path: Path, writer_of: Callable[..., CheckpointWriter], value: float, caplog: pytest.LogCaptureFixture
) -> None:
    runner = FakeRunner({"optimizer": [{"momentum": torch.ones(3)}], "loss": math.nan, "count": torch.ones(2).long()})
    writer = writer_of(runner)
    writer.save()
    assert path.exists()
    before = path.read_bytes()
    runner.node["optimizer"][0]["momentum"][1] = value
    for _ in range(3):
        writer.save()
    assert path.read_bytes() == before
    assert not older_path(path, 1).exists()
    (record,) = caplog.records
    assert "the state of the run is not finite (momentum), and it cannot be resumed from that" in record.message
    runner.node["optimizer"][0]["momentum"][1] = 2.0
    writer.save()
    assert caplog.records[-1].message == "offbeat: checkpoints are written again"
    assert older_path(path, 1).read_bytes() == before
    assert runner.failure is None


def test_a_checkpoint_that_fails_is_tried_again_and_does_not_end_the_run(
    path: Path,
    writer_of: Callable[..., CheckpointWriter],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fsync, tries = os.fsync, threading.Semaphore(0)

    def fail(file: int) -> None:
        tries.release()
        full()

    monkeypatch.setattr(checkpoints, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(os, "fsync", fail)
    runner = FakeRunner({"parameters": torch.ones(3)})
    writer = writer_of(runner)
    writer.start()
    for _ in range(3):
        assert tries.acquire(timeout=60)
    monkeypatch.setattr(os, "fsync", fsync)
    while not path.exists():
        assert writer._thread.is_alive()
    writer.close()
    assert runner.failure is None
    assert caplog.text.count("no checkpoint was written") == 1


def test_its_repr_is_short_however_large_the_model_is() -> None:
    assert len(repr(a_checkpoint(node={"parameters": list(range(10_000))}))) < 1000
