"""Failures by chance: machines that fail now and then, each for itself, and come back after a while."""

from __future__ import annotations

from offbeat.cluster.faults import Crash
from offbeat.randomness import stream
from offbeat.validation import require


def failures(
    workers: int,
    mtbf_seconds: float,
    recovery_seconds: float,
    until_seconds: float,
    seed: int = 0,
    first_rank: int = 1,
) -> tuple[Crash, ...]:
    """Crashes for `Cluster(faults=...)`, in the order of time, of `workers` ranks from `first_rank` on.

    Each rank fails after an exponential time with this mean (MTBF), whatever the others do, is back `recovery_seconds`
    later, and may fail again from then on. `first_rank` is 1 where rank 0 is a hub that does not fail.
    """
    require(
        workers >= 0 and mtbf_seconds > 0 and recovery_seconds >= 0,
        f"failures() needs an mtbf_seconds greater than 0 and a recovery_seconds of 0 or more, "
        f"but was given {mtbf_seconds:g} and {recovery_seconds:g}, for {workers} workers",
    )
    found = []
    for rank in range(first_rank, first_rank + workers):
        random = stream(seed, "failures", rank)
        at = float(random.exponential(mtbf_seconds))
        while at < until_seconds:
            found.append(Crash(rank, at, recovery_seconds))
            at += recovery_seconds + float(random.exponential(mtbf_seconds))
    return tuple(sorted(found, key=lambda crash: crash.at_seconds))
