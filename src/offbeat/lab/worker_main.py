"""One rank of a live run of an experiment: its training loop, and the result of the run.

The processes of one machine share only the run directory: the header describes the experiment, `live.json` holds the
options, and each rank writes its own file of records. A worker on another machine receives header and options from
rank 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from offbeat.core.validation import require
from offbeat.core.workload import Workload
from offbeat.engine.workload_losses import WorkloadLosses
from offbeat.lab.experiment_plan import decode_experiment
from offbeat.lab.run_results import save_result
from offbeat.launch.process_settings import name_process
from offbeat.launch.rank_info import RankInfo
from offbeat.live.session import Session
from offbeat.live.session_options import RunDescription, SessionOptions, read_live_options
from offbeat.records.files import read_header
from offbeat.transports.address import Address
from offbeat.transports.rendezvous import request_assignment
from offbeat.transports.tls import Credentials


def worker_main(directory: Path, rank_info: RankInfo) -> int:
    """Run one rank of the run in a directory; returns the exit code."""
    header = read_header(directory)
    experiment, workload = decode_experiment(header.experiment).resolved()
    options = SessionOptions(experiment=experiment, live=read_live_options(directory), header=header)
    run_rank(options, workload, rank_info)
    return 0


def join_run(
    address: Address,
    credentials: Credentials,
    *,
    wait_seconds: float,
    member: str,
    prepare: Callable[[dict[str, Any]], None] | None = None,
    threads: int | None = None,
) -> int:
    """Join a run as one more worker, until it ends; returns the exit code.

    address: the listener of the run
    credentials: of the run
    wait_seconds: how long to wait for a listener at the address
    member: the name by which the listener recognises this process
    prepare: is called with the experiment as plain data before it is decoded
    threads: torch threads; None: as many as the run says
    """
    assignment = request_assignment(address, credentials, member=member, rank=None, wait_seconds=wait_seconds)
    require(
        assignment.experiment is not None,
        f"the run at {address} trains a script of its own; name it: offbeat work {address} script.py",
    )
    assert assignment.experiment is not None
    description = msgspec.json.decode(assignment.experiment, type=RunDescription)
    header = description.header
    if prepare is not None and header.experiment is not None:
        prepare(header.experiment)
    experiment, workload = decode_experiment(header.experiment).resolved()
    rank_info = RankInfo(assignment.rank, assignment.processes, address, credentials, launcher="offbeat", member=member)
    live = description.live if threads is None else dataclasses.replace(description.live, threads=threads)
    options = SessionOptions(experiment=experiment, live=live, header=header, sends_records=True)
    run_rank(options, workload, rank_info)
    return 0


def run_rank(options: SessionOptions, workload: Workload, rank_info: RankInfo) -> Session:
    """Run one rank until the run has ended.

    options: the experiment, resolved, with the options and the header of the run
    workload: the workload of the experiment
    rank_info: the rank of this process
    """
    experiment = options.experiment
    torch.set_num_threads(options.live.threads)
    name_process(f"offbeat {rank_info.rank}")
    model = workload.initial_model(experiment.seed)
    session = Session(model, options, rank_info, workload.evaluate, workload.validate)
    losses = WorkloadLosses(workload, model)
    with session:
        for batch in session.batches(workload.train, split=workload.split):
            session.backward(losses.of(batch))
    if session.is_main and rank_info.directory is not None and session.finish is not None:
        save_result(rank_info.directory, session.finish)
    return session
