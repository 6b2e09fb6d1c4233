"""The local-steps family: every worker trains a replica of its own, and they exchange now and then through a hub.

Start with `named.py` (the algorithms), then `composition.py` (what they are made of), `node.py` (the hub) and
`strategies/learner.py`.
"""

from offbeat.strategies.local_steps.local_steps_parts import Everyone, Merge, Quorum
from offbeat.strategies.local_steps.local_steps_strategies import (
    DecoupledDiLoCo,
    DelayedExchange,
    DiLoCo,
    LocalSGD,
    LocalSteps,
)
from offbeat.strategies.local_training import Content, Differences, Gradients

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
