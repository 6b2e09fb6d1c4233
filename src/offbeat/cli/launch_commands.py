"""`offbeat launch`: a script of the user's own, in several processes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from offbeat.cli.class_lookup import load_files
from offbeat.cli.live_view import LineWatcher, RunState, RunWatcher
from offbeat.cli.mpirun import exec_mpirun
from offbeat.cli.options import QuietFlag, option
from offbeat.cli.output import new_directory, prepare_directory, print_status
from offbeat.core.configuration import from_plain
from offbeat.core.validation import require
from offbeat.errors import RunFailed, unknown
from offbeat.lab.worker_main import join_run
from offbeat.launch.children import Child, start_command
from offbeat.launch.listeners import advertised_address, open_listener
from offbeat.launch.rank_info import TRANSPORTS, RankInfo, environment_of, read_token
from offbeat.launch.supervisor import RunMonitor, Supervisor
from offbeat.records.files import HEADER, check_idle, file_name
from offbeat.transports.mpi import check_installed
from offbeat.transports.rendezvous import Address, request_assignment

EXAMPLE = "type, for example: offbeat launch -n 4 train.py"


def launch(
    *script: Annotated[str, Parameter(name="SCRIPT", help="the script, and what it is to be called with")],
    n: Annotated[str | None, option("how many processes, the hub among them", "N", ("-n", "--processes"))] = None,
    out: Annotated[
        str | None, option("directory for records and checkpoints [runs/SCRIPT-NNN, the next that is free]", "DIR")
    ] = None,
    overwrite: Annotated[bool, option("replace the run that --out holds already")] = False,
    resume: Annotated[
        str | None, option("go on with the run in this directory, from its last checkpoint", "RUN")
    ] = None,
    restarts: Annotated[str | None, option("times that a process which died is started again [3]", "N")] = None,
    listen: Annotated[str | None, option("for workers on other machines [this machine alone]", "HOST:PORT")] = None,
    token_file: Annotated[
        str | None, option("file with the secret that workers must show; needed with --listen", "FILE")
    ] = None,
    transport: Annotated[
        str | None, option("how messages travel: gloo, or mpi, which calls mpirun [gloo]", "NAME")
    ] = None,
    quiet: QuietFlag = False,
) -> int:
    """Start the script so many times, until its rank 0 has ended."""
    require(bool(script), f"no script is named; {EXAMPLE}")
    require(Path(script[0]).is_file(), f"there is no script {script[0]}; {EXAMPLE}")
    require(n is not None, f"-n says how many processes to start; {EXAMPLE}")
    processes, again = from_plain(int, n, "-n"), from_plain(int, restarts or "3", "--restarts")
    require(processes >= 1, f"-n must be 1 or more, but is {processes}")
    require(again >= 0, f"--restarts must be 0 or more, but is {again}")
    require(resume is None or out is None, "--resume goes on in the directory of the run; leave out --out")
    if resume is not None:
        require((Path(resume) / HEADER).is_file(), f"there is no run at {resume} to go on with")
        check_idle(Path(resume))
    if transport not in (None, *TRANSPORTS):
        raise unknown("transport", str(transport), TRANSPORTS)
    if transport == "mpi":
        for name, value in (("--listen", listen), ("--token-file", token_file), ("--restarts", restarts)):
            require(value is None, f"{name} does not go with --transport mpi, where mpirun keeps the processes")
        check_installed()
        directory, _ = _directory(script[0], out, overwrite, resume)
        wish = {"OFFBEAT_DIRECTORY": str(directory.absolute()), "OFFBEAT_RESUME": "1" if resume is not None else ""}
        exec_mpirun(processes, script, wish)
    token = None if token_file is None else read_token(token_file)
    listener, address, token = open_listener(listen, token)
    with listener:
        directory, made = _directory(script[0], out, overwrite, resume)
        rank_info = RankInfo(0, processes, address, token, None, directory, resume is not None, "offbeat")
        try:
            watcher = RunWatcher(_name) if quiet else LineWatcher(Path(script[0]).name, _name, RunState())
            return _supervise(script, rank_info, listener, again, listen, watcher)
        finally:
            if made:
                _remove_if_empty(directory)


def _directory(script: str, out: str | None, overwrite: bool, resume: str | None) -> tuple[Path, bool]:
    """Where records go, and whether it was made for them just now."""
    if resume is not None:
        return Path(resume), False
    if out is None:
        return new_directory(file_name(Path(script).stem)), True
    there = Path(out)
    is_new = not there.exists()
    return prepare_directory(there, overwrite), is_new


def _remove_if_empty(directory: Path) -> None:
    """A script that does not record anything leaves no trace."""
    with contextlib.suppress(OSError):
        directory.rmdir()


def _supervise(
    script: Sequence[str],
    rank_info: RankInfo,
    listener: socket.socket,
    restarts: int,
    listen: str | None,
    watcher: RunWatcher,
) -> int:
    assert rank_info.address is not None
    assert rank_info.directory is not None
    watch = RunMonitor(rank_info.directory, watcher)
    if listen is not None:
        there = advertised_address(listen, rank_info.address)
        watcher.say(f"others join with: offbeat work {there} --token-file FILE {' '.join(script)}")
    supervisor = Supervisor(
        _starter(script, rank_info, listener, watch, watcher.line),
        range(rank_info.processes),
        restarts_max=restarts,
        say=watcher.say,
        has_joined=watch.has_joined,
        rounds=watch.rounds.__getitem__,
        is_required=lambda rank: rank == 0 and not watch.rounds[0],  # a hub does not compute
        name=_name,
        others=listen is not None,
        on_gone=lambda rank: None if rank else listener.close(),
    )
    failure = supervisor.run(watch)
    if watch.joined or watch.rounds:
        watcher.ended()
    if failure is not None:
        raise RunFailed(failure)
    return 0


def _starter(
    script: Sequence[str],
    rank_info: RankInfo,
    listener: socket.socket,
    watch: RunMonitor,
    on_line: Callable[[int, str], None],
) -> Callable[[int, int], Child]:
    def start(rank: int, incarnation: int) -> Child:
        began = watch.began if incarnation and rank == 0 else None
        process_info = dataclasses.replace(
            rank_info, rank=rank, resume=rank_info.resume and incarnation == 0, incarnation=incarnation, began=began
        )
        return start_command(
            [sys.executable, *script],
            rank=rank,
            incarnation=incarnation,
            environment=environment_of(process_info),
            on_line=on_line,
            listener=listener.dup() if rank == 0 else None,
            own_stdout=True,
        )

    return start


def _name(rank: int) -> str:
    """Which of them is a hub is the script's business."""
    return f"rank {rank}"


# `offbeat work`: one more worker for a run that is going on elsewhere.


WAIT_SECONDS = 60.0


def work(
    address: Annotated[str, Parameter(name="HOST:PORT", help="where the run listens, as its --listen says")],
    /,
    *script: Annotated[
        str,
        Parameter(name="SCRIPT", help="where the run trains a script: that script, and what it is called with"),
    ],
    token_file: Annotated[
        str | None, option("file with the token of the run; needed unless it runs on this machine", "FILE")
    ] = None,
    wait: Annotated[str | None, option(f"how long to try where nothing answers [{WAIT_SECONDS:g}]", "SECONDS")] = None,
    threads: Annotated[str | None, option("threads to compute with [as the run says]", "N")] = None,
) -> int:
    """Join as a worker until the run ends."""
    there = Address.parse(address)
    seconds = from_plain(float, WAIT_SECONDS if wait is None else wait, "--wait")
    require(seconds >= 0, f"--wait must be 0 or more, but is {seconds:g}")
    count = None if threads is None else from_plain(int, threads, "--threads")
    require(count is None or count >= 1, f"--threads must be 1 or more, but is {count}")
    if script:
        require(count is None, "a script sets its threads itself, with torch.set_num_threads; leave out --threads")
        require(Path(script[0]).is_file(), f"there is no script {script[0]}; name the one that the run trains")
    token = None if token_file is None else read_token(token_file)
    member = f"{socket.gethostname()}-{uuid.uuid4().hex}"
    if script:
        return _exec_script(list(script), there, token, member, seconds)
    return join_run(
        there,
        token,
        wait_seconds=seconds,
        member=member,
        prepare=lambda experiment: load_files(experiment, f"the run at {there}"),
        threads=count,
    )


def _exec_script(script: list[str], address: Address, token: bytes | None, member: str, seconds: float) -> int:
    """Ask which rank to take, and be the script under that rank."""
    told = request_assignment(address, token, member=member, rank=None, wait_seconds=seconds)
    process_info = RankInfo(told.rank, told.processes, address, token, launcher="offbeat", member=member)
    print_status(f"joining the run at {address} as rank {told.rank}")
    sys.stdout.flush()
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **environment_of(process_info)}
    os.execve(sys.executable, [sys.executable, *script], environment)
