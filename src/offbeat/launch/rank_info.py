"""Where this process sits in a run: the only reader of the variables by which launchers tell it.

Ours come first (OFFBEAT_RANK and its kin, which `offbeat launch`, `offbeat train` and `offbeat work` set), then those
of torchrun, then those of mpirun, then those of SLURM. Where there are none the process is alone. Processes of mpirun
meet over MPI; those of srun do so where OFFBEAT_TRANSPORT says mpi.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from offbeat.errors import ConfigurationError, unknown
from offbeat.launch.listeners import LOOPBACK
from offbeat.transports.rendezvous import Address

MAKE_A_TOKEN = "umask 077; head -c 32 /dev/urandom | base64 > FILE"


@dataclass(frozen=True)
class RankInfo:
    """Where this process sits in a run."""

    rank: int = 0
    processes: int = 1
    address: Address | None = None
    """Of rank 0; None where there is nobody else."""
    token: bytes | None = None
    listener: int | None = None
    """For rank 0, a socket that listens at `address` already (its file descriptor); None: open one there."""
    directory: Path | None = None
    """Where records go."""
    resume: bool = False
    launcher: Literal["alone", "offbeat", "torchrun", "mpirun", "slurm"] = "alone"
    member: str = ""
    """What a process that was started by hand calls itself, so that it finds the rank it was promised."""
    transport: Literal["gloo", "mpi"] = "gloo"
    """How it reaches the others."""
    first_here: bool = True
    """Whether no lower rank is on this machine, as far as the launcher tells."""
    incarnation: int = 0
    """How often this rank has been started before, in the same run."""
    began: float | None = None
    """For a rank 0 that is started again, when the run began, by this machine's monotonic clock."""

    @property
    def alone(self) -> bool:
        """Whether there is nobody else."""
        return self.address is None and self.transport == "gloo"


Environment = Mapping[str, str]


def read_rank_info(environment: Environment | None = None, transport: str = "auto") -> RankInfo:
    """The seat of this process, from its environment; `transport` comes before what that says about transports."""
    known = os.environ if environment is None else environment
    if transport == "auto":
        transport = known.get("OFFBEAT_TRANSPORT") or "auto"
    if transport not in TRANSPORTS:
        raise unknown("transport", transport, TRANSPORTS)
    if "OFFBEAT_RANK" in known:
        return _ours(known)
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= known.keys():
        return _of_torchrun(known)
    for rank, processes, here in _MPIRUNS:
        if {rank, processes, here} <= known.keys():
            if transport == "gloo" and known[processes] != "1":
                raise ConfigurationError(
                    "processes that mpirun starts meet over MPI, not over gloo; start them with 'offbeat launch -n N' "
                    "or 'offbeat train', or leave the transport to be chosen"
                )
            return _of_mpi(known, rank, processes, here, "mpirun")
    if {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID"} <= known.keys():
        if transport == "mpi":
            return _of_mpi(known, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "slurm")
        return _of_slurm(known)
    return RankInfo(directory=_directory(known), resume=_resume(known))


_MPIRUNS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
"""How Open MPI and the descendants of MPICH say it: rank, processes, rank on this machine. PMI alone may be srun's."""

TRANSPORTS = ("auto", "gloo", "mpi")


def _of_mpi(known: Environment, rank: str, processes: str, here: str, launcher: Literal["mpirun", "slurm"]) -> RankInfo:
    mine, all_of_us = _number(known, rank), _number(known, processes, least=1)
    _check_rank(mine, all_of_us, rank, processes)
    return RankInfo(
        mine,
        all_of_us,
        directory=_directory(known),
        resume=_resume(known),
        launcher=launcher,
        transport="mpi" if all_of_us > 1 else "gloo",
        first_here=known.get(here, "0") == "0",
    )


def environment_of(rank_info: RankInfo) -> dict[str, str]:
    """The variables that give a child this seat; the number of a door is added by who hands the door over."""
    variables = {"OFFBEAT_RANK": str(rank_info.rank), "OFFBEAT_PROCESSES": str(rank_info.processes)}
    if rank_info.address is not None:
        variables["OFFBEAT_ADDRESS"] = str(rank_info.address)
    if rank_info.token is not None:
        variables["OFFBEAT_TOKEN"] = rank_info.token.hex()
    if rank_info.directory is not None:
        variables["OFFBEAT_DIRECTORY"] = str(rank_info.directory.absolute())
    if rank_info.resume:
        variables["OFFBEAT_RESUME"] = "1"
    if rank_info.member:
        variables["OFFBEAT_MEMBER"] = rank_info.member
    if rank_info.incarnation:
        variables["OFFBEAT_INCARNATION"] = str(rank_info.incarnation)
    if rank_info.began is not None:
        variables["OFFBEAT_BEGAN"] = repr(rank_info.began)
    return variables


def read_token(path: str | Path, say: Callable[[str], None] | None = None) -> bytes:
    """The token in a file, without the blanks around it. One that others can read is warned of."""
    try:
        token = Path(path).read_bytes().strip()
        mode = os.stat(path).st_mode
    except OSError as error:
        reason = (error.strerror or "it cannot be read").lower()
        raise ConfigurationError(
            f"the token file {path} cannot be read: {reason}; to make one type: {MAKE_A_TOKEN}"
        ) from None
    if not token:
        raise ConfigurationError(f"the token file {path} is empty; to make a token type: {MAKE_A_TOKEN}")
    if mode & 0o077:
        (say or _say)(f"other users can read the token file {path}; type: chmod 600 {path}")
    return token


def _say(sentence: str) -> None:
    print(f"offbeat: {sentence}", file=sys.stderr)


def _ours(known: Environment) -> RankInfo:
    rank, processes = _number(known, "OFFBEAT_RANK"), _number(known, "OFFBEAT_PROCESSES", least=1)
    address = known.get("OFFBEAT_ADDRESS")  # a latecomer's rank may lie beyond the processes that were expected
    if rank > 0 and address is None:
        raise ConfigurationError(
            f"rank {rank} does not know where rank 0 is; set OFFBEAT_ADDRESS to its HOST:PORT, "
            "or start the processes with 'offbeat launch'"
        )
    return RankInfo(
        rank=rank,
        processes=processes,
        address=None if address is None else Address.parse(address),
        token=_token(known),
        listener=_number(known, "OFFBEAT_LISTENER") if known.get("OFFBEAT_LISTENER") else None,
        directory=_directory(known),
        resume=_resume(known),
        launcher="offbeat",
        member=known.get("OFFBEAT_MEMBER", ""),
        incarnation=_number(known, "OFFBEAT_INCARNATION") if known.get("OFFBEAT_INCARNATION") else 0,
        began=float(known["OFFBEAT_BEGAN"]) if known.get("OFFBEAT_BEGAN") else None,
    )


def _of_torchrun(known: Environment) -> RankInfo:
    from offbeat.launch.listeners import meet

    rank, processes = _number(known, "RANK"), _number(known, "WORLD_SIZE", least=1)
    _check_rank(rank, processes, "RANK", "WORLD_SIZE")
    token, address, listener = _token(known), None, None
    if processes > 1:
        together = known.get("LOCAL_WORLD_SIZE", str(processes)) == str(processes)
        if not together and token is None:
            raise _needs_token("torchrun")
        met = meet(
            rank=rank,
            host=LOOPBACK if together else known["MASTER_ADDR"],
            store=(known["MASTER_ADDR"], _number(known, "MASTER_PORT")),
            store_is_there=known.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            prefix=f"offbeat/{known.get('TORCHELASTIC_RUN_ID', '')}/{known.get('TORCHELASTIC_RESTART_COUNT', '0')}",
            token=token,
        )
        address, token, listener = Address(met.host, met.port), met.token, met.listener
    first = known.get("LOCAL_RANK", "0") == "0"
    return RankInfo(
        rank, processes, address, token, listener, _directory(known), _resume(known), "torchrun", first_here=first
    )


def _of_slurm(known: Environment) -> RankInfo:
    rank, processes = _number(known, "SLURM_PROCID"), _number(known, "SLURM_NTASKS", least=1)
    _check_rank(rank, processes, "SLURM_PROCID", "SLURM_NTASKS")
    token, host = _token(known), LOOPBACK
    if known.get("SLURM_NNODES", "1") != "1":
        if token is None:
            raise _needs_token("SLURM")
        nodes = known.get("SLURM_JOB_NODELIST") or known.get("SLURM_NODELIST", "")
        host = first_host(nodes)
        if not host:
            raise ConfigurationError("SLURM names no nodes; SLURM_JOB_NODELIST is expected to hold them")
    # One port for all processes of a job, and another for the next job on the same machine.
    port = 20_000 + _number(known, "SLURM_JOB_ID") % 20_000
    address = Address(host, port) if processes > 1 else None
    first = known.get("SLURM_LOCALID", "0") == "0"
    return RankInfo(rank, processes, address, token, None, _directory(known), _resume(known), "slurm", first_here=first)


def first_host(nodes: str) -> str:
    """The first of a list of hosts as SLURM writes it: `node[01-04,7],gpu3` begins with node01."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes.strip())
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""


def _token(known: Environment) -> bytes | None:
    if text := known.get("OFFBEAT_TOKEN"):
        try:
            return bytes.fromhex(text)
        except ValueError:
            raise ConfigurationError(
                "OFFBEAT_TOKEN does not hold hexadecimal digits; set OFFBEAT_TOKEN_FILE to the path of a token instead"
            ) from None
    return read_token(known["OFFBEAT_TOKEN_FILE"]) if known.get("OFFBEAT_TOKEN_FILE") else None


def _needs_token(launcher: str) -> ConfigurationError:
    return ConfigurationError(
        f"{launcher} started this run on several machines, and listening beyond this one needs a token; "
        "set OFFBEAT_TOKEN_FILE to a file that all of them can read"
    )


def _directory(known: Environment) -> Path | None:
    return Path(known["OFFBEAT_DIRECTORY"]) if known.get("OFFBEAT_DIRECTORY") else None


def _resume(known: Environment) -> bool:
    return known.get("OFFBEAT_RESUME", "") not in ("", "0")


def _number(known: Environment, name: str, least: int = 0) -> int:
    text = known.get(name, "")
    if not text.isdecimal() or int(text) < least:
        raise ConfigurationError(f"{name} is a whole number of at least {least}, but it is {text!r} here")
    return int(text)


def _check_rank(rank: int, processes: int, name: str, of: str) -> None:
    if rank >= processes:
        raise ConfigurationError(f"{name} is {rank}, but {of} is {processes}, and ranks count from 0")
