"""`offbeat.join`: a user's own training loop as a node's compute.

    with offbeat.join(model, strategy, until=offbeat.Samples(1_000_000)) as run:
        for x, y in run.batches(train_set):
            run.backward(F.cross_entropy(model(x), y, reduction="none"))

Started alone, the process holds every rank that the strategy needs, and the loop is the one that computes. Started by
`offbeat launch`, torchrun, mpirun or srun, it is one rank of many. A rank that does not compute gets no batches: it
serves until the end.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from torch import Tensor, nn

from offbeat.cluster.cluster import Cluster
from offbeat.core.actions import Budget
from offbeat.core.splits import Shared, Split
from offbeat.core.strategy import Cadence, EverySeconds, Strategy
from offbeat.core.validation import check_instance, require, require_bandwidth_limit
from offbeat.core.workload import Target
from offbeat.errors import ConfigurationError
from offbeat.launch.rank_info import RankInfo
from offbeat.live.batch_sources import batch_source_for
from offbeat.live.evaluation import Evaluation
from offbeat.live.local_ranks import LIVE_SECONDS_PER_SAMPLE, SessionOptions
from offbeat.live.node_runner import LiveRound
from offbeat.live.session_base import LINGER_SECONDS, SessionBase, parse_until, rank_info_for


def join(
    model: nn.Module,
    strategy: Strategy,
    until: Budget | int | str,
    *,
    evaluate: Evaluation | None = None,
    every: Cadence | None = EverySeconds(1.0),  # noqa: B008  (frozen)
    target: Target | None = None,
    cluster: Cluster | None = None,
    bytes_per_second: float | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    checkpoint_seconds: float | None = 30.0,
) -> Session:
    """Take part in the training of `model`; use it in a `with` statement.

    `until` is how long to train: `Samples(1_000_000)` or `Seconds(90)`. `evaluate(model)` measures held-out loss and
    accuracy, on a copy, `every` so often, and never in the way of an update. `bytes_per_second` is what this process
    may send to each of its peers. With `out`, records and checkpoints are written to that directory, and `resume=True`
    goes on from there.
    """
    check_instance(model, (nn.Module,), "the model", "offbeat.join(model, strategy)")
    check_instance(strategy, (Strategy,), "the strategy", "offbeat.AsyncFixed(optimizer=offbeat.SGD(lr=0.1))")
    until = parse_until(until)
    check_instance(every, (Cadence, type(None)), "every", "every=offbeat.EverySeconds(1)")
    check_instance(cluster, (Cluster, type(None)), "the cluster", "cluster=offbeat.Cluster()")
    require_bandwidth_limit(bytes_per_second)
    rank_info = rank_info_for(out)
    has_directory = rank_info.directory is not None
    require(has_directory or not resume, "resume=True needs the directory of the run; type out='runs/mine'")
    rank_info = dataclasses.replace(rank_info, resume=resume or rank_info.resume)
    options = SessionOptions(
        until=until,
        seed=seed,
        cluster=cluster or Cluster(),
        bytes_per_second=bytes_per_second,
        every=every,
        target=target,
        checkpoint_seconds=checkpoint_seconds,
        reserved=frozenset(range(rank_info.processes)),
    )
    return Session(model, strategy.with_default_timing(LIVE_SECONDS_PER_SAMPLE), options, rank_info, evaluate)


class Session(SessionBase):
    """A process's part in a run. `rank`, `processes` and `computes` say which; `summary` how it went."""

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy,
        options: SessionOptions,
        rank_info: RankInfo,
        evaluate: Evaluation | None,
    ) -> None:
        super().__init__(model, strategy, options, rank_info, evaluate)
        self._pending = 0
        self._losses: list[Tensor] = []
        self._entered = False

    # The loop

    def __enter__(self) -> Session:
        require(not self._entered, "this session has been used already; call offbeat.join again")
        self._entered = True
        self._begin()
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
        source = batch_source_for(
            data,
            split,
            worker=self._ranks.workers[self.rank],
            workers=max(len(self._ranks.workers), self._ranks.workers[self.rank] + 1),
            rank=self.rank,
            seed=self._ranks.options.seed,
        )
        while (current := self._runner.next_round()) is not None:
            self._begin_round(current)
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
            gradient = self._pool.copy(self._flat.gradients)  # used again as soon as the message with it has left
            self._hand_in(gradient, sum(map(float, self._losses)))

    def _begin_round(self, current: LiveRound) -> None:
        self._round = current
        self._losses = []
        self._flat.zero_gradients()
        current.hold_up()

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
        self._runner.wait()

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
        self._over(error)

    def _end(self) -> None:
        if self.computes:
            if not self._runner.ended:  # the loop was left before training was over
                self._leave()
        else:
            self._serve()
        others = [runner for rank, runner in self._ranks.runners.items() if rank != self.rank]
        if others:
            self._runner.close(LINGER_SECONDS)
        for runner in others:
            # It ends by itself, after an evaluation perhaps, unless ours was left behind.
            runner.wait(None if self._runner.finish is not None else LINGER_SECONDS * 2)


def summed(loss: Any, reduction: str, count: int) -> Tensor:
    """The sum of the losses of a micro-batch."""
    if not isinstance(loss, Tensor):
        raise ConfigurationError(f"run.backward takes the tensor of losses, but was given {type(loss).__name__}")
    if reduction == "none":
        if loss.dim() == 1 and len(loss) == count:
            return loss.sum()
        if loss.dim() == 0:
            raise ConfigurationError(
                f"run.backward takes one loss per sample, here of shape ({count},), but was given a scalar; type "
                "reduction='none' in the loss function, or run.backward(loss, reduction='mean')"
            )
        raise ConfigurationError(
            f"run.backward takes one loss per sample, here of shape ({count},), but was given shape "
            f"{tuple(loss.shape)}; average what belongs to one sample, for example losses.flatten(1).mean(1)"
        )
    require(reduction in ("sum", "mean"), f"reduction must be 'none', 'sum' or 'mean', but is {reduction!r}")
    require(
        loss.dim() == 0,
        f"with reduction={reduction!r} the loss must be a scalar, but has shape {tuple(loss.shape)}; "
        "leave reduction out",
    )
    return loss * count if reduction == "mean" else loss
