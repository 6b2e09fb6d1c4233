"""Workloads: model, training data, loss and evaluation.

A `Workload` has a model and data of your own. A `NamedWorkload` is a configuration that builds one, and is selected by
its name on the command line and in TOML.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from offbeat.core.actions import Samples
from offbeat.core.configuration import Configuration, Family, build
from offbeat.core.device_transfer import on_device
from offbeat.core.examples import Data, Examples, data_of, is_whole
from offbeat.core.optimizers import Adam, Optimizer
from offbeat.core.randomness import stream
from offbeat.core.recalibration import recalibrate
from offbeat.core.splits import Shared, Split
from offbeat.core.validation import check_instance, require
from offbeat.errors import ConfigurationError, ContractViolation

EVALUATION_CHUNK = 512
"""Examples per evaluation batch: enough to keep a core busy, few enough for any memory."""

RECALIBRATION_BATCH = 128
"""Examples per batch whose statistics are averaged: a usual batch size of training."""

EVALUATION_MAX = 2048
"""Training examples that are evaluated if there is no test data."""

VALIDATION_SHARE = 0.1
"""The part of the training data that is taken for validation if a workload has no validation data of its own."""

VALIDATION_MAX = 2000
"""The most examples that are taken from the training data for validation."""


@dataclass(frozen=True)
class Target(Configuration):
    """The goal of a run: an accuracy of at least, or a loss of at most, `value` on the test data."""

    metric: Literal["accuracy", "loss"] = "accuracy"
    """accuracy or loss"""
    value: float = 0.9
    """the value to reach"""

    def __post_init__(self) -> None:
        require(
            self.metric != "accuracy" or 0 < self.value <= 1,
            f"an accuracy to reach is above 0 and at most 1, but is {self.value!r}; for a loss write loss:{self.value}",
        )

    @classmethod
    def shorthand(cls, text: str) -> Target:
        """`accuracy:0.9`, `loss:0.1`, or just `0.9` for an accuracy."""
        metric, _, value = text.rpartition(":")
        return build(cls, {"metric": metric or "accuracy", "value": value}, "target")

    def reached(self, loss: float, accuracy: float | None) -> bool:
        if self.metric == "loss":
            return loss <= self.value
        return accuracy is not None and accuracy >= self.value


class Measured(NamedTuple):
    """The result of an evaluation: mean loss, accuracy and top-5 accuracy.

    Accuracies are None if the model is no classifier; top-5 accuracy also with 5 classes or fewer.
    """

    loss: float
    accuracy: float | None = None
    accuracy_top5: float | None = None


@dataclass(frozen=True, eq=False)
class Workload(Configuration):
    """A model with its data and loss.

    `loss` is, for example, `functools.partial(F.cross_entropy, reduction="none")`. `train` and `test` are `Examples`, a
    pair of tensors or arrays, or a map-style dataset. `optimizer` and `until` are the defaults for strategies and runs
    that set none.
    """

    model: Callable[[], nn.Module] | nn.Module
    """a function that creates the model, or a module, which is copied"""
    loss: Callable[[Tensor, Tensor], Tensor]
    """`loss(outputs, targets)` returns one loss per sample"""
    train: Any
    """the training data"""
    test: Any = None
    """the test data; none: up to 2,048 training examples"""
    split: Split = Shared()
    """which examples each worker draws from"""
    optimizer: Optimizer = Adam(lr=3e-3)
    """the default optimizer"""
    target: Target | None = None
    """the goal that runs are timed against; none: they are not timed"""
    until: Samples = Samples(60_000)
    """the default length of a run, in samples"""
    label: str = "custom"
    """the name in records and tables"""
    recalibrate: int = 0
    """training examples that the statistics of batch norm are computed from, anew before each evaluation; 0: none"""
    validation: Any = None
    """data that strategies score models on; none: a tenth of the training data, at most 2,000 examples, if needed"""

    def __post_init__(self) -> None:
        require(
            isinstance(self.model, nn.Module) or callable(self.model),
            f"Workload.model must be a module or a function that makes one, but is {type(self.model).__name__}",
        )
        require(callable(self.loss), f"Workload.loss must be a function, but is {self.loss!r}")
        require(
            isinstance(self.recalibrate, int) and (self.recalibrate == 0 or self.recalibrate >= 2),
            f"Workload.recalibrate must be 0, or 2 training examples or more, but is {self.recalibrate!r}",
        )
        check_instance(self.split, (Split,), "Workload.split", "offbeat.workloads.Sharded()")
        object.__setattr__(self, "optimizer", Optimizer.adopt(self.optimizer) or self.optimizer)
        check_instance(self.optimizer, (Optimizer,), "Workload.optimizer", "offbeat.SGD(lr=0.1)")
        check_instance(self.target, (Target, type(None)), "Workload.target", 'offbeat.Target("accuracy", 0.9)')
        check_instance(self.until, (Samples,), "Workload.until", "offbeat.Samples(60_000)")
        object.__setattr__(self, "train", data_of(self.train))
        for name in ("test", "validation"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, data_of(getattr(self, name)))

    def initial_model(self, seed: int) -> nn.Module:
        """A new model, whose initial parameters depend on the seed only; the global random state is unchanged."""
        if isinstance(self.model, nn.Module):
            model: Any = copy.deepcopy(self.model)
        else:
            with torch.random.fork_rng(devices=[]):
                # torch.manual_seed would reach GPU generators too, which are not forked here.
                torch.default_generator.manual_seed(seed)
                model = self.model()
        require(
            isinstance(model, nn.Module),
            f"Workload.model must make a torch.nn.Module, but made {type(model).__name__}",
        )
        trainable = any(parameter.requires_grad for parameter in model.parameters())
        require(trainable, f"the model {type(model).__name__} has no parameters to train")
        return model.train()  # type: ignore[no-any-return]

    def losses(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The differentiable losses of a batch on the device of the model, one per sample."""
        return self._outputs_and_losses(model, batch)[1]

    @functools.cached_property
    def with_validation(self) -> Workload:
        """This workload with validation data: its own, or a part of the training data that is not trained on.

        The part is random, and the same for every seed. Raises ConfigurationError for fewer than 2 training examples.
        """
        if self.validation is not None:
            return self
        length = len(self.train)
        require(length >= 2, "there is 1 training example, so none is left to score models on; give 2 or more")
        count = max(1, min(VALIDATION_MAX, int(VALIDATION_SHARE * length)))
        order = stream(0, "validation").permutation(length)
        train, validation = (self.train.subset(np.sort(part)) for part in (order[count:], order[:count]))
        return dataclasses.replace(self, train=train, validation=validation)

    def evaluate(self, model: nn.Module) -> Measured:
        """Mean loss on the test data, and accuracies if outputs and targets are those of a classifier."""
        return self._measure(model, self.evaluation_examples)

    def validate(self, model: nn.Module) -> Measured:
        """As `evaluate`, on the validation data; raises ContractViolation if there are none."""
        if self.validation is None:
            raise ContractViolation(
                "the strategy asks for a score, but the workload has no validation data; let `scores_models` of the "
                "strategy be True, or give Workload(validation=...)"
            )
        return self._measure(model, self.validation)

    def _measure(self, model: nn.Module, data: Data) -> Measured:
        device = next(model.parameters()).device
        if self.recalibrate:
            recalibrate(model, self._recalibration_batches())
        loss, correct, among_five, classifies, classes = 0.0, 0, 0, True, 0
        with torch.no_grad(), _evaluating(model):
            for first in range(0, len(data), EVALUATION_CHUNK):
                batch = on_device(data.between(first, first + EVALUATION_CHUNK), device)
                outputs, losses = self._outputs_and_losses(model, batch)
                loss += float(losses.sum(dtype=torch.float64))
                classifies = classifies and _is_classification(outputs, batch[1])
                if classifies:
                    classes = outputs.shape[1]
                    correct += int((outputs.argmax(1) == batch[1]).sum())
                    among_five += _among_five(outputs, batch[1])
        return Measured(
            loss / len(data),
            correct / len(data) if classifies else None,
            among_five / len(data) if classifies and classes > 5 else None,
        )

    @functools.cached_property
    def evaluation_examples(self) -> Data:
        """The data of `evaluate`: the test data, or evenly spaced training examples."""
        data: Data = self.train if self.test is None else self.test
        if self.test is not None or len(data) <= EVALUATION_MAX:
            return data
        return Examples(*data.take(spaced(len(data), EVALUATION_MAX)))

    def _recalibration_batches(self) -> Iterator[Tensor]:
        """Inputs of evenly spaced training examples."""
        for indices in torch.split(spaced(len(self.train), self.recalibrate), RECALIBRATION_BATCH):
            if len(indices) > 1:  # batch norm fails on a single sample
                yield self.train.take(indices)[0]

    def _outputs_and_losses(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        outputs = model(inputs)
        losses = self.loss(outputs, targets)
        if not isinstance(losses, Tensor) or losses.shape != (len(targets),):
            raise _wrong_shape(losses, len(targets))
        return outputs, losses


def spaced(length: int, count: int) -> Tensor:
    """`count` evenly spaced indices of `length`, or all of them if there are no more."""
    return torch.linspace(0, length - 1, min(count, length), dtype=torch.float64).long()


def _wrong_shape(losses: Any, samples: int) -> ConfigurationError:
    if not isinstance(losses, Tensor):
        return ConfigurationError(f"the loss must return a tensor with one loss per sample, not {losses!r}")
    if losses.dim() == 0:
        advice = "type: loss=functools.partial(F.cross_entropy, reduction='none')"
    else:
        advice = "average what belongs to one sample; type: losses.flatten(1).mean(1)"
    return ConfigurationError(
        f"the loss must return one loss per sample, here of shape ({samples},), "
        f"but returned shape {tuple(losses.shape)}; {advice}"
    )


def _is_classification(outputs: Any, targets: Tensor) -> bool:
    return is_whole(targets) and targets.dim() == 1 and isinstance(outputs, Tensor) and outputs.dim() == 2


def _among_five(outputs: Tensor, targets: Tensor) -> int:
    likeliest = outputs.topk(min(5, outputs.shape[1]), sorted=False).indices
    return int((likeliest == targets[:, None]).sum())


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards exactly those modules that were in training mode are in it again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@dataclass(frozen=True)
class Size:
    """The size of a workload: parameters, examples, and classes if it has any."""

    model: str
    parameters: int
    train: int
    test: int
    classes: int | None


@dataclass(frozen=True, kw_only=True)
class NamedWorkload(Family, ABC):
    """A workload with a name."""

    summary: ClassVar[str] = ""
    """Description in one line."""

    paper: ClassVar[str] = ""
    """The publication of the data or the problem."""

    split: Split = Shared()
    """which examples each worker draws from: shared, sharded, by-label, by-group, dirichlet"""

    layers: ClassVar[str] = ""
    """Description of the model in a few words."""

    strategy_defaults: ClassVar[Mapping[str, Any]] = {}
    """Fields of strategies that suit the workload, where a command line or an experiment file leaves them out."""

    @abstractmethod
    def build(self) -> Workload:
        """The model, data and loss."""

    def size(self) -> Size:
        """Its size; overridden by workloads whose data may not be downloaded yet."""
        workload = self.build()
        targets = workload.train.targets
        return Size(
            self.layers,
            sum(parameter.numel() for parameter in workload.initial_model(0).parameters()),
            len(workload.train),
            len(workload.evaluation_examples),
            len(targets.unique()) if is_whole(targets) else None,
        )
