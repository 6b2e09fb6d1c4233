"""`peer.optimizer`: a torch optimizer whose `step` is `peer.step`, for code that calls `optimizer.step()` itself.

Trainers take an optimizer, wrap it and call its `step`, with or without a closure. This one has no groups and no state
of its own: what is read from it or written to it is that of the user's optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Closure = Callable[[], Any]


class PeerOptimizer(torch.optim.Optimizer):
    """The optimizer of a peer, as trainers take one.

    wrapped: the user's optimizer.
    share_step: steps it and shares the change: `AsyncDataParallel.step`.
    """

    # Names of attributes that Lightning's wrapper, which copies ours, does not use itself.
    _wrapped: torch.optim.Optimizer
    _step_supports_amp_scaling = False
    """A `GradScaler` would give the scale of the gradients to this optimizer, and a fused one would not see it."""
    _share_step: Callable[[], None]

    def __init__(self, wrapped: torch.optim.Optimizer, share_step: Callable[[], None]) -> None:
        # Not the constructor of the base class: it would make groups and state beside those of `wrapped`.
        self._wrapped = wrapped
        self._share_step = share_step

    def step(self, closure: Closure | None = None) -> Any:
        """Call the closure, if there is one, which computes the gradient; then step and share the change."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._share_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._wrapped.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self._wrapped.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._wrapped.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._wrapped.add_param_group(param_group)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._wrapped.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._wrapped.param_groups = groups

    @property
    def state(self) -> Any:
        return self._wrapped.state

    @state.setter
    def state(self, state: Any) -> None:
        self._wrapped.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self._wrapped.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._wrapped.defaults = defaults

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._wrapped!r})"

    def __getattr__(self, name: str) -> Any:
        """Hooks and the like are those of the user's optimizer."""
        if name in ("_wrapped", "_share_step"):  # of an object whose constructor has not run
            raise AttributeError(name)
        return getattr(self._wrapped, name)
