"""Federated averaging as a loop in plain PyTorch: what all contestants are measured against."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from task import BATCH, CLIENTS, IMAGES, RATE, report, task_of_arguments
from torch import nn


def main() -> None:
    task = task_of_arguments()
    model = task.model()
    parameters = list(model.parameters())
    steps = 0
    start = time.perf_counter()
    server = [parameter.detach().clone() for parameter in parameters]
    for round_index in range(task.rounds):
        totals = [torch.zeros_like(values) for values in server]
        for client in range(CLIENTS):
            with torch.no_grad():
                for parameter, values in zip(parameters, server, strict=True):
                    parameter.copy_(values)
            optimizer = torch.optim.SGD(parameters, lr=RATE)
            images, labels = task.examples(round_index, client)
            for first in range(0, IMAGES, BATCH):
                batch = slice(first, first + BATCH)
                optimizer.zero_grad()
                F.cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
                steps += 1
            with torch.no_grad():
                for total, parameter in zip(totals, parameters, strict=True):
                    total.add_(parameter)
        server = [total.div_(CLIENTS) for total in totals]
    report(time.perf_counter() - start, steps, nn.utils.parameters_to_vector(server))


if __name__ == "__main__":
    main()
