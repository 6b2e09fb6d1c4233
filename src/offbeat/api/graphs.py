"""Graphs for gossip: which peers average with each other, and what follows from the shape of a graph."""

from offbeat.topology.graphs import Complete, Cycle, Edges, ExponentialGraph, Graph, Star
from offbeat.topology.topology import Topology

__all__ = ["Complete", "Cycle", "Edges", "ExponentialGraph", "Graph", "Star", "Topology"]
