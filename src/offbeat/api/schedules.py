"""Learning rates as functions of the samples applied so far, for the field `lr` of an optimizer.

    import offbeat as ob

    optimizer = ob.SGD(lr=ob.schedules.Linear(0.1, 0.0, 60_000))
    run = ob.simulate(ob.workloads.Digits(), ob.FixedMinibatch(optimizer=optimizer))

`large_batch` sets an optimizer for large updates: warm-up, a rate in proportion to the batch, milestones.
"""

from offbeat.core.optimizers import large_batch
from offbeat.core.schedules import Constant, Cosine, Exponential, Linear, Milestones, Schedule, WarmUp

__all__ = ["Constant", "Cosine", "Exponential", "Linear", "Milestones", "Schedule", "WarmUp", "large_batch"]
