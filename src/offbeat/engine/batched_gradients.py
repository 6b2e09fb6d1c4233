"""The gradients of several rounds in one call: `torch.func.vmap` over rounds, each with parameters of its own.

A call of torch costs microseconds however little it computes, and a round of a small model is a few dozen calls. For
all rounds of a group together there are as many calls as for one. Results are those of `GradientComputer` up to
rounding. Which models vmap takes, and for which it is faster, is in `batching.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from offbeat.core.device_transfer import on_device
from offbeat.core.examples import Batch, Data, Order
from offbeat.core.flat import FlatModule
from offbeat.core.workload import Workload
from offbeat.engine.gradient_accumulator import GradientResult, is_result_finite


@dataclass(frozen=True)
class RoundInputs:
    """What a round differentiates: the loss of the draws [first, stop) of a rank, at these parameters."""

    parameters: Tensor
    order: Order
    first: int
    stop: int


class BatchedGradients:
    """Differentiates a workload's model for several rounds at once.

    workload: its data and loss.
    flat: its model; its values are not used, and not changed.
    """

    def __init__(self, workload: Workload, flat: FlatModule) -> None:
        self._data: Data = workload.train
        self._layout = flat.layout
        self._device = flat.parameters.device
        self._summed = _SummedLoss(workload, flat.module)
        self._names = [name for name, one in self._summed.named_parameters() if one.requires_grad]
        differentiated = grad_and_value(self._loss)
        self._at_shared = vmap(differentiated, in_dims=(None, 0, 0), randomness="error")
        self._at_own = vmap(differentiated, in_dims=(0, 0, 0), randomness="error")

    def compute(self, rounds: Sequence[RoundInputs]) -> list[GradientResult]:
        """The sum of gradients of each round; all rounds have equally many samples."""
        inputs, targets = self._batches(rounds)
        parameters = [one.parameters for one in rounds]
        if _are_equal(parameters):
            gradients, losses = self._at_shared(tuple(self._layout.shaped(parameters[0])), inputs, targets)
        else:
            gradients, losses = self._at_own(self._views(torch.stack(parameters)), inputs, targets)
        flat = gradients[0].new_empty((len(rounds), self._layout.numel))
        for view, gradient in zip(self._views(flat), gradients, strict=True):
            view.copy_(gradient)
        finite = (flat.sum(1).isfinite() & losses.isfinite()).tolist()
        # Each result has memory of its own: nodes change gradients in place, and keep some longer than others.
        return [
            GradientResult(vector.clone(), loss, (), is_finite or is_result_finite(vector, loss, ()))
            for vector, loss, is_finite in zip(flat, losses.tolist(), finite, strict=True)
        ]

    def _loss(self, parameters: tuple[Tensor, ...], inputs: Tensor, targets: Tensor) -> Tensor:
        named = dict(zip(self._names, parameters, strict=True))
        loss: Tensor = functional_call(self._summed, named, (inputs, targets))
        return loss

    def _views(self, stacked: Tensor) -> tuple[Tensor, ...]:
        """The parameters in the rows of a matrix, one tensor for each parameter of the model."""
        rows, width = stacked.shape
        return tuple(
            stacked.as_strided((rows, *part.shape), (width, *part.stride), part.start)
            for part in self._layout.parameters
        )

    def _batches(self, rounds: Sequence[RoundInputs]) -> Batch:
        """The samples of all rounds: as many rows as rounds."""
        if type(self._data).drawn is Data.drawn:
            indices = torch.cat([one.order.take(one.first, one.stop) for one in rounds])
            taken = on_device(self._data.take(indices), self._device)
            sizes = len(rounds), rounds[0].stop - rounds[0].first
            inputs, targets = (part.reshape(*sizes, *part.shape[1:]) for part in taken)
            return inputs, targets
        drawn = [on_device(self._data.drawn(one.order, one.first, one.stop), self._device) for one in rounds]
        return torch.stack([batch[0] for batch in drawn]), torch.stack([batch[1] for batch in drawn])


class _SummedLoss(nn.Module):
    """The sum of the losses of a batch, as a module: `functional_call` replaces the parameters of one."""

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._workload = workload

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self._workload.losses(self.model, (inputs, targets)).sum()


def _are_equal(vectors: Sequence[Tensor]) -> bool:
    """Whether all vectors have the same values: results must not depend on which of them share memory."""
    first = vectors[0]
    return all(vector is first or torch.equal(vector, first) for vector in vectors)
