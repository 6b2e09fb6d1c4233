"""The gossip family: peers without a hub.

Start with `named.py` (what can be chosen) and `replica.py` (the arithmetic), then `averaging.py` (exchanges) and
`node.py` (training). How peers begin, who is there and how they end is in `together.py` and `agreement.py`.
"""

from offbeat.strategies.gossip.gossip_parts import (
    Acid,
    Clock,
    FirstAvailable,
    Matchings,
    Momentum,
    Partner,
    Poisson,
    Random,
    Regular,
)
from offbeat.strategies.gossip.gossip_strategies import Gossip, GossipAcid

__all__ = [
    "Acid",
    "Clock",
    "FirstAvailable",
    "Gossip",
    "GossipAcid",
    "Matchings",
    "Momentum",
    "Partner",
    "Poisson",
    "Random",
    "Regular",
]
