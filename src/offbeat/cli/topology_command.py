"""`offbeat topology`: the constants of a gossip graph, a drawing in Braille dots, and lists of neighbours."""

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

from offbeat.cli.options import File, JsonFlag, number
from offbeat.cli.output import console, print_json, print_lines, refuse_unwritable, table
from offbeat.core.configuration import to_plain
from offbeat.core.validation import require
from offbeat.lab.plots.rank_pairs import graph_figure, layout
from offbeat.lab.plots.style import save
from offbeat.lab.report.formatting import plural
from offbeat.lab.report.topology_table import CONSTANT_HEADS, constant_rows, degrees, edges, sentences, speedup
from offbeat.topology.graphs import Edges, Graph
from offbeat.topology.topology import Constants, Topology

PEERS = 16
PEERS_MAX = 2048
"""All eigenvalues are computed, in time cubic in the number of peers: seconds at this size, minutes soon after."""
DRAWN_PEERS_MAX = 16
"""More peers are not drawn on the terminal: the dots would overlap."""
LISTED_PEERS_MAX = 32
"""More peers are not listed with their neighbours."""
ROWS, COLUMNS = 19, 39
"""Size of the drawing in characters; about square on a terminal, where a character is twice as high as wide."""
Dots = NDArray[np.bool_]


def topology(
    graph: Annotated[str, Parameter(name="GRAPH")],
    /,
    *,
    n: Annotated[int | None, number("N", ("-n", "--peers"), least=1)] = None,
    rate: Annotated[float, number("RATE", least=-math.inf)] = 1.0,
    plot: File = None,
    json: JsonFlag = False,
) -> int:
    """Print the constants of a graph, and draw it.

    Args:
        graph: complete, cycle, exponential or star, or a file with an edge a line
        n: how many peers [16; an edge list: its own]
        rate: averagings of a peer per gradient [1]
        plot: draw the graph to this file, .png or .svg [none]
        json: print one JSON object and nothing else
    """
    shape: Graph = Graph.shorthand(graph)
    peers = n or (shape.peers if isinstance(shape, Edges) else PEERS)
    require(peers <= PEERS_MAX, f"constants are computed for up to {PEERS_MAX} peers, but {peers} were asked for")
    require(0 < rate < math.inf, f"--rate must be greater than 0, but is {rate:g}")
    made = Topology(shape, peers)
    constants = made.constants(rate)
    title = f"{Path(graph).name if isinstance(shape, Edges) else shape.name}, {plural(peers, 'peer')}"
    if plot is not None:
        with refuse_unwritable(Path(plot), "--plot", "file"):
            plot = str(save(graph_figure(made, title), Path(plot)))
    if json:
        print_json(_to_plain(made, constants, rate))
        return 0
    screen = console()
    screen.print(render_topology(made, constants, f"{title}, rate {rate:g}", screen.width))
    print_lines(*sentences(made, constants))
    if plot is not None:
        print_lines(f"written: {plot}", wrap=False)
    elif peers > LISTED_PEERS_MAX:
        print_lines("It is too large to draw here; add --plot graph.png.")
    return 0


def render_topology(topology: Topology, constants: Constants, title: str, width: int) -> Group:
    """The table of constants and the drawing, for a screen of `width` columns; `sentences` come after them."""
    peers = len(topology.members)
    drawings: list[RenderableType] = [Text(drawing(topology))] if 1 < peers <= DRAWN_PEERS_MAX else []
    if 1 < peers <= LISTED_PEERS_MAX:
        drawings.append(_neighbour_table(topology))
    if len(drawings) == 2 and width >= COLUMNS + 40:
        side_by_side = Table.grid(padding=(0, 4))
        side_by_side.add_row(*drawings)
        drawings = [side_by_side]
    parts = [
        Text(title, style="bold"),
        table(CONSTANT_HEADS, constant_rows(topology, constants), right=["value"]),
        *drawings,
    ]
    return Group(*(item for part in parts for item in (part, Text(""))))


def _neighbour_table(topology: Topology) -> Table:
    counts = {rank: Counter(topology.neighbours(rank)) for rank in topology.members}
    rows = [
        (str(rank), " ".join(f"{peer}×{n}" if n > 1 else str(peer) for peer, n in peers.items()))
        for rank, peers in counts.items()
    ]
    return table(["rank", "neighbours"], rows, right=["rank"])


def _to_plain(topology: Topology, constants: Constants, rate: float) -> dict[str, Any]:
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


# The drawing: lines of dots, 2 by 4 to a Braille character, with the ranks on top


def drawing(topology: Topology) -> str:
    """The members as numbers, and a line for each edge."""
    places = {
        rank: (0.5 + 0.5 * float(x), 0.5 - 0.5 * float(y))
        for rank, (x, y) in zip(topology.members, layout(topology), strict=True)
    }
    dots = np.zeros((ROWS * 4, COLUMNS * 2), dtype=bool)
    for one, other in edges(topology):
        _draw_line(dots, places[one], places[other])
    characters = [[_braille(cell) for cell in np.hsplit(band, COLUMNS)] for band in np.vsplit(dots, ROWS)]
    for rank, (x, y) in places.items():
        label = str(rank)
        column = min(COLUMNS - len(label), round(x * (COLUMNS - len(label))))
        characters[round(y * (ROWS - 1))][column : column + len(label)] = label
    return "\n".join("".join(row).rstrip() for row in characters)


def _draw_line(dots: Dots, one: tuple[float, float], other: tuple[float, float]) -> None:
    height, width = dots.shape
    steps = np.linspace(0.0, 1.0, height + width)
    # From the middle of the outermost characters, where the ranks are drawn.
    columns = 1 + (one[0] + (other[0] - one[0]) * steps) * (width - 3)
    rows = 2 + (one[1] + (other[1] - one[1]) * steps) * (height - 5)
    dots[np.rint(rows).astype(int), np.rint(columns).astype(int)] = True


BITS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
"""The bit of each dot in the code of a Braille character."""


def _braille(dots: Dots) -> str:
    return chr(0x2800 + int(BITS[dots].sum())) if dots.any() else " "
