"""How much a stale gradient counts: the delay-adaptive learning rate of asynchronous hub strategies.

With a delay of τ updates, gradient descent is stable only at rates of about 1/(1 + τ) of those without: on a quadratic
exactly at sin(π/(4τ + 2)) of them. So a gradient of staleness τ has the weight

    v = min(1, (1 + free) / (1 + τ))^damping

and the update is made at the rate lr · Σ v·samples / Σ samples. `free` is the staleness that is not damped: 0, so that
on a quadratic every rate up to 3/4 of the limit without delay is stable with any. Adaptive optimizers without momentum,
whose steps do not grow with the gradient, get by with 1.

Momentum is damped with the rate (`Stepper.step`). Without delay it bears steps that are (1 + μ)/(1 − μ) times as long
as those of plain descent, 19 times at 0.9; with a delay of one update no longer ones, and it only adds to the delay.

Two things are known before any delay has been measured:

- With w workers and K messages per update, the staleness will be about (w − 1)/K even without latency.
- Gradients at the initial parameters all point the same way, however many arrive before the first answer of the hub has
  reached a worker. Their weight is squared, so that their sum stays bounded.

Delay-adaptive rates: K. Mishchenko et al., 2022, arXiv:2206.07638; A. Koloskova et al., 2022, arXiv:2206.08307.
"""

from __future__ import annotations

from offbeat.core.optimizers import Stepper


def free_staleness(optimizer: Stepper) -> int:
    """The staleness, in updates, that does not reduce the rate of this optimizer."""
    return 1 if optimizer.is_adaptive and not optimizer.has_momentum else 0


def gradient_weight(damping: float, free: int, staleness: int, expected: float, is_initial: bool) -> float:
    """The weight of a gradient, above 0 and at most 1.

    damping: the exponent; 0: all gradients have weight 1.
    free: the staleness that is not damped, in updates.
    staleness: that of the gradient.
    expected: the staleness that follows from the number of workers.
    is_initial: whether the gradient is of the initial parameters.
    """
    measured = min(1.0, (1.0 + free) / (1.0 + staleness))
    structural = min(1.0, (1.0 + free) / (1.0 + expected))
    return float(min(measured * measured if is_initial else measured, structural) ** damping)
