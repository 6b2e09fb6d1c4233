"""A user's own training loop takes part in a run: `offbeat.join` and `offbeat.AsyncDataParallel`."""

from offbeat.live.data_parallel import AsyncDataParallel
from offbeat.live.local_ranks import LIVE_SECONDS_PER_SAMPLE, SessionOptions
from offbeat.live.session import Session, join

__all__ = ["LIVE_SECONDS_PER_SAMPLE", "AsyncDataParallel", "Session", "SessionOptions", "join"]
