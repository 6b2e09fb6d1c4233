"""`offbeat.join`: a user's own training loop takes part in a run."""

from offbeat.session.ranks import LIVE_SECONDS_PER_SAMPLE, Terms
from offbeat.session.session import Session, join

__all__ = ["LIVE_SECONDS_PER_SAMPLE", "Session", "Terms", "join"]
