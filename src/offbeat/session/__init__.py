"""A user's own training loop takes part in a run: `offbeat.join` and `offbeat.AsyncDataParallel`."""

from offbeat.session.data_parallel import AsyncDataParallel
from offbeat.session.ranks import LIVE_SECONDS_PER_SAMPLE, Terms
from offbeat.session.session import Session, join

__all__ = ["LIVE_SECONDS_PER_SAMPLE", "AsyncDataParallel", "Session", "Terms", "join"]
