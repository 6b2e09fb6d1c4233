"""Models of what slows a worker down, for `Cluster(straggle=...)`, and speeds of single workers."""

from offbeat.cluster.cluster import WorkerOverride
from offbeat.cluster.stragglers import (
    CEDAR,
    NIAGARA,
    Lognormal,
    Mixture,
    NoStragglers,
    Pareto,
    RoundDelay,
    ShiftedExponential,
    Slowdown,
    StragglerModel,
    Trace,
)

__all__ = [
    "CEDAR",
    "NIAGARA",
    "Lognormal",
    "Mixture",
    "NoStragglers",
    "Pareto",
    "RoundDelay",
    "ShiftedExponential",
    "Slowdown",
    "StragglerModel",
    "Trace",
    "WorkerOverride",
]
