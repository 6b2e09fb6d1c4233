"""Torch optimizers and schedulers of a user, built on, or moved to, the views of a flat vector.

What a user may give, where `offbeat.TorchOptimizer` or a field `optimizer` is expected:

    a function of parameters           functools.partial(torch.optim.AdamW, lr=3e-4), torch.optim.SGD
    an optimizer built on the model    torch.optim.AdamW([{"params": …, "lr": …}, …])
    several of these                   [torch.optim.Muon(matrices), torch.optim.AdamW(others)]
    functions by parameter name        {"layers.*.weight": functools.partial(torch.optim.Muon, lr=0.02), "*": …}

An optimizer that is built already is copied with its groups and its state; its parameters are replaced by the views.
"""

from __future__ import annotations

import copy
import fnmatch
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from offbeat.core.validation import require
from offbeat.errors import ConfigurationError

Views = Mapping[str, nn.Parameter]
"""Parameter name → view of the flat vector."""
Groups = list[dict[str, Any]]
"""Parameter groups of `torch.optim`."""
Make = Callable[..., torch.optim.Optimizer]

EXAMPLE = "functools.partial(torch.optim.AdamW, lr=3e-4)"
MIX_EXAMPLE = '{"layers.*.weight": functools.partial(torch.optim.Muon, lr=0.02), "*": ' + EXAMPLE + "}"


@dataclass
class TorchParts:
    """The torch optimizers that update one vector of parameters together, and their schedulers."""

    optimizers: list[torch.optim.Optimizer]
    schedulers: list[LRScheduler] = field(default_factory=list)

    @property
    def groups(self) -> Groups:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]


def is_usable(given: Any) -> bool:
    """Whether this is one of the things that a user may give."""
    if isinstance(given, torch.optim.Optimizer):
        return True
    if isinstance(given, Mapping):
        return bool(given) and all(isinstance(key, str) and callable(value) for key, value in given.items())
    if isinstance(given, list | tuple):
        return bool(given) and all(isinstance(item, torch.optim.Optimizer) for item in given)
    return callable(given)


def instances_of(given: Any) -> list[torch.optim.Optimizer]:
    """The optimizers among what was given that are built already."""
    if isinstance(given, torch.optim.Optimizer):
        return [given]
    return list(given) if isinstance(given, list | tuple) else []


def check_scheduler(given: Any, scheduler: Any) -> None:
    """Refuse schedulers that do not belong to what was given."""
    for one in _as_list(scheduler):
        require(
            not isinstance(one, ReduceLROnPlateau) and not _is_plateau(one),
            "ReduceLROnPlateau goes by a metric, which updates do not have; choose a scheduler that goes by steps",
        )
        if isinstance(one, LRScheduler):
            require(
                any(one.optimizer is optimizer for optimizer in instances_of(given)),
                f"the scheduler {type(one).__name__} belongs to another optimizer than the one that is given; "
                "build it on that one, or give a function such as "
                "functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=1000)",
            )
        else:
            require(callable(one), f"a scheduler is one of torch.optim.lr_scheduler, or makes one, but is {one!r}")


def build_parts(
    given: Any, scheduler: Any, views: Views, names: Mapping[int, str] | None, groups: Groups, fused: bool | None
) -> TorchParts:
    """The optimizers and schedulers for these views.

    given, scheduler: what the user gave.
    views: the parameters, by name.
    names: the name of each parameter of the model, by its id; None if the model is not known.
    groups: the groups of one optimizer for all parameters.
    fused: whether to ask for fused kernels where a class has them and the user said nothing.
    """
    if built := instances_of(given):
        memo = _memo(built, views, names)
        optimizers = [_moved(optimizer, memo) for optimizer in built]
        memo.update({id(before): after for before, after in zip(built, optimizers, strict=True)})
        _check_disjoint(optimizers)
    else:
        makes = given.values() if isinstance(given, Mapping) else [given]
        parts = _matched(given, views) if isinstance(given, Mapping) else [groups]
        optimizers = [_made(make, part, fused) for make, part in zip(makes, parts, strict=True)]
        memo = {}
    schedulers = []
    for one in _as_list(scheduler):
        if isinstance(one, LRScheduler):
            moved = copy.deepcopy(one, memo)
            _count_steps(moved.optimizer)
            schedulers.append(moved)
        else:
            schedulers += [one(optimizer) for optimizer in optimizers]
    return TorchParts(optimizers, schedulers)


def described(given: Any) -> str:
    """Class and settings of what a user gave, in one line."""
    if isinstance(given, Mapping):
        return ", ".join(f"{pattern}: {described(make)}" for pattern, make in given.items())
    if built := instances_of(given):
        return " + ".join(_described_instance(optimizer) for optimizer in built)
    if isinstance(given, functools.partial):
        by_name = (f"{key}={value!r}" for key, value in given.keywords.items())
        return f"{_name(given.func)}({', '.join([*map(repr, given.args), *by_name])})"
    return f"{_name(given)}()" if isinstance(given, type) else _name(given)


def _described_instance(optimizer: torch.optim.Optimizer) -> str:
    every = [
        ", ".join(f"{key}={value!r}" for key, value in group.items() if key != "params" and value is not None)
        for group in optimizer.param_groups
    ]
    return f"{_name(type(optimizer))}({'; '.join(every)})"


def _name(made_by: Any) -> str:
    module, name = getattr(made_by, "__module__", ""), getattr(made_by, "__qualname__", repr(made_by))
    return f"torch.optim.{name}" if str(module).startswith("torch.optim") else f"{module}.{name}".lstrip(".")


def _as_list(scheduler: Any) -> list[Any]:
    if scheduler is None:
        return []
    return list(scheduler) if isinstance(scheduler, list | tuple) else [scheduler]


def _is_plateau(scheduler: Any) -> bool:
    made = scheduler.func if isinstance(scheduler, functools.partial) else scheduler
    return isinstance(made, type) and issubclass(made, ReduceLROnPlateau)


# Functions


def _made(make: Make, groups: Groups, fused: bool | None) -> torch.optim.Optimizer:
    """The optimizer that a function makes of these groups. Raises `ConfigurationError` where it refuses them."""
    settings = {"fused": True} if fused and _takes_fused(make) else {}
    try:
        optimizer = make(groups, **settings)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        advice = f"; give each its own: {MIX_EXAMPLE}" if "2D" in reason else ""
        raise ConfigurationError(f"{described(make)} does not take these parameters ({reason}){advice}") from None
    require(
        isinstance(optimizer, torch.optim.Optimizer),
        f"{described(make)} must make a torch.optim.Optimizer, but made {type(optimizer).__name__}; type: {EXAMPLE}",
    )
    return optimizer


def _takes_fused(make: Make) -> bool:
    """Whether a class has fused kernels, and the user has not chosen another implementation."""
    cls, chosen = make, dict[str, Any]()
    if isinstance(make, functools.partial):
        cls, chosen = make.func, make.keywords
    if not isinstance(cls, type) or not {"fused", "foreach", "differentiable", "capturable"}.isdisjoint(chosen):
        return False
    return "fused" in inspect.signature(cls).parameters


def _matched(given: Mapping[str, Make], views: Views) -> list[Groups]:
    """The parameters of each pattern: those whose name it fits, and no earlier one does."""
    taken: dict[str, list[nn.Parameter]] = {pattern: [] for pattern in given}
    for name, view in views.items():
        pattern = next((pattern for pattern in given if fnmatch.fnmatchcase(name, pattern)), None)
        if pattern is None:
            raise ConfigurationError(
                f'no optimizer is given for the parameter {name}; add one for the rest: {{…, "*": {EXAMPLE}}}'
            )
        taken[pattern].append(view)
    for pattern, chosen in taken.items():
        require(
            bool(chosen),
            f"no parameter is left for {pattern!r}; the names are {', '.join(list(views)[:6])}"
            f"{', …' if len(views) > 6 else ''}",
        )
    return [[{"params": chosen}] for chosen in taken.values()]


# Optimizers that are built already


def _memo(built: Sequence[torch.optim.Optimizer], views: Views, names: Mapping[int, str] | None) -> dict[int, Any]:
    """Parameter → view, for `copy.deepcopy`. Raises `ConfigurationError` for parameters of another model."""
    require(
        names is not None,
        f"an optimizer that is built already goes with a model that is built already; give {EXAMPLE} instead, "
        "or a Workload whose model is that module",
    )
    assert names is not None
    memo: dict[int, Any] = {}
    for parameter in _parameters(built):
        name = names.get(id(parameter), "")
        if name in views:
            memo[id(parameter)] = views[name]
        else:
            require(
                not parameter.requires_grad,
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not one of the model's; "
                "build it on the parameters of the model that is trained",
            )
    return memo


def _parameters(optimizers: Iterable[torch.optim.Optimizer]) -> Iterable[nn.Parameter]:
    return (parameter for one in optimizers for group in one.param_groups for parameter in group["params"])


def _moved(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """A copy with its groups and state, on the views."""
    moved = copy.deepcopy(optimizer, memo)
    views = {id(view) for view in memo.values()}
    for group in moved.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in views]
    for key, value in vars(optimizer).items():  # those of a class of the user's own; torch copies its own alone
        if key not in vars(moved) and key != "step" and not key.startswith("_"):
            setattr(moved, key, copy.deepcopy(value, memo))
    for parameter in _parameters([optimizer]):
        view = memo.get(id(parameter))
        if view is not None and view.dtype != parameter.dtype:  # master values of a model in bfloat16 or float16
            slots = moved.state.get(view, {})
            slots.update({key: _cast(value, parameter.dtype, view.dtype) for key, value in slots.items()})
    return moved


def _cast(value: Any, before: torch.dtype, after: torch.dtype) -> Any:
    """What an optimizer remembers of a parameter, if it has the dtype of the parameter, in another one."""
    return value.to(after) if isinstance(value, torch.Tensor) and value.dtype == before else value


def _check_disjoint(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    seen: set[int] = set()
    for parameter in _parameters(optimizers):
        require(
            id(parameter) not in seen,
            f"two optimizers have the same parameter, of shape {tuple(parameter.shape)}; give it to one of them",
        )
        seen.add(id(parameter))


def _count_steps(optimizer: torch.optim.Optimizer) -> None:
    """Let schedulers see that the optimizer steps before they do; a copy has lost what they had put around `step`."""
    step: Any = optimizer.step
    if hasattr(step, "_wrapped_by_lr_sched"):
        return

    @functools.wraps(step)
    def counted(*arguments: Any, **named: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(*arguments, **named)

    counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = counted  # type: ignore[method-assign]
