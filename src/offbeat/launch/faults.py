"""Which of the faults of a cluster can be done to real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from offbeat.cluster.faults import Crash, Fault, Pause
from offbeat.errors import ConfigurationError


def check_faults(
    faults: Iterable[Fault],
    ranks: Iterable[int] | None = None,
    is_required: Callable[[int], bool] = lambda rank: rank == 0,
) -> None:
    """Refuse what cannot be done to real processes, or to others than those that are started here.

    A rank with which the run stands and falls is not started again.
    """
    here = None if ranks is None else set(ranks)
    for fault in faults:
        if not isinstance(fault, Crash | Pause):
            raise ConfigurationError(
                f"the fault {fault.name!r} can only be simulated; a live run takes crash and pause, "
                "or type: offbeat simulate"
            )
        if here is not None and fault.rank not in here:
            raise ConfigurationError(f"the fault {fault.name!r} names rank {fault.rank}, which is not started here")
        if isinstance(fault, Crash) and is_required(fault.rank) and fault.back_after_seconds is not None:
            raise ConfigurationError(
                f"rank {fault.rank} does not come back by itself in a live run; leave out back_after_seconds, "
                "and go on with --resume"
            )
