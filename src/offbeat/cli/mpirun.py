"""Commands under MPI: a process that mpirun has started is one rank; any other process executes mpirun."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from offbeat.cli.output import expect_no_terminal, print_status
from offbeat.core.validation import require
from offbeat.launch.mpirun_command import mpirun_command
from offbeat.launch.rank_info import RankInfo, read_rank_info
from offbeat.transports.mpi import check_installed, mpi_world

if TYPE_CHECKING:
    from offbeat.live.session_options import LiveOptions


STARTED_BY_OFFBEAT = "OFFBEAT_UNDER_MPIRUN"
"""Environment variable of processes whose mpirun was executed by offbeat, so that none of them executes it again."""


def read_rank_info_for(transport: str) -> RankInfo:
    """The rank of this process, for this transport; initializes MPI if that is the transport.

    MPI_Init blocks until all ranks have called it, so nothing may fail in one of them before this call.
    """
    rank_info = read_rank_info(transport=transport)
    if rank_info.transport == "mpi":
        mpi_world()
        expect_no_terminal()
    return rank_info


def print_rank_error(rank_info: RankInfo, error: object) -> None:
    """Print an error with rank and host: it may concern one machine only, such as a file that is missing there."""
    print_status(f"rank {rank_info.rank} on {socket.gethostname()}: {error}")


def check_mpi_options(live: LiveOptions) -> None:
    """Refuse options for processes that offbeat starts itself, and MPI that is not installed."""
    for name in ("listen", "token_file", "tls", "certificate", "key", "ca", "local_workers"):
        require(
            getattr(live, name) == getattr(type(live), name),
            f"--{name.replace('_', '-')} does not go with --transport mpi, where mpirun starts all ranks; leave it out",
        )
    check_installed()


def exec_mpirun(
    processes: int, script: Sequence[str] | None = None, variables: Mapping[str, str] | None = None
) -> NoReturn:
    """Replace this process by mpirun.

    Args:
        processes: how many processes mpirun starts.
        script: the script with its arguments; none: the command line of this process.
        variables: environment variables for the processes.
    """
    require(
        STARTED_BY_OFFBEAT not in os.environ,
        "mpirun has started this process, but has set no rank for it; use the mpirun of Open MPI or MPICH",
    )
    arguments = ["-P", "-m", "offbeat", *sys.argv[1:]] if script is None else script
    command = [*mpirun_command(processes), sys.executable, *arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread per core in each of several processes would oversubscribe the cores.
    os.execve(command[0], command, {"OMP_NUM_THREADS": "1", **os.environ, **(variables or {}), STARTED_BY_OFFBEAT: "1"})
