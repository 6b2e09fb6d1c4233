"""`train`: experiments on real processes, with the same strategies and records as in virtual time.

Either this process starts and supervises the ranks on this machine, or a launcher (mpirun, torchrun, srun) has started
them and this process is one rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec

from offbeat.cluster.cluster import Cluster
from offbeat.core.actions import Budget, Finish
from offbeat.core.strategy import Cadence, EverySeconds, Strategy
from offbeat.core.validation import require
from offbeat.core.workload import NamedWorkload, Workload
from offbeat.engine.experiment import Experiment, workers_for
from offbeat.errors import ConfigurationError, RunFailed
from offbeat.lab.experiment_progress import StderrObserver, show_experiments
from offbeat.lab.forking import can_fork, prepare_to_fork
from offbeat.lab.run_results import read_result, save_result
from offbeat.lab.simulated_runs import Run, check_new
from offbeat.lab.tracked_runs import track_live_run
from offbeat.lab.worker_main import run_rank
from offbeat.launch.children import Child, start_command, start_forked
from offbeat.launch.failure_reports import report_uncaught
from offbeat.launch.listeners import advertised_address, open_listener
from offbeat.launch.process_faults import check_faults
from offbeat.launch.process_settings import keep_freed_memory, rank_names
from offbeat.launch.rank_info import RankInfo, environment_of, read_rank_info, read_report_pipe
from offbeat.launch.rank_processes import RankFacts
from offbeat.launch.run_failure import RunFailure
from offbeat.launch.run_monitor import RunMonitor, RunObserver
from offbeat.launch.supervisor import Supervisor, SupervisorOptions
from offbeat.launch.token_files import read_token
from offbeat.live.checkpoints import has_checkpoint, is_being_written, read_checkpoint
from offbeat.live.local_ranks import LIVE_SECONDS_PER_SAMPLE
from offbeat.live.session_options import LiveOptions, SessionOptions, read_live_options, write_live_options
from offbeat.records.files import HEADER, RankWriter, check_idle, rank_files, read_header, read_run, write_header
from offbeat.records.metrics import end_of
from offbeat.records.schema import RECORD_DECODER, RunHeader, RunRecords
from offbeat.tracking.named_trackers import Track, checked_trackers

DEFAULT_LIVE_WORKERS = 2
EVALUATE_LIVE = EverySeconds(0.5)
POLL_SECONDS = 0.25


def train(
    workload: NamedWorkload | Workload,
    strategy: Strategy,
    until: Budget | None = None,
    *,
    workers: int | None = None,
    cluster: Cluster | None = None,
    seed: int = 0,
    evaluate: Cadence | None = EVALUATE_LIVE,
    bytes_per_second: float | None = None,
    out: str | Path | None = None,
    live: LiveOptions = LiveOptions(),  # noqa: B008  (frozen)
    progress: bool | None = None,
    track: Track = None,
) -> Run:
    """Train on processes of this machine.

    They are forked from this process where that is possible, so a workload of your own needs no name. In a script that
    mpirun, torchrun or srun has started, this process is one rank of the run instead: the number of workers follows
    from the number of processes, and rank 0 returns the records of all ranks.

    workload: model, data, loss and evaluation
    strategy: the algorithm; an optimizer that it leaves out is the workload's
    until: how long to train, in samples or seconds; None: the default of the workload
    workers: workers that compute; None: as many as the cluster says, or else 2
    cluster: delays and faults that are injected, and limits of links; None: none of them
    seed: seed of initial parameters, data order and injected delays
    evaluate: how often to evaluate; None: only at the end
    bytes_per_second: bandwidth limit of each direction of each link; None: no limit
    out: a new directory for records and checkpoints; None: a temporary one
    live: options of processes, transport and checkpoints
    progress: whether to show progress, as a bar in a notebook or on a terminal; None: in a notebook only. A rank that
        a launcher has started shows none
    track: follow the run in "tensorboard", "wandb" or "mlflow": a name, an `offbeat.Tracker`, or a list of these
    """
    report_uncaught(read_report_pipe())
    rank_info = read_rank_info(transport=live.transport)
    cluster = cluster or Cluster()
    workers = workers_for(workers, cluster, DEFAULT_LIVE_WORKERS)
    experiment = Experiment(
        workload,
        strategy,
        cluster=cluster,
        workers=workers,
        until=until,
        seed=seed,
        evaluate=evaluate,
        bytes_per_second=bytes_per_second,
    )
    directory = None if out is None else Path(out)
    if rank_info.alone:
        return _train_showing(experiment, directory, live, progress, track)
    workers = workers_for_processes(strategy, rank_info.processes)
    return train_as_rank(dataclasses.replace(experiment, workers=workers), directory, rank_info, live, track=track)


def _train_showing(
    experiment: Experiment, out: Path | None, live: LiveOptions, progress: bool | None, track: Track
) -> Run:
    with show_experiments(progress, 1) as shown:
        resolved = experiment if shown is None else experiment.resolved(LIVE_SECONDS_PER_SAMPLE)[0]
        run = train_experiment(experiment, out, live, StderrObserver(resolved, shown), track=track)
        if shown is not None:
            shown.on_end(run.records)
        return run


def train_experiment(
    experiment: Experiment,
    out: Path | None,
    live: LiveOptions = LiveOptions(),  # noqa: B008  (frozen)
    observer: RunObserver | None = None,
    resume: bool = False,
    track: Track = None,
) -> Run:
    """Train an experiment on supervised processes of this machine, and on workers that join them.

    experiment: what to train
    out: the directory of the run; None: a temporary one
    live: options of processes, transport and checkpoints
    observer: is called with records and output while the run goes on; None: output is printed to standard error
    resume: whether to continue the run in `out` from its checkpoint
    track: trackers that follow the run

    Raises `RunFailed` if the run fails.
    """
    trackers = checked_trackers(track)
    require(
        live.transport != "mpi",
        "processes that are started here meet over TCP; for MPI start the script itself: mpirun -n 4 python script.py",
    )
    experiment, workload = experiment.resolved(LIVE_SECONDS_PER_SAMPLE)
    processes = experiment.strategy.processes(experiment.worker_count)
    experiment.cluster.check(processes, experiment.worker_count)
    local = live.local_ranks(experiment.strategy, processes)
    check_faults(experiment.cluster.faults, local, experiment.strategy.is_required)
    with _run_directory(out) as name:
        directory = Path(name)
        experiment = _prepare(directory, experiment, workload, live, resume)
        tracked = track_live_run(
            trackers,
            experiment,
            workload,
            directory,
            is_kept=out is not None,
            resume=resume,
            observer=observer or StderrObserver(experiment),
        )
        with tracked as watching:
            failure = _supervise(directory, experiment, workload, live, watching, resume)
            if failure is not None:
                raise RunFailed(failure.sentence + _resume_hint(failure, directory, experiment))
        return _finished_run(directory, out, experiment, workload)


def train_as_rank(
    experiment: Experiment,
    out: Path | None,
    rank_info: RankInfo,
    live: LiveOptions = LiveOptions(),  # noqa: B008  (frozen)
    observer: RunObserver | None = None,
    resume: bool = False,
    track: Track = None,
) -> Run:
    """Run one rank of an experiment whose processes a launcher has started.

    experiment: what to train
    out: the directory of the run; None: a temporary one. Rank 0 writes it; other ranks read it on resuming, and write
        it if rank 0 is lost
    rank_info: the rank of this process
    live: options of transport and checkpoints
    observer: is called with records and output while the run goes on; None: output is printed to standard error
    resume: whether to continue the run in `out` from its checkpoint
    track: trackers that follow the run from rank 0

    Returns the whole run on rank 0, and what is known of it on other ranks.
    """
    if rank_info.rank != 0:
        return run_follower(experiment, out, rank_info, live, resume)[0]
    trackers = checked_trackers(track)
    experiment, workload = _resolve_for_launcher(experiment, rank_info, live)
    with _run_directory(out) as name:
        directory = Path(name)
        experiment = _prepare(directory, experiment, workload, live, resume)
        rank_info = dataclasses.replace(rank_info, directory=directory, resume=resume)
        tracked = track_live_run(
            trackers,
            experiment,
            workload,
            directory,
            is_kept=out is not None,
            resume=resume,
            observer=observer or StderrObserver(experiment),
        )
        with tracked as watching, _polled(RunMonitor(directory, watching)):
            options = SessionOptions(experiment=experiment, live=live, header=read_header(directory))
            run_rank(options, workload, rank_info)
        return _finished_run(directory, out, experiment, workload)


def run_follower(
    experiment: Experiment, out: Path | None, rank_info: RankInfo, live: LiveOptions, resume: bool = False
) -> tuple[Run, bool]:
    """Run a rank other than 0; returns what it knows of the run, and whether it has succeeded rank 0, which was lost.

    For the arguments see `train_as_rank`.
    """
    experiment, workload = _resolve_for_launcher(experiment, rank_info, live)
    if resume and out is not None:
        _check_unfinished(out)
    header = _header(experiment, workload)
    options = SessionOptions(experiment=experiment, live=live, header=header, sends_records=True)
    session = run_rank(options, workload, rank_info)
    records = session.records
    if session.is_main and session.finish is not None and out is not None and (out / HEADER).exists():
        records = _write_as_successor(out, records, session.finish)
    return Run(records, session.finish, workload, experiment.seed), session.is_main


def _write_as_successor(out: Path, records: RunRecords, finish: Finish) -> RunRecords:
    """Write the records and the result of a run whose rank 0 was lost to its directory, which is visible from here."""
    writers: dict[int, RankWriter] = {}
    with contextlib.ExitStack() as stack:
        for record in records.records:
            rank = getattr(record, "rank", 0)
            if rank not in writers:
                writers[rank] = stack.enter_context(RankWriter(out, rank))
                writers[rank].truncate(0)  # rank 0 had written a part of these records
            writers[rank].write(record)
    save_result(out, finish)
    return read_run(out)


def _resolve_for_launcher(
    experiment: Experiment, rank_info: RankInfo, live: LiveOptions
) -> tuple[Experiment, Workload]:
    """The experiment with defaults filled in; raises if processes of a launcher cannot run it."""
    for name in ("listen", "token_file", "tls", "certificate", "key", "ca", "local_workers"):
        require(
            getattr(live, name) == getattr(type(live), name),
            f"{rank_info.launcher} has started the processes of this run, so --{name.replace('_', '-')} has no use "
            "here; leave it out",
        )
    keep_freed_memory()
    experiment, workload = experiment.resolved(LIVE_SECONDS_PER_SAMPLE)
    experiment.cluster.check(rank_info.processes, experiment.worker_count)
    check_faults(experiment.cluster.faults, ())
    return experiment, workload


def workers_for_processes(strategy: Strategy, processes: int) -> int:
    """The number of workers for which the strategy needs this number of processes; raises if there is none."""
    for workers in range(1, processes + 1):
        with contextlib.suppress(ConfigurationError):  # not every number of peers has a graph
            if strategy.processes(workers) == processes:
                return workers
    most, least = strategy.processes(processes), strategy.processes(1)  # the first raises if peers cannot be so many
    name = strategy.name or "this strategy"
    require(
        most >= processes,
        f"{name} trains in {least} process{'es' if least > 1 else ''}, but {processes} were started; start fewer of "
        "them",
    )
    raise ConfigurationError(
        f"{processes} process{'es' if processes > 1 else ''} cannot train with {name}, which needs {least} or more; "
        "start more of them"
    )


@contextlib.contextmanager
def _polled(monitor: RunMonitor) -> Iterator[None]:
    """Call the monitor at intervals from a thread, while this thread runs a rank, and once more at the end."""
    stopped = threading.Event()

    def poll() -> None:
        while not stopped.wait(POLL_SECONDS):
            monitor()

    thread = threading.Thread(target=poll, name="offbeat-monitor", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        monitor()


def _run_directory(out: Path | None) -> AbstractContextManager[str]:
    """The path of a run directory: `out`, or a temporary directory that is removed at the end."""
    if out is not None:
        return contextlib.nullcontext(str(out))
    return tempfile.TemporaryDirectory(prefix="offbeat-", ignore_cleanup_errors=True)


def _prepare(
    directory: Path, experiment: Experiment, workload: Workload, live: LiveOptions, resume: bool
) -> Experiment:
    """Make the files of a new run, or check those of one to resume; returns the experiment to run."""
    if not resume:
        check_new(directory)
        write_header(directory, _header(experiment, workload))
        write_live_options(directory, live)
        return experiment
    check_idle(directory)
    _check_unfinished(directory)
    if experiment.strategy.is_decentralized:
        _truncate_records(directory, read_checkpoint(directory).elapsed_seconds)
    # Faults have been injected before the checkpoint, and are not repeated.
    return dataclasses.replace(experiment, cluster=dataclasses.replace(experiment.cluster, faults=()))


class _TimedRecord(msgspec.Struct):
    """The time of a record of any kind."""

    at: float


def _truncate_records(directory: Path, elapsed_seconds: float) -> None:
    """Remove what peers recorded after the checkpoint of rank 0, since they resume from its time, too.

    An aggregate of which a part is later is removed as a whole. Earlier records may come after it.
    """
    for rank, path in rank_files(directory):
        if rank == 0:  # truncates its own file, at the position in the checkpoint
            continue
        lines = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        is_kept = [msgspec.json.decode(line, type=_TimedRecord).at <= elapsed_seconds for line in lines]
        leading = is_kept.index(False) if False in is_kept else len(lines)
        with RankWriter(directory, rank) as writer:
            writer.truncate(sum(map(len, lines[:leading])))
            for line in itertools.compress(lines[leading:], is_kept[leading:]):
                writer.write(RECORD_DECODER.decode(line))


def _finished_run(directory: Path, out: Path | None, experiment: Experiment, workload: Workload) -> Run:
    records = read_run(directory)
    if out is None:
        records = dataclasses.replace(records, directory=None)
    return Run(records, read_result(directory), workload, experiment.seed)


def _resume_hint(failure: RunFailure, directory: Path, experiment: Experiment) -> str:
    """How to resume a run whose hub was killed; empty if the hub failed, which it would do again."""
    is_named = experiment.to_plain() is not None
    if not failure.was_killed or not is_named or not has_checkpoint(directory):
        return ""
    return f"; to go on from its last checkpoint type: offbeat train --resume {directory}"


def _header(experiment: Experiment, workload: Workload) -> RunHeader:
    model = workload.initial_model(experiment.seed)
    numel = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return experiment.header("live", workload.label, numel)


def _check_unfinished(directory: Path) -> None:
    end = end_of(read_run(directory))
    require(
        end is None or end.failure is not None,
        f"the run in {directory} has ended already, so there is nothing to resume; start a new one for more",
    )


# Supervised processes


def _supervise(
    directory: Path, experiment: Experiment, workload: Workload, live: LiveOptions, observer: RunObserver, resume: bool
) -> RunFailure | None:
    """Start the local ranks and supervise them until the run ends; returns why it failed, or None."""
    strategy = experiment.strategy
    processes = strategy.processes(experiment.worker_count)
    token = None if live.token_file is None else read_token(live.token_file)
    listener, address, credentials = open_listener(live.listen, token, live.tls_settings())
    if live.listen is not None:
        observer.say(f"workers may join: offbeat work {advertised_address(live.listen, address)}")
    forks = _can_fork(experiment)
    if forks:
        prepare_to_fork()
    monitor = RunMonitor(directory, observer)

    def start(rank: int, incarnation: int) -> Child:
        rank_info = RankInfo(
            rank, processes, address, credentials, None, directory, False, "offbeat", incarnation=incarnation
        )
        if rank == 0:
            began = monitor.began if incarnation else None
            rank_info = dataclasses.replace(rank_info, resume=resume and not incarnation, began=began)
        common: dict[str, Any] = {
            "rank": rank,
            "incarnation": incarnation,
            "environment": environment_of(rank_info),
            "on_line": observer.line,
            "listener": listener.dup() if rank == 0 else None,
        }
        if forks:
            return start_forked(functools.partial(_forked_main, directory, experiment, workload, listener), **common)
        return start_command([sys.executable, "-P", "-m", "offbeat.cli.worker_process", str(directory)], **common)

    with listener:
        supervisor = Supervisor(
            start,
            live.local_ranks(strategy, processes),
            RankFacts(
                has_joined=monitor.has_joined,
                rounds=monitor.rounds.__getitem__,
                is_required=strategy.is_required,
                name=rank_names(strategy),
            ),
            say=observer.say,
            on_gone=lambda rank: None if rank else listener.close(),
            options=SupervisorOptions(
                restarts_max=live.restarts,
                faults=experiment.cluster.faults,
                has_remote_ranks=live.listen is not None,
                is_saving=functools.partial(is_being_written, directory),
            ),
        )
        return supervisor.run(monitor)


def _can_fork(experiment: Experiment) -> bool:
    """Whether ranks can be forked; refuse what would need it."""
    if can_fork():
        return True
    require(
        experiment.to_plain() is not None,
        "a workload without a name is trained by copies of this process, which needs Linux and a GPU that has not been "
        "used yet; use offbeat.join in a script, and start it with: offbeat launch -n 3 script.py",
    )
    return False


def _forked_main(directory: Path, experiment: Experiment, workload: Workload, listener: socket.socket) -> int:
    listener.close()  # rank 0 has a duplicate
    header, live = read_header(directory), read_live_options(directory)
    run_rank(SessionOptions(experiment=experiment, live=live, header=header), workload, read_rank_info())
    return 0
