"""The options of a node runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.core.messages import Buffers
from offbeat.live.clock import Clock
from offbeat.live.evaluation import Evaluator, Measure
from offbeat.live.injected_delay import InjectedDelay
from offbeat.live.record_sink import OnRemoteRecords
from offbeat.records.files import Writer


@dataclass(frozen=True, kw_only=True, eq=False)
class RunnerOptions:
    """What a `NodeRunner` needs besides its node and its transport."""

    rank: int
    clock: Clock
    """Time since the start of the run; synchronized with rank 0 at the first join."""
    writer: Writer
    """Receives the records of this rank."""
    is_peer: Callable[[int], bool]
    """Whether this rank exchanges messages with another, by its strategy."""
    load: Callable[[Tensor, Buffers], None] | None = None
    """Copies the parameters and buffers of a `Compute` into the model; None for a rank that does not compute."""
    measure: Measure | None = None
    """Measures loss and accuracy; None if this rank does not evaluate."""
    make_evaluator: Callable[..., Evaluator] = Evaluator
    """Makes the evaluator, which by default calls `measure` on a thread of its own."""
    injected_delay: InjectedDelay = field(default_factory=InjectedDelay)
    """Delay added on purpose."""
    on_remote_records: OnRemoteRecords | None = None
    """Receives the records that other ranks send here."""
    device: torch.device | None = None
    """Where the node's tensors are; received tensors are copied there."""
    irreplaceable: frozenset[int] = frozenset()
    """Peers that cannot come back; the run fails once all of them are lost."""
    hub: int | None = None
    """The rank that gives this one its work; None where there is none."""
    is_rejoining: bool = False
    """Whether this rank was restarted; the run fails if all peers are lost before it got their state."""
    bytes_per_second: float | None = None
    """Rate limit per peer; None for no limit."""
    records_max_bytes: float | None = None
    """The size of records from which they are aggregated; None for no limit."""
