"""Whether gradients of several rounds are computed in one call: by a fixed rule, so that equal seeds give equal bytes.

The rule knows the work of a round, its samples times the floating-point operations of a sample, and how many workers
there are. Its constants were read off `bench/batching.py`. What `torch.vmap` does not take is found out once for each
workload, by a trial with a few samples.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from offbeat.core.compiled_modules import plain_module
from offbeat.core.device_transfer import on_device
from offbeat.core.examples import Order
from offbeat.core.flat import FlatModule
from offbeat.core.workload import Workload
from offbeat.engine.batched_gradients import BatchedGradients, RoundInputs
from offbeat.engine.gradient_computer import SAMPLES_PER_CALL_MAX
from offbeat.engine.workload_losses import has_batch_norm
from offbeat.errors import shortened

Batched = Literal["auto", "on", "off"]

GROUP_MIN = 8
"""Fewer rounds of a perceptron take longer in one call than one by one: what vmap costs does not depend on how many."""
WORKERS_MIN = 10
"""With fewer workers there are too few groups of that size."""
GROUP_MAX = 64
"""More rounds in a call are no faster, and more of them are computed in vain if the run ends before they do."""
GROUP_ELEMENTS_MAX = 1 << 24
"""Limit of rounds times parameters: there are several vectors of that length at a time."""
FLOPS_PER_ROUND_MAX = 5e6
"""Floating-point operations of the forward pass of a round from which on rounds by themselves are faster."""

WORDS_MAX = 90
"""Characters of an error that a notice quotes."""

TRIAL_SAMPLES = 2
TRIAL_ERROR_MAX = 1e-3
"""Largest difference in a trial between a gradient in a batch and one by itself, over the length of the latter."""


@dataclass(frozen=True)
class Batching:
    """Which rounds of a run are computed together."""

    group_max: int = 0
    """How many rounds are computed in one call at most; 0: each by itself."""
    group_min: int = 2
    """How many rounds are computed in one call at least."""
    samples_max: int = 0
    """The most samples of a round that is computed with others."""
    obstacle: str | None = None
    """Why no rounds are computed together although it was asked for, or would be faster."""

    def notice(self) -> str | None:
        """A sentence for the user about the obstacle; None if there is none."""
        if self.obstacle is None:
            return None
        return f"gradients of several workers are not computed together, which takes longer: the model {self.obstacle}"


def choose_batching(workload: Workload, batched: Batched, workers: int) -> Batching:
    """Apply the rule.

    workload: model, loss and data.
    batched: "auto": where it is faster; "on": wherever it is possible; "off": nowhere.
    workers: how many ranks compute.
    """
    workers_min, group_min = (WORKERS_MIN, GROUP_MIN) if batched == "auto" else (2, 2)
    if batched == "off" or workers < workers_min:
        return Batching()
    tried = try_batching(workload)
    samples_max = SAMPLES_PER_CALL_MAX
    if batched == "auto":
        samples_max = min(samples_max, int(FLOPS_PER_ROUND_MAX / tried.flops_per_sample))
    if samples_max < 1:
        return Batching()
    if tried.obstacle is not None:
        return Batching(obstacle=tried.obstacle)
    group_max = min(GROUP_MAX, GROUP_ELEMENTS_MAX // tried.parameters)
    return Batching(group_max, group_min, samples_max) if group_max >= group_min else Batching()


class Trial(NamedTuple):
    """What a trial has shown."""

    parameters: int
    """The number of parameters of the model."""
    flops_per_sample: float
    """Floating-point operations of a forward pass, two for each parameter at least."""
    obstacle: str | None
    """What the model has or does so that rounds cannot be computed together; None if they can."""


_trials: WeakKeyDictionary[Workload, Trial] = WeakKeyDictionary()


def try_batching(workload: Workload) -> Trial:
    """Try a workload, once: the result is the same for every seed."""
    trial = _trials.get(workload)
    if trial is None:
        trial = _trials[workload] = _try(workload)
    return trial


def _try(workload: Workload) -> Trial:
    # A copy, in case that the user's function makes the same model each time.
    flat = FlatModule(copy.deepcopy(workload.initial_model(0)))
    flops, obstacle = 2.0 * flat.layout.numel, _known_obstacle(flat)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("error")  # vmap warns of operations that it computes one after the other
        try:
            flops = max(flops, _flops_per_sample(workload, flat))
            if obstacle is None and not _agrees(workload, flat):
                obstacle = "has other gradients then"
        except Exception as error:  # model and loss are the user's, and may raise anything
            obstacle = obstacle or f"is refused by torch.vmap ({_first_words(error)})"
    return Trial(flat.layout.numel, flops, obstacle)


def _first_words(error: Exception) -> str:
    """The beginning of the text of an error: those of vmap go on with advice for its users."""
    text = shortened(error) or type(error).__name__
    return text if len(text) <= WORDS_MAX else f"{text[:WORDS_MAX].rsplit(' ', 1)[0]} …"


def _known_obstacle(flat: FlatModule) -> str | None:
    if has_batch_norm(flat.module):
        return "has batch norm"
    if flat.layout.buffers:
        return "has buffers, which a round may change"
    if flat.layout.dtype != flat.layout.master_dtype:
        return f"has parameters of type {str(flat.layout.dtype).removeprefix('torch.')}"
    if any(plain_module(part) is not part for part in flat.module.modules()):
        return "is compiled"
    return None


def _trial_round(workload: Workload, flat: FlatModule, rank: int) -> RoundInputs:
    order = Order(np.arange(len(workload.train)), 0, rank)
    return RoundInputs(flat.parameters.detach(), order, 0, TRIAL_SAMPLES)


def _flops_per_sample(workload: Workload, flat: FlatModule) -> float:
    first = _trial_round(workload, flat, 0)
    batch = on_device(workload.train.drawn(first.order, 0, TRIAL_SAMPLES), flat.parameters.device)
    counter: Any = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        workload.losses(flat.module, batch)
    return float(counter.get_total_flops()) / TRIAL_SAMPLES


def _agrees(workload: Workload, flat: FlatModule) -> bool:
    """Whether a round has the same gradient together with another, at the same and at other parameters."""
    batched = BatchedGradients(workload, flat)
    first, second = (_trial_round(workload, flat, rank) for rank in range(2))
    elsewhere = RoundInputs(second.parameters + 0.01, second.order, second.first, second.stop)
    flat.zero_gradients()
    batch = on_device(workload.train.drawn(first.order, 0, TRIAL_SAMPLES), flat.parameters.device)
    workload.losses(flat.module, batch).sum().backward()  # type: ignore[no-untyped-call]
    expected = flat.gradients
    together = [batched.compute([first, other])[0].gradient for other in (second, elsewhere)]
    tolerance = TRIAL_ERROR_MAX * float(expected.norm()) + 1e-12
    return all(float((gradient - expected).norm()) <= tolerance for gradient in together)
