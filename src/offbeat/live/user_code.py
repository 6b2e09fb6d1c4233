"""What a user hands over: losses, evaluations, optimizers; taken as they come or refused with one sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.core.flat import FlatModule
from offbeat.core.messages import Buffers
from offbeat.core.validation import check_instance, require
from offbeat.core.workload import Measured
from offbeat.errors import ConfigurationError, RunFailed
from offbeat.live.evaluator import Measure

Evaluation = Callable[[nn.Module], Any]
"""Takes a model in evaluation mode; returns loss, (loss, accuracy), or {"loss": …, "accuracy": …}.

A third value, or "accuracy_top5", is how often the label was among the five likeliest.
"""


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

    def measure(parameters: Tensor, buffers: Buffers) -> Measured:
        flat.load(parameters, buffers)
        flat.module.eval()
        with torch.no_grad():
            return _measured(evaluate(flat.module))

    return measure


def _measured(value: Any) -> Measured:
    if isinstance(value, Mapping):
        value = tuple(value.get(name) for name in Measured._fields)
    values = value if isinstance(value, tuple | list) else (value, None)
    try:
        loss, *accuracies = Measured(*values)
        return Measured(float(loss), *(None if accuracy is None else float(accuracy) for accuracy in accuracies))
    except (TypeError, ValueError):
        raise RunFailed(
            f"evaluate must return a loss, (loss, accuracy) or a dictionary with these, but returned {value!r}"
        ) from None


def check_unwrapped(model: nn.Module) -> None:
    """A model of the user's own, and not yet one of DDP's."""
    check_instance(model, (nn.Module,), "the model", "offbeat.AsyncDataParallel(model, optimizer)")
    require(
        not isinstance(model, nn.parallel.DistributedDataParallel),
        "the model is wrapped in DistributedDataParallel, which would make every peer wait for all others; leave that "
        "wrapper out, or pass model.module",
    )


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Every trained parameter is stepped, and whatever is stepped is averaged."""
    example = "torch.optim.SGD(model.parameters(), lr=0.1)"
    check_instance(optimizer, (torch.optim.Optimizer,), "the optimizer", example)
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = dict(model.named_parameters())
    trained = [name for name, parameter in named.items() if parameter.requires_grad]
    missing = [name for name in trained if id(named[name]) not in stepped]
    require(
        not trained or len(missing) < len(trained),
        f"the optimizer holds none of the model's parameters, perhaps those of a copy; type {example}",
    )
    require(
        not missing,
        f"the optimizer does not hold {len(missing)} of the model's {len(trained)} trainable parameters "
        f"({', '.join(missing)[:80]}); give it all of model.parameters(), or freeze these with requires_grad_(False)",
    )
    require(
        stepped <= {id(parameter) for parameter in named.values()},
        "the optimizer also holds parameters that are not the model's, and these would not be averaged; put all that "
        "is trained into one module, for example nn.ModuleList([model, head])",
    )


def mean_loss(loss: Tensor | float) -> float:
    """The mean loss that a step is told of, as a number."""
    try:
        return float(loss.detach() if isinstance(loss, Tensor) else loss)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigurationError(
            "peer.step takes the mean loss of its samples as one number, but was given "
            f"{f'shape {tuple(loss.shape)}' if isinstance(loss, Tensor) else repr(loss)}; type loss=loss.mean()"
        ) from None
