"""offbeat trains one model on many machines without making the fast ones wait."""

__version__ = "0.1.0"
