"""How fast machines and links are and what goes wrong."""

from offbeat.cluster.cluster import Cluster, Link, WorkerOverride
from offbeat.cluster.faults import Corrupt, Crash, Fault, Partition, Pause, failures
from offbeat.cluster.presets import PRESETS, SUMMARIES, load_cluster
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
    Speed,
    StragglerModel,
    Trace,
)

__all__ = [
    "CEDAR",
    "NIAGARA",
    "PRESETS",
    "SUMMARIES",
    "Cluster",
    "Corrupt",
    "Crash",
    "Fault",
    "Link",
    "Lognormal",
    "Mixture",
    "NoStragglers",
    "Pareto",
    "Partition",
    "Pause",
    "RoundDelay",
    "ShiftedExponential",
    "Slowdown",
    "Speed",
    "StragglerModel",
    "Trace",
    "WorkerOverride",
    "failures",
    "load_cluster",
]
