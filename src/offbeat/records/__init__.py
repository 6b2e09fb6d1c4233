"""Records of runs: their kinds, run directories, and what is computed from them.

`schema.py` has the kinds of record, `files.py` writes and reads run directories, and `traffic.py` counts messages. The
others compute from records alone: metrics of a run, exchanges of gossip, curves for figures, comparison of runs.

Imports `core` only.
"""
