"""`offbeat launch` runs a script in several processes; `offbeat work` joins a run on another machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
import uuid
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from offbeat.cli.class_lookup import load_files
from offbeat.cli.live_view import LineWatcher, RunWatcher
from offbeat.cli.mpirun import exec_mpirun
from offbeat.cli.options import (
    BooleanFlag,
    Directory,
    File,
    Files,
    HostPort,
    Name,
    QuietFlag,
    RunDirectory,
    TlsFlags,
    number,
)
from offbeat.cli.output import new_directory, prepare_directory, print_status
from offbeat.cli.run_state import RunState
from offbeat.core.validation import require
from offbeat.errors import RunFailed, unknown
from offbeat.lab.worker_main import join_run
from offbeat.launch.children import Child, start_command
from offbeat.launch.listeners import advertised_address, open_listener
from offbeat.launch.rank_info import TRANSPORTS, RankInfo, environment_of
from offbeat.launch.rank_processes import RankFacts
from offbeat.launch.run_monitor import RunMonitor
from offbeat.launch.supervisor import Supervisor, SupervisorOptions
from offbeat.launch.token_files import joining_token, read_token
from offbeat.live.checkpoints import is_being_written
from offbeat.records.files import HEADER, check_idle, file_name
from offbeat.transports.address import Address
from offbeat.transports.mpi import check_installed
from offbeat.transports.rendezvous import request_assignment
from offbeat.transports.tls import Credentials

EXAMPLE = "type, for example: offbeat launch -n 4 train.py"


def launch(
    *script: str,
    n: Annotated[int | None, number("N", ("-n", "--processes"), least=1)] = None,
    out: Directory = None,
    overwrite: BooleanFlag = False,
    resume: RunDirectory = None,
    restarts: Annotated[int | None, number()] = None,
    listen: HostPort = None,
    token_file: File = None,
    transport: Name = None,
    tls: Annotated[TlsFlags, Parameter(name="*")] = TlsFlags(),  # noqa: B008 (frozen)
    quiet: QuietFlag = False,
) -> int:
    """Start a script in several processes and supervise them until its rank 0 has ended.

    Args:
        script: the script and its arguments
        n: processes to start, including the hub
        out: directory for records and checkpoints [runs/SCRIPT-NNN, the next that is free]
        overwrite: replace the run that --out holds already
        resume: continue the run in this directory from its last checkpoint
        restarts: times that a process which died is started again [3]
        listen: for workers on other machines [this machine alone]
        token_file: file with the secret that workers must present; needed for workers on other machines
        transport: how messages travel: tcp, or mpi, which calls mpirun [tcp]
        quiet: show no progress while it runs
    """
    require(bool(script), f"no script is named; {EXAMPLE}")
    require(Path(script[0]).is_file(), f"there is no script {script[0]}; {EXAMPLE}")
    require(n is not None, f"-n says how many processes to start; {EXAMPLE}")
    assert n is not None
    require(resume is None or out is None, "--resume continues in the directory of the run; leave out --out")
    if resume is not None:
        require((Path(resume) / HEADER).is_file(), f"there is no run at {resume} to continue")
        check_idle(Path(resume))
    if transport not in (None, *TRANSPORTS):
        raise unknown("transport", str(transport), TRANSPORTS)
    if transport == "mpi":
        for name, value in (("--listen", listen), ("--token-file", token_file), ("--restarts", restarts)):
            require(value is None, f"{name} does not go with --transport mpi, where mpirun manages the processes")
        require(
            tls == TlsFlags(), "MPI has its own connections, which --tls and certificates do not reach; leave them out"
        )
        check_installed()
        directory, _ = _directory(script[0], out, overwrite, resume)
        environment = {"OFFBEAT_DIRECTORY": str(directory.absolute()), "OFFBEAT_RESUME": "1" if resume else ""}
        exec_mpirun(n, script, environment)
    token = None if token_file is None else read_token(token_file)
    listener, address, credentials = open_listener(listen, token, tls.settings())
    with listener:
        directory, is_new = _directory(script[0], out, overwrite, resume)
        rank_info = RankInfo(0, n, address, credentials, None, directory, resume is not None, "offbeat")
        watcher = RunWatcher(_rank_name) if quiet else LineWatcher(Path(script[0]).name, _rank_name, RunState())
        try:
            starter = _Starter([sys.executable, *script], rank_info, listener, RunMonitor(directory, watcher), watcher)
            return _supervise(starter, 3 if restarts is None else restarts, listen)
        finally:
            if is_new:
                with contextlib.suppress(OSError):
                    directory.rmdir()  # only if it is empty: the script has recorded nothing


def _directory(script: str, out: str | None, overwrite: bool, resume: str | None) -> tuple[Path, bool]:
    """The directory for records, and whether it was created by this call."""
    if resume is not None:
        return Path(resume), False
    if out is None:
        return new_directory(file_name(Path(script).stem)), True
    is_new = not Path(out).exists()
    return prepare_directory(Path(out), overwrite), is_new


@dataclasses.dataclass(frozen=True)
class _Starter:
    """Starts the processes of a script; called with a rank and how many times that rank has been started before."""

    command: list[str]
    rank_info: RankInfo
    listener: socket.socket
    monitor: RunMonitor
    watcher: RunWatcher

    def __call__(self, rank: int, incarnation: int) -> Child:
        rank_info = dataclasses.replace(
            self.rank_info,
            rank=rank,
            resume=self.rank_info.resume and incarnation == 0,
            incarnation=incarnation,
            began=self.monitor.began if incarnation and rank == 0 else None,
        )
        return start_command(
            self.command,
            rank=rank,
            incarnation=incarnation,
            environment=environment_of(rank_info),
            on_line=self.watcher.line,
            listener=self.listener.dup() if rank == 0 else None,
            own_stdout=True,
        )


def _supervise(starter: _Starter, restarts: int, listen: str | None) -> int:
    rank_info, monitor, watcher = starter.rank_info, starter.monitor, starter.watcher
    if listen is not None:
        assert rank_info.address is not None
        address = advertised_address(listen, rank_info.address)
        script = " ".join(starter.command[1:])
        watcher.say(f"others join with: offbeat work {address} --token-file FILE {script}")
    supervisor = Supervisor(
        starter,
        range(rank_info.processes),
        RankFacts(
            has_joined=monitor.has_joined,
            rounds=monitor.rounds.__getitem__,
            is_required=lambda rank: rank == 0 and not monitor.rounds[0],  # a hub does not compute
            name=_rank_name,
        ),
        say=watcher.say,
        on_gone=lambda rank: None if rank else starter.listener.close(),
        options=SupervisorOptions(
            restarts_max=restarts,
            has_remote_ranks=listen is not None,
            is_saving=lambda: _is_saving(rank_info.directory),
        ),
    )
    failure = supervisor.run(monitor)
    if monitor.joined or monitor.rounds:
        watcher.ended()
    if failure is not None:
        raise RunFailed(failure.sentence)
    return 0


def _is_saving(directory: Path | None) -> bool:
    return directory is not None and is_being_written(directory)


def _rank_name(rank: int) -> str:
    """Only the script knows which of its ranks is a hub."""
    return f"rank {rank}"


def work(
    address: Annotated[str, Parameter(name="HOST:PORT")],
    /,
    *script: str,
    token_file: File = None,
    tls: Annotated[TlsFlags, Parameter(name="*")] = TlsFlags(),  # noqa: B008 (frozen)
    wait: Annotated[float, number("SECONDS")] = 60.0,
    threads: Annotated[int | None, number(least=1)] = None,
    allow: Files = (),
) -> int:
    """Join as a worker until the run ends.

    Args:
        address: where the run listens: the address of its --listen
        script: if the run trains a script: that script and its arguments
        token_file: file with the token of the run; needed unless it runs on this machine
        wait: how long to retry while the address does not answer [60]
        threads: threads to compute with [as the run sets]
        allow: a file with a class that the run names, which is run as Python; may be repeated
    """
    there = Address.parse(address)
    if script:
        require(threads is None, "a script sets its threads itself, with torch.set_num_threads; leave out --threads")
        require(Path(script[0]).is_file(), f"there is no script {script[0]}; name the one that the run trains")
    credentials = Credentials(joining_token(there, token_file), tls.settings())
    member = f"{socket.gethostname()}-{uuid.uuid4().hex}"
    if script:
        return _exec_script(script, there, credentials, member, wait)
    return join_run(
        there,
        credentials,
        wait_seconds=wait,
        member=member,
        prepare=lambda experiment: load_files(experiment, f"the run at {there}", allow),
        threads=threads,
    )


def _exec_script(
    script: tuple[str, ...], address: Address, credentials: Credentials, member: str, seconds: float
) -> int:
    """Request a rank, and replace this process by the script under that rank."""
    assignment = request_assignment(address, credentials, member=member, rank=None, wait_seconds=seconds)
    rank_info = RankInfo(assignment.rank, assignment.processes, address, credentials, launcher="offbeat", member=member)
    print_status(f"joining the run at {address} as rank {assignment.rank}")
    sys.stdout.flush()
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **environment_of(rank_info)}
    os.execve(sys.executable, [sys.executable, *script], environment)
