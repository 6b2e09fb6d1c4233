"""What notebooks show of a graph: a drawing, and the constants that follow from its shape. Neither needs matplotlib."""

from __future__ import annotations

from html import escape

from offbeat.core.notebook_html import notebook_html
from offbeat.errors import ConfigurationError
from offbeat.lab.notebook.card import card, paragraph, table
from offbeat.lab.plots.rank_pairs import layout
from offbeat.lab.report.formatting import plural
from offbeat.lab.report.topology_table import CONSTANT_HEADS, constant_rows, edges, sentences
from offbeat.topology.graphs import Edges, Graph
from offbeat.topology.topology import Topology

PEERS = 16
"""A graph is a rule for any number of peers, and is shown with so many, as `offbeat topology` does."""
PEERS_MAX = 256
"""With more peers, constants take seconds."""
EDGES_MAX = 2100
"""With more edges a drawing takes more than about 50 kB."""
LABELLED_MAX = 64
SIDE = 260
"""Width and height of a drawing in pixels."""
MARGIN = 20


@notebook_html.register
def graph_card(graph: Graph) -> str | None:
    """A graph for a usual number of peers; None if it cannot have that number."""
    peers = graph.peers if isinstance(graph, Edges) else PEERS
    try:
        return topology_card(Topology(graph, peers))
    except ConfigurationError:
        return None


@notebook_html.register
def topology_card(topology: Topology) -> str:
    """A graph of a number of peers, with its constants at one averaging per peer and gradient."""
    members = len(topology.members)
    name = topology.graph.name or type(topology.graph).__name__
    of = f" of {topology.peers}" if members < topology.peers else ""
    title = f"{name}, {members}{of} {'peer' if topology.peers == 1 else 'peers'}, rate 1"
    if members > PEERS_MAX:
        return card(title, paragraph(f"It is shown with up to {PEERS_MAX} peers.", quiet=True))
    try:
        constants = topology.constants(rate=1.0)
    except ConfigurationError as error:  # it is not connected
        return card(title, drawing(topology), paragraph(str(error)))
    rows = constant_rows(topology, constants)
    return card(
        title,
        drawing(topology),
        table(CONSTANT_HEADS, rows, right=("value",)),
        *(paragraph(sentence) for sentence in sentences(topology, constants)),
    )


def drawing(topology: Topology) -> str:
    """The members on a circle and their edges, as an SVG element; a note if there are too many edges."""
    counts = edges(topology)
    if len(counts) > EDGES_MAX:
        return paragraph(f"With {len(counts):,} edges it is too large to draw here.", quiet=True)
    middle, radius = SIDE / 2, SIDE / 2 - MARGIN
    places = {
        rank: (middle + radius * float(x), middle - radius * float(y))
        for rank, (x, y) in zip(topology.members, layout(topology), strict=True)
    }
    lines = "".join(_line(places[one], places[other]) for one, other in counts)
    pale = min(1.0, 0.25 + 2.0 * len(places) / max(1, len(counts)))
    nodes = "".join(_node(rank, place, len(places) <= LABELLED_MAX) for rank, place in places.items())
    label = escape(f"graph of {plural(len(places), 'peer')} and {plural(len(counts), 'edge')}")
    return (
        f'<svg role="img" aria-label="{label}" width="{SIDE}" height="{SIDE}" viewBox="0 0 {SIDE} {SIDE}">'
        f'<path d="{lines}" fill="none" stroke="#0072b2" stroke-opacity="{pale:.2f}"/>{nodes}</svg>'
    )


def _line(one: tuple[float, float], other: tuple[float, float]) -> str:
    return f"M{one[0]:.0f} {one[1]:.0f}L{other[0]:.0f} {other[1]:.0f}"


def _node(rank: int, place: tuple[float, float], is_labelled: bool) -> str:
    """A dot, and beside it its rank, in the colour of the text: a filled disc would have to know the theme."""
    x, y = place
    dot = f'<circle cx="{x:.0f}" cy="{y:.0f}" r="3" fill="#0072b2"/>'
    if not is_labelled:
        return dot
    middle = SIDE / 2
    away = [12 * (value - middle) / (SIDE / 2 - MARGIN) for value in place]
    if place == (middle, middle):
        away = [7, -7]
    text = f'<text x="{x + away[0]:.0f}" y="{y + away[1] + 3:.0f}" font-size="9" text-anchor="middle"'
    return f'{dot}{text} fill="currentColor">{rank}</text>'
