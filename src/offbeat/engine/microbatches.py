"""How a round is divided into micro-batches, in virtual time and live.

Every micro-batch has `microbatch` samples, except the last. A single sample that would be left over is added to the
last micro-batch, since batch norm fails on one sample; if `microbatch` is 1, single samples are what was asked for.
"""

from __future__ import annotations


def next_microbatch(done: int, microbatch: int, samples_max: int | None) -> int:
    """Samples of the next micro-batch of a round; 0 if the round is complete.

    done: samples of the round so far.
    microbatch: the usual size.
    samples_max: samples of the whole round; None if unlimited.
    """
    if samples_max is None:
        return microbatch
    left = max(0, samples_max - done)
    return left if left <= microbatch + _surplus(microbatch) else microbatch


def divide(samples: int, microbatch: int) -> tuple[int, int]:
    """How many micro-batches of the usual size a round of `samples` has, and the size of a last, other one, or 0."""
    whole, rest = divmod(samples, microbatch)
    return (whole - 1, microbatch + rest) if whole and 0 < rest <= _surplus(microbatch) else (whole, rest)


def samples_after(calls: int, microbatch: int, samples_max: int | None) -> int:
    """Samples of a round that are done after `calls` micro-batches.

    calls: how many micro-batches are done, perhaps more than the round has.
    microbatch: the usual size.
    samples_max: samples of the whole round; None if unlimited.
    """
    done = calls * microbatch
    if samples_max is None or samples_max - done > (_surplus(microbatch) if calls else 0):
        return done
    return samples_max


def _surplus(microbatch: int) -> int:
    """By how many samples the last micro-batch may exceed the usual size."""
    return 1 if microbatch > 1 else 0
