"""Federated averaging by Flower's simulation: one Ray actor for each core, each of one thread; without evaluation.

Actors read the task, and import torch, in a round that is not measured and takes no steps.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from flower_client import train
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from task import CLIENTS, report, task_of_arguments
from torch import nn


def summed_steps(contents: list[RecordDict], weight: str) -> MetricRecord:
    return MetricRecord({"steps": sum(content["metrics"]["steps"] for content in contents)})


def serve(grid: Grid, context: Context) -> None:
    task = task_of_arguments()
    model = task.model()
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=CLIENTS, train_metrics_aggr_fn=summed_steps)
    arrays = ArrayRecord(model.state_dict())
    path = str(Path(sys.argv[1]).resolve())
    strategy.start(grid, arrays, num_rounds=1, train_config=ConfigRecord({"path": path, "measured": False}))
    start = time.perf_counter()
    config = ConfigRecord({"path": path, "measured": True})
    result = strategy.start(grid, arrays, num_rounds=task.rounds, train_config=config)
    seconds = time.perf_counter() - start
    model.load_state_dict(result.arrays.to_torch_state_dict())
    steps = sum(int(metrics["steps"]) for metrics in result.train_metrics_clientapp.values())
    report(seconds, steps, nn.utils.parameters_to_vector(model.parameters()))


def main() -> None:
    os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")
    server, client = ServerApp(), ClientApp()
    server.main()(serve)
    client.train()(train)
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=CLIENTS, backend_config=resources)


if __name__ == "__main__":
    main()
