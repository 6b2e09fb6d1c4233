"""The virtual-time engine: all nodes in one process, real gradients, no waiting.

`simulator.Simulation` runs an `Experiment`. May import engine, strategies, cluster, records, topology and core, and
nothing that reaches a clock, a thread or a socket.
"""
