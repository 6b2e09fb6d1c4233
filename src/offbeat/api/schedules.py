"""Learning rates as functions of the samples applied so far, for the `lr` of an optimizer."""

from offbeat.core.optimizers import large_batch
from offbeat.core.schedules import Constant, Exponential, Linear, Milestones, Schedule, WarmUp

__all__ = ["Constant", "Exponential", "Linear", "Milestones", "Schedule", "WarmUp", "large_batch"]
