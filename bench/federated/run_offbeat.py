"""Federated averaging by `ob.LocalSGD`, simulated with its virtual clock; the third argument is `batched`."""

from __future__ import annotations

import functools
import sys
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F
from task import BATCH, CLIENTS, IMAGES, RATE, STEPS, report, task_of_arguments
from torch import Tensor

import offbeat as ob
from offbeat.core.splits import Split
from offbeat.records.schema import Round


@dataclass(frozen=True)
class ByClient(Split):
    """Every worker has the images of one client, which are consecutive."""

    def indices(self, targets: Tensor, worker: int, workers: int, seed: int) -> npt.NDArray[np.int64]:
        return np.arange(worker * IMAGES, (worker + 1) * IMAGES)


def main() -> None:
    task = task_of_arguments()
    images, labels = task.images.flatten(0, 1), task.labels.flatten()
    workload = ob.Workload(
        model=task.model,
        loss=functools.partial(F.cross_entropy, reduction="none"),
        train=(images, labels),
        test=(images[:1], labels[:1]),  # the end of a run is evaluated; other contestants evaluate nothing
        split=ByClient(),
    )
    strategy = ob.LocalSGD(every=STEPS, batch=BATCH, microbatch=BATCH, optimizer=ob.SGD(lr=RATE))
    until = ob.Samples(task.rounds * CLIENTS * IMAGES)
    batched: object = sys.argv[3]
    start = time.perf_counter()
    run = ob.simulate(workload, strategy, until=until, workers=CLIENTS, evaluate=None, batched=batched)  # type: ignore[arg-type]
    seconds = time.perf_counter() - start
    assert run.finish is not None, run.summary.failure
    steps = sum(isinstance(record, Round) and record.samples > 0 for record in run.records.records)
    report(seconds, steps, run.finish.parameters)


if __name__ == "__main__":
    main()
