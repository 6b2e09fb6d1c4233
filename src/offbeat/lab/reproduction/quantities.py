"""What is measured of runs, one number a run; intervals over seeds are made of these.

A quantity is of all runs of a case at once, for some can only be had by looking at all of them: a training loss that
every run reaches, for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from offbeat.errors import unknown
from offbeat.records import curves
from offbeat.records.files import RunRecords
from offbeat.records.metrics import Summary


@dataclass(frozen=True)
class Measured:
    """A run, and its summary."""

    case: str
    records: RunRecords
    summary: Summary

    @property
    def strategy(self) -> str:
        return self.records.header.label

    @property
    def seed(self) -> int:
        return self.records.header.seed


Values = list[float | None]


@dataclass(frozen=True)
class Quantity:
    """How it is called in a table and on an axis, and how it is had of the runs of one case, one value each."""

    head: str
    of: Callable[[Sequence[Measured], int | None], Values]
    """Takes the runs, and how many samples an epoch has."""
    digits: int | None = None
    """Digits after the point; none: three that count."""
    in_bytes: bool = False


def _read(read: Callable[[Summary], float | None]) -> Callable[[Sequence[Measured], int | None], Values]:
    return lambda runs, epoch: [read(run.summary) for run in runs]


def _per_epoch(runs: Sequence[Measured], epoch: int | None) -> Values:
    return [
        run.summary.seconds / run.summary.samples * epoch if epoch and run.summary.samples else None for run in runs
    ]


def _per_step(runs: Sequence[Measured], epoch: int | None) -> Values:
    return [run.summary.seconds / run.summary.updates if run.summary.updates else None for run in runs]


def _training_loss(runs: Sequence[Measured], epoch: int | None) -> Values:
    ends = [curves.training_loss_curve(run.records).values for run in runs]
    return [float(values[-1]) if len(values) else None for values in ends]


def _seconds_to_common_loss(runs: Sequence[Measured], epoch: int | None) -> Values:
    """When the training loss was first as low as every run of the case becomes at least."""
    made = [curves.training_loss_curve(run.records) for run in runs]
    if not made or any(not len(curve.values) for curve in made):
        return [None] * len(made)
    level = common_training_loss(runs)
    return [float(curve.over[int(np.argmax(curve.values <= level))]) for curve in made]


MARGIN = 1.05
"""So much above the lowest loss is looked at: at the very end a curve is so flat that its noise decides."""


def common_training_loss(runs: Sequence[Measured]) -> float:
    """A training loss that all of these runs reach: 5% above the lowest that there is."""
    return MARGIN * max(float(curves.training_loss_curve(run.records).values.min()) for run in runs)


QUANTITIES: dict[str, Quantity] = {
    "seconds_to_target": Quantity("time to target (s)", _read(lambda run: run.seconds_to_target)),
    "samples_to_target": Quantity("samples to target", _read(lambda run: run.samples_to_target)),
    "bytes_to_target": Quantity("bytes to target (B)", _read(lambda run: run.bytes_to_target), in_bytes=True),
    "seconds_to_common_loss": Quantity("time to a training loss that all reach (s)", _seconds_to_common_loss),
    "seconds": Quantity("time (s)", _read(lambda run: run.seconds)),
    "seconds_per_epoch": Quantity("time per epoch (s)", _per_epoch),
    "seconds_per_step": Quantity("time per step (s)", _per_step),
    "accuracy": Quantity("accuracy at the end", _read(lambda run: run.accuracy), 3),
    "accuracy_top5": Quantity("top-5 accuracy at the end", _read(lambda run: run.accuracy_top5), 3),
    "loss": Quantity("loss at the end", _read(lambda run: run.loss), 3),
    "training_loss": Quantity("training loss at the end", _training_loss, 3),
    "consensus_distance": Quantity("consensus distance (squared)", _read(lambda run: run.consensus_distance)),
    "exchanges_per_gradient": Quantity("averagings per gradient", _read(lambda run: run.exchanges_per_gradient)),
    "samples_per_update": Quantity("samples per update", _read(lambda run: run.samples_per_update)),
    "updates": Quantity("updates", _read(lambda run: run.updates)),
    "staleness_mean": Quantity("staleness (versions)", _read(lambda run: run.staleness_mean)),
    "idle_share": Quantity("share of time idle", _read(lambda run: run.idle_share), 2),
    "bytes_sent": Quantity("bytes sent (B)", _read(lambda run: run.bytes_sent), in_bytes=True),
}


def quantity(name: str) -> Quantity:
    if name not in QUANTITIES:
        raise unknown("quantity", name, QUANTITIES)
    return QUANTITIES[name]
