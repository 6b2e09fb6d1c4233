"""Everything that `ob.Hub`, `ob.LocalSteps`, `ob.Population` and `ob.Gossip` are composed from."""

from offbeat.strategies.gossip.gossip_parts import Acid, FirstAvailable, Matchings, Poisson, Random, Regular
from offbeat.strategies.hub import (
    AllWorkers,
    Collect,
    CollectStatus,
    Distinct,
    Every,
    HubStrategy,
    Messages,
    Share,
    TargetBatch,
)
from offbeat.strategies.local_steps import Everyone, Merge, Quorum
from offbeat.strategies.local_training import Content, Differences, Gradients, Values
from offbeat.strategies.population import AllMembers, Best, Better, Initial, Same, Shuffled, Sources

__all__ = [
    "Acid",
    "AllMembers",
    "AllWorkers",
    "Best",
    "Better",
    "Collect",
    "CollectStatus",
    "Content",
    "Differences",
    "Distinct",
    "Every",
    "Everyone",
    "FirstAvailable",
    "Gradients",
    "HubStrategy",
    "Initial",
    "Matchings",
    "Merge",
    "Messages",
    "Poisson",
    "Quorum",
    "Random",
    "Regular",
    "Same",
    "Share",
    "Shuffled",
    "Sources",
    "TargetBatch",
    "Values",
]
