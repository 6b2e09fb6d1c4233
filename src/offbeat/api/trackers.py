"""Trackers with settings, for `track` of `ob.join`, `ob.train` and `ob.simulate`; with defaults their names do.

    import offbeat as ob

    tracker = ob.trackers.MLflow(experiment="stragglers")
    run = ob.simulate(ob.workloads.Digits(), ob.AsyncTimed(), track=["tensorboard", tracker])

`ob.Tracker` is the class that a tracker of your own derives from, and `TrackedRun` is what it is told of a run.
"""

from offbeat.tracking.mlflow_tracker import MLflow
from offbeat.tracking.tensorboard_tracker import TensorBoard
from offbeat.tracking.tracker import TrackedRun
from offbeat.tracking.wandb_tracker import WandB

__all__ = ["MLflow", "TensorBoard", "TrackedRun", "WandB"]
