"""Local-steps strategies: every worker trains a replica of its own, and the hub merges what they send every few steps.

Start with `local_steps_strategies.py` (the algorithms), then `local_steps_parts.py` (when the hub merges),
`local_steps_server.py` (the node of rank 0) and `strategies/local_steps_worker.py` (the node of all other ranks, shared
with populations). Imports core, records and the shared nodes of `strategies`, and no other family.
"""
