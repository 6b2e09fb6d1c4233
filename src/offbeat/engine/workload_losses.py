"""The losses of a workload's model, with an explanation where model, loss and data do not fit together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from offbeat.core.device_transfer import on_device
from offbeat.core.flat import master_dtype
from offbeat.core.workload import Measured, Workload
from offbeat.errors import ConfigurationError


class WorkloadLosses:
    """Computes the losses of batches and evaluates.

    An error on the first batch is a `ConfigurationError`. Later ones are raised unchanged, except that of batch norm on
    a single sample.

    workload: data and loss.
    model: the model of the workload, which is trained.
    """

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        self._workload = workload
        self._model = model
        self._parameter = next(one for one in model.parameters() if one.requires_grad)
        self.batch_norm = has_batch_norm(model)
        self._has_succeeded = False

    def of(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The differentiable losses of a batch, one per sample, in a dtype to add them up in."""
        batch = on_device(batch, self._parameter.device)
        if self._has_succeeded and len(batch[1]) > 1:
            losses = self._workload.losses(self._model, batch)
        else:
            with self._explain_errors(batch):
                losses = self._workload.losses(self._model, batch)
        return losses.to(master_dtype(losses.dtype))

    def evaluate(self, *, is_score: bool = False) -> Measured:
        """Loss and accuracies on the test data, or for a score on the validation data."""
        with self._explain_errors(self._workload.evaluation_examples.between(0, 2)):
            measure = self._workload.validate if is_score else self._workload.evaluate
            return Measured(*measure(self._model))

    @contextmanager
    def _explain_errors(self, batch: tuple[Tensor, Tensor]) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            if self.batch_norm and len(batch[1]) == 1 and isinstance(error, ValueError):
                raise ConfigurationError(
                    "the model has batch norm, which needs at least 2 samples at a time, but a micro-batch of 1 was "
                    "asked for; raise microbatch (and batch) to 2 or more"
                ) from None
            if self._has_succeeded:
                raise
            described = [f"{tensor.dtype} of shape {tuple(tensor.shape)}".removeprefix("torch.") for tensor in batch]
            raise ConfigurationError(
                f"the model or the loss failed on its first batch (inputs: {described[0]}; targets: {described[1]}; "
                f"parameters: {str(self._parameter.dtype).removeprefix('torch.')}): {str(error).splitlines()[0]}"
            ) from error
        self._has_succeeded = True


def has_batch_norm(module: nn.Module) -> bool:
    """Batch norm depends on the size of a batch even if it tracks no statistics and has no buffers."""
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())
