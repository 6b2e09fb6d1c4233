"""What all sessions share: how a process starts its part of a run, ends it, and reads its records afterwards."""

from __future__ import annotations

import dataclasses
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec
import torch
from torch import Tensor, nn

from offbeat.core.actions import Finish
from offbeat.core.compiled_modules import plain_copy, plain_module
from offbeat.core.events import GradientReady
from offbeat.core.flat import FlatModule
from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Buffers
from offbeat.core.validation import require
from offbeat.engine.experiment import Experiment
from offbeat.engine.gradient_accumulator import copied_buffers
from offbeat.failpoints import failpoint
from offbeat.launch.failure_reports import report_uncaught
from offbeat.launch.rank_info import RankInfo, read_rank_info, read_report_pipe
from offbeat.live.evaluation import Evaluation, ModelMeasure
from offbeat.live.live_round import LiveRound
from offbeat.live.local_ranks import LocalRanks, Placement
from offbeat.live.node_runner import ResultEvent
from offbeat.live.session_options import LiveOptions, SessionOptions
from offbeat.live.session_tracking import SessionTracking
from offbeat.live.signals import defer_signals, install_sigterm_handler
from offbeat.records.files import read_rank, read_run
from offbeat.records.metrics import Summary, summarize
from offbeat.records.schema import RunRecords
from offbeat.tracking.tracker import Tracker

LINGER_SECONDS = 5.0
SWITCH_SECONDS = 5e-4
"""`sys.setswitchinterval` during a run. A message passes through several threads: with the default of 5 ms an exchange
took 10 to 14 ms, longer than the gradient of a small model; with this value it took 5 to 6 ms."""
ORDERLY_EXITS = (KeyboardInterrupt, SystemExit)
"""Exceptions of a loop that ends on request: Ctrl-C, SIGTERM, or the script's own sys.exit."""


def rank_info_for(out: str | Path | None) -> RankInfo:
    """The rank of this process; its records go to `out`, if given, otherwise to the directory of its launcher.

    From here on, the launcher is told of an exception that ends this process.
    """
    report_uncaught(read_report_pipe())
    rank_info = read_rank_info()
    return rank_info if out is None else dataclasses.replace(rank_info, directory=Path(out))


def loop_options(
    experiment: Experiment, live: LiveOptions, rank_info: RankInfo, hub_beside_worker: bool = False
) -> SessionOptions:
    """The options of a loop of the user's own: the number of workers follows from the processes that were started."""
    workers = len(Placement.of(experiment.strategy, rank_info, hub_beside_worker).computing)
    experiment = dataclasses.replace(experiment, workers=workers)
    return SessionOptions(experiment=experiment, live=live, hub_beside_worker=hub_beside_worker)


class SessionBase(ABC):
    """The part of one process in a run: its `rank` of `processes` ranks, and the `summary` afterwards."""

    _result_event: ClassVar[ResultEvent] = GradientReady
    """The event that ends a computation of this kind of loop."""

    def __init__(
        self,
        model: nn.Module,
        options: SessionOptions,
        rank_info: RankInfo,
        evaluate: Evaluation | None,
        validate: Evaluation | None = None,
    ) -> None:
        self.model = model
        self.strategy = options.experiment.strategy.for_module(model)
        experiment = dataclasses.replace(options.experiment, strategy=self.strategy)
        options = dataclasses.replace(options, experiment=experiment)
        cadence = options.experiment.evaluate
        measure = None
        if evaluate is not None and cadence is not None:
            measure = ModelMeasure(plain_copy(model), evaluate, validate)
        self._flat = FlatModule(model)
        self._ranks = LocalRanks(self._flat, options, rank_info, measure, type(plain_module(model)).__name__)
        self._runner = self._ranks.own_runner
        self.rank = self._ranks.rank
        self.processes = self._ranks.processes
        self.computes = self.strategy.computes(self._ranks.rank)
        self._pool = Pool()
        self._round: LiveRound | None = None
        self._uninstall_sigterm_handler: Callable[[], None] = lambda: None
        self._switch_seconds = sys.getswitchinterval()
        self._records: RunRecords | None = None
        self._tracking: SessionTracking | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process reports the result of the run.

        True where rank 0 is; in a decentralized run that has ended, where the lowest rank is that was left.
        """
        return self._ranks.is_main

    def _start(self) -> None:
        failpoint("start")
        self._start_tracking()
        self._uninstall_sigterm_handler = install_sigterm_handler(self._ranks.rank_info, self.is_main)
        self._switch_seconds = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_SECONDS, self._switch_seconds))
        self._ranks.start()

    def tracked_by(self, trackers: Sequence[Tracker]) -> Self:
        """Let trackers follow the run, and return this session; call it before the session begins."""
        self._tracking = SessionTracking(trackers, self._ranks)
        return self

    def _start_tracking(self) -> None:
        try:
            if self._tracking is not None:
                self._tracking.start()
        except BaseException:
            self._ranks.close_files()
            raise

    def _complete_round(self, result: Tensor, loss: float | None, buffers: Buffers, finite: bool, **more: Any) -> None:
        """End the current round, and let the node handle its result.

        result: the sum of gradients over the samples, or the step.
        loss: the sum of the losses; None if unknown.
        buffers: copies of the buffers after the round.
        finite: whether result, loss and buffers are finite.
        more: further fields of the event.
        """
        self._round = None
        with defer_signals():
            self._runner.complete(result, loss, buffers, finite, self._result_event, **more)

    # The end

    def _shut_down(self, error: BaseException | None) -> None:
        """End the session: in order if the loop ended or was asked to end, at once if it failed with `error`."""
        if error is None:
            try:
                self._wait_for_end()
            except BaseException as raised:  # Ctrl-C while waiting for the other ranks
                self._shut_down(raised)
                raise
        is_orderly = isinstance(error, ORDERLY_EXITS)
        try:
            if is_orderly:
                self.interrupt()
        finally:
            self._uninstall_sigterm_handler()
            self._close(LINGER_SECONDS if error is None or is_orderly else 0.5, error)
            if error is not None and self._ranks.rank_info.transport == "mpi":
                from offbeat.transports.mpi import exit_without_finalize

                exit_without_finalize()  # a failed process does not wait for the other ranks at exit
        if error is None:
            for runner in self._ranks.runners.values():
                runner.check()

    @abstractmethod
    def _wait_for_end(self) -> None:
        """The loop has ended without an error, perhaps before the end of training: wait until this rank may close."""

    def _wait_for_other_ranks(self) -> None:
        """Wait until the other ranks of this process have finished; that of the loop has."""
        others = [runner for rank, runner in self._ranks.runners.items() if rank != self._ranks.rank]
        if others:
            self._runner.close(LINGER_SECONDS)
        for runner in others:
            # They finish by themselves, perhaps after an evaluation, unless our own node was abandoned.
            runner.wait(None if self._runner.finish is not None else LINGER_SECONDS * 2)

    def _leave(self, stay: bool = False) -> None:
        zeros, buffers = self._zeros(), copied_buffers(self._flat)
        self._runner.leave(lambda: self._runner.complete(zeros, 0.0, buffers, True, self._result_event), stay=stay)

    def _zeros(self) -> Tensor:
        """The result of a round without samples."""
        return torch.zeros_like(self._flat.parameters, dtype=self._flat.layout.master_dtype)

    def interrupt(self) -> None:
        """Write a checkpoint and leave the run in order, as after Ctrl-C."""
        if self._ranks.checkpoint_writer is not None and not self._ranks.runners[0].ended:
            self._ranks.checkpoint_writer.close()
            self._ranks.checkpoint_writer.save()
        if self.computes:
            self._leave()
        for rank, runner in self._ranks.runners.items():
            if rank != self._ranks.rank or not self.computes:
                runner.leave()

    def _close(self, linger_seconds: float, error: BaseException | None) -> None:
        failpoint("end")
        if self._ranks.checkpoint_writer is not None:
            self._ranks.checkpoint_writer.close()
        for runner in self._ranks.runners.values():
            runner.close(linger_seconds)
        sys.setswitchinterval(self._switch_seconds)
        self._write_ended_records(error)
        self._ranks.close_files()
        result = self._successful_finish()
        if result is not None:
            self._flat.load(result.parameters, result.buffers)
        if self._tracking is not None:
            self._tracking.close(lambda: self.summary, error)

    def _write_ended_records(self, error: BaseException | None) -> None:
        for runner in self._ranks.runners.values():
            record = runner.ended_record()
            if record.failure is None and isinstance(error, ORDERLY_EXITS):
                record = msgspec.structs.replace(record, failure="it was interrupted")
            elif record.failure is None and runner.finish is None:
                reason = "it did not end in time" if error is None else f"{type(error).__name__}: {error}"
                record = msgspec.structs.replace(record, failure=reason)
            runner.write_last(record)

    def _successful_finish(self) -> Finish | None:
        finishes = [self._ranks.runners[rank].finish for rank in sorted(self._ranks.runners)]
        return next((finish for finish in finishes if finish is not None and finish.failure is None), None)

    @property
    def finish(self) -> Finish | None:
        """The `Finish` action of this rank's node; None if it has not finished."""
        return self._runner.finish

    @property
    def records(self) -> RunRecords:
        """The records of all ranks where `is_main` and they share a directory, otherwise those of this process."""
        require(self._runner.ended, "the run is still going on; read its records after the with block")
        if self._records is None:
            directory = self._ranks.rank_info.directory
            if directory is not None and self.is_main:
                self._records = read_run(directory)
            else:
                own = list(read_rank(directory, self._ranks.rank)) if directory else self._ranks.memory.records
                records = sorted(own, key=lambda record: record.at)
                self._records = RunRecords(None, self._ranks.header(), tuple(records))  # type: ignore[arg-type]
        return self._records

    @property
    def summary(self) -> Summary:
        """The metrics of the run, computed from `records`."""
        return summarize(self.records)
