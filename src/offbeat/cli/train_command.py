"""`offbeat train`: strategies on a workload, on real processes.

Without a launcher, the command starts the processes. Under mpirun, torchrun or srun every process runs the command:
rank 0 prints, the other ranks take part in the same runs in the same order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from offbeat.cli.experiment_commands import print_results, read_experiment, run_directories, run_plan
from offbeat.cli.flags import FlagValues, flag_name, live_defaults, live_flags, read_flags, with_flags
from offbeat.cli.live_view import watch_run
from offbeat.cli.mpirun import check_mpi_options, exec_mpirun, print_rank_error, read_rank_info_for
from offbeat.cli.options import CLUSTER, LIVE, OPTIMIZER, RUN, STRATEGY, WORKLOAD, Output, option
from offbeat.cli.plans import check_plan, live_of, plan_from_file, plan_of
from offbeat.core.actions import Budget
from offbeat.core.configuration import from_plain
from offbeat.core.validation import require
from offbeat.engine.experiment import Experiment
from offbeat.errors import ConfigurationError, RunFailed
from offbeat.lab.experiment_plan import Plan
from offbeat.lab.live_runs import run_follower, train_as_rank, train_experiment, workers_for_processes
from offbeat.lab.simulated_runs import Run
from offbeat.launch.process_faults import check_faults
from offbeat.launch.rank_info import RankInfo
from offbeat.launch.run_monitor import RunObserver
from offbeat.live.checkpoints import has_checkpoint
from offbeat.live.session_options import LiveOptions, read_live_options
from offbeat.records.files import HEADER, find_runs, read_header, read_run
from offbeat.records.schema import Ended, RunRecords
from offbeat.tracking.named_trackers import Track


@dataclass(frozen=True)
class _Command:
    """A parsed `train` command, and the rank of the process that runs it."""

    words: Sequence[str]
    flags: FlagValues
    live: LiveOptions
    rank_info: RankInfo
    resume: Path | None
    output: Output
    allow: tuple[str, ...] = ()
    """Files with classes of the run to resume, which may be run."""


@with_flags(live_flags())
def train(
    *words: Annotated[
        str,
        Parameter(
            name="WORKLOAD STRATEGY...",
            help="a workload and one strategy or more, as for 'offbeat simulate', or an experiment file (.toml)",
        ),
    ],
    resume: Annotated[
        str | None, option("continue the run in this directory from its last checkpoint", "RUN", section=LIVE)
    ] = None,
    allow: Annotated[
        tuple[str, ...],
        option(
            "with --resume: a file with a class of the run, which is run as Python; may be repeated",
            "FILE.py",
            section=LIVE,
        ),
    ] = (),
    flags: Any,
    output: Any,
) -> int:
    """Train the runs that the command line describes, one after the other."""
    values = read_flags(flags, live_flags())
    live = live_of(values)
    rank_info = read_rank_info_for(live.transport)
    command = _Command(words, values, live, rank_info, None if resume is None else Path(resume), output, allow)
    require(resume is not None or not allow, "--allow is for --resume: classes that you name yourself are run anyway")
    require(
        "restarts" not in values[LIVE] or (rank_info.alone and live.transport != "mpi"),
        "--restarts is for processes that offbeat starts itself; leave it out",
    )
    if rank_info.rank > 0:
        return _follow(command)
    return _train_plan(command) if command.resume is None else _resume(command)


def _train_plan(command: _Command) -> int:
    live, rank_info = command.live, command.rank_info
    plan = read_plan(command.words, command.flags, rank_info)
    _check_links(plan, command.flags)
    if live.transport == "mpi" and rank_info.alone:
        check_mpi_options(live)
        exec_mpirun(_processes_needed(plan))
    for strategy in plan.strategies:
        local = live.local_ranks(strategy, strategy.processes(plan.worker_count)) if rank_info.alone else ()
        check_faults(plan.cluster.faults, local, strategy.is_required)

    def run(experiment: Experiment, directory: Path, position: str) -> RunRecords:
        with watch_run(experiment, command.output.quiet, position) as watcher:
            return run_recorded(experiment, directory, live, watcher, rank_info, track=command.output.track)

    return run_plan(plan, command.output, run, "train")


def read_plan(words: Sequence[str], flags: FlagValues, rank_info: RankInfo) -> Plan:
    """The plan of a command.

    Args:
        words: a workload and strategies, or an experiment file.
        flags: the values of the flags.
        rank_info: if a launcher has started the processes, their number determines that of the workers.
    """
    if rank_info.alone:
        return _parse_plan(words, flags, live_defaults())
    # As many workers as processes at the most; some strategies use a process for something else.
    most = {**live_defaults(), "workers": rank_info.processes}
    plan = _parse_plan(words, flags, most, sized=False)
    counts = sorted({workers_for_processes(strategy, rank_info.processes) for strategy in plan.strategies})
    require(
        "workers" not in flags[RUN] or [plan.worker_count] == counts,
        f"{rank_info.launcher} has started {rank_info.processes} processes, which makes {counts[0]} workers; "
        "leave out --workers",
    )
    require(
        len(counts) == 1,
        f"{rank_info.processes} processes make {' or '.join(map(str, counts))} workers with these strategies; "
        "train them one by one",
    )
    require(
        rank_info.transport == "mpi" or len(plan.strategies) * len(plan.seeds) == 1,
        f"under {rank_info.launcher} a command trains one run; name one strategy and one seed",
    )
    return check_plan(dataclasses.replace(plan, workers=counts[0]))


def _parse_plan(words: Sequence[str], flags: FlagValues, defaults: dict[str, Any], sized: bool = True) -> Plan:
    """The plan of an experiment file, or that of a workload and strategies; for `sized` see `plan_of`."""
    if not words or not words[0].endswith(".toml"):
        return plan_of(words, flags, defaults, sized=sized)
    require(len(words) == 1, f"{words[0]} describes the whole experiment, so {words[-1]!r} is one word too many")
    for path in (*flags[STRATEGY], *flags[OPTIMIZER], *flags[WORKLOAD]):
        raise ConfigurationError(f"{flag_name(path)} does not go with an experiment file; write it into {words[0]}")
    return plan_from_file(words[0], flags, defaults, sized=sized)


def _processes_needed(plan: Plan) -> int:
    """The number of processes for all runs of a plan, which mpirun starts once."""
    needed = {strategy.processes(plan.worker_count) for strategy in plan.strategies}
    require(
        len(needed) == 1,
        f"with {plan.worker_count} workers these strategies need {' or '.join(map(str, sorted(needed)))} processes; "
        "train them one by one",
    )
    return needed.pop()


def _check_links(plan: Plan, flags: FlagValues) -> None:
    """Refuse flags for links of a measured cluster: its links are the real ones, so no delay is injected on them."""
    for path in flags[CLUSTER]:
        require(
            not (plan.cluster.measured and path.startswith("link.")),
            f"{flag_name(path)} does not go with a measured cluster, whose link delays live runs do not inject; "
            "leave one of them out",
        )


def run_recorded(
    experiment: Experiment,
    directory: Path,
    live: LiveOptions,
    watcher: RunObserver,
    rank_info: RankInfo,
    resume: bool = False,
    track: Track = None,
) -> RunRecords:
    """Train, and return the records of the run. A run that failed has records too, which hold the reason.

    Args:
        experiment: what to train.
        directory: where records and checkpoints go.
        live: options for processes.
        watcher: receives records and messages during the run.
        rank_info: the rank of this process; if it is alone, it starts the others.
        resume: continue from the last checkpoint in the directory.
        track: trackers that follow the run.
    """
    try:
        if rank_info.alone:
            return train_experiment(experiment, directory, live, watcher, resume, track).records
        return train_as_rank(experiment, directory, rank_info, live, watcher, resume, track).records
    except KeyboardInterrupt:
        if not has_checkpoint(directory):
            raise
        raise KeyboardInterrupt(f"to continue this run type: offbeat train --resume {directory}") from None
    except RunFailed as failed:
        if not (directory / HEADER).exists():
            raise
        try:
            run = read_run(directory)
        except ConfigurationError:  # it failed before the first record was written
            run = RunRecords(directory, read_header(directory), ())
        return _with_failure(run, str(failed))


def _with_failure(run: RunRecords, sentence: str) -> RunRecords:
    """The records with this failure in every `Ended` record; the files on disk are not changed."""
    at = max((record.at for record in run.records), default=0.0)
    end = Ended(at=at, bytes_sent=0, messages_sent=0, failure=sentence)
    kept = (record for record in run.records if not (isinstance(record, Ended) and record.rank == 0))
    failed = (msgspec.structs.replace(each, failure=sentence) if isinstance(each, Ended) else each for each in kept)
    return dataclasses.replace(run, records=(*failed, end))


def _resume(command: _Command) -> int:
    """Continue one run. Only `--until` and the options for processes may change."""
    require(command.output.out is None, "--resume continues in the directory of the run; leave out --out")
    directory, experiment, live = _read_resumed(command)
    if live.transport == "mpi" and command.rank_info.alone:
        check_mpi_options(live)
        exec_mpirun(experiment.strategy.processes(experiment.worker_count))
    with watch_run(experiment, command.output.quiet) as watcher:
        track = command.output.track
        run = run_recorded(experiment, directory, live, watcher, command.rank_info, resume=True, track=track)
    return print_results([run], command.output, directory, None)


def _follow(command: _Command) -> int:
    """Take part in the runs of rank 0, as another rank that a launcher has started.

    If rank 0 is lost and the strategy can continue without it, the lowest remaining rank prints the results.
    """
    rank_info, output = command.rank_info, command.output
    led: list[RunRecords] = []
    try:
        for run in _follower_runs(command):
            try:
                ended, leads = run()
                led += [ended.records] if leads else []
            except RunFailed as failed:
                print_rank_error(rank_info, failed)
        if led:
            print_rank_error(rank_info, "rank 0 was lost; these results are from the records of this rank")
            has_directories = all(run.directory is not None for run in led)
            directory = command.resume or Path(output.out or "") if has_directories else Path()
            output = dataclasses.replace(output, no_report=output.no_report or not has_directories)
            return print_results(led, output, directory, None)
    except ConfigurationError as error:
        if rank_info.first_here:  # once per machine: the error may be a file that is missing on this one
            print_rank_error(rank_info, error)
        return 2
    return 0


def _follower_runs(command: _Command) -> list[Callable[[], tuple[Run, bool]]]:
    """For each run a function that takes part in it; see `run_follower` for what it returns."""
    if command.resume is not None:
        directory, experiment, live = _read_resumed(command)
        return [functools.partial(run_follower, experiment, directory, command.rank_info, live, resume=True)]
    out = None if command.output.out is None else Path(command.output.out)
    return [
        functools.partial(run_follower, experiment, out and out / name, command.rank_info, command.live)
        for experiment, name in run_directories(read_plan(command.words, command.flags, command.rank_info)).items()
    ]


def _read_resumed(command: _Command) -> tuple[Path, Experiment, LiveOptions]:
    """The directory of the run that --resume names, its experiment, and its live options with the flags given now."""
    assert command.resume is not None
    require(
        not command.words, f"--resume takes workload and strategy from the run; leave out {' '.join(command.words)}"
    )
    directory, *more = runs = find_runs([command.resume])
    require(not more, f"{command.resume} holds {len(runs)} runs; name one of them: --resume {directory}")
    for section, values in command.flags.items():
        for path in values:
            if section != LIVE and path != "until":
                raise ConfigurationError(f"{flag_name(path)} cannot be changed on --resume; --until can")
    header = read_header(directory)
    require(
        header.engine == "live",
        f"{directory} was simulated; to repeat it type: offbeat replay {directory}",
    )
    require(
        header.experiment is not None,
        f"{directory} trained a workload or strategy without a name; resume it from its script, with resume=True",
    )
    experiment = read_experiment(header, directory, command.allow)
    if "until" in command.flags[RUN]:
        until: Budget | None = from_plain(Budget | None, command.flags[RUN]["until"], "--until")
        experiment = dataclasses.replace(experiment, until=until)
    needed, started = experiment.strategy.processes(experiment.worker_count), command.rank_info.processes
    require(
        command.rank_info.alone or needed == started,
        f"{directory} was trained by {needed} processes, but {command.rank_info.launcher} has started {started}; "
        "start as many as there were",
    )
    changes = {path: getattr(command.live, path) for path in command.flags[LIVE]}
    return directory, experiment, dataclasses.replace(read_live_options(directory), **changes)
