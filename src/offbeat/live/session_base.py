"""A process's part in a run, whatever its loop looks like: how it begins, how it ends, and what is known afterwards."""

from __future__ import annotations

import copy
import dataclasses
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import msgspec
import torch
from torch import Tensor, nn

from offbeat.core.actions import Budget, Finish, Samples, Seconds
from offbeat.core.events import GradientReady
from offbeat.core.flat import FlatModule, is_finite
from offbeat.core.memory_pool import Pool
from offbeat.core.messages import Buffers
from offbeat.core.strategy import Strategy
from offbeat.core.validation import check_instance, require
from offbeat.launch.rank_info import RankInfo, read_rank_info
from offbeat.live.evaluation import Evaluation, measure_with
from offbeat.live.local_ranks import LocalRanks, SessionOptions
from offbeat.live.node_runner import LiveRound, ResultEvent
from offbeat.live.signals import defer_signals, exit_without_finalize, install_sigterm_handler
from offbeat.records.files import read_rank, read_run
from offbeat.records.metrics import Summary, summarize
from offbeat.records.schema import RunRecords

LINGER_SECONDS = 5.0
SWITCH_SECONDS = 5e-4
"""After so long a loop in Python lets other threads have their turn, while a run goes on. With the usual 5 ms a message
that needs several threads on its way takes longer than a small model's gradient: an exchange took 10 to 14 ms, and 5 to
6 with this."""
ASKED_TO_END = (KeyboardInterrupt, SystemExit)
"""What ends a loop that was asked to: Ctrl-C, SIGTERM, or the script's own sys.exit."""


def parse_until(until: Budget | int | str) -> Budget:
    """How long to train, as a user writes it."""
    if isinstance(until, int | str) and not isinstance(until, bool):
        until = Budget.shorthand(str(until))
    check_instance(until, (Samples, Seconds), "until", "until=offbeat.Samples(60_000)")
    assert isinstance(until, Budget)
    return until


def rank_info_for(out: str | Path | None) -> RankInfo:
    """Where this process sits; its records go to `out`, or else to where its launcher says."""
    rank_info = read_rank_info()
    return rank_info if out is None else dataclasses.replace(rank_info, directory=Path(out))


class SessionBase(ABC):
    """A process's part in a run. `rank` and `processes` say which; `summary` how it went."""

    _ready: ClassVar[ResultEvent] = GradientReady
    """What the computations of this kind of loop end in."""

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy,
        options: SessionOptions,
        rank_info: RankInfo,
        evaluate: Evaluation | None,
    ) -> None:
        self.model = model
        self.strategy = strategy
        measure = None if evaluate is None or options.every is None else measure_with(copy.deepcopy(model), evaluate)
        self._flat = FlatModule(model)
        self._ranks = LocalRanks(strategy, self._flat, options, rank_info, measure, type(model).__name__)
        self._runner = self._ranks.own_runner
        self.rank = self._ranks.rank
        self.processes = self._ranks.processes
        self.computes = strategy.computes(self.rank)
        self._pool = Pool()
        self._round: LiveRound | None = None
        self._heeded: Callable[[], None] = lambda: None
        self._switch_seconds = sys.getswitchinterval()
        self._records: RunRecords | None = None

    @property
    def is_main(self) -> bool:
        """Whether it is up to this process to say how the run went.

        It is where rank 0 is; and among equals, once the run has ended, where the lowest rank is that was left then.
        """
        return self._ranks.leads

    def _begin(self) -> None:
        self._heeded = install_sigterm_handler(self._ranks.rank_info, self.is_main)
        self._switch_seconds = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_SECONDS, self._switch_seconds))
        self._ranks.start()

    def _hand_in(self, result: Tensor, loss: float | None) -> None:
        """The round at hand has ended with this: let the node have it, and answer."""
        buffers = self._buffers()
        statistics = [buffer for buffer in buffers if buffer.is_floating_point()]
        finite = all(map(is_finite, [result, *statistics])) and (loss is None or abs(loss) < float("inf"))
        self._round = None
        with defer_signals():
            self._runner.complete(result, loss, buffers, finite, self._ready)

    def _buffers(self) -> Buffers:
        return tuple(buffer.clone() for buffer in self._flat.buffers)

    # The end

    def _over(self, error: BaseException | None) -> None:
        """The loop is over: in order where it came to its end or was asked to, at once where it failed."""
        if error is None:
            try:
                self._end()
            except BaseException as raised:  # Ctrl-C, while it waited for the others
                self._over(raised)
                raise
        asked = isinstance(error, ASKED_TO_END)
        try:
            if asked:
                self.interrupt()
        finally:
            self._heeded()
            self._close(LINGER_SECONDS if error is None or asked else 0.5, error)
            if error is not None and self._ranks.rank_info.transport == "mpi":
                exit_without_finalize()
        if error is None:
            for runner in self._ranks.runners.values():
                runner.check()

    @abstractmethod
    def _end(self) -> None:
        """The loop was left without an error, perhaps before training was over: wait for what is to be waited for."""

    def _leave(self, stay: bool = False) -> None:
        nothing, buffers = torch.zeros_like(self._flat.parameters), self._buffers()
        self._runner.leave(lambda: self._runner.complete(nothing, 0.0, buffers, True, self._ready), stay=stay)

    def interrupt(self) -> None:
        """End in order, as after Ctrl-C: a checkpoint of where it was, then goodbye."""
        if self._ranks.checkpoint_writer is not None and not self._ranks.runners[0].ended:
            self._ranks.checkpoint_writer.close()
            self._ranks.checkpoint_writer.save()
        if self.computes:
            self._leave()
        for rank, runner in self._ranks.runners.items():
            if rank != self.rank or not self.computes:
                runner.leave()

    def _close(self, linger_seconds: float, error: BaseException | None) -> None:
        if self._ranks.checkpoint_writer is not None:
            self._ranks.checkpoint_writer.close()
        for runner in self._ranks.runners.values():
            runner.close(linger_seconds)
        sys.setswitchinterval(self._switch_seconds)
        self._write_ends(error)
        self._ranks.close_files()
        result = self._result()
        if result is not None:
            self._flat.load(result.parameters, result.buffers)

    def _write_ends(self, error: BaseException | None) -> None:
        for runner in self._ranks.runners.values():
            record = runner.ended_record()
            if record.failure is None and isinstance(error, ASKED_TO_END):
                record = msgspec.structs.replace(record, failure="it was interrupted")
            elif record.failure is None and runner.finish is None:
                why = "it did not end in time" if error is None else f"{type(error).__name__}: {error}"
                record = msgspec.structs.replace(record, failure=why)
            runner.write_last(record)

    def _result(self) -> Finish | None:
        finishes = [self._ranks.runners[rank].finish for rank in sorted(self._ranks.runners)]
        return next((finish for finish in finishes if finish is not None and finish.failure is None), None)

    @property
    def finish(self) -> Finish | None:
        """How this rank's node ended."""
        return self._runner.finish

    @property
    def records(self) -> RunRecords:
        """What was recorded: by all ranks where rank 0 is here and they share a directory, otherwise by those here."""
        require(self._runner.ended, "the run is still going on; look after the with block")
        if self._records is None:
            directory = self._ranks.rank_info.directory
            if directory is not None and self.is_main:
                self._records = read_run(directory)
            else:
                found = list(read_rank(directory, self.rank)) if directory else self._ranks.memory.records
                records = sorted(found, key=lambda record: record.at)
                self._records = RunRecords(None, self._ranks.header(), tuple(records))  # type: ignore[arg-type]
        return self._records

    @property
    def summary(self) -> Summary:
        """The run in numbers; on a rank of its own that is not rank 0, what this rank knows of it."""
        return summarize(self.records)
