"""The options of a live run: those of its processes, and what a session is started with.

The processes of one machine read the header and the options from the run directory. A worker on another machine
receives both from rank 0, as a `RunDescription`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from offbeat.core.configuration import Configuration
from offbeat.core.strategy import Strategy
from offbeat.core.validation import check_types, require, require_not_negative, require_positive
from offbeat.engine.experiment import Experiment
from offbeat.errors import ConfigurationError, shortened, unknown
from offbeat.launch.rank_info import TRANSPORTS
from offbeat.records.files import LIVE
from offbeat.records.schema import RunHeader
from offbeat.transports.tls import Tls

RECORDS_MAX_BYTES = 1e8
"""Some 400,000 rounds or updates: what a machine reads into memory to draw a report."""


@dataclass(frozen=True, kw_only=True)
class LiveOptions(Configuration):
    """Options of live runs that are no part of the experiment."""

    listen: str | None = None
    """HOST:PORT at which workers on other machines can join; none: this machine alone"""
    token_file: str | None = None
    """file with the secret that workers must have; needed with --listen"""
    tls: str = "auto"
    """which connections are encrypted: auto: those with other machines; on: all; off: none, for trusted networks"""
    certificate: str | None = None
    """file with a certificate of your own, in PEM, instead of one made for the run; needs --key and --ca"""
    key: str | None = None
    """file with the key of --certificate, in PEM"""
    ca: str | None = None
    """file with the authority that must have signed the certificates of all machines, in PEM"""
    local_workers: int | None = None
    """workers started here; none: all of them"""
    checkpoint_seconds: float | None = 30.0
    """seconds between checkpoints; none: no checkpoints"""
    records_max_bytes: float | None = RECORDS_MAX_BYTES
    """bytes of records of each rank from which one record stands for several; none: no limit"""
    restarts: int = 3
    """how often a worker that died is restarted"""
    checksum: bool = False
    """verify a checksum of every message"""
    transport: str = "auto"
    """transport of messages: tcp, mpi, or auto: MPI under mpirun, otherwise TCP"""
    threads: int = 1
    """torch threads of each process"""
    shared_memory: bool = True
    """pass large tensors between processes of one machine through shared memory"""

    def __post_init__(self) -> None:
        check_types(self)
        if self.transport not in TRANSPORTS:
            raise unknown("transport", self.transport, TRANSPORTS)
        self.tls_settings()
        require_positive(self, "checkpoint_seconds", "records_max_bytes", "threads")
        require_not_negative(self, "local_workers", "restarts")

    def tls_settings(self) -> Tls:
        return Tls(mode=self.tls, certificate=self.certificate, key=self.key, ca=self.ca)

    def local_ranks(self, strategy: Strategy, processes: int) -> list[int]:
        """The ranks that are started on this machine: all that do not compute, and `local_workers` that do.

        Rank 0 is always among them, since it has the listener at which the others join.
        """
        require(
            self.local_workers != 0 or not strategy.computes(0),
            "among peers rank 0 computes, and it is started here, so --local-workers must be 1 or more",
        )
        computing = [rank for rank in range(processes) if strategy.computes(rank)]
        started = computing if self.local_workers is None else computing[: self.local_workers]
        return [rank for rank in range(processes) if rank in started or not strategy.computes(rank)]


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """What the session of a rank is started with."""

    experiment: Experiment
    """Resolved, with `until` set."""
    live: LiveOptions = LiveOptions()
    header: RunHeader | None = None
    """The header of the run if it has been written already; otherwise rank 0 writes one."""
    hub_beside_worker: bool = False
    """Whether every process computes, and the first one holds the hub too."""
    sends_records: bool = False
    """Whether records are sent to rank 0, because no directory is shared with it."""

    def description(self) -> bytes | None:
        """The run, encoded, for workers that join from other machines; None if its experiment has no name."""
        if self.header is None or self.header.experiment is None:
            return None
        return msgspec.json.encode(RunDescription(self.header, self.live))


class RunDescription(msgspec.Struct):
    """What rank 0 sends to a worker on another machine; the header holds the experiment."""

    header: RunHeader
    live: LiveOptions


def write_live_options(directory: Path, live: LiveOptions) -> None:
    """Write the options of a live run to its directory."""
    (directory / LIVE).write_bytes(msgspec.json.encode(live))


def read_live_options(directory: Path) -> LiveOptions:
    """The options that the live run in a directory was started with."""
    try:
        return msgspec.json.decode((directory / LIVE).read_bytes(), type=LiveOptions)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(
            f"{directory / LIVE} cannot be read ({shortened(error)}); name the directory of a live run"
        ) from None
