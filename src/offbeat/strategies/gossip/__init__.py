"""Gossip: every rank is a peer that trains a replica of its own and averages it with one neighbour at a time.

Imports `core`, `records`, `topology` and the modules of `strategies` that families share.

`gossip_strategies.py`, `gossip_parts.py`   the strategies and their fields
`replica.py`                              arithmetic of one exchange and of A²CiD² momentum
`exchange_schedule.py`, `averaging.py`      when exchanges are due, with which partner, and their messages
`membership_view.py`, `membership.py`       live ranks, the root, start, late joiners, restarts
`tree_reduce.py`, `termination.py`          global averages at the start and at the end of a run
`peer_state.py`, `peer.py`                  the state of a peer, and its training
"""
