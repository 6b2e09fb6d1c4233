"""What is simulated."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.cluster.cluster import Cluster
from offbeat.core.actions import Budget
from offbeat.core.optimizers import Optimizer
from offbeat.core.strategy import Cadence, Strategy
from offbeat.core.workload import Workload


@dataclass(frozen=True, eq=False)
class Scenario:
    """What is simulated."""

    strategy: Strategy
    workload: Workload
    cluster: Cluster
    workers: int
    until: Budget
    seed: int
    evaluate: Cadence | None = None
    user_optimizer: Optimizer | None = None
    """If set, each worker steps its own copy of this optimizer, as a user's loop would, and nodes get `StepReady`."""
    notice_seconds: float = 0.0
    """The largest difference between the times at which two peers notice the same crash."""
    bytes_per_second: float | None = None
    """The bandwidth limit of each direction of each link; None: no limit."""
