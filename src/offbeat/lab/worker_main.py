"""One process's part in a run of an experiment: what it is told, what it trains, and what it leaves behind.

A run directory is all that processes of one machine share: the header says what is trained, `live.json` how, and every
rank writes records of its own beside them. A worker that joins from another machine gets both over the wire.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from offbeat.core.actions import Finish
from offbeat.core.configuration import Configuration
from offbeat.core.strategy import Strategy
from offbeat.core.validation import check_types, require, require_not_negative, require_positive
from offbeat.core.workload import Workload, on_device
from offbeat.errors import ConfigurationError, unknown
from offbeat.lab.experiment import Experiment
from offbeat.launch.process_settings import name_process
from offbeat.launch.rank_info import TRANSPORTS, RankInfo
from offbeat.live.local_ranks import SessionOptions
from offbeat.live.session import Session
from offbeat.live.state_file import load, save
from offbeat.records.files import LIVE, RESULT, read_header
from offbeat.records.schema import RunHeader
from offbeat.transports.rendezvous import Address, request_assignment


@dataclass(frozen=True, kw_only=True)
class LiveOptions(Configuration):
    """What live runs can be told besides the experiment."""

    listen: str | None = None
    """HOST:PORT for workers on other machines; none: this machine alone"""
    token_file: str | None = None
    """file with the secret that workers must show; needed with --listen"""
    local_workers: int | None = None
    """workers started here; none: all of them"""
    checkpoint_seconds: float | None = 30.0
    """seconds between checkpoints; none: no checkpoints"""
    restarts: int = 3
    """times that a worker which died is started again"""
    checksum: bool = False
    """check every message for corruption"""
    transport: str = "auto"
    """how messages travel: gloo, mpi, or auto: MPI under mpirun, otherwise gloo"""
    threads: int = 1
    """threads that each process computes with"""
    shared_memory: bool = True
    """large tensors go through memory between processes of one machine"""

    def __post_init__(self) -> None:
        check_types(self)
        if self.transport not in TRANSPORTS:
            raise unknown("transport", self.transport, TRANSPORTS)
        require_positive(self, "checkpoint_seconds", "threads")
        require_not_negative(self, "local_workers", "restarts")


def read_live_options(directory: Path) -> LiveOptions:
    """How the run in a directory was started."""
    try:
        return LiveOptions(**msgspec.json.decode((directory / LIVE).read_bytes(), type=dict[str, Any]))
    except (OSError, msgspec.MsgspecError, TypeError) as error:
        raise ConfigurationError(
            f"{directory / LIVE} cannot be read ({error}); name the directory of a live run"
        ) from None


def local_ranks(strategy: Strategy, processes: int, local_workers: int | None) -> list[int]:
    """The ranks that are started here: those that do not compute, and as many workers as are wanted.

    Rank 0 is always here, since the others find each other through it.
    """
    require(
        local_workers != 0 or not strategy.computes(0),
        "among peers rank 0 computes, and it is started here, so --local-workers must be 1 or more",
    )
    computing = [rank for rank in range(processes) if strategy.computes(rank)]
    started = computing if local_workers is None else computing[:local_workers]
    return [rank for rank in range(processes) if rank in started or not strategy.computes(rank)]


def worker_main(directory: Path, place: RankInfo) -> int:
    """Be one rank of the run in a directory, and return the exit code."""
    header = read_header(directory)
    experiment, workload = _decode_experiment(header.experiment).resolved()
    run_rank(experiment, workload, header, read_live_options(directory), place)
    return 0


def _decode_experiment(plain: dict[str, Any] | None) -> Experiment:
    require(plain is not None, "this run trains something that has no name, which only the process that began it knows")
    assert plain is not None
    return Experiment.from_plain(plain)


def join_run(
    address: Address,
    token: bytes | None,
    *,
    wait_seconds: float,
    member: str,
    prepare: Callable[[dict[str, Any]], None] | None = None,
    threads: int | None = None,
) -> int:
    """Join the run at an address as one more worker, until it ends; `prepare` sees the experiment before it is made."""
    told = request_assignment(address, token, member=member, rank=None, wait_seconds=wait_seconds)
    require(
        told.experiment is not None,
        f"the run at {address} trains a script of its own; name it: offbeat work {address} script.py",
    )
    assert told.experiment is not None
    header = msgspec.json.decode(told.experiment, type=RunDescription)
    if prepare is not None and header.header.experiment is not None:
        prepare(header.header.experiment)
    experiment, workload = _decode_experiment(header.header.experiment).resolved()
    place = RankInfo(told.rank, told.processes, address, token, launcher="offbeat", member=member)
    live = LiveOptions(**header.live)
    if threads is not None:
        live = dataclasses.replace(live, threads=threads)
    run_rank(experiment, workload, header.header, live, place, sends_records=True)
    return 0


class RunDescription(msgspec.Struct):
    """What a worker from another machine is told."""

    header: RunHeader
    live: dict[str, Any]


def run_rank(
    experiment: Experiment,
    workload: Workload,
    header: RunHeader,
    live: LiveOptions,
    place: RankInfo,
    sends_records: bool = False,
) -> Session:
    """Be the rank that a seat says, until the run has ended. With `sends_records` its records travel to rank 0."""
    assert experiment.until is not None
    torch.set_num_threads(live.threads)
    name_process(f"offbeat {place.rank}")
    assignment = SessionOptions(
        until=experiment.until,
        seed=experiment.seed,
        cluster=experiment.cluster,
        bytes_per_second=experiment.bytes_per_second,
        every=experiment.evaluate,
        target=experiment.target,
        header=header,
        checkpoint_seconds=live.checkpoint_seconds,
        checksum=live.checksum,
        shared_memory=live.shared_memory,
        reserved=frozenset(
            local_ranks(experiment.strategy, place.processes, live.local_workers)
            if place.launcher == "offbeat"
            else range(place.processes)
        ),
        experiment=None
        if header.experiment is None
        else msgspec.json.encode(RunDescription(header, dataclasses.asdict(live))),
        split=workload.split,
        sends_records=sends_records,
    )
    model = workload.initial_model(experiment.seed)
    session = Session(model, experiment.strategy, assignment, place, workload.evaluate)
    device = next(model.parameters()).device
    with session:
        for batch in session.batches(workload.train, split=workload.split):
            if session.begins_round:
                # Dropout and the like depend on the sample, not on who was faster; as in virtual time.
                key = ((experiment.seed, session.rank), session.draw)
                torch.default_generator.manual_seed(zlib.crc32(repr(key).encode()))
            session.backward(workload.losses(model, on_device(batch, device)))
    if session.is_main and place.directory is not None and session.finish is not None:
        save_result(place.directory, session.finish)
    return session


def save_result(directory: Path, finish: Finish) -> None:
    """Keep what a live run ended with."""
    save(
        directory / RESULT,
        {"parameters": finish.parameters, "buffers": list(finish.buffers), "version": finish.version},
    )


def read_result(directory: Path) -> Finish | None:
    """What a live run ended with."""
    path = directory / RESULT
    if not path.exists():
        return None
    saved = load(path)
    return Finish(saved["parameters"], tuple(saved["buffers"]), saved["version"])
