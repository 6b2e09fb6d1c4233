"""The hub family: one hub holds the parameters, workers compute gradients for it.

Start with `named.py` (the algorithms), then `composition.py` (what they are made of), `node.py` (the hub) and
`worker.py`.
"""

from offbeat.strategies.hub.composition import Hub
from offbeat.strategies.hub.named import (
    AnytimeMinibatch,
    AsyncAdaptive,
    AsyncFixed,
    AsyncTimed,
    BackupWorkers,
    FixedMinibatch,
    HubStrategy,
    RestartFromCheckpoint,
    SyncAdaptive,
)
from offbeat.strategies.hub.parts import All, Census, Collect, Distinct, Every, Messages, Share, TargetBatch

__all__ = [
    "All",
    "AnytimeMinibatch",
    "AsyncAdaptive",
    "AsyncFixed",
    "AsyncTimed",
    "BackupWorkers",
    "Census",
    "Collect",
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
