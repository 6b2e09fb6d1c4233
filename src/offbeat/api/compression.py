"""Compression of the messages of a strategy, for its field `compression`.

    import offbeat as ob

    strategy = ob.AsyncFixed(compression=ob.compression.TopK(0.01))
    run = ob.simulate(ob.workloads.Digits(), strategy)

`BFloat16` and `Int8` quantize every value; `TopK` sends the largest entries and keeps the rest as error feedback.
"""

from offbeat.core.compression import BFloat16, Compression, Int8, TopK

__all__ = ["BFloat16", "Compression", "Int8", "TopK"]
