"""Graphs for gossip: which peers average with each other, and the constants that follow from the shape.

    import offbeat as ob

    run = ob.simulate(ob.workloads.Digits(), ob.Gossip(graph=ob.graphs.Cycle()), workers=16)
    print(ob.graphs.Topology(ob.graphs.Cycle(), 16).constants(rate=1.0))

`Topology` computes the constants of a graph and its matchings; `offbeat topology` prints them.
"""

from offbeat.topology.graphs import Complete, Cycle, Edges, ExponentialGraph, Graph, Star
from offbeat.topology.topology import Topology

__all__ = ["Complete", "Cycle", "Edges", "ExponentialGraph", "Graph", "Star", "Topology"]
