"""`offbeat topology`: what follows from the shape of a graph, before anything is trained on it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from offbeat.cli.output import console, print_json
from offbeat.cli.topology_view import LISTED_MAX, degrees, edges, sentences, speedup, view
from offbeat.core.configuration import from_plain, to_plain
from offbeat.core.validation import require
from offbeat.errors import ConfigurationError
from offbeat.lab.plots.graph import graph_figure
from offbeat.lab.plots.style import save
from offbeat.topology import Edges, Graph, Topology

PEERS = 16
PEERS_MAX = 2048
"""Every eigenvalue is computed, in time that grows with the cube: seconds at this size, minutes soon after."""


def _option(text: str, metavar: str | None = None, name: str | tuple[str, ...] | None = None) -> Parameter:
    return Parameter(name=name, help=text, metavar=metavar, negative=(), show_default=False)


def topology(
    graph: Annotated[
        str, Parameter(name="GRAPH", help="complete, cycle, exponential or star, or a file with an edge a line")
    ],
    /,
    *,
    n: Annotated[str | None, _option("how many peers [16; an edge list: its own]", "N", ("-n", "--peers"))] = None,
    rate: Annotated[str, _option("averagings of a peer per gradient [1]", "RATE")] = "1",
    plot: Annotated[str | None, _option("draw the graph to this file, .png or .svg [none]", "FILE")] = None,
    json: Annotated[bool, _option("print one JSON object and nothing else")] = False,
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
        print_json(_plain(made, per_gradient))
        return 0
    screen = console()
    screen.print(view(made, constants, f"{title}, rate {per_gradient:g}", screen.width))
    for sentence in sentences(made, constants):
        screen.print(sentence, markup=False, soft_wrap=not screen.is_terminal)
    if place is None and peers > LISTED_MAX:
        screen.print("It is too large to draw here; add --plot graph.png.", markup=False)
    if place is not None:
        screen.print(f"written: {place}", markup=False, soft_wrap=True)
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
    try:
        return save(graph_figure(topology, title), path)
    except OSError as error:
        raise ConfigurationError(f"cannot write {path} ({error.strerror}); name another file with --plot") from None


def _plain(topology: Topology, rate: float) -> dict[str, Any]:
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
