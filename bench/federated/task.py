"""Federated averaging as all contestants of `bench/simulators.py` compute it: model, images, batches, result.

Imports torch and NumPy alone, since each contestant runs in an environment of its own. A contestant is a script that is
given the file of a task and a directory, into which it writes its result.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLIENTS = 50
IMAGES = 50
"""Images per client."""
BATCH = 10
STEPS = IMAGES // BATCH
"""Local steps of a client in a round: one epoch."""
RATE = 0.01
"""Learning rate of the clients. At 0.1, rounding errors of the CNN grow a hundredfold in a round."""
CLASSES = 10
HIDDEN = 64

MODELS = ("cnn", "cnn-dropout", "perceptron")
PARAMETERS, RESULT = "parameters.npy", "result.json"


@dataclass(frozen=True)
class Task:
    """What a contestant computes, the same for all of them.

    images, labels: those of each client: clients × images × …
    orders: the order in which each client takes its images, for each round: rounds × clients × images
    initial: the initial parameters of the model, as one vector
    """

    name: str
    images: Tensor
    labels: Tensor
    orders: Tensor
    initial: Tensor

    @property
    def rounds(self) -> int:
        return len(self.orders)

    def model(self) -> nn.Module:
        """A new model with the initial parameters."""
        model = new_model(self.name)
        nn.utils.vector_to_parameters(self.initial.clone(), model.parameters())
        return model

    def examples(self, round_index: int, client: int) -> tuple[Tensor, Tensor]:
        """The images and labels of a client in the order of a round; consecutive ones are a batch."""
        order = self.orders[round_index, client]
        return self.images[client, order], self.labels[client, order]

    def save(self, path: Path) -> None:
        arrays = {name: getattr(self, name).numpy() for name in ("images", "labels", "orders", "initial")}
        np.savez(path, name=np.array(self.name), **arrays)

    @classmethod
    def load(cls, path: Path) -> Task:
        with np.load(path) as arrays:
            tensors = (torch.from_numpy(arrays[name]) for name in ("images", "labels", "orders", "initial"))
            return cls(str(arrays["name"]), *tensors)


def train_epoch(model: nn.Module, images: Tensor, labels: Tensor) -> int:
    """One local epoch of a client; the number of steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for first in range(0, IMAGES, BATCH):
        batch = slice(first, first + BATCH)
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    return STEPS


def new_model(name: str) -> nn.Module:
    """`cnn`: the small CNN of pfl's benchmarks without dropout; `cnn-dropout`: with it; `perceptron`: one layer."""
    if name == "perceptron":
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    dropouts = (nn.Dropout(0.25), nn.Dropout(0.5)) if name == "cnn-dropout" else (nn.Identity(), nn.Identity())
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        dropouts[0],
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128),
        nn.ReLU(),
        dropouts[1],
        nn.Linear(128, CLASSES),
    )
    for module in model:
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    return model


def task_of_arguments() -> Task:
    """The task named on the command line; from then on torch computes in one thread."""
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # the first optimizer of a process imports torch's compiler
    return Task.load(Path(sys.argv[1]))


def report(seconds: float, steps: int, parameters: Tensor) -> None:
    """Write the result of a contestant.

    seconds: wall time of training, without imports, reading the task and starting processes
    steps: local steps that were taken
    parameters: the final parameters of the server, as one vector
    """
    directory = Path(sys.argv[2])
    np.save(directory / PARAMETERS, parameters.detach().numpy())
    (directory / RESULT).write_text(json.dumps({"seconds": seconds, "steps": steps}))
