"""Recalibration of batch norm: running statistics computed anew, for the parameters as they are now.

While parameters change, running statistics lag behind them, the more the staler gradients are. Code that compares final
parameters, as APAM's, therefore computes the statistics again before each evaluation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.core.buffer_merge import batch_norm_layers
from offbeat.core.device_transfer import to_device
from offbeat.errors import ConfigurationError


def recalibrate(model: nn.Module, batches: Iterable[Any]) -> int:
    """Replace the running statistics of batch norm by means over these batches; returns the number of batches.

    Forward passes without gradients; only batch norm is in training mode, so that dropout, which is inactive in
    evaluation too, does not change the statistics. A model without running statistics is left as it is.

    model: the model, changed in place
    batches: inputs, or tuples or dictionaries as a DataLoader yields them, whose first entry is the inputs

    Raises ConfigurationError if there is no batch.
    """
    layers = list(batch_norm_layers(model).values())
    if not layers:
        return 0
    momenta = [layer.momentum for layer in layers]
    training = {module: module.training for module in model.modules()}
    device = next(model.parameters()).device
    count = 0
    model.eval()
    try:
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # the mean over all batches
            layer.train()
        with torch.no_grad():
            for batch in _iterate(batches):
                model(to_device(_inputs(batch), device))
                count += 1
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        for module, was_training in training.items():
            module.training = was_training
    if count == 0:
        raise ConfigurationError(
            "recalibrate was given no batches, so batch norm has no statistics now; give it at least one batch of "
            "training data, for example a DataLoader"
        )
    return count


def _iterate(batches: Any) -> Iterable[Any]:
    if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
        raise ConfigurationError(
            f"recalibrate needs batches to iterate over, but got {type(batches).__name__}; give it a DataLoader, or a "
            "list of batches"
        )
    return batches


def _inputs(batch: Any) -> Tensor:
    if isinstance(batch, dict):
        batch = tuple(batch.values())
    first = next(iter(batch), None) if isinstance(batch, Sequence) else batch
    if not isinstance(first, Tensor) or first.dim() == 0:
        raise ConfigurationError(
            "recalibrate needs batches that are tensors of several samples, or tuples that begin with one, but got "
            f"{'a number' if isinstance(first, Tensor) else type(first).__name__}"
        )
    if len(first) < 2:
        raise ConfigurationError(
            "recalibrate got a batch of a single sample, but batch norm needs 2 or more; give larger batches, for "
            "example DataLoader(..., batch_size=128, drop_last=True)"
        )
    return first
