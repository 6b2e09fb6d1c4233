"""What `offbeat topology` shows: the constants in a table, a drawing of dots, and who is next to whom."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offbeat.cli.options import JsonFlag, option
from offbeat.cli.output import console, print_json, print_lines, refuse_unwritable, table
from offbeat.core.configuration import from_plain, to_plain
from offbeat.core.validation import require
from offbeat.lab.plots.rank_pairs import graph_figure, layout
from offbeat.lab.plots.style import save
from offbeat.topology.graphs import Edges, Graph
from offbeat.topology.topology import Constants, Topology

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


def render_topology(topology: Topology, constants: Constants, title: str, width: int) -> Group:
    """The figures and the drawing, for a screen of so many columns; `sentences` come after them."""
    parts: list[RenderableType] = [Text(title, style="bold"), Text(""), _constants_table(topology, constants), Text("")]
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


def _constants_table(topology: Topology, constants: Constants) -> Table:
    fewest, most = degrees(topology)
    rows = [
        ("χ1", constants.chi1, "1/λ2: the slowest way in which peers come to agree, in gradients"),
        ("χ2", constants.chi2, "half of the largest effective resistance of an edge"),
        ("η", constants.eta, "how fast the two copies of an accelerated peer mix, per gradient"),
        ("α̃", constants.alpha_tilde, "what the second copy takes of a difference; the first takes ½"),
        ("spectral gap", constants.gap, "λ2 of the Laplacian"),
    ]
    cells = [
        *((name, f"{value:.5f}", text) for name, value, text in rows),
        ("edges", str(len(edges(topology))), "pairs of peers that average"),
        ("degree", str(most) if fewest == most else f"{fewest}–{most}", "neighbours of a peer, as they count"),
    ]
    return table(["constant", "value", "what it is"], cells, right=["value"])


def _listing(topology: Topology) -> Table:
    counts = {rank: Counter(topology.neighbours(rank)) for rank in topology.members}
    rows = [
        (str(rank), " ".join(f"{peer}×{n}" if n > 1 else str(peer) for peer, n in peers.items()))
        for rank, peers in counts.items()
    ]
    return table(["rank", "neighbours"], rows, right=["rank"])


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


# `offbeat topology`: what follows from the shape of a graph, before anything is trained on it.


PEERS = 16
PEERS_MAX = 2048
"""Every eigenvalue is computed, in time that grows with the cube: seconds at this size, minutes soon after."""


def topology(
    graph: Annotated[
        str, Parameter(name="GRAPH", help="complete, cycle, exponential or star, or a file with an edge a line")
    ],
    /,
    *,
    n: Annotated[str | None, option("how many peers [16; an edge list: its own]", "N", ("-n", "--peers"))] = None,
    rate: Annotated[str, option("averagings of a peer per gradient [1]", "RATE")] = "1",
    plot: Annotated[str | None, option("draw the graph to this file, .png or .svg [none]", "FILE")] = None,
    json: JsonFlag = False,
) -> int:
    """Print the constants of a graph, and draw it."""
    shape: Graph = Graph.shorthand(graph)
    peers = _peers(n, shape)
    per_gradient = from_plain(float, rate, "--rate")
    require(0 < per_gradient < math.inf, f"--rate must be greater than 0, but is {per_gradient:g}")
    made = Topology(shape, peers)
    constants = made.constants(per_gradient)
    title = f"{_label(graph, shape)}, {peers} peer{'' if peers == 1 else 's'}"
    place = None if plot is None else _drawn(made, title, Path(plot))
    if json:
        print_json(_to_plain(made, per_gradient))
        return 0
    screen = console()
    screen.print(render_topology(made, constants, f"{title}, rate {per_gradient:g}", screen.width))
    print_lines(*sentences(made, constants))
    if place is None and peers > LISTED_MAX:
        print_lines("It is too large to draw here; add --plot graph.png.")
    if place is not None:
        print_lines(f"written: {place}", wrap=False)
    return 0


def _peers(n: str | None, graph: Graph) -> int:
    if n is None:
        peers = graph.peers if isinstance(graph, Edges) else PEERS
    else:
        peers = from_plain(int, n, "-n")
        require(peers >= 1, f"-n must be 1 or more, but is {peers}")
    require(peers <= PEERS_MAX, f"constants are computed for up to {PEERS_MAX} peers, but {peers} were asked for")
    return peers


def _label(word: str, graph: Graph) -> str:
    return Path(word).name if isinstance(graph, Edges) else graph.name


def _drawn(topology: Topology, title: str, path: Path) -> Path:
    with refuse_unwritable(path, "--plot", "file"):
        return save(graph_figure(topology, title), path)


def _to_plain(topology: Topology, rate: float) -> dict[str, Any]:
    constants = topology.constants(rate)
    fewest, most = degrees(topology)
    return {
        "graph": to_plain(topology.graph),
        "peers": topology.peers,
        "rate": rate,
        **dataclasses.asdict(constants),
        "speedup": speedup(constants),
        "degree_min": fewest,
        "degree_max": most,
        "edges": [{"ranks": list(pair), "counts": count} for pair, count in edges(topology).items()],
    }
