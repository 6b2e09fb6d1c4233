"""Straggler models, for `Cluster(straggle=...)`, and speeds of single workers.

    import offbeat as ob

    cluster = ob.Cluster(straggle=ob.stragglers.Lognormal(0.5))
    run = ob.simulate(ob.workloads.Digits(), ob.AsyncTimed(), cluster)

`NIAGARA` and `CEDAR` are mixtures of random sleeps, as in published studies; `offbeat clusters` lists whole clusters.
"""

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
