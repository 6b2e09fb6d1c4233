"""`offbeat.join`: a training loop of the user's own computes the gradients of a rank.

    with offbeat.join(model, strategy, until=offbeat.Samples(1_000_000)) as run:
        for x, y in run.batches(train_set):
            run.backward(F.cross_entropy(model(x), y))

Started without a launcher, the process holds every rank that the strategy needs for one worker, and the loop is that
worker. Started by `offbeat launch`, torchrun, mpirun or srun, it is one rank of many. On a rank that does not compute,
such as the server, `batches` yields nothing and returns at the end of training.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from offbeat.cluster.cluster import Cluster
from offbeat.core.actions import Budget
from offbeat.core.flat import master_dtype
from offbeat.core.splits import Shared, Split
from offbeat.core.strategy import Cadence, EverySeconds, Strategy
from offbeat.core.validation import check_instance, require
from offbeat.core.workload import Target
from offbeat.engine.experiment import Experiment, parse_until
from offbeat.engine.gradient_accumulator import GradientAccumulator
from offbeat.errors import ConfigurationError
from offbeat.failpoints import failpoint
from offbeat.live.batch_sources import BatchSource, indexed_source
from offbeat.live.evaluation import Evaluation
from offbeat.live.live_round import LiveRound
from offbeat.live.local_ranks import LIVE_SECONDS_PER_SAMPLE
from offbeat.live.session_base import SessionBase, loop_options, rank_info_for
from offbeat.live.session_options import RECORDS_MAX_BYTES, LiveOptions
from offbeat.live.session_tracking import session_trackers
from offbeat.live.stateful_source import loader_source
from offbeat.tracking.named_trackers import Track

GRAD_SCALE_MIN = 1024.0
"""Smaller factors may be weights of a loss."""


def join(
    model: nn.Module,
    strategy: Strategy,
    until: Budget | int | str,
    *,
    evaluate: Evaluation | None = None,
    validate: Evaluation | None = None,
    every: Cadence | None = EverySeconds(1.0),  # noqa: B008  (frozen)
    target: Target | None = None,
    cluster: Cluster | None = None,
    bytes_per_second: float | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    checkpoint_seconds: float | None = 30.0,
    records_max_bytes: float | None = RECORDS_MAX_BYTES,
    track: Track = None,
) -> Session:
    """Join the training of `model`; use it in a `with` statement. Raises `ConfigurationError` for values it cannot use.

    At the start of each round torch's default generator is seeded from `seed`, the rank and the position in its data,
    so that dropout and the like depend on the samples and not on timing.

    model: the model that the loop trains; its parameters are overwritten with the newest ones.
    strategy: the algorithm.
    until: how long all ranks together train: `Samples(1_000_000)`, `Seconds(90)`, or short, 1_000_000 or "90s".
    evaluate: `evaluate(model)` returns held-out loss, or (loss, accuracy); called on a copy, in a thread of its own.
    validate: as `evaluate`, on data that neither it nor the loop uses: populations score their members by it, and
        without it by their training loss; needs `evaluate`.
    every: how often to evaluate.
    target: the loss or accuracy to which the summary gives the time.
    cluster: delays to inject, and how long a silent peer is waited for.
    bytes_per_second: rate limit from this process to each of its peers; None for no limit.
    seed: of the data order, of torch's default generator in each round, and of all random decisions.
    out: directory for records and checkpoints; None keeps records in memory.
    resume: continue the run in `out` from its checkpoint.
    checkpoint_seconds: interval between two checkpoints; None for no checkpoints.
    records_max_bytes: bytes of records of each rank from which one record stands for several; None for no limit.
    track: follow the run in "tensorboard", "wandb" or "mlflow": a name, an `offbeat.Tracker`, or a list of these.
    """
    check_instance(model, (nn.Module,), "the model", "offbeat.join(model, strategy)")
    check_instance(strategy, (Strategy,), "the strategy", "offbeat.AsyncFixed(optimizer=offbeat.SGD(lr=0.1))")
    check_instance(every, (Cadence, type(None)), "every", "every=offbeat.EverySeconds(1)")
    experiment = Experiment(
        None,
        strategy.with_default_timing(LIVE_SECONDS_PER_SAMPLE),
        until=parse_until(until),
        evaluate=every,
        target=target,
        cluster=Cluster() if cluster is None else cluster,
        bytes_per_second=bytes_per_second,
        seed=seed,
    )
    live = LiveOptions(checkpoint_seconds=checkpoint_seconds, records_max_bytes=records_max_bytes)
    rank_info = rank_info_for(out)
    has_directory = rank_info.directory is not None
    require(has_directory or not resume, "resume=True needs the directory of the run; type out='runs/mine'")
    rank_info = dataclasses.replace(rank_info, resume=resume or rank_info.resume)
    trackers = session_trackers(track, rank_info)
    return Session(model, loop_options(experiment, live, rank_info), rank_info, evaluate, validate).tracked_by(trackers)


class Session(SessionBase):
    """The part of one process in a run, around a loop over `batches` that calls `backward`.

    `rank`, `processes` and `computes` describe the process; `summary` and `records` the run, once it has ended.
    """

    _accumulator: GradientAccumulator
    _pending = 0
    """Samples of the micro-batch that `backward` has not been called for yet."""
    _weight: float | None = None
    """The sum of the weights of the samples in the round; None where none was given."""
    _entered = False

    # The loop

    def __enter__(self) -> Session:
        require(not self._entered, "this session has been used already; call offbeat.join again")
        self._entered = True
        self._accumulator = GradientAccumulator(self._flat, self._pool)
        self._start()
        return self

    def batches(
        self,
        data: Any,
        *,
        split: Split = Shared(),  # noqa: B008  (frozen)
        exactly_once: bool | None = None,
    ) -> Iterator[Any]:
        """Yield micro-batches of the size that the strategy asks for, until the end of training.

        On a rank that does not compute, yields nothing and returns at the end of training.

        data: a pair of tensors, a dataset, a DataLoader, or another iterable of batches. Indexable data is drawn in an
            order that depends on seed and rank alone, so that a restarted worker repeats lost samples. So does one with
            a loader that has `state_dict` and `load_state_dict`, such as torchdata's StatefulDataLoader; samples of
            other iterables are counted, but cannot be repeated.
        split: how the examples are divided among the workers; every worker draws from all of them by default.
        exactly_once: True: raise `ConfigurationError` if lost samples cannot be repeated; False: count the samples of a
            loader alone, without saving its state; None: repeat them if that is possible.
        """
        require(self._entered, "the session has not begun; type: with offbeat.join(model, strategy) as run:")
        if not self.computes:
            self._runner.wait()
            return
        source = self._source(data, split, exactly_once)
        while (current := self._runner.next_round()) is not None:
            self._begin_round(current)
            source.begin_round(current.action.draw, current.action.loader)
            while next_microbatch_size := current.next_microbatch_size():
                current.inject_hang()
                batch_and_size = source.take(current.action.draw + current.samples, next_microbatch_size)
                if batch_and_size is None:
                    return
                batch, self._pending = batch_and_size
                samples, began = self._pending, time.monotonic()
                yield batch
                require(
                    self._pending == 0,
                    "a micro-batch was taken from run.batches and not differentiated; call run.backward(losses) once "
                    "for each",
                )
                current.samples += samples
                current.inject_slowdown(time.monotonic() - began)
            result = self._accumulator.end()  # its memory returns to the pool when the message has left
            loader = source.end_round()
            if self._weight is None:
                self._complete_round(*result, loader=loader)
            else:
                mean = result.loss / self._weight
                self._complete_round(*result._replace(loss=mean * current.samples), weight=self._weight, loader=loader)

    def _source(self, data: Any, split: Split, exactly_once: bool | None) -> BatchSource:
        require(
            exactly_once in (None, False, True),
            f"exactly_once must be True, False or None, but is {exactly_once!r}",
        )
        worker = self._ranks.workers[self.rank]
        workers = max(len(self._ranks.workers), worker + 1)
        indexed = indexed_source(
            data, split, worker=worker, workers=workers, rank=self.rank, seed=self._ranks.experiment.seed
        )
        if indexed is not None:
            return indexed
        return loader_source(data, split, exactly_once=exactly_once, strategy=self.strategy, notice=self._runner.notice)

    def _begin_round(self, current: LiveRound) -> None:
        self._round, self._weight = current, None
        failpoint("round")
        current.inject_delay()  # before the generator is seeded, which an evaluation meanwhile might use
        self._accumulator.begin(self._ranks.experiment.seed, self.rank, current.action.draw)

    def backward(
        self,
        loss: Tensor,
        *,
        reduction: Literal["none", "sum", "mean"] | None = None,
        weight: float | Tensor | None = None,
        samples: int | None = None,
    ) -> None:
        """Accumulate the gradient of the current micro-batch; call it once for each.

        loss: the mean loss of the micro-batch, as loss functions return it, or one loss per sample.
        reduction: how `loss` was reduced; None: a scalar is the mean. With "sum" a scalar is the sum.
        weight: what the micro-batch counts for in the mean of an update, such as its number of tokens where sequences
            differ in length, with `loss` the mean over tokens; or a tensor of one weight per sample. None: its samples.
        samples: the size of the micro-batch, as a check; may be left out.
        """
        count = self._pending
        require(
            count > 0,
            "run.backward has no micro-batch to count: it was called twice for one, or outside run.batches; add the "
            "losses up and call it once for each micro-batch",
        )
        require(
            samples is None or samples == count,
            f"run.backward was given samples={samples}, but the micro-batch has {count}; count samples, not tokens "
            "or pixels, which go into weight, or leave samples out",
        )
        total, divisor = weighted_sum(loss, reduction, count, weight)
        self._accumulator.add(total)
        done = self._round.samples if self._round is not None else 0
        if weight is not None or self._weight is not None:
            self._weight = (done if self._weight is None else self._weight) + divisor
        self._pending = 0

    # The end

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._shut_down(error)

    def _wait_for_end(self) -> None:
        if self.computes:
            if not self._runner.ended:  # the loop was left before the end of training
                self._leave()
        else:
            self._runner.wait()
        self._wait_for_other_ranks()


def weighted_sum(loss: Any, reduction: str | None, count: int, weight: float | Tensor | None) -> tuple[Tensor, float]:
    """The sum of the losses of a micro-batch of `count` samples, and what it is divided by in a mean.

    Raises `ConfigurationError` for shapes and weights that do not fit.
    """
    if not isinstance(loss, Tensor):
        raise ConfigurationError(f"run.backward takes the tensor of losses, but was given {type(loss).__name__}")
    require(
        reduction in (None, "none", "sum", "mean"),
        f"reduction must be 'none', 'sum' or 'mean', but is {reduction!r}",
    )
    scale = _grad_scale(loss)
    require(
        scale is None,
        f"run.backward was given a loss that a GradScaler has multiplied by {scale}, and nothing divides the gradient "
        "by it; leave the scaler out, and type torch.autocast(..., dtype=torch.bfloat16), which needs none",
    )
    loss = loss.to(master_dtype(loss.dtype))  # a sum of bfloat16 has three digits
    divisor = float(count) if weight is None else _weight_sum(weight, count)
    if loss.dim() == 0:
        require(
            reduction != "none",
            f"with reduction='none' run.backward takes one loss per sample, here of shape ({count},), but was given a "
            "scalar; leave reduction out if it is the mean, or type reduction='sum'",
        )
        return (loss if reduction == "sum" else loss * divisor), divisor
    require(
        reduction in (None, "none"),
        f"with reduction={reduction!r} the loss must be a scalar, but has shape {tuple(loss.shape)}; "
        "leave reduction out",
    )
    require(
        loss.dim() == 1 and len(loss) == count,
        f"run.backward takes a scalar or one loss per sample, here of shape ({count},), but was given shape "
        f"{tuple(loss.shape)}; average what belongs to one sample, for example losses.flatten(1).mean(1)",
    )
    if weight is None:
        return loss.sum(), divisor
    require(
        isinstance(weight, Tensor) and weight.shape == loss.shape,
        f"one loss per sample goes with one weight per sample, a tensor of shape ({count},); give that, or the mean "
        "loss with one weight",
    )
    return (loss * weight).sum(), divisor


def _grad_scale(loss: Tensor) -> float | None:
    """The factor of a GradScaler, where the loss is its product: no other factor is a power of two, and a tensor.

    The scale of a scaler begins at 65536. Python numbers in a product are float64 or int64.
    """
    factor = getattr(loss.grad_fn, "_saved_other", None) if "Mul" in type(loss.grad_fn).__name__ else None
    if not isinstance(factor, Tensor) or factor.dim() > 0 or factor.dtype is not torch.float32:
        return None
    value = float(factor)
    return value if value >= GRAD_SCALE_MIN and math.frexp(value)[0] == 0.5 else None


def _weight_sum(weight: Any, count: int) -> float:
    """The sum of the weights of a micro-batch."""
    if isinstance(weight, Tensor):
        fits = weight.dim() == 0 or tuple(weight.shape) == (count,)
        require(
            fits and not bool((weight < 0).any()),
            f"the weight of a micro-batch is a number or {count} of them that are not negative, but is a tensor of "
            f"shape {tuple(weight.shape)}{' with negative ones' if fits else ''}",
        )
        weight = float(weight.sum())
    is_number = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
    require(
        is_number and math.isfinite(weight) and weight > 0,
        f"the weight of a micro-batch must be a number greater than 0, such as its tokens, but is {weight!r}",
    )
    return float(weight)
