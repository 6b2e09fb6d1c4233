"""Populations: every worker trains a model of its own, and learns from those that do better.

Start with `named.py` (the configuration), then `parts.py` (who learns from whom), `node.py` (the switch) and
`member.py`.
"""

from offbeat.strategies.population.population_parts import AllMembers, Best, Better, Initial, Same, Shuffled, Sources
from offbeat.strategies.population.population_strategies import Population

__all__ = ["AllMembers", "Best", "Better", "Initial", "Population", "Same", "Shuffled", "Sources"]
