"""Federated averaging as a loop in plain PyTorch: what all contestants are measured against."""

from __future__ import annotations

import time

import torch
from task import CLIENTS, report, task_of_arguments, train_epoch
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
            steps += train_epoch(model, *task.examples(round_index, client))
            with torch.no_grad():
                for total, parameter in zip(totals, parameters, strict=True):
                    total.add_(parameter)
        server = [total.div_(CLIENTS) for total in totals]
    report(time.perf_counter() - start, steps, nn.utils.parameters_to_vector(server))


if __name__ == "__main__":
    main()
