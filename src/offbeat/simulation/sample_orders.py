"""The order in which each rank of a simulation draws its samples."""

from __future__ import annotations

from offbeat.core.examples import Order
from offbeat.core.workload import Workload
from offbeat.simulation.process import Process


class SampleOrders:
    """The order in which each rank draws its samples.

    workload: its training data and how they are split.
    seed: the seed of the run.
    workers: how many ranks compute.
    """

    def __init__(self, workload: Workload, seed: int, workers: int) -> None:
        self._workload = workload
        self._seed = seed
        self._workers = workers
        self._orders: dict[int, Order] = {}

    def of(self, process: Process) -> Order:
        """The order of a process that computes; created with its first round, since it takes time and memory."""
        order = self._orders.get(process.rank)
        if order is None:
            assert process.worker is not None
            split, targets = self._workload.split, self._workload.train.targets
            indices = split.indices(targets, process.worker, self._workers, self._seed)
            order = self._orders[process.rank] = Order(indices, self._seed, process.rank)
        return order
