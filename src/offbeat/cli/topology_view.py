"""What `offbeat topology` shows: the constants in a table, a drawing of dots, and who is next to whom."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offbeat.lab.plots.graph import layout
from offbeat.topology import Constants, Topology

DRAWN_MAX = 16
"""Up to so many peers the graph is drawn on the terminal; of more, a drawing of dots shows nothing."""
LISTED_MAX = 32
"""Up to so many peers their neighbours are listed."""
Dots = NDArray[np.bool_]
ROWS, COLUMNS = 19, 39
"""The drawing, in signs; about as high as wide on a terminal, where a sign is twice as high as wide."""


def edges(topology: Topology) -> Counter[tuple[int, int]]:
    """Every edge, lower rank first, and how often it counts."""
    return Counter((rank, peer) for rank in topology.members for peer in topology.neighbours(rank) if rank < peer)


def degrees(topology: Topology) -> tuple[int, int]:
    """The fewest and the most neighbours that a peer has, each as often as it counts."""
    counts = [len(topology.neighbours(rank)) for rank in topology.members]
    return min(counts), max(counts)


def speedup(constants: Constants) -> float:
    """How many times sooner peers agree with acceleration than without, by the bounds: √(χ1/χ2)."""
    return math.sqrt(constants.chi1 / constants.chi2) if constants.chi2 else 1.0


def view(topology: Topology, constants: Constants, title: str, width: int) -> Group:
    """The figures and the drawing, for a screen of so many columns; `sentences` come after them."""
    parts: list[RenderableType] = [Text(title, style="bold"), Text(""), _table(topology, constants), Text("")]
    peers = len(topology.members)
    shown: list[RenderableType] = []
    if 1 < peers <= DRAWN_MAX:
        shown.append(Text(drawing(topology)))
    if 1 < peers <= LISTED_MAX:
        shown.append(_listing(topology))
    if len(shown) == 2 and width >= COLUMNS + 40:
        side_by_side = Table.grid(padding=(0, 4))
        side_by_side.add_row(*shown)
        shown = [side_by_side]
    for part in shown:
        parts += [part, Text("")]
    return Group(*parts)


def sentences(topology: Topology, constants: Constants) -> list[str]:
    """What the constants mean, in words."""
    if len(topology.members) == 1:
        return ["One peer has nobody to average with."]
    plain, accelerated = constants.chi1, math.sqrt(constants.chi1 * constants.chi2)
    agree = f"The time that peers take to agree is of the order of χ1 = {plain:.3g} gradients"
    if speedup(constants) < 1.005:
        agree += "; acceleration has nothing to gain here, where χ1 = χ2."
    else:
        agree += f", and with acceleration of √(χ1·χ2) = {accelerated:.3g}: {speedup(constants):.2g} times shorter."
    return [agree]


def _table(topology: Topology, constants: Constants) -> Table:
    fewest, most = degrees(topology)
    rows = [
        ("χ1", constants.chi1, "1/λ2: the slowest way in which peers come to agree, in gradients"),
        ("χ2", constants.chi2, "half of the largest effective resistance of an edge"),
        ("η", constants.eta, "how fast the two copies of an accelerated peer mix, per gradient"),
        ("α̃", constants.alpha_tilde, "what the second copy takes of a difference; the first takes ½"),
        ("spectral gap", constants.gap, "λ2 of the Laplacian"),
    ]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("constant", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("what it is", overflow="fold")
    for name, value, text in rows:
        table.add_row(name, f"{value:.5f}", text)
    table.add_row("edges", str(len(edges(topology))), "pairs of peers that average")
    table.add_row("degree", str(most) if fewest == most else f"{fewest}–{most}", "neighbours of a peer, as they count")
    return table


def _listing(topology: Topology) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("neighbours", overflow="fold")
    for rank in topology.members:
        counts = Counter(topology.neighbours(rank))
        table.add_row(str(rank), " ".join(f"{peer}×{n}" if n > 1 else str(peer) for peer, n in counts.items()))
    return table


# The drawing: lines of dots, 2 by 4 to a sign, with the ranks on top


def drawing(topology: Topology) -> str:
    """The members in their places, and a line for each edge."""
    places = {
        rank: (0.5 + 0.5 * float(x), 0.5 - 0.5 * float(y))
        for rank, (x, y) in zip(topology.members, layout(topology), strict=True)
    }
    dots = np.zeros((ROWS * 4, COLUMNS * 2), dtype=bool)
    for one, other in edges(topology):
        _line(dots, places[one], places[other])
    signs = [[_sign(cell) for cell in np.hsplit(band, COLUMNS)] for band in np.vsplit(dots, ROWS)]
    for rank, (x, y) in places.items():
        label = str(rank)
        column = min(COLUMNS - len(label), round(x * (COLUMNS - len(label))))
        signs[round(y * (ROWS - 1))][column : column + len(label)] = label
    return "\n".join("".join(row).rstrip() for row in signs)


def _line(dots: Dots, one: tuple[float, float], other: tuple[float, float]) -> None:
    height, width = dots.shape
    steps = np.linspace(0.0, 1.0, height + width)
    # From the middle of the outermost signs, where the ranks stand.
    columns = 1 + (one[0] + (other[0] - one[0]) * steps) * (width - 3)
    rows = 2 + (one[1] + (other[1] - one[1]) * steps) * (height - 5)
    dots[np.rint(rows).astype(int), np.rint(columns).astype(int)] = True


BITS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
"""Which dot of a Braille sign is which bit of its code."""


def _sign(dots: Dots) -> str:
    return chr(0x2800 + int(BITS[dots].sum())) if dots.any() else " "
