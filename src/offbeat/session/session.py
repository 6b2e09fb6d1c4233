"""`offbeat.join`: a user's own training loop as a node's compute.

    with offbeat.join(model, strategy, until=offbeat.Samples(1_000_000)) as run:
        for x, y in run.batches(train_set):
            run.backward(F.cross_entropy(model(x), y, reduction="none"))

Started alone, the process holds every rank that the strategy needs, and the loop is the one that computes. Started by
`offbeat launch`, torchrun, mpirun or srun, it is one rank of many. A rank that does not compute gets no batches: it
serves until the end.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from offbeat.actions import Budget, Finish, Samples, Seconds
from offbeat.analysis import Summary, summarize
from offbeat.cluster import Cluster
from offbeat.engines.computing import is_finite
from offbeat.engines.live_round import LiveRound
from offbeat.flat import FlatModule
from offbeat.launch import Seat, seat
from offbeat.pool import Pool
from offbeat.records.files import RunRecords, read_rank, read_run
from offbeat.session.ending import heed_end, leave_at_once
from offbeat.session.ranks import LIVE_SECONDS_PER_SAMPLE, Ranks, Terms
from offbeat.session.sources import source_of
from offbeat.session.user_code import Evaluation, measure_with, summed
from offbeat.strategies.strategy import Cadence, EverySeconds, Strategy
from offbeat.validation import check_instance, require
from offbeat.workloads import Shared, Split, Target

LINGER_SECONDS = 5.0
ASKED_TO_END = (KeyboardInterrupt, SystemExit)
"""What ends a loop that was asked to: Ctrl-C, SIGTERM, or the script's own sys.exit."""


def join(
    model: nn.Module,
    strategy: Strategy,
    until: Budget | int | str | None = None,
    *,
    evaluate: Evaluation | None = None,
    every: Cadence | None = EverySeconds(1.0),  # noqa: B008  (frozen)
    target: Target | None = None,
    cluster: Cluster | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    checkpoint_seconds: float | None = 30.0,
) -> Session:
    """Take part in the training of `model`; use it in a `with` statement.

    `until` is how long to train: `Samples(1_000_000)` or `Seconds(90)`. `evaluate(model)` measures held-out loss and
    accuracy, on a copy, `every` so often, and never in the way of an update. With `out`, records and checkpoints are
    written to that directory, and `resume=True` goes on from there.
    """
    check_instance(model, (nn.Module,), "the model", "offbeat.join(model, strategy)")
    check_instance(strategy, (Strategy,), "the strategy", "offbeat.AsyncFixed(optimizer=offbeat.SGD(lr=0.1))")
    if isinstance(until, int | str) and not isinstance(until, bool):
        until = Budget.shorthand(str(until))
    check_instance(until, (Samples, Seconds), "until", "until=offbeat.Samples(60_000)")
    check_instance(every, (Cadence, type(None)), "every", "every=offbeat.EverySeconds(1)")
    check_instance(cluster, (Cluster, type(None)), "the cluster", "cluster=offbeat.Cluster()")
    assert isinstance(until, Budget)
    place = seat()
    directory = Path(out) if out is not None else place.directory
    require(directory is not None or not resume, "resume=True needs the directory of the run; type out='runs/mine'")
    place = dataclasses.replace(place, directory=directory, resume=resume or place.resume)
    terms = Terms(
        until=until,
        seed=seed,
        cluster=cluster or Cluster(),
        every=every,
        target=target,
        checkpoint_seconds=checkpoint_seconds,
        reserved=frozenset(range(place.processes)),
    )
    return Session(model, strategy.paced(LIVE_SECONDS_PER_SAMPLE), terms, place, evaluate)


class Session:
    """A process's part in a run. `rank`, `processes` and `computes` say which; `summary` how it went."""

    def __init__(
        self, model: nn.Module, strategy: Strategy, terms: Terms, place: Seat, evaluate: Evaluation | None
    ) -> None:
        self.model = model
        self.strategy = strategy
        measure = None if evaluate is None or terms.every is None else measure_with(copy.deepcopy(model), evaluate)
        self._flat = FlatModule(model)
        self._ranks = Ranks(strategy, self._flat, terms, place, measure, type(model).__name__)
        self._mine = self._ranks.mine
        self.rank = self._ranks.rank
        self.processes = self._ranks.processes
        self.computes = strategy.computes(self.rank)
        self.is_main = 0 in self._ranks.participants
        """Whether rank 0 is here, which knows how the whole run went; alone, every rank is."""
        self._pool = Pool()
        self._round: LiveRound | None = None
        self._pending = 0
        self._losses: list[Tensor] = []
        self._entered = False
        self._heeded: Callable[[], None] = lambda: None
        self._records: RunRecords | None = None

    # The loop

    def __enter__(self) -> Session:
        require(not self._entered, "this session has been used already; call offbeat.join again")
        self._entered = True
        self._heeded = heed_end(self._ranks.place, self.is_main)
        self._ranks.start()
        return self

    def batches(self, data: Any, *, split: Split = Shared()) -> Iterator[Any]:  # noqa: B008  (frozen)
        """Micro-batches, paced by the strategy, until training is over.

        `data` is a pair of tensors, a dataset, a DataLoader, or anything that gives batches. What has a length is
        drawn in an order that depends on seed and rank alone, so that a restarted worker repeats what was lost;
        what merely iterates is counted, but cannot be repeated. On a rank that does not compute there are none.
        """
        require(self._entered, "the session has not begun; type: with offbeat.join(model, strategy) as run:")
        if not self.computes:
            self._serve()
            return
        source = source_of(
            data,
            split,
            worker=self._ranks.workers[self.rank],
            workers=max(len(self._ranks.workers), self._ranks.workers[self.rank] + 1),
            rank=self.rank,
            seed=self._ranks.terms.seed,
        )
        while (current := self._mine.next_round()) is not None:
            self._begin(current)
            while wanted := current.wanted():
                taken = source.take(current.action.draw + current.samples, wanted)
                if taken is None:
                    return
                batch, self._pending = taken
                samples, began = self._pending, time.monotonic()
                yield batch
                require(
                    self._pending == 0,
                    "a micro-batch was taken from run.batches and not differentiated; call run.backward(losses) once "
                    "for each",
                )
                current.samples += samples
                current.stretch(time.monotonic() - began)
            self._complete()

    def _begin(self, current: LiveRound) -> None:
        self._round = current
        self._losses = []
        self._flat.zero_gradients()
        current.hold_up()

    def _complete(self) -> None:
        gradient = self._pool.copy(self._flat.gradients)  # used again as soon as the message with it has left
        buffers = tuple(buffer.clone() for buffer in self._flat.buffers)
        loss = sum(map(float, self._losses))
        statistics = [buffer for buffer in buffers if buffer.is_floating_point()]
        finite = all(map(is_finite, [gradient, *statistics])) and abs(loss) < float("inf")
        self._round = None
        self._mine.complete(gradient, loss, buffers, finite)

    def backward(
        self, loss: Tensor, *, reduction: Literal["none", "sum", "mean"] = "none", samples: int | None = None
    ) -> None:
        """Differentiate the loss of the micro-batch: one loss per sample, or a scalar that says how it was reduced."""
        count = self._pending
        require(
            count > 0,
            "run.backward has no micro-batch to count: it was called twice for one, or outside run.batches; add the "
            "losses up and call it once for each micro-batch",
        )
        require(
            samples is None or samples == count,
            f"run.backward was told of {samples} samples, but the micro-batch has {count}; count samples, not tokens "
            "or pixels, or leave samples out",
        )
        total = summed(loss, reduction, count)
        self._flat.bind_gradients()
        total.backward()  # type: ignore[no-untyped-call]
        self._losses.append(total.detach())
        self._pending = 0

    def _serve(self) -> None:
        """Wait until training is over; a rank that does not compute does nothing else in this thread."""
        self._mine.wait()

    @property
    def begins_round(self) -> bool:
        """Whether the micro-batch at hand is the first of its round."""
        return self._round is not None and self._round.samples == 0

    @property
    def draw(self) -> int:
        """The position in this rank's data at which the round at hand began."""
        return 0 if self._round is None else self._round.action.draw

    # The end

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None:
                self._end()
            elif isinstance(error, ASKED_TO_END):
                self.interrupt()
        finally:
            self._heeded()
            self._close(LINGER_SECONDS if error is None or isinstance(error, ASKED_TO_END) else 0.5, error)
            if error is not None and self._ranks.place.transport == "mpi":
                leave_at_once()
        if error is None:
            for participant in self._ranks.participants.values():
                participant.check()

    def _end(self) -> None:
        if self.computes:
            if not self._mine.ended:  # the loop was left before training was over
                self._leave()
        else:
            self._serve()
        others = [participant for rank, participant in self._ranks.participants.items() if rank != self.rank]
        if others:
            self._mine.close(LINGER_SECONDS)
        for participant in others:
            # It ends by itself, after an evaluation perhaps, unless ours was left behind.
            participant.wait(None if self._mine.finish is not None else LINGER_SECONDS * 2)

    def _leave(self) -> None:
        nothing = torch.zeros_like(self._flat.gradients)
        self._mine.leave(nothing, tuple(buffer.clone() for buffer in self._flat.buffers))

    def interrupt(self) -> None:
        """End in order, as after Ctrl-C: a checkpoint of where it was, then goodbye."""
        if self._ranks.checkpointing is not None and not self._ranks.participants[0].ended:
            self._ranks.checkpointing.close()
            self._ranks.checkpointing.save()
        if self.computes:
            self._leave()
        for rank, participant in self._ranks.participants.items():
            if rank != self.rank or not self.computes:
                participant.leave()

    def _close(self, linger_seconds: float, error: BaseException | None) -> None:
        if self._ranks.checkpointing is not None:
            self._ranks.checkpointing.close()
        for participant in self._ranks.participants.values():
            participant.close(linger_seconds)
        self._write_ends(error)
        self._ranks.close_files()
        result = self._result()
        if result is not None:
            self._flat.load(result.parameters, result.buffers)

    def _write_ends(self, error: BaseException | None) -> None:
        for participant in self._ranks.participants.values():
            record = participant.ended_record()
            if record.failure is None and isinstance(error, ASKED_TO_END):
                record = msgspec.structs.replace(record, failure="it was interrupted")
            elif record.failure is None and participant.finish is None:
                why = "it did not end in time" if error is None else f"{type(error).__name__}: {error}"
                record = msgspec.structs.replace(record, failure=why)
            participant.write_last(record)

    def _result(self) -> Finish | None:
        finishes = [self._ranks.participants[rank].finish for rank in sorted(self._ranks.participants)]
        return next((finish for finish in finishes if finish is not None and finish.failure is None), None)

    @property
    def finish(self) -> Finish | None:
        """How this rank's node ended."""
        return self._mine.finish

    @property
    def records(self) -> RunRecords:
        """What was recorded: by all ranks where rank 0 is here and they share a directory, otherwise by those here."""
        require(self._mine.ended, "the run is still going on; look after the with block")
        if self._records is None:
            directory = self._ranks.place.directory
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
