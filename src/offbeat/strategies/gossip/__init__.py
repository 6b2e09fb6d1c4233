"""The gossip family: peers without a hub.

Start with `named.py` (what can be chosen) and `replica.py` (the arithmetic), then `averaging.py` (exchanges) and
`node.py` (how peers start, count, end, and go on without those who are lost).
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
