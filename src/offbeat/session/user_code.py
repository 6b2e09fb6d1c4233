"""What a user's loop hands over: losses and evaluations, taken as they come or refused with one sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.engines.evaluator import Measure
from offbeat.errors import ConfigurationError, RunFailed
from offbeat.flat import FlatModule
from offbeat.messages import Buffers
from offbeat.validation import require

Evaluation = Callable[[nn.Module], Any]
"""Takes a model in evaluation mode; returns loss, (loss, accuracy), or {"loss": …, "accuracy": …}."""


def summed(loss: Any, reduction: str, count: int) -> Tensor:
    """The sum of the losses of a micro-batch."""
    if not isinstance(loss, Tensor):
        raise ConfigurationError(f"run.backward takes the tensor of losses, but was given {type(loss).__name__}")
    if reduction == "none":
        if loss.dim() == 1 and len(loss) == count:
            return loss.sum()
        if loss.dim() == 0:
            raise ConfigurationError(
                f"run.backward takes one loss per sample, here of shape ({count},), but was given a scalar; type "
                "reduction='none' in the loss function, or run.backward(loss, reduction='mean')"
            )
        raise ConfigurationError(
            f"run.backward takes one loss per sample, here of shape ({count},), but was given shape "
            f"{tuple(loss.shape)}; average what belongs to one sample, for example losses.flatten(1).mean(1)"
        )
    require(reduction in ("sum", "mean"), f"reduction must be 'none', 'sum' or 'mean', but is {reduction!r}")
    require(
        loss.dim() == 0,
        f"with reduction={reduction!r} the loss must be a scalar, but has shape {tuple(loss.shape)}; "
        "leave reduction out",
    )
    return loss * count if reduction == "mean" else loss


def measure_with(model: nn.Module, evaluate: Evaluation) -> Measure:
    """The user's evaluation, on a copy of the model, as the engine wants it."""
    flat = FlatModule(model)

    def measure(parameters: Tensor, buffers: Buffers) -> tuple[float, float | None]:
        flat.load(parameters, buffers)
        flat.module.eval()
        with torch.no_grad():
            return _measured(evaluate(flat.module))

    return measure


def _measured(value: Any) -> tuple[float, float | None]:
    if isinstance(value, Mapping):
        value = value.get("loss"), value.get("accuracy")
    pair = value if isinstance(value, tuple | list) else (value, None)
    try:
        loss, accuracy = pair
        return float(loss), None if accuracy is None else float(accuracy)
    except (TypeError, ValueError):
        raise RunFailed(
            f"evaluate must return a loss, (loss, accuracy) or a dictionary with these, but returned {value!r}"
        ) from None
