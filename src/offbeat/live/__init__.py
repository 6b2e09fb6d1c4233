"""The wall-clock engine: one node per rank, driven by real messages, timers and a user's training loop.

`session.join` and `data_parallel.AsyncDataParallel` are the entry points, `node_runner` drives a node, `local_ranks`
builds and connects the ranks of a process. May import everything below it: launch, strategies, transports, cluster,
records, topology and core; not the simulation, which is its counterpart.
"""
