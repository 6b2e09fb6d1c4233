"""The hub family: one hub holds the parameters, workers compute gradients for it.

Start with `named.py` (the algorithms), then `composition.py` (what they are made of), `node.py` (the hub) and
`worker.py`.
"""

from offbeat.strategies.hub.hub_parts import (
    AllWorkers,
    Collect,
    CollectStatus,
    Distinct,
    Every,
    Messages,
    Share,
    TargetBatch,
)
from offbeat.strategies.hub.hub_strategies import (
    AnytimeMinibatch,
    AsyncAdaptive,
    AsyncFixed,
    AsyncTimed,
    BackupWorkers,
    FixedMinibatch,
    Hub,
    HubStrategy,
    RestartFromCheckpoint,
    SyncAdaptive,
)

__all__ = [
    "AllWorkers",
    "AnytimeMinibatch",
    "AsyncAdaptive",
    "AsyncFixed",
    "AsyncTimed",
    "BackupWorkers",
    "Collect",
    "CollectStatus",
    "Distinct",
    "Every",
    "FixedMinibatch",
    "Hub",
    "HubStrategy",
    "Messages",
    "RestartFromCheckpoint",
    "Share",
    "SyncAdaptive",
    "TargetBatch",
]
