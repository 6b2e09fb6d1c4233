"""Which rank this process is: the only module that reads the environment variables of launchers.

Those of offbeat come first (OFFBEAT_RANK and others, set by `offbeat launch`, `offbeat train` and `offbeat work`), then
those of torchrun, of mpirun, and of SLURM. Without any the process is alone. Processes of mpirun are connected by MPI;
those of srun if OFFBEAT_TRANSPORT is mpi.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from offbeat.errors import ConfigurationError, unknown
from offbeat.launch.failure_reports import find_pipe
from offbeat.launch.listeners import LOOPBACK, find_listener
from offbeat.launch.token_files import read_token, shared_token
from offbeat.transports.address import Address
from offbeat.transports.tls import Credentials, Tls

LISTENER_VARIABLE, REPORT_VARIABLE = "OFFBEAT_LISTENER", "OFFBEAT_REPORT"
"""File descriptors that are passed to a child: of the socket at which it listens, and of the pipe for its failure."""


@dataclass(frozen=True)
class RankInfo:
    """The rank of this process, and how it reaches the others."""

    rank: int = 0
    processes: int = 1
    address: Address | None = None
    """Of rank 0; None where there are no other processes, and under MPI."""
    credentials: Credentials | None = None
    """Of the run; None where there are no other processes, and under MPI."""
    listener: int | None = None
    """File descriptor of a socket that listens at `address` already, for rank 0; None to open one there."""
    directory: Path | None = None
    """Where records are written."""
    resume: bool = False
    launcher: Literal["alone", "offbeat", "torchrun", "mpirun", "slurm"] = "alone"
    member: str = ""
    """Name of a process that was started by hand, by which rank 0 recognises it."""
    transport: Literal["tcp", "mpi"] = "tcp"
    """How it is connected to the other ranks."""
    first_here: bool = True
    """Whether no lower rank is on this machine, as far as the launcher reports it."""
    incarnation: int = 0
    """How often this rank was started before in the same run."""
    began: float | None = None
    """When the run began, by this machine's monotonic clock, for a rank 0 that is restarted."""

    @property
    def alone(self) -> bool:
        """Whether there are no other processes."""
        return self.address is None and self.transport == "tcp"


Environment = Mapping[str, str]


def read_rank_info(environment: Environment | None = None, transport: str = "auto") -> RankInfo:
    """The rank of this process, from its environment.

    Args:
        environment: variables; None for those of this process.
        transport: one of `TRANSPORTS`; anything but auto overrides OFFBEAT_TRANSPORT.

    Raises:
        ConfigurationError: the variables are incomplete or contradict each other.
    """
    env = os.environ if environment is None else environment
    if transport == "auto":
        transport = env.get("OFFBEAT_TRANSPORT") or "auto"
    if transport not in TRANSPORTS:
        raise unknown("transport", transport, TRANSPORTS)
    directory = Path(env["OFFBEAT_DIRECTORY"]) if env.get("OFFBEAT_DIRECTORY") else None
    is_resumed = env.get("OFFBEAT_RESUME", "") not in ("", "0")
    return dataclasses.replace(_from_launcher(env, transport), directory=directory, resume=is_resumed)


def read_report_pipe(environment: Environment | None = None) -> int | None:
    """The descriptor of the pipe for a report of this process (`failure_reports`); None if no launcher reads one."""
    return find_pipe((os.environ if environment is None else environment).get(REPORT_VARIABLE, ""))


def _from_launcher(env: Environment, transport: str) -> RankInfo:
    if "OFFBEAT_RANK" in env:
        return _from_offbeat(env)
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= env.keys():
        return _from_torchrun(env)
    for names in _MPI_VARIABLES:
        if set(names) <= env.keys():
            if transport == "tcp" and env[names[1]] != "1":
                raise ConfigurationError(
                    "processes that mpirun starts are connected by MPI, not by TCP; start them with 'offbeat launch "
                    "-n N' or 'offbeat train', or leave the transport to be chosen"
                )
            return _from_mpi(env, names, "mpirun")
    if {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID"} <= env.keys():
        if transport == "mpi":
            return _from_mpi(env, ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"), "slurm")
        return _from_slurm(env)
    return RankInfo()


_MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
"""Variables of Open MPI and of MPICH and its derivatives: rank, processes, local rank. srun may set PMI_RANK alone."""

TRANSPORTS = ("auto", "tcp", "mpi")


def _from_mpi(env: Environment, names: tuple[str, str, str], launcher: Literal["mpirun", "slurm"]) -> RankInfo:
    rank, processes = _rank_and_processes(env, *names[:2])
    first_here = env.get(names[2], "0") == "0"
    return RankInfo(
        rank, processes, launcher=launcher, transport="mpi" if processes > 1 else "tcp", first_here=first_here
    )


_READ_BY_TRAINERS = {
    "torchrun": (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    ),
    "mpirun": tuple(itertools.chain(*_MPI_VARIABLES)),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "PMI_RANK", "PMI_SIZE"),
}
"""launcher → the variables from which trainers conclude that the processes average their gradients"""


def hide_launcher(rank_info: RankInfo, environment: MutableMapping[str, str] | None = None) -> list[str]:
    """Remove the variables of the launcher from the environment of this process; returns the names of those there."""
    env = os.environ if environment is None else environment
    names = [name for name in _READ_BY_TRAINERS.get(rank_info.launcher, ()) if name in env]
    for name in names:
        del env[name]
    return names


def environment_of(rank_info: RankInfo) -> dict[str, str]:
    """The variables that pass this to a child; `start_command` adds the file descriptor of a listener."""
    values = {
        "OFFBEAT_RANK": str(rank_info.rank),
        "OFFBEAT_PROCESSES": str(rank_info.processes),
        "OFFBEAT_ADDRESS": rank_info.address and str(rank_info.address),
        **_environment_of_credentials(rank_info.credentials),
        "OFFBEAT_DIRECTORY": rank_info.directory and str(rank_info.directory.absolute()),
        "OFFBEAT_RESUME": "1" if rank_info.resume else None,
        "OFFBEAT_MEMBER": rank_info.member,
        "OFFBEAT_INCARNATION": str(rank_info.incarnation) if rank_info.incarnation else None,
        "OFFBEAT_BEGAN": None if rank_info.began is None else repr(rank_info.began),
    }
    return {name: str(value) for name, value in values.items() if value}


def _environment_of_credentials(credentials: Credentials | None) -> dict[str, str | None]:
    if credentials is None:
        return {}
    tls = credentials.tls
    return {
        "OFFBEAT_TOKEN": credentials.token.hex(),
        "OFFBEAT_TLS": tls.mode,
        "OFFBEAT_CERTIFICATE": tls.certificate,
        "OFFBEAT_KEY": tls.key,
        "OFFBEAT_CA": tls.ca,
    }


def _from_offbeat(env: Environment) -> RankInfo:
    # The rank of a process that joins late may exceed the number of processes.
    rank, processes = _number(env, "OFFBEAT_RANK"), _number(env, "OFFBEAT_PROCESSES", least=1)
    address = env.get("OFFBEAT_ADDRESS")
    if rank > 0 and address is None:
        raise ConfigurationError(
            f"rank {rank} does not know where rank 0 is; set OFFBEAT_ADDRESS to its HOST:PORT, "
            "or start the processes with 'offbeat launch'"
        )
    return RankInfo(
        rank=rank,
        processes=processes,
        address=None if address is None else Address.parse(address),
        credentials=None if address is None else Credentials(_token(env) or _no_token(), _tls(env)),
        listener=_number(env, LISTENER_VARIABLE) if env.get(LISTENER_VARIABLE) else None,
        launcher="offbeat",
        member=env.get("OFFBEAT_MEMBER", ""),
        incarnation=_number(env, "OFFBEAT_INCARNATION") if env.get("OFFBEAT_INCARNATION") else 0,
        began=float(env["OFFBEAT_BEGAN"]) if env.get("OFFBEAT_BEGAN") else None,
    )


def _from_torchrun(env: Environment) -> RankInfo:
    rank, processes = _rank_and_processes(env, "RANK", "WORLD_SIZE")
    credentials, address, listener = None, None, None
    if processes > 1:
        is_one_machine = env.get("LOCAL_WORLD_SIZE", str(processes)) == str(processes)
        token = _token(env)
        if not is_one_machine and token is None:
            raise _needs_token("torchrun")
        run = f"{env.get('TORCHELASTIC_RUN_ID', '')}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        store = (env["MASTER_ADDR"], _number(env, "MASTER_PORT"))
        credentials = Credentials(token or shared_token(_file_name("torchrun", run, store[1])), _tls(env))
        address, listener = find_listener(
            rank=rank,
            host=LOOPBACK if is_one_machine else env["MASTER_ADDR"],
            store=store,
            store_exists=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            prefix=f"offbeat/{run}",
        )
    first_here = env.get("LOCAL_RANK", "0") == "0"
    return RankInfo(rank, processes, address, credentials, listener, launcher="torchrun", first_here=first_here)


def _from_slurm(env: Environment) -> RankInfo:
    rank, processes = _rank_and_processes(env, "SLURM_PROCID", "SLURM_NTASKS")
    token, host = _token(env), LOOPBACK
    if env.get("SLURM_NNODES", "1") != "1":
        if token is None:
            raise _needs_token("SLURM")
        host = first_host(env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST", ""))
        if not host:
            raise ConfigurationError("SLURM names no nodes; SLURM_JOB_NODELIST is expected to hold them")
    # One port for all processes of a job, and another for the next job on the same machine.
    port = 20_000 + _number(env, "SLURM_JOB_ID") % 20_000
    first_here = env.get("SLURM_LOCALID", "0") == "0"
    if processes == 1:
        return RankInfo(rank, processes, launcher="slurm", first_here=first_here)
    step = [env.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
    credentials = Credentials(token or shared_token(_file_name("slurm", *step)), _tls(env))
    address = Address(host, port)
    return RankInfo(rank, processes, address, credentials, launcher="slurm", first_here=first_here)


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list: node01 of `node[01-04,7],gpu3`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes.strip())
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""


def _token(env: Environment) -> bytes | None:
    if text := env.get("OFFBEAT_TOKEN"):
        try:
            return bytes.fromhex(text)
        except ValueError:
            raise ConfigurationError(
                "OFFBEAT_TOKEN does not hold hexadecimal digits; set OFFBEAT_TOKEN_FILE to the path of a token instead"
            ) from None
    return read_token(env["OFFBEAT_TOKEN_FILE"]) if env.get("OFFBEAT_TOKEN_FILE") else None


def _tls(env: Environment) -> Tls:
    return Tls(
        mode=env.get("OFFBEAT_TLS") or "auto",
        certificate=env.get("OFFBEAT_CERTIFICATE") or None,
        key=env.get("OFFBEAT_KEY") or None,
        ca=env.get("OFFBEAT_CA") or None,
    )


def _file_name(*parts: object) -> str:
    """A name for the token of a launcher's run."""
    return re.sub(r"[^A-Za-z0-9.-]", "_", "-".join(str(part) for part in parts))[:200]


def _no_token() -> bytes:
    raise ConfigurationError(
        "OFFBEAT_ADDRESS is set, but no token; set OFFBEAT_TOKEN_FILE to the file with the token of the run, or start "
        "the processes with 'offbeat launch'"
    )


def _needs_token(launcher: str) -> ConfigurationError:
    return ConfigurationError(
        f"{launcher} started this run on several machines, and listening beyond this one needs a token; "
        "set OFFBEAT_TOKEN_FILE to a file that all of them can read"
    )


def _number(env: Environment, name: str, least: int = 0) -> int:
    text = env.get(name, "")
    if not text.isdecimal() or int(text) < least:
        raise ConfigurationError(f"{name} is a whole number of at least {least}, but it is {text!r} here")
    return int(text)


def _rank_and_processes(env: Environment, rank_name: str, processes_name: str) -> tuple[int, int]:
    rank, processes = _number(env, rank_name), _number(env, processes_name, least=1)
    if rank >= processes:
        raise ConfigurationError(f"{rank_name} is {rank}, but {processes_name} is {processes}, and ranks count from 0")
    return rank, processes
