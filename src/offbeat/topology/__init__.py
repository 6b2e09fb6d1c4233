"""Communication graphs for gossip: the named graphs, spectral constants, and perfect matchings.

Imports `core`, NumPy and networkx only. `graphs.py` has the graphs, `topology.py` a graph of a given size restricted to
its live members, and `matchings.py` schedules of disjoint pairs.
"""
