"""`offbeat work`: one more worker for a run that is going on elsewhere."""

from __future__ import annotations

import os
import socket
import sys
import uuid
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from offbeat.cli.member import prepare
from offbeat.cli.output import say
from offbeat.core.configuration import from_plain
from offbeat.core.validation import require
from offbeat.lab.worker_main import work as work_there
from offbeat.launch import RankInfo, environment_of, read_token
from offbeat.transports.rendezvous import Address, request_assignment

WAIT_SECONDS = 60.0


def work(
    address: Annotated[str, Parameter(name="HOST:PORT", help="where the run listens, as its --listen says")],
    /,
    *script: Annotated[
        str,
        Parameter(name="SCRIPT", help="where the run trains a script: that script, and what it is called with"),
    ],
    token_file: Annotated[
        str | None,
        Parameter(help="file with the token of the run; needed unless it runs on this machine", metavar="FILE"),
    ] = None,
    wait: Annotated[
        str | None,
        Parameter(
            help=f"how long to try where nothing answers [{WAIT_SECONDS:g}]", metavar="SECONDS", show_default=False
        ),
    ] = None,
    threads: Annotated[
        str | None,
        Parameter(help="threads to compute with [as the run says]", metavar="N", show_default=False),
    ] = None,
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
        return _become(list(script), there, token, member, seconds)
    return work_there(
        there,
        token,
        wait_seconds=seconds,
        member=member,
        prepare=lambda experiment: prepare(experiment, f"the run at {there}"),
        threads=count,
    )


def _become(script: list[str], address: Address, token: bytes | None, member: str, seconds: float) -> int:
    """Ask which rank to take, and be the script under that rank."""
    told = request_assignment(address, token, member=member, rank=None, wait_seconds=seconds)
    rank_info = RankInfo(told.rank, told.processes, address, token, launcher="offbeat", member=member)
    say(f"joining the run at {address} as rank {told.rank}")
    sys.stdout.flush()
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **environment_of(rank_info)}
    os.execve(sys.executable, [sys.executable, *script], environment)
