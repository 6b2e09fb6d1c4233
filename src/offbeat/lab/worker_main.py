"""One rank of a live run of an experiment: its options, its training loop, and the result of the run.

The processes of one machine share only the run directory: the header describes the experiment, `live.json` holds the
options, and each rank writes its own file of records. A worker on another machine receives header and options from
rank 0, as a `RunDescription`.
"""

from __future__ import annotations

import dataclasses
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
from offbeat.core.workload import Workload
from offbeat.engine.workload_losses import WorkloadLosses
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
    """Options of live runs that are no part of the experiment."""

    listen: str | None = None
    """HOST:PORT at which workers on other machines can join; none: this machine alone"""
    token_file: str | None = None
    """file with the secret that workers must have; needed with --listen"""
    local_workers: int | None = None
    """workers started here; none: all of them"""
    checkpoint_seconds: float | None = 30.0
    """seconds between checkpoints; none: no checkpoints"""
    restarts: int = 3
    """how often a worker that died is restarted"""
    checksum: bool = False
    """verify a checksum of every message"""
    transport: str = "auto"
    """transport of messages: gloo, mpi, or auto: MPI under mpirun, otherwise gloo"""
    threads: int = 1
    """torch threads of each process"""
    shared_memory: bool = True
    """pass large tensors between processes of one machine through shared memory"""

    def __post_init__(self) -> None:
        check_types(self)
        if self.transport not in TRANSPORTS:
            raise unknown("transport", self.transport, TRANSPORTS)
        require_positive(self, "checkpoint_seconds", "threads")
        require_not_negative(self, "local_workers", "restarts")


def read_live_options(directory: Path) -> LiveOptions:
    """The options that the live run in a directory was started with."""
    try:
        return LiveOptions(**msgspec.json.decode((directory / LIVE).read_bytes(), type=dict[str, Any]))
    except (OSError, msgspec.MsgspecError, TypeError) as error:
        raise ConfigurationError(
            f"{directory / LIVE} cannot be read ({error}); name the directory of a live run"
        ) from None


def local_ranks(strategy: Strategy, processes: int, local_workers: int | None) -> list[int]:
    """The ranks that are started on this machine: all that do not compute, and `local_workers` (None: all) that do.

    Rank 0 is always among them, since it has the listener at which the others join.
    """
    require(
        local_workers != 0 or not strategy.computes(0),
        "among peers rank 0 computes, and it is started here, so --local-workers must be 1 or more",
    )
    computing = [rank for rank in range(processes) if strategy.computes(rank)]
    started = computing if local_workers is None else computing[:local_workers]
    return [rank for rank in range(processes) if rank in started or not strategy.computes(rank)]


def worker_main(directory: Path, rank_info: RankInfo) -> int:
    """Run one rank of the run in a directory; returns the exit code."""
    header = read_header(directory)
    experiment, workload = _decode_experiment(header.experiment).resolved()
    run_rank(experiment, workload, header, read_live_options(directory), rank_info)
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
    """Join a run as one more worker, until it ends; returns the exit code.

    address: the listener of the run
    token: the secret of the run, or None
    wait_seconds: how long to wait for a listener at the address
    member: the name by which the listener recognises this process
    prepare: is called with the experiment as plain data before it is decoded
    threads: torch threads; None: as many as the run says
    """
    assignment = request_assignment(address, token, member=member, rank=None, wait_seconds=wait_seconds)
    require(
        assignment.experiment is not None,
        f"the run at {address} trains a script of its own; name it: offbeat work {address} script.py",
    )
    assert assignment.experiment is not None
    description = msgspec.json.decode(assignment.experiment, type=RunDescription)
    header = description.header
    if prepare is not None and header.experiment is not None:
        prepare(header.experiment)
    experiment, workload = _decode_experiment(header.experiment).resolved()
    rank_info = RankInfo(assignment.rank, assignment.processes, address, token, launcher="offbeat", member=member)
    live = LiveOptions(**description.live)
    if threads is not None:
        live = dataclasses.replace(live, threads=threads)
    run_rank(experiment, workload, header, live, rank_info, sends_records=True)
    return 0


class RunDescription(msgspec.Struct):
    """What rank 0 sends to a worker on another machine."""

    header: RunHeader
    live: dict[str, Any]
    """The fields of `LiveOptions`."""


def run_rank(
    experiment: Experiment,
    workload: Workload,
    header: RunHeader,
    live: LiveOptions,
    rank_info: RankInfo,
    sends_records: bool = False,
) -> Session:
    """Run one rank until the run has ended.

    experiment: resolved, with `until` set
    workload: the workload of the experiment
    header: the header of the run
    live: options of the run
    rank_info: the rank of this process
    sends_records: whether to send records to rank 0, since its directory is not shared
    """
    assert experiment.until is not None
    torch.set_num_threads(live.threads)
    name_process(f"offbeat {rank_info.rank}")
    reserved = (
        local_ranks(experiment.strategy, rank_info.processes, live.local_workers)
        if rank_info.launcher == "offbeat"
        else range(rank_info.processes)
    )
    description = msgspec.json.encode(RunDescription(header, dataclasses.asdict(live)))
    options = SessionOptions(
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
        reserved=frozenset(reserved),
        experiment=None if header.experiment is None else description,
        split=workload.split,
        sends_records=sends_records,
    )
    model = workload.initial_model(experiment.seed)
    session = Session(model, experiment.strategy, options, rank_info, workload.evaluate)
    losses = WorkloadLosses(workload, model)
    with session:
        for batch in session.batches(workload.train, split=workload.split):
            session.backward(losses.of(batch))
    if session.is_main and rank_info.directory is not None and session.finish is not None:
        save_result(rank_info.directory, session.finish)
    return session


def save_result(directory: Path, finish: Finish) -> None:
    """Write the final parameters and buffers of a live run to its directory."""
    save(
        directory / RESULT,
        {"parameters": finish.parameters, "buffers": list(finish.buffers), "version": finish.version},
    )


def read_result(directory: Path) -> Finish | None:
    """The final parameters and buffers of a live run; None if it has not ended well."""
    path = directory / RESULT
    if not path.exists():
        return None
    saved = load(path)
    return Finish(saved["parameters"], tuple(saved["buffers"]), saved["version"])
