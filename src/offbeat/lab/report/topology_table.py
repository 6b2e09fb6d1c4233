"""The constants of a gossip graph as rows of a table, and what they mean in a sentence."""

from __future__ import annotations

import math
from collections import Counter

from offbeat.topology.topology import Constants, Topology

CONSTANT_HEADS = ("constant", "value", "what it is")


def edges(topology: Topology) -> Counter[tuple[int, int]]:
    """Every edge, lower rank first, with its multiplicity."""
    return Counter((rank, peer) for rank in topology.members for peer in topology.neighbours(rank) if rank < peer)


def degrees(topology: Topology) -> tuple[int, int]:
    """The smallest and the largest degree, multiple edges counted as often as they occur."""
    counts = [len(topology.neighbours(rank)) for rank in topology.members]
    return min(counts), max(counts)


def speedup(constants: Constants) -> float:
    """The ratio of the bounds on the time to consensus without and with acceleration: √(χ1/χ2)."""
    return math.sqrt(constants.chi1 / constants.chi2) if constants.chi2 else 1.0


def sentences(topology: Topology, constants: Constants) -> list[str]:
    """What the constants mean."""
    if len(topology.members) == 1:
        return ["One peer has no other to average with."]
    plain, accelerated = constants.chi1, math.sqrt(constants.chi1 * constants.chi2)
    text = f"The time to consensus is of the order of χ1 = {plain:.3g} gradients"
    if speedup(constants) < 1.005:
        return [f"{text}; acceleration has nothing to gain here, where χ1 = χ2."]
    return [f"{text}, and with acceleration of √(χ1·χ2) = {accelerated:.3g}: {speedup(constants):.2g} times shorter."]


def constant_rows(topology: Topology, constants: Constants) -> list[tuple[str, str, str]]:
    """The rows of the table under `CONSTANT_HEADS`."""
    fewest, most = degrees(topology)
    rows = [
        ("χ1", constants.chi1, "1/λ2: time constant of the slowest mode of consensus, in gradients"),
        ("χ2", constants.chi2, "half of the largest effective resistance of an edge"),
        ("η", constants.eta, "how fast the two copies of an accelerated peer mix, per gradient"),
        ("α̃", constants.alpha_tilde, "share of a difference that the second copy moves by; the first moves by ½"),
        ("spectral gap", constants.gap, "λ2 of the Laplacian"),
    ]
    return [
        *((name, f"{value:.5f}", text) for name, value, text in rows),
        ("edges", str(len(edges(topology))), "pairs of peers that average"),
        ("degree", str(most) if fewest == most else f"{fewest}–{most}", "neighbours of a peer, with multiplicity"),
    ]
