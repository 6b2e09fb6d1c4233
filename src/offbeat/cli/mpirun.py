"""What commands that start processes do about MPI: under mpirun they take part, otherwise they call it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from offbeat.cli.output import expect_no_terminal, print_status
from offbeat.core.validation import require
from offbeat.launch.mpirun import mpirun_command
from offbeat.launch.rank_info import RankInfo, read_rank_info
from offbeat.transports.mpi import check_installed, mpi_world

if TYPE_CHECKING:
    from offbeat.lab.worker_main import LiveOptions


STARTED_BY_OFFBEAT = "OFFBEAT_UNDER_MPIRUN"
"""Set for processes of an mpirun that we have called, so that none of them calls it again."""


def read_rank_info_for(transport: str) -> RankInfo:
    """Where this process sits, if messages are to travel in this way.

    Under MPI it begins here: nobody gets through the beginning where a rank is missing, so nothing may fail before it.
    """
    place = read_rank_info(transport=transport)
    if place.transport == "mpi":
        mpi_world()
        expect_no_terminal()
    return place


def say_of_rank(place: RankInfo, error: Exception) -> None:
    """What is wrong on another rank than 0 may be wrong there alone: a file that only some machines have."""
    print_status(f"rank {place.rank} on {socket.gethostname()}: {error}")


def check_mpi_options(live: LiveOptions) -> None:
    """Refuse what only processes can be told that we start ourselves."""
    for name in ("listen", "token_file", "local_workers"):
        require(
            getattr(live, name) is None,
            f"--{name.replace('_', '-')} does not go with --transport mpi, where mpirun says who takes part; "
            "leave it out",
        )
    check_installed()


def exec_mpirun(
    processes: int, script: Sequence[str] | None = None, variables: Mapping[str, str] | None = None
) -> NoReturn:
    """A script, or else the same command again, in so many processes. mpirun takes the place of this one."""
    require(
        STARTED_BY_OFFBEAT not in os.environ,
        "mpirun has started this process, but does not say as which rank; use the mpirun of Open MPI or MPICH",
    )
    words = ["-P", "-m", "offbeat", *sys.argv[1:]] if script is None else script
    command = [*mpirun_command(processes), sys.executable, *words]
    sys.stdout.flush()
    sys.stderr.flush()
    # Each of many processes with a thread per core would only be in the others' way.
    os.execve(command[0], command, {"OMP_NUM_THREADS": "1", **os.environ, **(variables or {}), STARTED_BY_OFFBEAT: "1"})
