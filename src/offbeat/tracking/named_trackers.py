"""The trackers that have a name, and what `track` of `ob.join` and the like may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offbeat.errors import ConfigurationError, quoted, unknown
from offbeat.tracking.mlflow_tracker import MLflow
from offbeat.tracking.tensorboard_tracker import TensorBoard
from offbeat.tracking.tracker import Tracker
from offbeat.tracking.wandb_tracker import WandB

TRACKERS: dict[str, Callable[[], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
"""Name → what makes a tracker with its default settings."""

Track = str | Tracker | Sequence[str | Tracker] | None
"""The name of a tracker, or several with commas between them; a tracker; or a list of names and trackers."""


def trackers_of(track: Track) -> list[Tracker]:
    """The trackers that are meant; raises `ConfigurationError` if there is none of a name.

    track: names and trackers; None: no tracker.
    """
    if track is None:
        return []
    trackers: dict[str, Tracker] = {}
    for each in [track] if isinstance(track, str) or not isinstance(track, Sequence) else track:
        if isinstance(each, str):
            trackers.update((name, _tracker_of(name)) for name in map(str.strip, each.split(",")))
        elif isinstance(each, Tracker):
            trackers[f"{id(each)}"] = each
        else:
            raise ConfigurationError(
                f"track takes names ({', '.join(TRACKERS)}) and objects of classes derived from offbeat.Tracker, but "
                f"was given {quoted(each)}"
            )
    return list(trackers.values())


def checked_trackers(track: Track) -> list[Tracker]:
    """The same as `trackers_of`; raises `ConfigurationError` if one of them cannot be used, too."""
    trackers = trackers_of(track)
    for tracker in trackers:
        tracker.check()
    return trackers


def _tracker_of(name: str) -> Tracker:
    if name not in TRACKERS:
        raise unknown("tracker", name, TRACKERS)
    return TRACKERS[name]()
