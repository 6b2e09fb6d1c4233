"""Modules that `torch.compile` has wrapped: names and copies without the wrapper.

`torch.compile(module)` returns a wrapper that holds the module under the name `_orig_mod`, so parameters are called
`_orig_mod.weight`. Here names are those of the plain module, so that a rank with a compiled model and one without, and
a checkpoint of either, fit together. The wrapper shares its parameters with the plain module.
"""

from __future__ import annotations

import copy

from torch import nn

WRAPPED = "_orig_mod"
"""The name under which a wrapper holds its module. Importing the class of the wrapper would take seconds."""


def plain_name(name: str) -> str:
    """The name of a parameter, buffer or module without those of wrappers."""
    return ".".join(part for part in name.split(".") if part != WRAPPED)


def plain_module(module: nn.Module) -> nn.Module:
    """The module itself where `module` is a wrapper; modules inside may still be wrapped."""
    while (inner := module._modules.get(WRAPPED)) is not None:
        module = inner
    return module


def plain_copy(module: nn.Module) -> nn.Module:
    """A deep copy in which nothing is compiled, so that calling it compiles nothing either."""
    copied = plain_module(copy.deepcopy(plain_module(module)))
    for owner in list(copied.modules()):
        for name, child in owner._modules.items():
            if child is not None:
                owner._modules[name] = plain_module(child)
    return copied
