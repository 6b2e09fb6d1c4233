"""The algorithms, one package or file per family, and the nodes that families with a server share.

Imports core, cluster, topology and records; families do not import each other. This is the registry: importing a
family enters its members in `Strategy.members`, in this order. A new family is one file here and one line below.
"""

# isort: off
from offbeat.strategies import hub as hub
from offbeat.strategies.gossip import gossip_strategies as gossip_strategies
from offbeat.strategies import local_steps as local_steps
from offbeat.strategies import population as population
from offbeat.strategies import serial as serial
