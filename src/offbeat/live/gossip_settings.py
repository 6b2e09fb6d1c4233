"""Settings of gossip as arguments of `AsyncDataParallel`: graph, partner and clock are chosen by name."""

from __future__ import annotations

from typing import Any, TypedDict

from offbeat.core.configuration import Family, from_plain
from offbeat.core.validation import require
from offbeat.strategies.gossip.gossip_parts import Acid, ExchangeClock, Partner
from offbeat.strategies.gossip.gossip_strategies import Gossip
from offbeat.topology.graphs import Graph


class GossipSettings(TypedDict, total=False):
    """Settings of gossip; those that are left out have the defaults of `Gossip`."""

    graph: str
    """The name of the communication graph."""
    acid: bool
    """Whether to use the A²CiD² momentum."""
    rate: float
    """Averagings that a peer takes part in per gradient."""
    partner: str
    """How a peer chooses the next partner."""
    clock: str
    """When to average."""


NAMED: dict[str, type[Family]] = {"graph": Graph, "partner": Partner, "clock": ExchangeClock}
"""Settings that are the name of a member of a family."""


def gossip_strategy(settings: GossipSettings) -> Gossip:
    """The strategy of these settings; it has no optimizer, since it gets steps and not gradients."""
    fields: dict[str, Any] = {}
    for name, value in settings.items():
        if name in NAMED:
            require(
                isinstance(value, str),
                f"{name} must be a name here, but is {value!r}; type strategy=offbeat.Gossip({name}=...) for an object",
            )
            fields[name] = from_plain(NAMED[name], value, name)
        elif name == "acid":
            fields["momentum"] = Acid() if value else None
        else:
            fields[name] = value
    return Gossip(**fields)
