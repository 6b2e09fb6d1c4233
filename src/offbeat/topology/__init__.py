"""Who averages with whom: graphs, what follows from their shape, and schedules of pairs."""

from offbeat.topology.graphs import Complete, Cycle, Edges, ExponentialGraph, Graph, Star
from offbeat.topology.matchings import Matching
from offbeat.topology.topology import Constants, Topology

__all__ = ["Complete", "Constants", "Cycle", "Edges", "ExponentialGraph", "Graph", "Matching", "Star", "Topology"]
