"""Serial training: one process computes and updates; nobody else takes part.

Start with `named.py` (what can be chosen), then `node.py`.
"""

from offbeat.strategies.serial.serial_strategies import ArtificialDelay, Serial

__all__ = ["ArtificialDelay", "Serial"]
