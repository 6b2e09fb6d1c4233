"""The processes of a probe: this one, those that it starts, those that a launcher started, and those that join by hand.

Rank 0 is the process at which the command was typed, except under MPI, where mpirun starts all of them.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from offbeat.errors import ConfigurationError, RunFailed
from offbeat.lab.network_test.coordinator import Coordinator, Progress, check_memory
from offbeat.lab.network_test.mail import LinkLost, Mail
from offbeat.lab.network_test.member import Member, present
from offbeat.lab.network_test.messages import ProbeTrouble
from offbeat.lab.network_test.plan import Probe
from offbeat.lab.network_test.probe_ranks import GUEST, RankAllocator
from offbeat.lab.network_test.result import Network, read_result
from offbeat.launch.children import Child, OnLine, start_command, start_forked
from offbeat.launch.listeners import open_listener
from offbeat.launch.mpirun import mpirun_command
from offbeat.launch.process_settings import name_process
from offbeat.launch.rank_info import RankInfo, environment_of
from offbeat.launch.supervisor import COMMAND_WAS_WRONG
from offbeat.transports.gloo import GlooTransport
from offbeat.transports.mpi import MpiTransport
from offbeat.transports.rendezvous import Address, Assignment, CallRequest, Listener, request_assignment
from offbeat.transports.transport import Transport

FINGERPRINT = "offbeat network 1"
"""Ranks that speak another kind of probe are refused."""

POLL_SECONDS = 0.01
DEATH_SECONDS = 1.0
END_SECONDS = 5.0
"""How long a rank may take to end once it knows that everything is over."""


@dataclass(frozen=True, kw_only=True)
class TestOptions:
    """How the processes of a probe reach each other."""

    wait_seconds: float = 60.0
    shared_memory: bool = True


def take_part(
    place: RankInfo,
    probe: Probe,
    options: TestOptions,
    progress: Progress,
    *,
    look: Callable[[], None] = lambda: None,
    assignment: Callable[[CallRequest], Assignment | str] | None = None,
) -> Network | None:
    """Be one rank; rank 0 returns the result. The others do what it says, whatever `probe` is here."""
    torch.set_num_threads(1)
    transport = _transport(place, options, assignment)
    linger_seconds = END_SECONDS
    try:
        mail = Mail(transport, place.rank, place.processes, look)
        _connect(mail, options.wait_seconds)
        if place.rank == 0:
            return Coordinator(mail, probe, progress).run(place.transport)
        Member(mail).serve()
        return None
    except KeyboardInterrupt:
        linger_seconds = 0.0
        raise
    finally:
        transport.close(linger_seconds)


def _connect(mail: Mail, wait_seconds: float) -> None:
    try:
        mail.connect(wait_seconds)
    except RunFailed as failed:
        if mail.rank and 0 not in mail.missing:
            peer = next(iter(mail.missing), 0)
            mail.send(0, ProbeTrouble(peer, str(failed)))
        raise


def _transport(
    place: RankInfo, options: TestOptions, assignment: Callable[[CallRequest], Assignment | str] | None
) -> Transport:
    """The one place where the ways of moving messages differ."""
    peers = [rank for rank in range(place.processes) if rank != place.rank]
    if place.transport == "mpi":
        return MpiTransport(rank=place.rank, processes=place.processes, peers=peers, fingerprint=FINGERPRINT)
    assert place.address is not None
    gloo = functools.partial(
        GlooTransport,
        rank=place.rank,
        processes=place.processes,
        peers=peers,
        token=place.token,
        fingerprint=FINGERPRINT,
        shared_memory=options.shared_memory,
    )
    if place.rank == 0:
        return gloo(rendezvous=Listener(place.address, place.token, place.listener), assign=assignment)
    return gloo(rendezvous=place.address, member=place.member or uuid.uuid4().hex)


def probe_here(
    probe: Probe,
    ranks: int,
    options: TestOptions,
    progress: Progress,
    on_line: OnLine,
    *,
    local: int | None = None,
    listen: str | None = None,
    token: bytes | None = None,
    invite: Callable[[Address], None] = lambda address: None,
) -> Network:
    """Be rank 0, with `local` ranks on this machine, itself among them, and the others from wherever they come."""
    here = range(1, ranks if local is None else local)
    check_memory(probe, [present()] * (1 + len(here)), ranks)
    listener, address, token = open_listener(listen, token)
    with listener:
        place = RankInfo(0, ranks, address, token, launcher="offbeat")
        if listen is not None:
            invite(address)
        with _started(place, options, here, on_line) as look:
            rank_info = replace(place, listener=listener.detach())
            try:
                network = take_part(
                    rank_info, probe, options, progress, look=look, assignment=RankAllocator(ranks, [0, *here])
                )
            except LinkLost as lost:
                with lost.told_also():
                    look(lost.peer)
                raise
    assert network is not None
    return network


@contextmanager
def _started(place: RankInfo, options: TestOptions, ranks: range, on_line: OnLine) -> Iterator[Callable[..., None]]:
    """The other ranks of this machine, and a function that raises RunFailed once one of them has died.

    The one that it is told of has lost its connection, and is given a moment to be dead.
    """
    children: list[Child] = []

    def look(lost: int | None = None) -> None:
        for child in children:
            if child.rank == lost:
                _wait(child, DEATH_SECONDS)
            code = child.poll()
            if code is not None and code != 0:
                raise RunFailed(_why(child, code))

    try:
        for rank in ranks:
            children.append(_start(replace(place, rank=rank), options, on_line))
        yield look
        for child in children:  # they have been told that it is over
            _wait(child, END_SECONDS)
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.wait()


def _start(place: RankInfo, options: TestOptions, on_line: OnLine) -> Child:
    environment = environment_of(place)
    if sys.platform == "linux":
        be = functools.partial(_be, place, options)
        return start_forked(be, rank=place.rank, incarnation=0, environment=environment, on_line=on_line)
    argv = [sys.executable, "-P", "-m", "offbeat", "network", "--wait", str(options.wait_seconds)]
    if not options.shared_memory:
        argv.append("--no-shared-memory")
    return start_command(argv, rank=place.rank, incarnation=0, environment=environment, on_line=on_line)


def _be(place: RankInfo, options: TestOptions) -> int:
    name_process(f"offbeat {place.rank}")
    take_part(place, Probe(), options, lambda share, what: None)
    return 0


def _wait(child: Child, seconds: float) -> None:
    until = time.monotonic() + seconds
    while child.poll() is None and time.monotonic() < until:
        time.sleep(POLL_SECONDS)


def _why(child: Child, code: int) -> str:
    if code < 0:
        return f"rank {child.rank} was killed by {signal.Signals(-code).name}"
    return f"rank {child.rank}: {child.last_words() or f'it ended with exit code {code} and said nothing'}"


def join_there(address: Address, token: bytes | None, options: TestOptions) -> None:
    """Be one more rank of the probe that listens at an address."""
    member = f"{GUEST}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex}"
    told = request_assignment(address, token, member=member, rank=None, wait_seconds=options.wait_seconds)
    place = RankInfo(told.rank, told.processes, address, token, launcher="offbeat", member=member)
    take_part(place, Probe(), options, lambda share, what: None)


def probe_under_mpirun(probe: Probe, ranks: int, options: TestOptions, on_line: OnLine) -> Network:
    """Have mpirun start all ranks on this machine, and take over what its rank 0 has found."""
    check_memory(probe, [present()] * ranks, ranks)
    with tempfile.TemporaryDirectory(prefix="offbeat-") as directory:
        result = Path(directory) / "network.json"
        told = [msgspec.json.encode(what).decode() for what in (probe, options)]
        argv = [*mpirun_command(ranks), sys.executable, "-P", "-m", "offbeat.cli.network_member", str(result), *told]
        mpirun = start_command(argv, rank=0, incarnation=0, environment={}, on_line=on_line)
        try:
            code = mpirun.wait()
        finally:
            mpirun.kill(signal.SIGTERM)  # it ends its ranks, which a process that is killed cannot
            _wait(mpirun, END_SECONDS)
            mpirun.kill()
            mpirun.wait()
        if code != 0:
            failure = mpirun.last_words() or f"mpirun ended with exit code {code} and said nothing"
            raise ConfigurationError(failure) if code == COMMAND_WAS_WRONG else RunFailed(failure)
        return read_result(result)
