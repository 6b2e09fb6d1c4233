"""The parts that `ob.Hub`, `ob.LocalSteps`, `ob.Population` and `ob.Gossip` are composed from.

    import offbeat as ob

    k_of_n = ob.Hub(collect=ob.parts.Distinct(8))
    gossip = ob.Gossip(momentum=ob.parts.Acid())

A part that does not fit the field is refused by the constructor, which names the expected type.
"""

from offbeat.strategies.gossip.gossip_parts import Acid, FirstAvailable, Matchings, Poisson, Random, Regular
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
from offbeat.strategies.hub.hub_strategies import HubStrategy
from offbeat.strategies.initial_parameters import Initial, Same, Shuffled
from offbeat.strategies.local_steps.local_steps_parts import Everyone, Merge, Quorum
from offbeat.strategies.local_training import Content, Differences, Gradients, Values
from offbeat.strategies.population.population_parts import AllMembers, Best, Better, Sources

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
