"""Federated averaging by pfl, in one process, as in its benchmarks; without evaluation."""

from __future__ import annotations

import time
import types

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from task import BATCH, CLIENTS, RATE, Task, report, task_of_arguments
from torch import Tensor, nn


class Clients:
    """Makes the data set of a client, in the order of the round that it is asked for."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._asked = 0

    def __call__(self, client: int) -> PyTorchTensorDataset:
        round_index, self._asked = self._asked // CLIENTS, self._asked + 1
        return PyTorchTensorDataset(self._task.examples(round_index, client), user_id=client)


def main() -> None:
    task = task_of_arguments()
    np.random.seed(0)
    module = task.model()
    steps = 0

    def loss(self: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        return F.cross_entropy(self(images), labels)

    def metrics(self: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Weighted]:
        return {"examples": Weighted(len(labels), len(labels))}  # pfl evaluates the first round in any case

    module.loss = types.MethodType(loss, module)
    module.metrics = types.MethodType(metrics, module)
    server = torch.optim.SGD(module.parameters(), lr=1.0)
    start = time.perf_counter()
    model = PyTorchModel(module, local_optimizer_create=torch.optim.SGD, central_optimizer=server)
    sampler = get_user_sampler("minimize_reuse", list(range(CLIENTS)))
    data = FederatedDataset(Clients(task), sampler)
    algorithm = FederatedAveraging()
    algorithm.run(
        NNAlgorithmParams(
            central_num_iterations=task.rounds,
            evaluation_frequency=task.rounds,
            train_cohort_size=CLIENTS,
            val_cohort_size=None,
        ),
        SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByUser()]),
        model,
        NNTrainHyperParams(local_learning_rate=RATE, local_num_epochs=1, local_batch_size=BATCH),
    )
    report(time.perf_counter() - start, steps, nn.utils.parameters_to_vector(module.parameters()))


if __name__ == "__main__":
    main()
