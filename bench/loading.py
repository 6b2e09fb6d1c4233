"""How much of training time goes into making batches of CIFAR-10: drawn, cropped, mirrored, normalised.

    python bench/loading.py --json

Batches are made as training makes them, and differentiated as the engines do it, on one thread. Both are timed by the
processor's clock within each repeat, interleaved over models; the share is the median over repeats. Needs
`offbeat data get cifar10`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from offbeat.core.examples import Order
from offbeat.core.flat import FlatModule
from offbeat.lab.workloads.images import Cifar10
from offbeat.lab.workloads.models import AllCNN, CifarCNN, LeNet5, Model

HEADLINE = (CifarCNN(0.25), 64)
CASES: tuple[tuple[Model, int], ...] = (
    HEADLINE,
    (CifarCNN(0.25), 16),
    (CifarCNN(0.125), 64),
    (CifarCNN(), 64),
    (AllCNN(0.25), 64),
    (LeNet5(), 64),
)
REPEATS = 7
SECONDS_PER_REPEAT = 0.5


@dataclass
class Case:
    """A model and a micro-batch, and what was measured of them, in seconds per sample."""

    model: Model
    microbatch: int
    loading: list[float] = field(default_factory=list)
    training: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._workload = Cifar10(model=self.model).build()
        self._flat = FlatModule(self._workload.initial_model(0))
        self._order = Order(np.arange(len(self._workload.train)), 0, 1)
        self._draw = 0
        self._steps = 1
        loading, training = self._timed()  # also warms up
        self._steps = max(1, round(SECONDS_PER_REPEAT / (self.microbatch * (loading + training))))

    def repeat(self) -> None:
        loading, training = self._timed()
        self.loading.append(loading)
        self.training.append(training)

    def _timed(self) -> tuple[float, float]:
        loading = training = 0.0
        for _ in range(self._steps):
            began = time.process_time()
            batch = self._workload.train.drawn(self._order, self._draw, self._draw + self.microbatch)
            made = time.process_time()
            self._flat.zero_gradients()
            self._workload.losses(self._flat.module, batch).sum().backward()
            loading += made - began
            training += time.process_time() - made
            self._draw += self.microbatch
        samples = self._steps * self.microbatch
        return loading / samples, training / samples

    def row(self) -> dict[str, str | int | float]:
        shares = [load / (load + train) for load, train in zip(self.loading, self.training, strict=True)]
        return {
            "model": f"{self.model.name}:{self.model.width:g}",
            "microbatch": self.microbatch,
            "loading_share": statistics.median(shares),
            "loading_microseconds": 1e6 * statistics.median(self.loading),
            "training_microseconds": 1e6 * statistics.median(self.training),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="the share of training time that making batches takes")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = [Case(model, microbatch) for model, microbatch in CASES]
    for _ in range(arguments.repeats):
        for case in cases:
            case.repeat()
    rows = [case.row() for case in cases]
    if arguments.json:
        print(json.dumps({"loading_share": rows[0]["loading_share"], "rows": rows}, indent=2))
        return
    print(f"{'model':16} {'micro-batch':>11} {'making a sample':>16} {'training on it':>15} {'share':>7}")
    for row in rows:
        print(
            f"{row['model']:16} {row['microbatch']:11} {row['loading_microseconds']:13.1f} µs "
            f"{row['training_microseconds']:12.0f} µs {row['loading_share']:7.1%}"
        )


if __name__ == "__main__":
    main()
