"""The local-steps family: every worker trains a replica of its own, and they exchange now and then through a hub.

Start with `named.py` (the algorithms), then `composition.py` (what they are made of), `node.py` (the hub) and
`strategies/learner.py`.
"""

from offbeat.strategies.learner import Content, Differences, Gradients
from offbeat.strategies.local_steps.composition import LocalSteps
from offbeat.strategies.local_steps.named import DecoupledDiLoCo, DelayedExchange, DiLoCo, LocalSGD
from offbeat.strategies.local_steps.parts import Everyone, Merge, Quorum

__all__ = [
    "Content",
    "DecoupledDiLoCo",
    "DelayedExchange",
    "DiLoCo",
    "Differences",
    "Everyone",
    "Gradients",
    "LocalSGD",
    "LocalSteps",
    "Merge",
    "Quorum",
]
