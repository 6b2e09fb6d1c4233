"""`offbeat train`: strategies on a workload, on real processes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from offbeat.cli.experiments import carry_out, places_of, present
from offbeat.cli.flags import Given, flag_of, given, live_defaults, live_flags, takes
from offbeat.cli.live_view import watch_run
from offbeat.cli.mpi import check_mpi_options, exec_mpirun, read_rank_info_for, say_of_rank
from offbeat.cli.options import CLUSTER, LIVE, OPTIMIZER, RUN, STRATEGY, WORKLOAD, Output, option
from offbeat.cli.plans import checked, live_of, plan_from_file, plan_of
from offbeat.cli.worker_process import prepare
from offbeat.core.actions import Budget
from offbeat.core.configuration import from_plain
from offbeat.core.validation import require
from offbeat.errors import ConfigurationError, RunFailed
from offbeat.lab.experiment import Experiment, Plan
from offbeat.lab.live_runs import run_follower, train_as_rank, train_experiment, workers_for_processes
from offbeat.lab.simulated_runs import Run
from offbeat.lab.worker_main import LiveOptions, local_ranks, read_live_options
from offbeat.launch import RankInfo, RunObserver, check_faults
from offbeat.live.checkpoints import checkpoint_path
from offbeat.records.files import HEADER, find_runs, read_header, read_run
from offbeat.records.schema import Ended, RunRecords


@takes(live_flags())
def train(
    *words: Annotated[
        str,
        Parameter(
            name="WORKLOAD STRATEGY...",
            help="a workload and one strategy or more, as for 'offbeat simulate', or an experiment file (.toml)",
        ),
    ],
    resume: Annotated[
        str | None, option("go on with the run in this directory, from its last checkpoint", "RUN", section=LIVE)
    ] = None,
    flags: Any,
    output: Any,
) -> int:
    """What the words and flags describe, one run after the other."""
    told = given(flags, live_flags())
    live = live_of(told)
    place = read_rank_info_for(live.transport)
    require(
        "restarts" not in told[LIVE] or (place.alone and live.transport != "mpi"),
        "--restarts is for processes that are started and looked after here; leave it out",
    )
    if place.rank > 0:
        return _accompany(words, told, live, place, resume, output)
    if resume is not None:
        return _resume(Path(resume), words, told, output, place)
    plan = _plan(words, told, place)
    _check_links(plan, told)
    if live.transport == "mpi" and place.alone:
        check_mpi_options(live)
        exec_mpirun(_processes(plan))
    for strategy in plan.strategies:
        local = local_ranks(strategy, strategy.processes(plan.workers), live.local_workers) if place.alone else ()
        check_faults(plan.cluster.faults, local, strategy.is_required)

    def run(experiment: Experiment, directory: Path, position: str) -> RunRecords:
        with watch_run(experiment, output.quiet, position) as watcher:
            return recorded(experiment, directory, live, watcher, place)

    return carry_out(plan, output, run, "train")


def _plan(words: Sequence[str], told: Given, place: RankInfo) -> Plan:
    """What the words describe. Where a launcher has started the processes, they say how many workers there are."""
    if place.alone:
        return _described(words, told, live_defaults())
    most = {**live_defaults(), "workers": place.processes}  # at the most; see below
    plan = _described(words, told, most, sized=False)
    found = [workers_for_processes(strategy, place.processes) for strategy in plan.strategies]
    require(
        "workers" not in told[RUN] or {plan.workers} == set(found),
        f"{place.launcher} has started {place.processes} processes, which makes {found[0]} workers; "
        "leave out --workers",
    )
    require(
        len(set(found)) == 1,
        f"{place.processes} processes make {' or '.join(map(str, sorted(set(found))))} workers with these strategies; "
        "train them one by one",
    )
    require(
        place.transport == "mpi" or len(plan.strategies) * len(plan.seeds) == 1,
        f"under {place.launcher} a command trains one run; name one strategy and one seed",
    )
    return checked(dataclasses.replace(plan, workers=found[0]))


def _described(words: Sequence[str], told: Given, defaults: dict[str, Any], sized: bool = True) -> Plan:
    if not words or not words[0].endswith(".toml"):
        return plan_of(words, told, defaults, sized=sized)
    require(len(words) == 1, f"{words[0]} says what is trained, so {words[-1]!r} is one word too many")
    for section in (STRATEGY, OPTIMIZER, WORKLOAD):
        for path in told[section]:
            raise ConfigurationError(f"{flag_of(path)} does not go with an experiment file; write it into {words[0]}")
    return plan_from_file(words[0], told, defaults, sized=sized)


def _processes(plan: Plan) -> int:
    """How many processes a plan needs: one number, where they are started once for all of it."""
    needed = {strategy.processes(plan.workers) for strategy in plan.strategies}
    require(
        len(needed) == 1,
        f"with {plan.workers} workers these strategies need {' or '.join(map(str, sorted(needed)))} processes; "
        "train them one by one",
    )
    return needed.pop()


def _check_links(plan: Plan, told: Given) -> None:
    """Links that were measured are the ones that are here, so none is induced, and none can be changed by a flag."""
    for path in told[CLUSTER]:
        require(
            not (plan.cluster.measured and path.startswith("link.")),
            f"{flag_of(path)} does not go with a cluster that was measured, whose links live runs do not induce; "
            "leave one of them out",
        )


def recorded(
    experiment: Experiment,
    directory: Path,
    live: LiveOptions,
    watcher: RunObserver,
    place: RankInfo,
    resume: bool = False,
) -> RunRecords:
    """The records of a run. One that failed has them, too, and they say why."""
    try:
        if place.alone:
            return train_experiment(experiment, directory, live, watcher, resume).records
        return train_as_rank(experiment, directory, place, live, watcher, resume).records
    except KeyboardInterrupt:
        if not checkpoint_path(directory).exists():
            raise
        raise KeyboardInterrupt(f"to go on with this run type: offbeat train --resume {directory}") from None
    except RunFailed as failed:
        if not (directory / HEADER).exists():
            raise
        try:
            run = read_run(directory)
        except ConfigurationError:  # it failed before anybody wrote a record
            run = RunRecords(directory, read_header(directory), ())
        return _with_failure(run, str(failed))


def _with_failure(run: RunRecords, sentence: str) -> RunRecords:
    """What rank 0 wrote as its end, if it could, may not know of it; it is not in the files, but in what is shown."""
    at = max((record.at for record in run.records), default=0.0)
    end = Ended(at=at, bytes_sent=0, messages_sent=0, failure=sentence)
    others = [record for record in run.records if not (isinstance(record, Ended) and record.rank == 0)]
    known = [msgspec.structs.replace(each, failure=sentence) if isinstance(each, Ended) else each for each in others]
    return dataclasses.replace(run, records=(*known, end))


def _resume(directory: Path, words: Sequence[str], told: Given, output: Output, place: RankInfo) -> int:
    """Go on with one run: everything is as it was, but for how long to train and how processes are kept."""
    require(output.out is None, "--resume goes on in the directory of the run; leave out --out")
    directory, experiment = _to_go_on_with(directory, words, told, place)
    live = dataclasses.replace(read_live_options(directory), **_changed(told))
    if live.transport == "mpi" and place.alone:
        check_mpi_options(live)
        exec_mpirun(experiment.strategy.processes(experiment.workers))
    with watch_run(experiment, output.quiet) as watcher:
        run = recorded(experiment, directory, live, watcher, place, resume=True)
    return present([run], output, directory, None)


def _accompany(
    words: Sequence[str], told: Given, live: LiveOptions, place: RankInfo, resume: str | None, output: Output
) -> int:
    """Be another process than rank 0 of what a launcher has started, run for run as rank 0 is.

    Where rank 0 is lost and the others can do without it, the lowest that is left says how it went.
    """
    led: list[RunRecords] = []
    try:
        for run in _runs(words, told, live, place, resume, output):
            try:
                ended, leads = run()
                led += [ended.records] if leads else []
            except RunFailed as failed:
                say_of_rank(place, failed)
        if led:
            say_of_rank(place, RunFailed("rank 0 was lost; this is what is known here of how it went on without it"))
            there = all(run.directory is not None for run in led)
            directory = Path(resume or output.out or "") if there else Path()
            return present(led, dataclasses.replace(output, no_report=output.no_report or not there), directory, None)
    except ConfigurationError as error:
        if place.first_here:  # on the machine of rank 0 it says the same; elsewhere a file may be missing
            say_of_rank(place, error)
        return 2
    return 0


def _runs(
    words: Sequence[str], told: Given, live: LiveOptions, place: RankInfo, resume: str | None, output: Output
) -> list[Callable[[], tuple[Run, bool]]]:
    if resume is not None:
        directory, experiment = _to_go_on_with(Path(resume), words, told, place)
        live = dataclasses.replace(read_live_options(directory), **_changed(told))
        return [functools.partial(run_follower, experiment, directory, place, live, resume=True)]
    places = places_of(_plan(words, told, place))
    out = None if output.out is None else Path(output.out)
    return [functools.partial(run_follower, each, out and out / name, place, live) for each, name in places.items()]


def _to_go_on_with(directory: Path, words: Sequence[str], told: Given, place: RankInfo) -> tuple[Path, Experiment]:
    require(not words, f"--resume goes on with what was trained; leave out {' '.join(words)}")
    found = find_runs([directory])
    require(len(found) == 1, f"{directory} holds {len(found)} runs; name one of them: --resume {found[0]}")
    directory = found[0]
    for section, texts in told.items():
        for path in texts:
            if section != LIVE and path != "until":
                raise ConfigurationError(f"{flag_of(path)} cannot be changed on --resume; --until can")
    header = read_header(directory)
    require(
        header.engine == "live",
        f"{directory} was run in virtual time; to have it again type: offbeat replay {directory}",
    )
    require(
        header.experiment is not None,
        f"{directory} trained what has no name; go on from the script that did, with resume=True",
    )
    assert header.experiment is not None
    prepare(header.experiment, str(directory))
    experiment = Experiment.from_plain(header.experiment)
    if "until" in told[RUN]:
        until: Budget | None = from_plain(Budget | None, told[RUN]["until"], "--until")
        experiment = dataclasses.replace(experiment, until=until)
    needed = experiment.strategy.processes(experiment.workers)
    require(
        place.alone or needed == place.processes,
        f"{directory} was trained by {needed} processes, but {place.launcher} has started {place.processes}; start as "
        "many as there were",
    )
    return directory, experiment


def _changed(told: Given) -> dict[str, Any]:
    asked = live_of(told)
    return {path: getattr(asked, path) for path in told[LIVE]}
