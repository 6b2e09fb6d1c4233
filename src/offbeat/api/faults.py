"""Faults of a cluster: what fails on which rank and when, for `Cluster(faults=...)`.

    import offbeat as ob

    faults = (ob.faults.Crash(1, at_seconds=30, back_after_seconds=10), ob.faults.Pause(2, at_seconds=5, seconds=20))
    run = ob.simulate(ob.workloads.Digits(), ob.AsyncTimed(), ob.Cluster(faults=faults))

`failures` draws random crashes with a mean time between failures.
"""

from offbeat.cluster.faults import Corrupt, Crash, Fault, Hang, Partition, Pause, failures

__all__ = ["Corrupt", "Crash", "Fault", "Hang", "Partition", "Pause", "failures"]
