"""Copies of this process by `fork`: seconds faster than a new interpreter, and what they run needs no name."""

from __future__ import annotations

import sys

import torch


def can_fork() -> bool:
    """Whether copies of this process can compute; CUDA does not survive a fork."""
    return sys.platform == "linux" and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def can_fork_to_differentiate() -> bool:
    """Whether copies can differentiate even if this process has: with GPUs, its first backward starts threads."""
    return can_fork() and not torch.cuda.is_available()


def prepare_to_fork() -> None:
    """Load what torch loads when the first optimizer is made: once, and not once in each copy."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])
