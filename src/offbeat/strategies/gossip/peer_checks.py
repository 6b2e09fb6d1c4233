"""What a peer checks in a message of another before it uses any of it: the other may be wrong, or lie.

Each check raises `InvalidMessage`; the engine then closes the link, and the run goes on. An offer whose values are not
finite is no violation: a peer that diverges sends it, and it is declined.
"""

from __future__ import annotations

import math

from torch import Tensor

from offbeat.core.events import MessageArrived
from offbeat.core.messages import Stop
from offbeat.strategies.gossip.gossip_messages import Answer, Average, CopyReply, Paired, PartialSum
from offbeat.strategies.gossip.membership_view import MembershipView
from offbeat.strategies.gossip.replica import Replica
from offbeat.strategies.member_checks import SAMPLES_PER_SECOND_MAX, MemberCheck

NUMBERS = ("sequence", "pairing", "round", "version", "peers", "draws_stop")
"""Header fields that count from 0."""
NUMBER_MAX = 1 << 53
RANKS = ("root", "partner")
LISTS_OF_RANKS = ("members", "ranks")


def check_peer_message(event: MessageArrived, view: MembershipView, replica: Replica) -> None:
    """Check everything that a message says against the model, the ranks of the run, and the time that has passed."""
    message, check = event.message, MemberCheck(event, view.rank)
    if isinstance(message, Stop):  # its parameters are not used: all peers have the result
        return
    is_empty = isinstance(message, PartialSum) and not message.peers
    for name in ("parameters", "difference"):
        vector = getattr(message, name, None)
        if isinstance(vector, Tensor):
            check.vector(name, vector, replica.storage, 0 if is_empty else replica.storage.numel())
            if isinstance(message, PartialSum | Average | CopyReply | Answer):
                check.finite(name, vector)
    if hasattr(message, "buffers"):
        check.require(
            is_empty or len(message.buffers) == len(replica.buffers), "buffers that are not those of the model"
        )
        check.buffers(message.buffers, replica.buffers)
    for name in NUMBERS:
        number = getattr(message, name, 0)
        check.require(0 <= number <= NUMBER_MAX, f"{name} {number}")
    ranks = [getattr(message, name) for name in RANKS if hasattr(message, name)]
    for name in LISTS_OF_RANKS:
        ranks += getattr(message, name, ())
    for rank in ranks:
        check.require(0 <= rank < view.size, f"rank {rank}, where there are {view.size}")
    _check_counts(check, event, view)
    if isinstance(message, PartialSum):
        check.require(message.peers <= view.size, f"a sum of {message.peers} peers, where there are {view.size}")
    if isinstance(message, Paired):
        check.require(message.partner != view.rank, "this rank as its own partner")
    if isinstance(message, Answer):
        check.number("distance", message.distance)
        check.require(math.isfinite(message.alpha_tilde), f"alpha_tilde {message.alpha_tilde}")


def _check_counts(check: MemberCheck, event: MessageArrived, view: MembershipView) -> None:
    """One number for each rank, none larger than what can have been computed by now."""
    counts = getattr(event.message, "counts", None)
    if counts is None:
        return
    check.require(len(counts) == view.size, f"sample counts of {len(counts)} ranks, where there are {view.size}")
    limit = SAMPLES_PER_SECOND_MAX * max(event.at, 1.0)
    for count in counts:
        check.require(0 <= count <= limit, f"a count of {count} samples, where {limit:.0f} is possible by now")
