"""Populations: every worker trains a model of its own, and learns from those that do better.

Start with `named.py` (the configuration), then `parts.py` (who learns from whom), `node.py` (the switch) and
`member.py`.
"""

from offbeat.strategies.population.named import Population
from offbeat.strategies.population.parts import All, Best, Better, Initial, Same, Shuffled, Sources

__all__ = ["All", "Best", "Better", "Initial", "Population", "Same", "Shuffled", "Sources"]
