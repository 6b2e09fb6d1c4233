"""The algorithms, one package or file per family, and the nodes that families with a server share.

Imports core, cluster, topology and records; families do not import each other. This is the registry: importing a
family enters its members in `Strategy.members`, in this order. A new family is one file here and one line below.
"""

# isort: off
from offbeat.strategies.hub import hub_strategies as hub_strategies
from offbeat.strategies.gossip import gossip_strategies as gossip_strategies
from offbeat.strategies.local_steps import local_steps_strategies as local_steps_strategies
from offbeat.strategies.population import population_strategies as population_strategies
from offbeat.strategies import serial as serial
