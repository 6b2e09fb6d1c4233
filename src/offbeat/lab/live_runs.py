"""`train`: experiments on real processes, with the same strategies and the same records as in virtual time.

Either the processes are started and looked after here, or a launcher (mpirun, torchrun, srun) has started them and this
is one of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from offbeat.cluster.cluster import Cluster
from offbeat.core.actions import Budget, Finish
from offbeat.core.strategy import Cadence, EverySeconds, Strategy
from offbeat.core.validation import require
from offbeat.core.workload import NamedWorkload, Workload
from offbeat.errors import ConfigurationError, RunFailed
from offbeat.lab.experiment import Experiment, workers_for
from offbeat.lab.simulated_runs import Run, header_of
from offbeat.lab.worker_main import LiveOptions, local_ranks, read_live_options, read_result, run_rank, save_result
from offbeat.launch.children import Child, start_command, start_forked
from offbeat.launch.listeners import advertised_address, open_listener
from offbeat.launch.process_settings import keep_freed_memory, rank_names
from offbeat.launch.rank_info import RankInfo, environment_of, read_rank_info, read_token
from offbeat.launch.supervisor import RunMonitor, RunObserver, Supervisor, check_faults
from offbeat.live.checkpoints import checkpoint_path, read_checkpoint
from offbeat.live.local_ranks import LIVE_SECONDS_PER_SAMPLE
from offbeat.records.files import HEADER, LIVE, RankWriter, check_idle, rank_files, read_header, read_run, write_header
from offbeat.records.metrics import end_of
from offbeat.records.schema import AnyRecord, RunHeader, RunRecords

DEFAULT_LIVE_WORKERS = 2
EVALUATE_LIVE = EverySeconds(0.5)
POLL_SECONDS = 0.25


class _StderrWatcher:
    def records(self, records: Sequence[AnyRecord]) -> None:
        pass

    def say(self, sentence: str) -> None:
        pass

    def line(self, rank: int, text: str) -> None:
        print(f"[rank {rank}] {text}", file=sys.stderr)


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
) -> Run:
    """Train on local processes, `workers` of which compute: as many as the cluster says, or else two.

    They are copies of this process where that is possible, so a workload of your own needs no name. `bytes_per_second`
    is what each direction of each link may carry. With `out`, records and checkpoints stay in that directory. In a
    script that mpirun, torchrun or srun has started, this process is one of the run's: there are as many workers as
    that makes, and rank 0 returns the records of all.
    """
    place = read_rank_info(transport=live.transport)
    cluster = cluster or Cluster()
    workers = workers_for(workers, cluster, DEFAULT_LIVE_WORKERS)
    experiment = Experiment(
        workload, strategy, cluster, workers, until, seed, evaluate, bytes_per_second=bytes_per_second
    )
    directory = None if out is None else Path(out)
    if place.alone:
        return train_experiment(experiment, directory, live)
    workers = workers_for_processes(strategy, place.processes)
    return train_as_rank(dataclasses.replace(experiment, workers=workers), directory, place, live)


def train_experiment(
    experiment: Experiment,
    out: Path | None,
    live: LiveOptions = LiveOptions(),  # noqa: B008  (frozen)
    watcher: RunObserver | None = None,
    resume: bool = False,
) -> Run:
    """Train an experiment on local processes and whoever joins them; raises `RunFailed` where that fails."""
    require(
        live.transport != "mpi",
        "processes that are started here meet over gloo; for MPI start the script itself: mpirun -n 4 python script.py",
    )
    experiment, workload = experiment.resolved(LIVE_SECONDS_PER_SAMPLE)
    processes = experiment.strategy.processes(experiment.worker_count)
    experiment.cluster.check(processes, experiment.worker_count)
    local = local_ranks(experiment.strategy, processes, live.local_workers)
    check_faults(experiment.cluster.faults, local, experiment.strategy.is_required)
    with _run_directory(out) as directory:
        if resume:
            experiment = _prepare_resume(directory, experiment)
        else:
            _prepare_new(directory, experiment, workload, live)
        failure = _supervise(directory, experiment, workload, live, watcher or _StderrWatcher(), resume)
        if failure is not None:
            raise RunFailed(failure + _resume_hint(failure, directory, by_name=experiment.to_plain() is not None))
        return _finished_run(directory, out, experiment, workload)


def train_as_rank(
    experiment: Experiment,
    out: Path | None,
    place: RankInfo,
    live: LiveOptions = LiveOptions(),  # noqa: B008  (frozen)
    watcher: RunObserver | None = None,
    resume: bool = False,
) -> Run:
    """Be one of the processes that a launcher has started for an experiment. Only rank 0 writes, and knows it all.

    `out` is where; elsewhere it matters for a run that is resumed, which then may turn out to have ended, and for one
    that goes on without rank 0.
    """
    if place.rank != 0:
        return run_follower(experiment, out, place, live, resume)[0]
    experiment, workload = _resolve_for_launcher(experiment, place, live)
    with _run_directory(out) as directory:
        if resume:
            experiment = _prepare_resume(directory, experiment)
        else:
            _prepare_new(directory, experiment, workload, live)
        place = dataclasses.replace(place, directory=directory, resume=resume)
        with _watch_records(RunMonitor(directory, watcher or _StderrWatcher())):
            run_rank(experiment, workload, read_header(directory), live, place)
        return _finished_run(directory, out, experiment, workload)


def run_follower(
    experiment: Experiment, out: Path | None, place: RankInfo, live: LiveOptions, resume: bool = False
) -> tuple[Run, bool]:
    """Be another process than rank 0: what is known here of the run, and whether nobody else is left to tell of it."""
    experiment, workload = _resolve_for_launcher(experiment, place, live)
    if resume and out is not None:
        _check_unfinished(out)
    session = run_rank(experiment, workload, _header(experiment, workload), live, place, sends_records=True)
    records, leads = session.records, session.is_main
    if leads and session.finish is not None and out is not None and (out / HEADER).exists():
        records = _write_as_successor(out, records, session.finish)
    return Run(records, session.finish, workload, experiment.seed), leads


def _write_as_successor(out: Path, records: RunRecords, finish: Finish) -> RunRecords:
    """Rank 0 is lost, but its directory can be seen from here: what those knew who were left goes there."""
    written: dict[int, RankWriter] = {}
    with contextlib.ExitStack() as stack:
        for record in records.records:
            rank = getattr(record, "rank", 0)
            if rank not in written:
                written[rank] = stack.enter_context(RankWriter(out, rank))
                written[rank].truncate(0)  # rank 0 had a part of it
            written[rank].write(record)
    save_result(out, finish)
    return read_run(out)


def _resolve_for_launcher(experiment: Experiment, place: RankInfo, live: LiveOptions) -> tuple[Experiment, Workload]:
    """The experiment with everything filled in, if the processes of a launcher can do it."""
    for name in ("listen", "token_file", "local_workers"):
        require(
            getattr(live, name) is None,
            f"{place.launcher} has started the processes of this run, so --{name.replace('_', '-')} has no use here; "
            "leave it out",
        )
    keep_freed_memory()
    experiment, workload = experiment.resolved(LIVE_SECONDS_PER_SAMPLE)
    experiment.cluster.check(place.processes, experiment.worker_count)
    check_faults(experiment.cluster.faults, ())
    return experiment, workload


def workers_for_processes(strategy: Strategy, processes: int) -> int:
    """How many workers so many processes make."""
    found = [workers for workers in range(1, processes + 1) if _processes_for(strategy, workers) == processes]
    if not found:
        strategy.processes(processes)  # who refuses that number among peers says which ones are allowed
    least = strategy.processes(1)
    require(
        bool(found) or strategy.processes(processes) >= processes,
        f"{strategy.name or 'this strategy'} trains in {least} process{'es' if least > 1 else ''}, but {processes} "
        "were started; start fewer of them",
    )
    require(
        bool(found),
        f"{processes} process{'es' if processes > 1 else ''} cannot train with {strategy.name or 'this strategy'}, "
        f"which needs {least} or more; start more of them",
    )
    return found[0]


def _processes_for(strategy: Strategy, workers: int) -> int | None:
    """How many processes so many workers need; None where there cannot be so many."""
    try:
        return strategy.processes(workers)
    except ConfigurationError:
        return None


@contextmanager
def _watch_records(watch: RunMonitor) -> Iterator[None]:
    """Look at the records of a run while this thread is part of it."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(POLL_SECONDS):
            watch()

    thread = threading.Thread(target=look, name="offbeat looks on", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        watch()


@contextmanager
def _run_directory(out: Path | None) -> Iterator[Path]:
    """The directory of a run; one for the time being where nobody wants to keep it."""
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="offbeat-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def _prepare_resume(directory: Path, experiment: Experiment) -> Experiment:
    """What to go on with. Faults are left out: they have struck already."""
    check_idle(directory)
    _check_unfinished(directory)
    if experiment.strategy.is_decentralized:
        _truncate_records(directory, read_checkpoint(directory).elapsed_seconds)
    return dataclasses.replace(experiment, cluster=dataclasses.replace(experiment.cluster, faults=()))


class _TimedRecord(msgspec.Struct):
    """A record of whatever kind."""

    at: float


def _truncate_records(directory: Path, elapsed_seconds: float) -> None:
    """Forget what peers have done since the checkpoint of rank 0: they go on from there, too, and do it again."""
    for rank, path in rank_files(directory):
        if rank == 0:  # cuts its own back, to where the checkpoint says
            continue
        position = 0
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n") or msgspec.json.decode(line, type=_TimedRecord).at > elapsed_seconds:
                break
            position += len(line)
        with RankWriter(directory, rank) as writer:
            writer.truncate(position)


def _finished_run(directory: Path, out: Path | None, experiment: Experiment, workload: Workload) -> Run:
    records = read_run(directory)
    if out is None:
        records = RunRecords(None, records.header, records.records)
    return Run(records, read_result(directory), workload, experiment.seed)


def _resume_hint(failure: str, directory: Path, by_name: bool) -> str:
    """For a hub that was killed, and not for one that failed: that would fail again."""
    if " was killed by " not in failure or not by_name or not checkpoint_path(directory).exists():
        return ""
    return f"; to go on from its last checkpoint type: offbeat train --resume {directory}"


def _prepare_new(directory: Path, experiment: Experiment, workload: Workload, live: LiveOptions) -> None:
    require(not (directory / HEADER).exists(), f"{directory} holds a run already; name another directory")
    write_header(directory, _header(experiment, workload))
    (directory / LIVE).write_bytes(msgspec.json.encode(dataclasses.asdict(live)))


def _header(experiment: Experiment, workload: Workload) -> RunHeader:
    model = workload.initial_model(experiment.seed)
    numel = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return header_of(experiment, workload, numel, engine="live")


def _check_unfinished(directory: Path) -> None:
    end = end_of(read_run(directory))
    require(
        end is None or end.failure is not None,
        f"the run in {directory} has ended already, so there is nothing to resume; start a new one for more",
    )


# The processes of a run


def _supervise(
    directory: Path, experiment: Experiment, workload: Workload, live: LiveOptions, watcher: RunObserver, resume: bool
) -> str | None:
    strategy = experiment.strategy
    processes = strategy.processes(experiment.worker_count)
    local = local_ranks(strategy, processes, live.local_workers)
    token = None if live.token_file is None else read_token(live.token_file)
    listener, address, token = open_listener(live.listen, token)
    if live.listen is not None:
        watcher.say(f"workers may join: offbeat work {advertised_address(live.listen, address)}")
    forks = _can_fork(experiment)
    if forks:  # torch loads a good part of itself when the first optimizer is made: once, before it is copied
        torch.optim.SGD([torch.zeros(1, requires_grad=True)])

    watch = RunMonitor(directory, watcher)

    def start(rank: int, incarnation: int) -> Child:
        resumes, began = (
            (resume and incarnation == 0, watch.began if incarnation else None) if rank == 0 else (False, None)
        )
        place = RankInfo(
            rank, processes, address, token, None, directory, resumes, "offbeat", incarnation=incarnation, began=began
        )
        common: dict[str, Any] = {
            "rank": rank,
            "incarnation": incarnation,
            "environment": environment_of(place),
            "on_line": watcher.line,
            "listener": listener.dup() if rank == 0 else None,
        }
        if forks:
            return start_forked(functools.partial(_forked_main, directory, experiment, workload, listener), **common)
        return start_command([sys.executable, "-P", "-m", "offbeat.cli.worker_process", str(directory)], **common)

    with listener:
        supervisor = Supervisor(
            start,
            local,
            restarts_max=live.restarts,
            say=watcher.say,
            has_joined=watch.has_joined,
            rounds=watch.rounds.__getitem__,
            is_required=strategy.is_required,
            faults=experiment.cluster.faults,
            name=rank_names(strategy),
            others=live.listen is not None,
            on_gone=lambda rank: None if rank else listener.close(),
        )
        return supervisor.run(watch)


def _can_fork(experiment: Experiment) -> bool:
    """Copies of this process start at once, where a fresh interpreter takes seconds; a GPU does not survive it."""
    if sys.platform == "linux" and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    require(
        experiment.to_plain() is not None,
        "a workload without a name is trained by copies of this process, which needs Linux and a GPU that has not been "
        "used yet; use offbeat.join in a script, and start it with: offbeat launch -n 3 script.py",
    )
    return False


def _forked_main(directory: Path, experiment: Experiment, workload: Workload, listener: socket.socket) -> int:
    listener.close()  # kept for rank 0, which has a copy, and not for this one
    run_rank(experiment, workload, read_header(directory), read_live_options(directory), read_rank_info())
    return 0
