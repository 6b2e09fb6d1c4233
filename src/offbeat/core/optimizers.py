"""Optimizers as frozen configurations that update a flat vector in place.

`optimizer.build(parameters, layout)` passes shaped views of the flat parameters to `torch.optim`, fused where torch
supports it, so that every torch optimizer and parameter groups work. It returns a `Stepper`, which makes one update per
mean gradient. Optimizers and schedulers of a user's own are in `torch_optimizers.py`.

Weight decay is part of the update: it is applied once per update, at the current parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from offbeat.core.compiled_modules import plain_name
from offbeat.core.configuration import Family
from offbeat.core.device_transfer import to_host
from offbeat.core.flat import Layout
from offbeat.core.schedules import Milestones, Schedule, WarmUp, rate_at
from offbeat.core.torch_optimizers import (
    EXAMPLE,
    Groups,
    TorchParts,
    Views,
    build_parts,
    check_scheduler,
    described,
    instances_of,
    is_usable,
)
from offbeat.core.validation import require, require_field, require_not_negative, require_positive
from offbeat.errors import ConfigurationError

DAMPED_KEYS = ("lr", "betas", "momentum")
"""The keys of a parameter group that the damping of one update changes."""
HEAVY_BALL = (torch.optim.SGD, torch.optim.RMSprop)
"""Classes whose `momentum` sums gradients; in others it may mean something else, and is left alone."""


@dataclass(frozen=True, kw_only=True)
class Optimizer(Family):
    """How a mean gradient becomes an update. A member creates a torch optimizer."""

    lr: float | Schedule | None = None
    """learning rate, or a schedule of it; none: torch's"""
    clip_norm: float | None = None
    """largest 2-norm of the mean gradient over all parameters, to which it is clipped; none: no clipping"""
    decay_1d: bool = True
    """weight decay on parameters of fewer than 2 dimensions (biases, norms) too"""

    def __post_init__(self) -> None:
        if not isinstance(self.lr, Schedule):
            require_not_negative(self, "lr")
        require_positive(self, "clip_norm")

    def build(self, parameters: Tensor, layout: Layout) -> Stepper:
        """A stepper that updates `parameters`, a flat vector of this layout, in place."""
        return Stepper(self, parameters, layout)

    @classmethod
    def adopt(cls, given: Any) -> Optimizer | None:
        """The configuration for what a PyTorch user has; None if this is nothing of the kind."""
        named = isinstance(given, Optimizer) or (isinstance(given, type) and issubclass(given, Optimizer))
        return TorchOptimizer(given) if is_usable(given) and not named else None

    def for_module(self, module: nn.Module) -> Self:
        """This configuration for the parameters of a module, which an optimizer that is built already refers to."""
        return self

    def describe(self) -> str:
        """Class and settings in one line, for records."""
        return repr(self)

    def torch_parts(self, views: Views, groups: Groups, fused: bool | None) -> TorchParts:
        """The torch optimizers of these views, and their schedulers.

        views: the parameters by name
        groups: the same, as groups of one optimizer
        fused: True if torch has fused kernels, otherwise None
        """
        return TorchParts([self.torch_optimizer(groups, fused)])

    def torch_optimizer(self, groups: Groups, fused: bool | None) -> torch.optim.Optimizer:
        """The torch optimizer of these groups. `fused` is True if torch has fused kernels, otherwise None."""
        raise NotImplementedError

    def before_step(self, groups: Groups, update: int) -> None:
        """Called before each update; `update` counts from 1."""


@dataclass(frozen=True)
class BuiltIn(Optimizer):
    """The base class of the named optimizers, whose own fields are arguments of `torch_class`."""

    torch_class: ClassVar[Callable[..., torch.optim.Optimizer]]
    has_fused_kernels: ClassVar[bool] = True

    lr: float | Schedule = 1e-3
    """learning rate, or a schedule of it"""
    _: KW_ONLY
    weight_decay: float = 0.0
    """weight decay per update"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_field(self, "lr", self.lr is not None, "must be a number or a schedule, but is None")
        require_not_negative(self, "weight_decay")

    def torch_optimizer(self, groups: Groups, fused: bool | None) -> torch.optim.Optimizer:
        common = {item.name for item in fields(Optimizer)}
        own = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in common}
        return type(self).torch_class(groups, **own, **({"fused": fused} if self.has_fused_kernels else {}))


@dataclass(frozen=True)
class SGD(BuiltIn, name="sgd"):
    """Stochastic gradient descent, with optional momentum."""

    torch_class = torch.optim.SGD

    lr: float | Schedule = 0.05
    """learning rate, or a schedule of it"""
    momentum: float = 0.0
    """momentum factor, from 0 to below 1"""
    nesterov: bool = False
    """use Nesterov momentum"""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_fraction(self, "momentum")
        require(self.momentum > 0 or not self.nesterov, "SGD.nesterov needs momentum; add momentum=0.9")


@dataclass(frozen=True)
class RMSprop(BuiltIn, name="rmsprop"):
    """Gradients divided by a running root mean square of themselves.

    Its decay is TensorFlow's default, with which anytime mini-batch was published; torch's default is 0.99.
    """

    torch_class = torch.optim.RMSprop
    # torch's default is foreach on a GPU only, which on a CPU takes 1.35 times as long.
    has_fused_kernels = False

    alpha: float = 0.9
    """smoothing factor of the running mean square, from 0 to below 1; torch's default is 0.99"""
    eps: float = 1e-8
    """added to the divisor"""
    momentum: float = 0.0
    """momentum factor, from 0 to below 1"""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_fraction(self, "alpha", "momentum")
        require_positive(self, "eps")


@dataclass(frozen=True)
class Adam(BuiltIn, name="adam"):
    """Adam as in torch: weight decay is added to the gradient."""

    torch_class: ClassVar[Callable[..., torch.optim.Optimizer]] = torch.optim.Adam

    betas: tuple[float, float] = (0.9, 0.999)
    """smoothing factors of the running means of gradients and of their squares, from 0 to below 1"""
    eps: float = 1e-8
    """added to the divisor"""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_fraction(self, "betas")
        require_positive(self, "eps")


@dataclass(frozen=True)
class AdamW(Adam, name="adamw"):
    """Adam with decoupled weight decay, applied to the parameters directly."""

    torch_class = torch.optim.AdamW

    weight_decay: float = 0.01
    """weight decay per update, times the learning rate"""


@dataclass(frozen=True)
class AMSGrad(Adam, name="amsgrad"):
    """AMSGrad in the form of APAM (Xu et al.), for update k:

        m = β1 m + (1−β1) g;  v = β2 v + (1−β2) g²;  v̂ = max(v̂, v);  x −= lr·√(1−β2^k)/(1−β1^k) · m/(√v̂ + ε)

    It differs from `torch.optim.Adam(amsgrad=True)`, which has ε·√(1−β2^k) in place of ε, for tiny gradients.
    """

    torch_class = staticmethod(partial(torch.optim.Adam, amsgrad=True))

    def before_step(self, groups: Groups, update: int) -> None:
        for group in groups:
            group["eps"] = self.eps / (1.0 - self.betas[1] ** update) ** 0.5

    @classmethod
    def like(cls, optimizer: Optimizer) -> AMSGrad:
        """AMSGrad with the fields that it shares with another optimizer: rate, weight decay, clipping."""
        shared = {item.name for item in fields(cls)} & {item.name for item in fields(optimizer)}
        return cls(**{name: value for name in shared if (value := getattr(optimizer, name)) is not None})


@dataclass(frozen=True)
class TorchOptimizer(Optimizer):
    """Any torch optimizer that steps without a closure, or several, with their schedulers.

        TorchOptimizer(functools.partial(torch.optim.NAdam, lr=2e-3))
        TorchOptimizer(optimizer, scheduler)  # both built on the model
        TorchOptimizer({"layers.*.weight": functools.partial(torch.optim.Muon, lr=0.02), "*": torch.optim.AdamW})

    Where a strategy has a field `optimizer`, the first argument alone will do. It has no name, so it cannot be written
    to a file or selected on the command line. `lr`, if given, overrides the rates of all groups.
    """

    make: Any
    """a function of parameters, an optimizer that is built on the model, several of these, or functions by name"""
    scheduler: Any = None
    """of `torch.optim.lr_scheduler`: built on the optimizer, or a function of it; none: constant rates"""
    scheduler_samples: int | None = None
    """samples per step of the scheduler; none: one step per update"""
    names: Mapping[int, str] | None = field(default=None, repr=False, compare=False)
    """parameter names of the model by the id of the parameter; filled in by `for_module`"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            is_usable(self.make),
            f"TorchOptimizer takes what makes a torch optimizer, such as {EXAMPLE}, but got {self.make!r}",
        )
        check_scheduler(self.make, self.scheduler)
        require_positive(self, "scheduler_samples")
        one = not isinstance(self.make, Mapping) and not instances_of(self.make)
        require(
            self.decay_1d or one,
            "decay_1d=False divides all parameters into two groups, but these optimizers have their own; set "
            "weight_decay=0 in theirs",
        )
        require(
            self.lr is None or self.scheduler is None,
            "TorchOptimizer has a rate of its own and a scheduler of torch's; leave out one of them",
        )

    def for_module(self, module: nn.Module) -> Self:
        if self.names is not None or not instances_of(self.make):
            return self  # that of a copy of the module would not be the one that the optimizer refers to
        named = module.named_parameters()
        return replace(self, names={id(parameter): plain_name(name) for name, parameter in named})

    def describe(self) -> str:
        return described(self.make)

    def torch_parts(self, views: Views, groups: Groups, fused: bool | None) -> TorchParts:
        return build_parts(self.make, self.scheduler, views, self.names, groups, fused)


@dataclass(frozen=True)
class LoopOptimizer(Optimizer):
    """Stands for the optimizer of a training loop that steps it itself: a strategy gets steps, and no gradients."""

    def describe(self) -> str:
        return "that of the training loop"

    def torch_optimizer(self, groups: Groups, fused: bool | None) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.0)  # never stepped; has no state


CIFAR_MILESTONES = (0.5, 0.75)
"""Fractions of the samples after which the learning rate drops, as is usual for CIFAR."""
IMAGENET_MILESTONES = (0.3, 0.6, 0.8)
"""The same for ImageNet."""


AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def large_batch(
    optimizer: AnyOptimizer,
    *,
    epoch_samples: int,
    until_samples: int,
    batch: int,
    workers: int,
    warmup_epochs: float = 5.0,
    milestones: tuple[float, ...] = CIFAR_MILESTONES,
    factor: float = 0.1,
    clip_norm: float | None = None,
) -> AnyOptimizer:
    """An optimizer for updates of `batch` samples from each of `workers` workers: linear scaling with warm-up.

    optimizer: the optimizer, whose `lr` is a number, the rate for 256 samples
    epoch_samples: samples in an epoch
    until_samples: samples in the whole run
    batch: samples of each worker in an update
    workers: number of workers
    warmup_epochs: epochs over which the rate rises to lr · batch · workers / 256
    milestones: fractions of `until_samples` at which the rate is multiplied by `factor`
    factor: see `milestones`
    clip_norm: clipping of the gradient; None: that of `optimizer`

    Parameters of fewer than two dimensions have no weight decay in it. Raises ConfigurationError for invalid arguments.
    """
    counts = {"epoch_samples": epoch_samples, "until_samples": until_samples, "batch": batch, "workers": workers}
    for name, count in counts.items():
        require(count >= 1, f"{name} must be 1 or more, but is {count!r}")
    require(warmup_epochs > 0, f"warmup_epochs must be greater than 0, but is {warmup_epochs!r}")
    rise = max(1, round(warmup_epochs * epoch_samples))
    drops = _drops(optimizer.lr, until_samples, milestones, factor)
    require(
        rise <= min(drops.at, default=until_samples),
        f"the warm-up takes {rise} samples, more than there are before the learning rate first drops or the run ends; "
        "make warmup_epochs smaller",
    )
    rate = WarmUp.for_batch(drops, samples=rise, batch=batch, workers=workers)
    clip = optimizer.clip_norm if clip_norm is None else clip_norm
    return replace(optimizer, lr=rate, decay_1d=False, clip_norm=clip)


def _drops(base: float | Schedule | None, until: int, shares: tuple[float, ...], factor: float) -> Milestones:
    if base is None or isinstance(base, Schedule):
        raise ConfigurationError(
            f"large_batch makes the schedule, so the optimizer's lr must be a number, the rate for 256 samples, "
            f"but is {base!r}"
        )
    require(
        all(0 < share < 1 for share in shares),
        f"milestones are fractions of the samples, above 0 and below 1, but are {shares!r}",
    )
    return Milestones(base, tuple(round(share * until) for share in shares), factor)


class Stepper:
    """Applies an optimizer to one flat vector of parameters."""

    def __init__(self, config: Optimizer, parameters: Tensor, layout: Layout) -> None:
        self._config = config
        self._layout = layout
        self.rate_factor = 1.0
        """Multiplier of the learning rate of the configuration."""
        self._updates = 0
        self._clipped: Tensor | None = None
        self._views = [nn.Parameter(view) for view in layout.shaped(parameters)]
        fused = True if parameters.device.type in ("cpu", "cuda") and parameters.is_floating_point() else None
        views = {part.name: view for part, view in zip(layout.parameters, self._views, strict=True)}
        self._torch = config.torch_parts(views, self._groups(), fused)
        self._scheduler_steps = 0

    @property
    def is_adaptive(self) -> bool:
        """Whether steps are divided by the size of past gradients, as by Adam; in torch these have an `eps`."""
        return any("eps" in optimizer.defaults for optimizer in self._torch.optimizers)

    @property
    def has_momentum(self) -> bool:
        return any(group.get("momentum", 0.0) > 0 for group in self._torch.groups)

    def step(self, gradient: Tensor, samples: int, damping: float = 1.0) -> float:
        """Make one update with a flat mean gradient, which is not changed, and return the learning rate.

        gradient: the flat mean gradient
        samples: samples applied in the run before this update: the argument of the schedule
        damping: factor on the learning rate of this update alone. Decoupled weight decay and momentum are damped with
            it, see `_damp` below.
        """
        self._schedule(samples)
        groups = self._torch.groups
        if self._config.lr is not None:
            rate = rate_at(self._config.lr, samples) * self.rate_factor
            for group in groups:
                group["lr"] = rate
        undamped = [{key: group[key] for key in DAMPED_KEYS if key in group} for group in groups]
        applied = float(groups[0]["lr"]) * damping
        if damping != 1.0:
            for optimizer in self._torch.optimizers:
                _damp(optimizer, damping)
        self._config.before_step(groups, self._updates + 1)
        # New views are cheaper than a copy of the gradient: 0.6 against 3.5 ms for 12 M parameters.
        for parameter, view in zip(self._views, self._layout.shaped(self._clip(gradient)), strict=True):
            parameter.grad = view
        for optimizer in self._torch.optimizers:
            optimizer.step()
        for parameter in self._views:
            parameter.grad = None  # the gradient may be a lease, whose memory is reused
        self._updates += 1
        for group, values in zip(groups, undamped, strict=True):
            group.update(values)  # a scheduler of the torch optimizer continues from the rate
        return applied

    def _schedule(self, samples: int) -> None:
        """Bring the schedulers to the present: to the number of updates, or of samples."""
        every = getattr(self._config, "scheduler_samples", None)
        due = self._updates if every is None else samples // every
        while self._scheduler_steps < due and self._torch.schedulers:
            self._scheduler_steps += 1
            for scheduler in self._torch.schedulers:
                scheduler.step()

    def state(self) -> dict[str, Any]:
        """A copy of everything that the next update depends on, except the parameters."""
        groups = [{key: value for key, value in g.items() if key != "params"} for g in self._torch.groups]
        return {
            "updates": self._updates,
            "rate_factor": self.rate_factor,
            "groups": _copy(groups),
            "slots": {
                part.name: {key: _copy(value) for key, value in self._slots(parameter).items()}
                for part, parameter in zip(self._layout.parameters, self._views, strict=True)
            },
            "scheduler_steps": self._scheduler_steps,
            "schedulers": [_copy(scheduler.state_dict()) for scheduler in self._torch.schedulers],
        }

    def _slots(self, parameter: nn.Parameter) -> dict[str, Any]:
        """What an optimizer remembers of a parameter."""
        states = (optimizer.state.get(parameter) for optimizer in self._torch.optimizers)
        return next((state for state in states if state), {})

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state()`, bit for bit."""
        self._updates, self.rate_factor = state["updates"], state["rate_factor"]
        self._scheduler_steps = state["scheduler_steps"]
        for scheduler, saved in zip(self._torch.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(_copy(saved))
        for group, saved in zip(self._torch.groups, state["groups"], strict=True):
            group.update(_copy(saved))
        # Not through load_state_dict, which casts state to the dtype of the parameters.
        named = zip(self._layout.parameters, self._views, strict=True)
        slots = {parameter: state["slots"][part.name] for part, parameter in named}
        for optimizer in self._torch.optimizers:
            optimizer.state.clear()
            for group in optimizer.param_groups:
                on_device = group.get("fused") or group.get("capturable")  # only then torch has steps on a GPU
                for parameter in (parameter for parameter in group["params"] if slots[parameter]):
                    values = {key: _copy(value) for key, value in slots[parameter].items()}
                    if not on_device and isinstance(step := values.get("step"), Tensor):
                        values["step"] = to_host(step)
                    optimizer.state[parameter] = values

    def _groups(self) -> Groups:
        if self._config.decay_1d:
            return [{"params": list(self._views)}]
        decayed = [view for view in self._views if view.ndim >= 2]
        undecayed = [view for view in self._views if view.ndim < 2]
        groups: Groups = [{"params": decayed}, {"params": undecayed, "weight_decay": 0.0}]
        return [group for group in groups if group["params"]]

    def _clip(self, gradient: Tensor) -> Tensor:
        if self._config.clip_norm is None:
            return gradient
        norm = float(torch.linalg.vector_norm(gradient))
        if norm <= self._config.clip_norm:
            return gradient
        if self._clipped is None:
            self._clipped = torch.empty_like(gradient)
        return torch.mul(gradient, self._config.clip_norm / norm, out=self._clipped)


def _damp(optimizer: torch.optim.Optimizer, damping: float) -> None:
    """Damp the learning rate, and the share of earlier gradients in a step.

    Momentum adds to the delay of a gradient: with μ = 0.9, as much as nine updates. With constant gradients, the length
    of a step is multiplied by `damping`, whatever the momentum: the weights of a running mean (`betas`) add up to 1;
    those of heavy-ball momentum to 1/(1 − μ), so its rate is multiplied by (1 − damping·μ)/(1 − μ).
    """
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * damping
        if "betas" in group:
            first, *others = group["betas"]
            group["betas"] = (first * damping, *others)
        elif isinstance(optimizer, HEAVY_BALL) and 0 < (momentum := group["momentum"]) < 1:
            group["momentum"] = momentum * damping
            group["lr"] = group["lr"] * (1.0 - momentum * damping) / (1.0 - momentum)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _require_fraction(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        fractions = value if isinstance(value, tuple) else (value,)
        is_valid = all(0 <= fraction < 1 for fraction in fractions)
        require_field(config, name, is_valid, f"must be at least 0 and below 1, but is {value!r}")
