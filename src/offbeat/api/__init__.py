"""The public names of `import offbeat as ob`: those that are used most, and namespaces for the rest.

`offbeat/__init__.py` imports this package when the first name is used, since importing torch takes a second or two.
May import everything but `cli`; no other package imports it.
"""

from offbeat import testing
from offbeat.api import compression, faults, graphs, models, nodes, parts, schedules, stragglers, trackers, workloads
from offbeat.cluster.cluster import Cluster, Link
from offbeat.cluster.presets import load_cluster
from offbeat.core.actions import Samples, Seconds
from offbeat.core.optimizers import SGD, Adam, AdamW, AMSGrad, RMSprop, TorchOptimizer
from offbeat.core.recalibration import recalibrate
from offbeat.core.strategy import EverySeconds, EveryUpdates, Strategy
from offbeat.core.workload import Target, Workload
from offbeat.engine.experiment import Experiment
from offbeat.errors import ConfigurationError, ContractViolation, MissingDependency, OffbeatError, RunFailed
from offbeat.lab.calibration import calibrate
from offbeat.lab.compared_runs import compare
from offbeat.lab.live_runs import train
from offbeat.lab.microbatching import microbatch
from offbeat.lab.notebook import cluster_card, graph_cards, result_cards  # noqa: F401  (what notebooks show)
from offbeat.lab.simulated_runs import Run, simulate
from offbeat.live.data_parallel import AsyncDataParallel
from offbeat.live.session import join
from offbeat.live.session_options import LiveOptions
from offbeat.records.comparison import Comparison
from offbeat.strategies.gossip.gossip_strategies import Gossip, GossipAcid
from offbeat.strategies.hub.hub_strategies import (
    AnytimeMinibatch,
    AsyncAdaptive,
    AsyncFixed,
    AsyncTimed,
    BackupWorkers,
    FixedMinibatch,
    Hub,
    RestartFromCheckpoint,
    SyncAdaptive,
)
from offbeat.strategies.local_steps.local_steps_strategies import (
    DecoupledDiLoCo,
    DelayedExchange,
    DiLoCo,
    LocalSGD,
    LocalSteps,
)
from offbeat.strategies.population.population_strategies import Population
from offbeat.strategies.serial import ArtificialDelay, Serial
from offbeat.tracking.tracker import Tracker

__all__ = [
    "SGD",
    "AMSGrad",
    "Adam",
    "AdamW",
    "AnytimeMinibatch",
    "ArtificialDelay",
    "AsyncAdaptive",
    "AsyncDataParallel",
    "AsyncFixed",
    "AsyncTimed",
    "BackupWorkers",
    "Cluster",
    "Comparison",
    "ConfigurationError",
    "ContractViolation",
    "DecoupledDiLoCo",
    "DelayedExchange",
    "DiLoCo",
    "EverySeconds",
    "EveryUpdates",
    "Experiment",
    "FixedMinibatch",
    "Gossip",
    "GossipAcid",
    "Hub",
    "Link",
    "LiveOptions",
    "LocalSGD",
    "LocalSteps",
    "MissingDependency",
    "OffbeatError",
    "Population",
    "RMSprop",
    "RestartFromCheckpoint",
    "Run",
    "RunFailed",
    "Samples",
    "Seconds",
    "Serial",
    "Strategy",
    "SyncAdaptive",
    "Target",
    "TorchOptimizer",
    "Tracker",
    "Workload",
    "calibrate",
    "compare",
    "compression",
    "faults",
    "graphs",
    "join",
    "load_cluster",
    "microbatch",
    "models",
    "nodes",
    "parts",
    "recalibrate",
    "schedules",
    "simulate",
    "stragglers",
    "testing",
    "trackers",
    "train",
    "workloads",
]
