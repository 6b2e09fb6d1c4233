"""`offbeat train`: strategies on a workload, on real processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from offbeat.actions import Budget
from offbeat.checkpoints import checkpoint_path
from offbeat.cli.flags import (
    GROUPS,
    LIVE,
    OPTIMIZER,
    RUN,
    STRATEGY,
    WORKLOAD,
    Given,
    Output,
    flag_of,
    given,
    live_defaults,
    live_flags,
    takes,
)
from offbeat.cli.live_view import watching
from offbeat.cli.member import prepare
from offbeat.cli.resolve import live_of, plan_from_file, plan_of
from offbeat.cli.running import carry_out, present
from offbeat.configuration import from_plain
from offbeat.errors import ConfigurationError, RunFailed
from offbeat.experiment import Experiment, Plan
from offbeat.launch import check_faults
from offbeat.records.files import HEADER, RunRecords, find_runs, read_header, read_run
from offbeat.records.schema import Ended
from offbeat.training import Live, local_ranks, read_live, train_experiment
from offbeat.validation import require


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
        str | None,
        Parameter(
            help="go on with the run in this directory, from its last checkpoint",
            metavar="RUN",
            group=GROUPS[LIVE],
            show_default=False,
        ),
    ] = None,
    flags: Any,
    output: Any,
) -> int:
    """What the words and flags describe, one run after the other."""
    told = given(flags, live_flags())
    if resume is not None:
        return _resume(Path(resume), words, told, output)
    plan = _plan(words, told)
    live = live_of(told)
    for strategy in plan.strategies:
        check_faults(plan.cluster.faults, local_ranks(strategy, strategy.processes(plan.workers), live.local_workers))

    def run(experiment: Experiment, directory: Path, position: str) -> RunRecords:
        with watching(experiment, output.quiet, position) as watcher:
            return recorded(experiment, directory, live, watcher)

    return carry_out(plan, output, run, "train")


def _plan(words: Sequence[str], told: Given) -> Plan:
    if not words or not words[0].endswith(".toml"):
        return plan_of(words, told, live_defaults())
    require(len(words) == 1, f"{words[0]} says what is trained, so {words[-1]!r} is one word too many")
    for section in (STRATEGY, OPTIMIZER, WORKLOAD):
        for path in told[section]:
            raise ConfigurationError(f"{flag_of(path)} does not go with an experiment file; write it into {words[0]}")
    return plan_from_file(words[0], told, live_defaults())


def recorded(experiment: Experiment, directory: Path, live: Live, watcher: Any, resume: bool = False) -> RunRecords:
    """The records of a run. One that failed has them, too, and they say why."""
    try:
        return train_experiment(experiment, directory, live, watcher, resume).records
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
    return dataclasses.replace(run, records=(*others, end))


def _resume(directory: Path, words: Sequence[str], told: Given, output: Output) -> int:
    """Go on with one run: everything is as it was, but for how long to train and how processes are kept."""
    require(not words, f"--resume goes on with what was trained; leave out {' '.join(words)}")
    require(output.out is None, "--resume goes on in the directory of the run; leave out --out")
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
    live = dataclasses.replace(read_live(directory), **_changed(told))
    with watching(experiment, output.quiet) as watcher:
        run = recorded(experiment, directory, live, watcher, resume=True)
    return present([run], output, directory, None)


def _changed(told: Given) -> dict[str, Any]:
    asked = live_of(told)
    return {path: getattr(asked, path) for path in told[LIVE]}
