"""Parameter-server strategies: the hub (rank 0) holds the parameters, all other ranks compute gradients for it.

Start with `hub_strategies.py` (the algorithms), then `hub_parts.py` (the parts they are composed of), `hub_server.py`
(the node of rank 0) and `hub_worker.py` (the node of all other ranks). Imports core, records and the shared nodes of
`strategies`, and no other family.
"""
