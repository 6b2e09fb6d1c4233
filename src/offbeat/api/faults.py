"""What goes wrong on which rank and when, for `Cluster(faults=...)`."""

from offbeat.cluster.faults import Corrupt, Crash, Fault, Partition, Pause, failures

__all__ = ["Corrupt", "Crash", "Fault", "Partition", "Pause", "failures"]
