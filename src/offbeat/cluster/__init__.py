"""Speed of machines and links, straggler models, and faults: the input of the simulator and of injected delay.

Imports `core` only. `cluster.py` has `Cluster` and `Link`, `stragglers.py` the straggler models, `faults.py` crashes,
pauses, partitions and corrupted gradients, and `presets.py` the clusters that have a name.
"""
