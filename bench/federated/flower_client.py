"""What a client of Flower's simulation does; Ray's processes import it, which `__main__` would not allow."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from task import IMAGES, Task, train_epoch
from torch import nn


@functools.lru_cache(maxsize=1)
def state_of_actor(path: str) -> tuple[Task, nn.Module]:
    """The task and a model, once in each process."""
    torch.set_num_threads(1)
    task = Task.load(Path(path))
    model = task.model()
    torch.optim.SGD(model.parameters())  # imports torch's compiler
    return task, model


def train(message: Message, context: Context) -> Message:
    config = message.content["config"]
    task, model = state_of_actor(config["path"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    steps = 0
    if config["measured"]:
        client, round_index = int(context.node_config["partition-id"]), int(config["server-round"]) - 1
        steps = train_epoch(model, *task.examples(round_index, client))
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": IMAGES, "steps": steps}),
    }
    return Message(content=RecordDict(content), reply_to=message)
