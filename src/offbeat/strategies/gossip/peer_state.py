"""The state of a peer, besides its parts, as a checkpoint holds it."""

from __future__ import annotations

from dataclasses import dataclass, field

from offbeat.core.messages import Buffers
from offbeat.strategies.gossip.gossip_messages import Average, PartialSum
from offbeat.strategies.gossip.tree_reduce import TreeReduce
from offbeat.strategies.node_state import Stateful

GATHERING, TRAINING, ENDING, COMPLETE = "gathering", "training", "ending", "complete"
"""Phases: waiting for the other ranks; training; waiting for the final average; holding the final average."""


@dataclass(eq=False)
class PeerState(Stateful):
    """Base of the peer that declares its state; some fields are used on the root only."""

    phase: str = GATHERING
    finished: bool = False
    """Whether `Finish` has been returned."""

    # Training
    version: int = 0
    """Updates of this replica."""
    draw: int = 0
    """The next position in this rank's data order."""
    computing: bool = False
    """Whether a `Compute` is outstanding."""
    buffers_before: Buffers = ()
    """Buffers at the start of the outstanding computation."""
    nonfinite_in_a_row: int = 0
    samples_reported: int = 0
    """Own samples at the last `SampleCounts` message to the root."""
    loop_ended: bool = False
    """Whether the user's training loop has ended; this peer goes on averaging with the others."""
    leaving: bool = False
    """Whether this peer finishes without the others, as soon as nothing is outstanding."""
    began_at: float = 0.0
    """When training began, in seconds on this process's clock."""

    # Start and membership
    root: int = 0
    """The root as of the last change, to notice the next one."""
    is_waiting_for_all: bool = True
    """Whether the start still waits for all expected ranks; false once `patience_seconds` have passed."""
    others_are_starting: bool = False
    """Whether another rank was waiting for the start too: this is a start then, and not a restart after the end."""
    copy_source: int | None = None
    """The training rank from which parameters have been requested."""
    copy_candidates: set[int] = field(default_factory=set)
    """Ranks known to be training."""
    unreachable_reported: list[int] = field(default_factory=list)
    """Ranks of the last notice about a graph in pieces."""

    # Global averages
    reduce_round: int = 0
    """The last round that this rank has started as root. The first is random, so that a restart repeats none."""
    last_reduce_start: tuple[int, int, int] = (-1, -1, -1)
    """Root, its incarnation, and round of the last `ReduceStart` that was accepted."""
    tree_reduce: TreeReduce | None = None
    """The round under way."""
    early_sums: list[tuple[int, PartialSum]] = field(default_factory=list)
    """Source and partial sum, of rounds whose `ReduceStart` has not arrived yet."""
    joined_too_late: bool = False
    """Whether training was over when this rank joined, so that it contributes no values."""
    result: Average | None = None
    """The final average."""

    # Termination
    loops_ended: set[int] = field(default_factory=set)
    """On the root: ranks whose training loop has ended."""
    required_links: set[int] = field(default_factory=set)
    """On a root that has just restarted: ranks that must be linked before it starts the final average."""
    awaiting_receipt: set[int] = field(default_factory=set)
    """On the root: ranks that have not confirmed the final average."""
    awaiting_stopped: set[int] = field(default_factory=set)
    """On the root: ranks that have not answered `Stop`."""
    receipt_due: bool = False
    """Whether `AverageReceived` is still to be sent."""
    stop_sent: bool = False
    stop_received: bool = False
