"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, or one of the user's own, fed from the records of a run.

`tracker.py` has the contract, and `run_metrics.py` turns records into values and events, for all trackers. `sink.py`
hands them to each tracker in a thread of its own (`tracker_thread.py`), so that no tracker can stop or slow a run. Each
`*_tracker.py` is the one place that imports its package, when it is used.

Imports `engine`, `records`, `core` and `errors`. Engines do not know that they are tracked: `lab` and `live` pass the
records on.
"""
