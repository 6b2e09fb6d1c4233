"""The algorithms: `strategy.py` is the contract, and there is one package or file per family.

Importing a family enters its members in `Strategy.members`, where the command line finds them, in this order.
"""

from offbeat.strategies import hub  # isort: skip
from offbeat.strategies import gossip, local_steps, population, serial

__all__ = ["gossip", "hub", "local_steps", "population", "serial"]
