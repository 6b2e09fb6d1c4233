"""Both engines give the same run: an experiment in the simulator, and in the live engine on the loopback.

The speeds of the cluster decide the order of events, so the cluster should make no two of them fall on one moment:
choose different speeds and some latency. Durations that are multiples of a power of two add up without rounding, and
then the runs agree bit for bit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from offbeat.core.actions import Finish, Record
from offbeat.engine.experiment import Experiment
from offbeat.lab.simulated_runs import one_thread
from offbeat.records.files import MemoryWriter
from offbeat.records.schema import Consensus, Ended, LinkUse, Membership, RunRecords, Traffic
from offbeat.records.traffic import bytes_received, sent_by_kind
from offbeat.simulation.simulator import Simulation
from offbeat.testing.fake_clock_run import FakeClockRun
from offbeat.testing.invariants import verify

SUMMARIES = (Consensus, Ended, LinkUse, Membership, Traffic)
"""Records that the engines write at different times: counts per rank or of all ranks, and what one engine alone knows.

Their totals are compared. All other records are compared one by one.
"""
RELATIVE_TOLERANCE = 1e-9
"""Of times in records; all that is not a time follows from them and from the data."""


@dataclass(frozen=True)
class EngineComparison:
    """How much was compared: records of each kind, and the bytes of messages of each kind."""

    records: dict[str, int]
    bytes_sent: dict[str, int]


def check_engines_agree(experiment: Experiment) -> EngineComparison:
    """Run an experiment in both engines and compare; returns what was compared.

    Compared are all records but summaries (updates with their staleness, rounds, dropped gradients, exchanges,
    evaluations), the messages and bytes of each kind, and the final parameters and buffers of every rank.

    experiment: what to run, without faults; `evaluate` may be None.
    Raises `Violation` at the first difference.
    """
    verify(not experiment.cluster.faults, "faults are not injected on the loopback; give a cluster without them")
    experiment, workload = experiment.resolved()
    with one_thread():
        simulated_records = MemoryWriter()
        simulation = Simulation(experiment, simulated_records, merge_microbatches=False)
        outcome = simulation.run()
        verify(outcome.failure is None, f"the simulated run failed: {outcome.failure}")
        live = FakeClockRun(experiment, workload)
        finishes = live.run()
    header = experiment.header("simulated", workload.label, simulation.gradient_computer.flat.layout.numel)
    runs = [
        RunRecords(None, header, tuple(records))  # type: ignore[arg-type]
        for records in (simulated_records.records, live.records.records)
    ]
    records = _compare_records(*(_comparable(run.records) for run in runs))
    flows = [sent_by_kind(run) for run in runs]
    verify(flows[0] == flows[1], f"the messages sent differ: simulated {flows[0]}, live {flows[1]}")
    received = [bytes_received(run) for run in runs]
    verify(received[0] == received[1], f"the bytes received differ: simulated {received[0]}, live {received[1]}")
    _compare_finishes(outcome.finishes, finishes)
    return EngineComparison(records, {kind: flow.bytes for kind, flow in flows[0].items()})


def _comparable(records: Iterable[Record]) -> list[dict[str, Any]]:
    """All records but summaries, in the order of time, kind and rank."""
    plain = [msgspec.to_builtins(record) for record in records if not isinstance(record, SUMMARIES)]
    return sorted(plain, key=lambda record: (round(record["at"], 9), record["record"], record.get("rank", 0)))


def _compare_records(simulated: Sequence[dict[str, Any]], live: Sequence[dict[str, Any]]) -> dict[str, int]:
    for left, right in zip(simulated, live, strict=False):
        verify(_is_close(left, right), f"the records differ: simulated {left}, live {right}")
    counts = [Counter(record["record"] for record in records) for records in (simulated, live)]
    verify(counts[0] == counts[1], f"the numbers of records differ: simulated {counts[0]}, live {counts[1]}")
    return dict(counts[0])


def _is_close(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-12) or (left != left and right != right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_is_close(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_is_close, left, right))
    return bool(left == right)


def _compare_finishes(simulated: dict[int, Finish], live: dict[int, Finish]) -> None:
    verify(simulated.keys() == live.keys(), f"ranks {sorted(simulated)} finished simulated, {sorted(live)} live")
    for rank, finish in simulated.items():
        other = live[rank]
        verify(finish.version == other.version, f"rank {rank} ends with version {finish.version}, live {other.version}")
        tensors = zip((finish.parameters, *finish.buffers), (other.parameters, *other.buffers), strict=True)
        for left, right in tensors:
            verify(
                torch.equal(left, right),
                f"rank {rank} ends with other values; the largest difference is {_difference(left, right):.3g}",
            )


def _difference(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left.double() - right.double()).abs().max()) if left.shape == right.shape else math.inf
