"""The gossip family: peers without a hub.

Start with `named.py` (what can be chosen) and `replica.py` (the arithmetic), then `averaging.py` (exchanges) and
`node.py` (training). How peers begin, who is there and how they end is in `together.py` and `agreement.py`.
"""

from offbeat.strategies.gossip.named import Gossip, GossipAcid
from offbeat.strategies.gossip.parts import (
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
