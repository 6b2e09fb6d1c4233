"""offbeat trains one model on many machines without making the fast ones wait.

import offbeat as ob

run = ob.simulate(ob.Digits(), ob.AsyncTimed(), ob.Cluster(straggle=ob.NIAGARA), workers=10)
print(run.summary.seconds_to_target)
"""

from offbeat.actions import Samples, Seconds
from offbeat.calibration import calibrate
from offbeat.cluster import (
    CEDAR,
    NIAGARA,
    Cluster,
    Corrupt,
    Crash,
    Link,
    Lognormal,
    Mixture,
    NoStraggle,
    Pareto,
    Partition,
    Pause,
    ShiftedExponential,
    Slowdown,
    Straggle,
    Trace,
    WorkerOverride,
    load_cluster,
)
from offbeat.comparison import Comparison
from offbeat.errors import ConfigurationError, ContractViolation, MissingDependency, OffbeatError, RunFailed
from offbeat.experiment import Experiment, Plan
from offbeat.optimizers import SGD, Adam, AdamW, AMSGrad, Optimizer, RMSprop, TorchOptimizer
from offbeat.running import Run, compare, simulate
from offbeat.schedules import Constant, Exponential, Linear, Milestones, Schedule, WarmUp
from offbeat.session import Session, join
from offbeat.strategies.hub import (
    AnytimeMinibatch,
    AsyncAdaptive,
    AsyncFixed,
    AsyncTimed,
    BackupWorkers,
    FixedMinibatch,
    Hub,
    SyncAdaptive,
)
from offbeat.strategies.strategy import EverySeconds, EveryUpdates, Node, Setup, Strategy
from offbeat.taking_part import Live
from offbeat.training import train
from offbeat.version import __version__
from offbeat.workloads import (
    ByLabel,
    Digits,
    DigitsCNN,
    DigitsLogistic,
    Examples,
    LinearRegression,
    NamedWorkload,
    Quadratic,
    Sharded,
    Shared,
    Target,
    TwoGaussians,
    Workload,
)

__all__ = [
    "CEDAR",
    "NIAGARA",
    "SGD",
    "AMSGrad",
    "Adam",
    "AdamW",
    "AnytimeMinibatch",
    "AsyncAdaptive",
    "AsyncFixed",
    "AsyncTimed",
    "BackupWorkers",
    "ByLabel",
    "Cluster",
    "Comparison",
    "ConfigurationError",
    "Constant",
    "ContractViolation",
    "Corrupt",
    "Crash",
    "Digits",
    "DigitsCNN",
    "DigitsLogistic",
    "EverySeconds",
    "EveryUpdates",
    "Examples",
    "Experiment",
    "Exponential",
    "FixedMinibatch",
    "Hub",
    "Linear",
    "LinearRegression",
    "Link",
    "Live",
    "Lognormal",
    "Milestones",
    "MissingDependency",
    "Mixture",
    "NamedWorkload",
    "NoStraggle",
    "Node",
    "OffbeatError",
    "Optimizer",
    "Pareto",
    "Partition",
    "Pause",
    "Plan",
    "Quadratic",
    "RMSprop",
    "Run",
    "RunFailed",
    "Samples",
    "Schedule",
    "Seconds",
    "Session",
    "Setup",
    "Sharded",
    "Shared",
    "ShiftedExponential",
    "Slowdown",
    "Straggle",
    "Strategy",
    "SyncAdaptive",
    "Target",
    "TorchOptimizer",
    "Trace",
    "TwoGaussians",
    "WarmUp",
    "WorkerOverride",
    "Workload",
    "__version__",
    "calibrate",
    "compare",
    "join",
    "load_cluster",
    "simulate",
    "train",
]
