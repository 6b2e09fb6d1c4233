"""What goes wrong on a Monday: one sentence each, the right exit code, and no waiting for ever."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from accounts import processes_of
from torch import nn

import offbeat as ob
from offbeat.cli import main
from offbeat.core.run_identity import RunIdentity
from offbeat.transports.address import Address
from offbeat.transports.listener import Listener
from offbeat.transports.tcp import TcpTransport
from offbeat.transports.tls import Credentials

TRAIN = ["train", "digits", "async-fmb", "--workers", "2", "--until", "2000", "--quiet", "--no-report"]


def sentence(capfd: pytest.CaptureFixture[str]) -> str:
    """The one sentence that was said."""
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("offbeat: ")]
    assert len(said) == 1, said
    return said[0]


def token_in(directory: Path, text: str = "a secret only for this test") -> str:
    path = directory / f"token-{len(text)}"
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def test_a_port_in_use(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        there = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main([*TRAIN, "--listen", there, "--out", str(tmp_path)]) == 2
    assert "is taken" in sentence(capfd)


def test_listening_beyond_this_machine_without_a_token(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*TRAIN, "--listen", "0.0.0.0:0", "--out", str(tmp_path)]) == 2
    assert "--token-file" in sentence(capfd)


def test_a_token_file_that_is_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--listen", "127.0.0.1:0", "--token-file", str(tmp_path / "none")]
    assert main([*TRAIN, *words, "--out", str(tmp_path)]) == 2
    assert "token file" in sentence(capfd)


def test_a_hub_that_cannot_be_reached(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert main(["work", f"127.0.0.1:{port}", "--wait", "0.3"]) == 1
    assert f"127.0.0.1:{port}" in sentence(capfd)


@contextmanager
def hub(token: str) -> Iterator[Address]:
    """A hub that listens."""
    credentials = Credentials(token.encode())
    listener = Listener(Address("127.0.0.1", 0), credentials)
    transport = TcpTransport(
        rank=0, processes=2, peers=[1], rendezvous=listener, credentials=credentials, identity=RunIdentity("", "")
    )
    try:
        yield listener.address
    finally:
        transport.close(0.1)


@pytest.mark.parametrize("token", [None, "another secret of this test"])
def test_a_wrong_token_and_none_at_all(token: str | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shown = [] if token is None else ["--token-file", token_in(tmp_path, token)]
    with hub("the secret of this test") as address:
        assert main(["work", str(address), "--wait", "5", *shown]) == 1
    assert "token" in sentence(capfd)


def script_of(tmp_path: Path, body: str) -> str:
    path = tmp_path / "mine.py"
    path.write_text(
        "import os, torch, offbeat as ob\n"
        "rank = int(os.environ['OFFBEAT_RANK'])\n"
        f"{body}\n"
        "with ob.join(model, ob.AsyncFixed(batch=8, optimizer=ob.SGD(lr=0.1)), until=100_000) as run:\n"
        "    for x, y in run.batches((torch.ones(64, 3), torch.zeros(64, 2))):\n"
        "        run.backward((model(x) - y).square().mean(1))\n"
    )
    return str(path)


@pytest.mark.integration
def test_a_different_model_on_one_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = script_of(tmp_path, "model = torch.nn.Sequential(*[torch.nn.Linear(3, 2, bias=rank != 2)])")
    assert main(["launch", "-n", "3", "--out", str(tmp_path / "run"), script]) == 1
    *_, said = capfd.readouterr().err.splitlines()
    assert said.startswith("offbeat: rank 2: rank 2 has a different model")  # its sentence, without the exception
    assert said.endswith("every rank must build the same model")
    assert not processes_of(os.getpid())


@pytest.mark.integration
def test_a_wrong_loop_of_a_script_is_not_started_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The script reports a configuration error, though its exit code is that of any exception."""
    script = Path(script_of(tmp_path, "model = torch.nn.Linear(3, 2)"))
    script.write_text(
        script.read_text().replace("        run.backward", "        if rank == 2: continue\n        run.backward")
    )
    assert main(["launch", "-n", "3", "--out", str(tmp_path / "run"), str(script)]) == 1
    said = capfd.readouterr().err
    assert said.splitlines()[-1].startswith("offbeat: rank 2: a micro-batch was taken from run.batches")
    assert "started again" not in said


def test_a_worker_script_that_raises(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = script_of(tmp_path, "model = torch.nn.Linear(3, 2)\nif rank == 1: raise ValueError('bad luck')")
    assert main(["launch", "-n", "3", "--out", str(tmp_path / "run"), script]) == 1
    said = capfd.readouterr().err
    assert "rank 1: ValueError: bad luck" in said
    assert "[rank 1] Traceback (most recent call last):" in said


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    strategy = ob.FixedMinibatch(batch=16, optimizer=ob.SGD(lr=0.1))
    inputs, targets = torch.ones(64, 3), torch.zeros(64, dtype=torch.int64)

    def train(net: nn.Module, resume: bool) -> None:
        with ob.join(net, strategy, until=10_000, out=tmp_path / "run", resume=resume) as run:
            for step, (x, y) in enumerate(run.batches((inputs, targets))):
                run.backward(F.cross_entropy(net(x), y, reduction="none"))
                if step == 3:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(nn.Linear(3, 2), resume=False)
    with pytest.raises(ob.ConfigurationError, match="another model"):
        train(nn.Linear(3, 4), resume=True)
    with pytest.raises(KeyboardInterrupt):
        train(nn.Linear(3, 2), resume=True)


def test_resuming_what_is_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", str(tmp_path)]) == 2
    assert "no run" in sentence(capfd)


def test_a_full_disk(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A limit on the size of files stands for it: writing fails in the same way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        words = [
            "train",
            "quadratic",
            "async-fmb",
            "--workers",
            "2",
            "--until",
            "1000000",
            "--checkpoint-seconds",
            "none",
        ]
        code = main([*words, "--quiet", "--no-report", "--out", str(tmp_path)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 1
    assert "make room there" in capfd.readouterr().err
    assert not processes_of(os.getpid())


def test_no_thread_is_left_of_a_session_that_could_not_begin() -> None:
    before = threading.active_count()
    with pytest.raises(ob.ConfigurationError):
        ob.join(nn.Linear(2, 2), ob.FixedMinibatch(), until=100)
    assert threading.active_count() == before
