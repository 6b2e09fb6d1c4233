"""The vocabulary of the library, without input or output: no clock, thread or socket.

Events, actions and messages; `Strategy`, `Node` and `NodeContext`; workloads, data and splits; the sample ledger; flat
vectors, optimizers and schedules; random streams; configuration; compression; the memory pool and rate limits.

Imports torch, NumPy, msgspec and `errors`; every other package may import it.
"""
