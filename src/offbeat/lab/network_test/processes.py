"""The processes of a network test: started here, by a launcher, or by hand on other machines.

Rank 0 is the process of the command itself, except under MPI, where mpirun starts all ranks.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from offbeat.core.events import PeerLost
from offbeat.core.run_identity import RunIdentity
from offbeat.errors import ConfigurationError, OffbeatError, RunFailed
from offbeat.lab.network_test.agent import Agent, CheckProcesses, Connections, describe_machine
from offbeat.lab.network_test.controller import Controller, OnStep, check_memory
from offbeat.lab.network_test.plan import NetworkTest
from offbeat.lab.network_test.protocol import LinkFailed
from offbeat.lab.network_test.result import NetworkResult, read_result
from offbeat.launch.children import Child, OnLine, start_command, start_forked
from offbeat.launch.failure_reports import FailureKind, decode_report
from offbeat.launch.listeners import open_listener
from offbeat.launch.mpirun_command import mpirun_command
from offbeat.launch.process_settings import name_process
from offbeat.launch.rank_info import RankInfo, environment_of
from offbeat.launch.run_failure import COMMAND_WAS_WRONG, signal_name
from offbeat.transports.address import Address
from offbeat.transports.link import LinkOptions
from offbeat.transports.listener import Listener
from offbeat.transports.mpi import MpiTransport
from offbeat.transports.rendezvous import Assignment, CallRequest, request_assignment
from offbeat.transports.tcp import Admission, TcpTransport
from offbeat.transports.tls import Credentials, Tls
from offbeat.transports.transport import Transport

IDENTITY = RunIdentity(model="none", strategy="offbeat network 2")
"""Ranks with another version of the protocol are refused."""
FAILURES = "failures.jsonl"
"""The file beside the result to which ranks of mpirun write reports, since mpirun passes them no pipe."""
POLL_SECONDS = 0.01
DEATH_SECONDS = 1.0
"""How long a process whose link is lost may take to end, before its link counts as the cause."""
END_SECONDS = 5.0
"""How long a process may take to end after the test."""

Assign = Callable[[CallRequest], Assignment | str]


class FreeRanks:
    """Assigns the ranks that are not started on this machine to processes that join. Any thread may call it.

    A process that asks again gets the same rank; a reason to refuse it is returned as a string.
    """

    def __init__(self, ranks: int, started_here: Iterable[int]) -> None:
        self._ranks = ranks
        self._free = sorted(set(range(ranks)) - set(started_here))
        self._assigned: dict[str, int] = {}
        self._lock = threading.Lock()

    def __call__(self, request: CallRequest) -> Assignment | str:
        if request.rank is not None:
            return Assignment(request.rank, self._ranks, 0.0, None)
        if request.program != "network test":
            return (
                "what listens there is 'offbeat network', and trains nothing; join it with: offbeat network HOST:PORT"
            )
        with self._lock:
            if request.member not in self._assigned:
                if not self._free:
                    return f"all {self._ranks} ranks are taken; start 'offbeat network' with a larger -n"
                self._assigned[request.member] = self._free.pop(0)
            return Assignment(self._assigned[request.member], self._ranks, 0.0, None)


def run_test_rank(
    info: RankInfo,
    test: NetworkTest,
    on_step: OnStep = lambda kind, share: None,
    *,
    check_processes: CheckProcesses = lambda lost: None,
    assign: Assign | None = None,
) -> NetworkResult | None:
    """Run one rank in this process; rank 0 returns the result.

    Args:
        info: rank, number of ranks, and how they are connected.
        test: the settings; those of rank 0 hold.
        on_step: called at rank 0 before each step.
        check_processes: called while waiting; it may raise `RunFailed`.
        assign: at rank 0, which rank a process that joins gets; none admits only the ranks of the launcher.
    """
    torch.set_num_threads(1)
    transport = _transport(info, test, assign)
    linger_seconds = END_SECONDS
    try:
        connections = Connections(transport, info.rank, info.processes, check_processes)
        _connect(connections, test.wait_seconds)
        if info.rank == 0:
            return Controller(connections, test, on_step).run(info.transport)
        Agent(connections).serve()
        return None
    except KeyboardInterrupt:
        linger_seconds = 0.0
        raise
    finally:
        transport.close(linger_seconds)


def _connect(connections: Connections, wait_seconds: float) -> None:
    try:
        connections.connect(wait_seconds)
    except RunFailed as failed:
        if connections.rank and 0 not in connections.missing:
            connections.send(0, LinkFailed(next(iter(connections.missing), 0), str(failed)))
        raise


def _transport(info: RankInfo, test: NetworkTest, assign: Assign | None) -> Transport:
    peers = [rank for rank in range(info.processes) if rank != info.rank]
    if info.transport == "mpi":
        return MpiTransport(rank=info.rank, processes=info.processes, peers=peers, identity=IDENTITY)
    assert info.address is not None
    assert info.credentials is not None
    tcp = functools.partial(
        TcpTransport,
        rank=info.rank,
        processes=info.processes,
        peers=peers,
        credentials=info.credentials,
        identity=IDENTITY,
        options=LinkOptions(shared_memory=test.shared_memory),
    )
    if info.rank == 0:
        return tcp(
            rendezvous=Listener(info.address, info.credentials, info.listener), admission=Admission(assign=assign)
        )
    return tcp(rendezvous=info.address, admission=Admission(member=info.member or uuid.uuid4().hex))


def run_local(
    test: NetworkTest,
    ranks: int,
    on_step: OnStep,
    *,
    local: int,
    listen: str | None = None,
    token: bytes | None = None,
    tls: Tls = Tls(),  # noqa: B008 (frozen)
    on_listen: Callable[[Address], None] = lambda address: None,
) -> NetworkResult:
    """Run rank 0 in this process, and start more ranks on this machine.

    Args:
        test: the settings.
        ranks: how many ranks there are in all.
        on_step: called before each step.
        local: how many ranks run on this machine, rank 0 included; the others join by hand.
        listen: the address to listen at, HOST:PORT; none for this machine alone.
        token: the secret that ranks authenticate with; none makes one, where only this machine can connect.
        tls: which connections are encrypted.
        on_listen: called with the address once it is open, where `listen` is given.
    """
    children = range(1, local)
    check_memory(test, [describe_machine()] * local, ranks)
    listener, address, credentials = open_listener(listen, token, tls)
    with listener:
        info = RankInfo(0, ranks, address, credentials, launcher="offbeat")
        if listen is not None:
            on_listen(address)
        with _started(info, test, children) as check_processes:
            info = replace(info, listener=listener.detach())
            assign = FreeRanks(ranks, [0, *children])
            result = run_test_rank(info, test, on_step, check_processes=check_processes, assign=assign)
    assert result is not None
    return result


@contextmanager
def _started(info: RankInfo, test: NetworkTest, ranks: range) -> Iterator[CheckProcesses]:
    """Start the other ranks of this machine; the value raises `RunFailed` once one of them has failed."""
    children: list[Child] = []

    def check_processes(lost: PeerLost | None) -> None:
        for child in sorted(children, key=lambda child: lost is None or child.rank != lost.peer):
            if lost is not None and child.rank == lost.peer:
                _wait(child, DEATH_SECONDS)
            if child.poll():
                reason = _reason(child)
                if lost is not None and child.report is not None and child.report.lost_peer == 0:
                    reason += f"; at rank 0: {lost.detail}"  # the cause is what this end knows
                raise RunFailed(reason)

    try:
        for rank in ranks:
            children.append(_start(replace(info, rank=rank), test))
        yield check_processes
        for child in children:
            _wait(child, END_SECONDS)
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.wait()


def _start(info: RankInfo, test: NetworkTest) -> Child:
    environment = environment_of(info)
    if sys.platform == "linux":
        main = functools.partial(_forked_main, info, test)
        return start_forked(main, rank=info.rank, incarnation=0, environment=environment, on_line=_ignore_line)
    argv = _rank_command(Path(os.devnull), test)
    return start_command(argv, rank=info.rank, incarnation=0, environment=environment, on_line=_ignore_line)


def _rank_command(result: Path, test: NetworkTest) -> list[str]:
    """The command line of one rank; rank 0 writes the result."""
    settings = msgspec.json.encode(test).decode()
    return [sys.executable, "-P", "-m", "offbeat.cli.network_command", str(result), settings]


def _ignore_line(rank: int, line: str) -> None:
    """What a rank prints is part of the reason where it fails."""


def _forked_main(info: RankInfo, test: NetworkTest) -> int:
    name_process(f"offbeat {info.rank}")
    run_test_rank(info, test)
    return 0


def _wait(child: Child, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _reason(child: Child) -> str:
    code = child.wait()
    if code < 0:
        return f"rank {child.rank} was killed by {signal_name(-code)}"
    return f"rank {child.rank}: {child.failure_reason() or f'it ended with exit code {code} and printed nothing'}"


def join_by_hand(address: Address, credentials: Credentials, test: NetworkTest) -> None:
    """Join the network test that listens at an address, as one of its free ranks."""
    member = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex}"
    assigned = request_assignment(
        address, credentials, member=member, rank=None, wait_seconds=test.wait_seconds, program="network test"
    )
    info = RankInfo(assigned.rank, assigned.processes, address, credentials, launcher="offbeat", member=member)
    run_test_rank(info, test)


def run_mpirun(test: NetworkTest, ranks: int, on_line: OnLine) -> NetworkResult:
    """Start all ranks on this machine with mpirun, and read the result that its rank 0 writes.

    `on_line` is called with each line that they print.
    """
    check_memory(test, [describe_machine()] * ranks, ranks)
    with tempfile.TemporaryDirectory(prefix="offbeat-") as directory:
        path = Path(directory) / "network.json"
        argv = [*mpirun_command(ranks), *_rank_command(path, test)]
        mpirun = start_command(argv, rank=0, incarnation=0, environment={}, on_line=on_line)
        try:
            code = mpirun.wait()
        finally:
            mpirun.kill(signal.SIGTERM)  # after which mpirun ends its ranks, and after SIGKILL it cannot
            _wait(mpirun, END_SECONDS)
            mpirun.kill()
            mpirun.wait()
        if code != 0:
            raise _mpirun_error(mpirun, code, path.with_name(FAILURES))
        return read_result(path)


def _mpirun_error(mpirun: Child, code: int, failures: Path) -> OffbeatError:
    """The error of a failed network test: what a rank reported last, or else what mpirun printed."""
    report = decode_report(failures.read_bytes()) if failures.exists() else None
    if report is not None:
        return (ConfigurationError if report.kind is FailureKind.CONFIGURATION else RunFailed)(report.sentence)
    failure = mpirun.failure_reason() or f"mpirun ended with exit code {code} and printed nothing"
    return (ConfigurationError if code == COMMAND_WAS_WRONG else RunFailed)(failure)
