"""`train`: experiments on real processes, with the same strategies and the same records as in virtual time.

A run directory is all that its processes share: the header says what is trained, `live.json` how, and every rank writes
records of its own beside them. A worker that joins from another machine gets both over the wire.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from offbeat.actions import Budget, Finish
from offbeat.checkpoints import checkpoint_path, load, save
from offbeat.cluster import Cluster
from offbeat.configuration import option
from offbeat.errors import ConfigurationError, RunFailed
from offbeat.experiment import Experiment
from offbeat.launch import (
    Child,
    Seat,
    Supervisor,
    Watch,
    Watcher,
    check_faults,
    environment_of,
    invited,
    open_door,
    read_token,
    start_command,
    start_forked,
)
from offbeat.launch.naming import name_process
from offbeat.records.files import HEADER, LIVE, RESULT, RunRecords, check_idle, read_header, read_run, write_header
from offbeat.records.schema import AnyRecord, Ended, RunHeader
from offbeat.running import Run, header_of
from offbeat.session import LIVE_SECONDS_PER_SAMPLE, Session, Terms
from offbeat.strategies.strategy import Cadence, EverySeconds, Strategy
from offbeat.transports.rendezvous import Address, ask_terms
from offbeat.validation import check_types, require, require_not_negative, require_positive
from offbeat.workloads import NamedWorkload, Workload
from offbeat.workloads.workload import on_device

DEFAULT_WORKERS = 2
EVALUATE_LIVE = EverySeconds(0.5)


@dataclass(frozen=True, kw_only=True)
class Live:
    """What live runs can be told besides the experiment."""

    listen: str | None = option(None, "HOST:PORT for workers on other machines; none: this machine alone")
    token_file: str | None = option(None, "file with the secret that workers must show; needed with --listen")
    local_workers: int | None = option(None, "workers started here; none: all of them")
    checkpoint_seconds: float | None = option(30.0, "seconds between checkpoints; none: no checkpoints")
    restarts: int = option(3, "times that a worker which died is started again")
    checksum: bool = option(False, "check every message for corruption")

    def __post_init__(self) -> None:
        check_types(self)
        require_positive(self, "checkpoint_seconds")
        require_not_negative(self, "local_workers", "restarts")


class _Nobody:
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
    workers: int = DEFAULT_WORKERS,
    cluster: Cluster | None = None,
    seed: int = 0,
    evaluate: Cadence | None = EVALUATE_LIVE,
    out: str | Path | None = None,
    live: Live = Live(),  # noqa: B008  (frozen)
) -> Run:
    """Train on local processes, `workers` of which compute.

    They are copies of this process where that is possible, so a workload of your own needs no name. With `out`,
    records and checkpoints stay in that directory.
    """
    experiment = Experiment(workload, strategy, cluster or Cluster(), workers, until, seed, evaluate)
    return train_experiment(experiment, None if out is None else Path(out), live)


def train_experiment(
    experiment: Experiment,
    out: Path | None,
    live: Live = Live(),  # noqa: B008  (frozen)
    watcher: Watcher | None = None,
    resume: bool = False,
) -> Run:
    """Train an experiment on local processes and whoever joins them; raises `RunFailed` where that fails."""
    experiment, workload = experiment.resolved(LIVE_SECONDS_PER_SAMPLE)
    processes = experiment.strategy.processes(experiment.workers)
    experiment.cluster.check(processes, experiment.workers)
    check_faults(experiment.cluster.faults, local_ranks(experiment.strategy, processes, live.local_workers))
    directory = out or Path(tempfile.mkdtemp(prefix="offbeat-"))
    try:
        if resume:
            check_idle(directory)
            _check_unfinished(directory)
            calm = dataclasses.replace(experiment.cluster, faults=())  # they have struck already
            experiment = dataclasses.replace(experiment, cluster=calm)
        else:
            _prepare(directory, experiment, workload, live)
        failure = _supervise(directory, experiment, workload, live, watcher or _Nobody(), resume)
        if failure is not None:
            raise RunFailed(failure + _how_to_go_on(failure, directory, by_name=experiment.to_plain() is not None))
        records = read_run(directory)
        finish = read_result(directory)
        if out is None:
            records = RunRecords(None, records.header, records.records)
        return Run(records, finish, workload, experiment.seed)
    finally:
        if out is None:
            shutil.rmtree(directory, ignore_errors=True)


def _how_to_go_on(failure: str, directory: Path, by_name: bool) -> str:
    """For a hub that was killed, and not for one that failed: that would fail again."""
    if " was killed by " not in failure or not by_name or not checkpoint_path(directory).exists():
        return ""
    return f"; to go on from its last checkpoint type: offbeat train --resume {directory}"


def _prepare(directory: Path, experiment: Experiment, workload: Workload, live: Live) -> None:
    require(not (directory / HEADER).exists(), f"{directory} holds a run already; name another directory")
    model = workload.initial_model(experiment.seed)
    numel = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    write_header(directory, header_of(experiment, workload, numel, engine="live"))
    (directory / LIVE).write_bytes(msgspec.json.encode(dataclasses.asdict(live)))


def _check_unfinished(directory: Path) -> None:
    ends = [record for record in read_run(directory).records if isinstance(record, Ended) and record.rank == 0]
    require(
        not ends or ends[-1].failure is not None,
        f"the run in {directory} has ended already, so there is nothing to resume; start a new one for more",
    )


def read_live(directory: Path) -> Live:
    """How the run in a directory was started."""
    try:
        return Live(**msgspec.json.decode((directory / LIVE).read_bytes(), type=dict[str, Any]))
    except (OSError, msgspec.MsgspecError, TypeError) as error:
        raise ConfigurationError(
            f"{directory / LIVE} cannot be read ({error}); name the directory of a live run"
        ) from None


# The processes of a run


def _supervise(
    directory: Path, experiment: Experiment, workload: Workload, live: Live, watcher: Watcher, resume: bool
) -> str | None:
    strategy = experiment.strategy
    processes = strategy.processes(experiment.workers)
    local = local_ranks(strategy, processes, live.local_workers)
    token = None if live.token_file is None else read_token(live.token_file)
    door, address, token = open_door(live.listen, token)
    doors = [door]
    if live.listen is not None:
        watcher.say(f"workers may join: offbeat work {invited(live.listen, address)}")
    forks = _may_fork(experiment)
    if forks:  # torch loads a good part of itself when the first optimizer is made: once, before it is copied
        torch.optim.SGD([torch.zeros(1, requires_grad=True)])

    def start(rank: int, life: int) -> Child:
        place = Seat(rank, processes, address, token, None, directory, resume and rank == 0, "offbeat")
        common: dict[str, Any] = {
            "rank": rank,
            "life": life,
            "environment": environment_of(place),
            "on_line": watcher.line,
            "door": doors.pop() if rank == 0 else None,
        }
        if forks:
            return start_forked(functools.partial(_forked, directory, experiment, workload), **common)
        return start_command([sys.executable, "-m", "offbeat.cli.member", str(directory)], **common)

    watch = Watch(directory, watcher)
    supervisor = Supervisor(
        start,
        local,
        restarts_max=live.restarts,
        say=watcher.say,
        has_joined=watch.joined.__contains__,
        faults=experiment.cluster.faults,
        others=live.listen is not None,
    )
    return supervisor.run(watch)


def _may_fork(experiment: Experiment) -> bool:
    """Copies of this process start at once, where a fresh interpreter takes seconds; a GPU does not survive it."""
    if sys.platform == "linux" and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    require(
        experiment.to_plain() is not None,
        "a workload without a name is trained by copies of this process, which needs Linux and a GPU that has not been "
        "used yet; use offbeat.join in a script, and start it with: offbeat launch -n 3 script.py",
    )
    return False


def local_ranks(strategy: Strategy, processes: int, local_workers: int | None) -> list[int]:
    """The ranks that are started here: those that do not compute, and as many workers as are wanted."""
    computing = [rank for rank in range(processes) if strategy.computes(rank)]
    started = computing if local_workers is None else computing[:local_workers]
    return [rank for rank in range(processes) if rank in started or not strategy.computes(rank)]


def _forked(directory: Path, experiment: Experiment, workload: Workload) -> int:
    from offbeat.launch import seat

    return _take_part(experiment, workload, read_header(directory), read_live(directory), seat())


def take_part(directory: Path, place: Seat) -> int:
    """Be one rank of the run in a directory, and return the exit code."""
    header = read_header(directory)
    experiment, workload = _experiment_of(header.experiment).resolved()
    return _take_part(experiment, workload, header, read_live(directory), place)


def _experiment_of(plain: dict[str, Any] | None) -> Experiment:
    require(plain is not None, "this run trains something that has no name, which only the process that began it knows")
    assert plain is not None
    return Experiment.from_plain(plain)


def work(
    address: Address,
    token: bytes | None,
    *,
    wait_seconds: float,
    member: str,
    prepare: Callable[[dict[str, Any]], None] | None = None,
) -> int:
    """Join the run at an address as one more worker, until it ends; `prepare` sees the experiment before it is made."""
    told = ask_terms(address, token, member=member, rank=None, wait_seconds=wait_seconds)
    require(
        told.experiment is not None,
        f"the run at {address} trains a script of its own; name it: offbeat work {address} script.py",
    )
    assert told.experiment is not None
    header = msgspec.json.decode(told.experiment, type=_Told)
    if prepare is not None and header.header.experiment is not None:
        prepare(header.header.experiment)
    experiment, workload = _experiment_of(header.header.experiment).resolved()
    place = Seat(told.rank, told.processes, address, token, launcher="offbeat", member=member)
    return _take_part(experiment, workload, header.header, Live(**header.live), place, journal=True)


class _Told(msgspec.Struct):
    """What a worker from another machine is told."""

    header: RunHeader
    live: dict[str, Any]


def _take_part(
    experiment: Experiment, workload: Workload, header: RunHeader, live: Live, place: Seat, journal: bool = False
) -> int:
    assert experiment.until is not None
    torch.set_num_threads(1)
    name_process(f"offbeat {place.rank}")
    terms = Terms(
        until=experiment.until,
        seed=experiment.seed,
        cluster=experiment.cluster,
        every=experiment.evaluate,
        target=experiment.target,
        header=header,
        checkpoint_seconds=live.checkpoint_seconds,
        checksum=live.checksum,
        reserved=frozenset(local_ranks(experiment.strategy, place.processes, live.local_workers)),
        experiment=None if header.experiment is None else msgspec.json.encode(_Told(header, dataclasses.asdict(live))),
        split=workload.split,
        journal=journal,
    )
    model = workload.initial_model(experiment.seed)
    session = Session(model, experiment.strategy, terms, place, workload.evaluate)
    device = next(model.parameters()).device
    with session:
        for batch in session.batches(workload.train, split=workload.split):
            if session.begins_round:
                # Dropout and the like depend on the sample, not on who was faster; as in virtual time.
                key = ((experiment.seed, session.rank), session.draw)
                torch.default_generator.manual_seed(zlib.crc32(repr(key).encode()))
            session.backward(workload.losses(model, on_device(batch, device)))
    if session.rank == 0 and place.directory is not None and session.finish is not None:
        _save_result(place.directory, session.finish)
    return 0


def _save_result(directory: Path, finish: Finish) -> None:
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
