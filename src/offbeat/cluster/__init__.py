"""How fast machines and links are and what goes wrong."""

from offbeat.cluster.cluster import Cluster, WorkerOverride
from offbeat.cluster.failures import failures
from offbeat.cluster.faults import Corrupt, Crash, Fault, Partition, Pause
from offbeat.cluster.links import Link
from offbeat.cluster.presets import PRESETS, SUMMARIES, load_cluster
from offbeat.cluster.speeds import (
    CEDAR,
    NIAGARA,
    Disturbance,
    Lognormal,
    Mixture,
    NoStraggle,
    Pareto,
    ShiftedExponential,
    Slowdown,
    Speed,
    Straggle,
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
    "Disturbance",
    "Fault",
    "Link",
    "Lognormal",
    "Mixture",
    "NoStraggle",
    "Pareto",
    "Partition",
    "Pause",
    "ShiftedExponential",
    "Slowdown",
    "Speed",
    "Straggle",
    "Trace",
    "WorkerOverride",
    "failures",
    "load_cluster",
]
