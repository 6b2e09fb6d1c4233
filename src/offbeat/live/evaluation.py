"""Evaluation on a thread of its own, with a copy of the model, so that it never delays an update."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from offbeat.core.actions import Evaluate
from offbeat.core.events import Evaluated
from offbeat.core.flat import FlatModule
from offbeat.core.workload import Measured
from offbeat.errors import ContractViolation, RunFailed
from offbeat.failpoints import failpoint
from offbeat.transports.tensor_threads import TensorThread

Evaluation = Callable[[nn.Module], Any]
"""Takes a model in evaluation mode; returns loss, (loss, accuracy), or {"loss": …, "accuracy": …}.

A third value, or "accuracy_top5", is the top-5 accuracy.
"""

Measure = Callable[[Evaluate], Measured]
"""Maps the parameters and buffers of a request to loss and accuracies."""


class ModelMeasure:
    """A `Measure` that loads parameters and buffers into a model.

    model: the model, which should be a copy.
    evaluate: measures it for records.
    validate: measures it for scores, on other data; None: there are no scores.
    """

    def __init__(self, model: nn.Module, evaluate: Evaluation, validate: Evaluation | None = None) -> None:
        self._flat = FlatModule(model)
        self._evaluate = evaluate
        self._validate = validate

    @property
    def can_score(self) -> bool:
        return self._validate is not None

    def __call__(self, request: Evaluate) -> Measured:
        self._flat.load(request.parameters, request.buffers)
        self._flat.module.eval()
        evaluate = self._validate if request.is_score else self._evaluate
        if evaluate is None:
            raise ContractViolation(
                "the strategy asks for a score, but there is nothing to score with; pass one: "
                "offbeat.join(model, strategy, until, validate=lambda model: loss)"
            )
        with torch.no_grad():
            return _measured(evaluate(self._flat.module))


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


class Evaluator:
    """Carries out `Evaluate` actions in order, on a thread that starts with the first one."""

    def __init__(
        self,
        measure: Measure,
        deliver: Callable[[Evaluated], None],
        fail: Callable[[BaseException], None],
        now: Callable[[], float],
    ) -> None:
        """Build the evaluator.

        measure: computes loss and accuracies.
        deliver: receives each result, on the evaluation thread.
        fail: receives an exception that `measure` raised.
        now: the time of the run, in seconds.
        """
        self._measure = measure
        self._deliver = deliver
        self._fail = fail
        self._now = now
        self._queue: queue.SimpleQueue[Evaluate | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, request: Evaluate) -> None:
        """Queue an evaluation."""
        if self._thread is None:
            self._thread = TensorThread(
                self._run, "offbeat evaluation", finish=functools.partial(self._queue.put, None), limit_seconds=None
            )
            self._thread.start()
        self._queue.put(request)

    def close(self) -> None:
        """Stop after the running evaluation, which is waited for: here a few seconds, at exit until it ends."""
        self._queue.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _run(self) -> None:
        try:
            while (request := self._queue.get()) is not None:
                failpoint("evaluation")
                measured = self._measure(request)
                self._deliver(Evaluated(self._now(), request.version, *measured))
        except Exception as error:
            self._fail(error)
