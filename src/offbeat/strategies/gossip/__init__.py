"""Gossip: every rank is a peer that trains a replica of its own and averages it with one neighbour at a time.

Imports `core`, `records`, `topology` and the modules of `strategies` that families share.

`gossip_strategies.py`, `gossip_parts.py`   the strategies and their fields
`replica.py`                              arithmetic of one exchange and of A²CiD² momentum
`exchange_schedule.py`, `averaging.py`      when exchanges are due, with which partner, and their messages
`membership_view.py`, `peer_membership.py`  live ranks, the root, start, late joiners, restarts
`peer_training.py`                        gradients and optimizer steps on the replica
`tree_reduce.py`, `global_averages.py`      averages over all ranks, at the start and at the end of a run
`termination.py`                          how all ranks end with the same result
`phases.py`, `transitions.py`, `peer.py`    phase × event → phase and handlers; the node that owns all parts
"""
