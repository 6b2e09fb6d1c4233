"""Population training: every worker trains a model of its own, averaged with models that have better scores.

Start with `population_strategies.py` (the strategy), then `population_parts.py` (with which models a model is
averaged), `population_server.py` (the node of rank 0) and `population_member.py` (the node of all other ranks).
Imports core, records and the shared nodes of `strategies`, and no other family.
"""
