"""What the simulator records about all ranks together: traffic, consensus distance, link use and the end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from offbeat.records.files import Writer
from offbeat.records.schema import Consensus, Ended, LinkUse
from offbeat.records.traffic import TrafficCounter
from offbeat.simulation.network import SimulatedNetwork
from offbeat.simulation.process import Process


class SimulationRecords:
    """Writes the records of a run.

    writer: receives them.
    processes: by rank, for the consensus distance.
    network: for the use of links.
    traffic: the messages of all ranks.
    bytes_per_second: the rate limit of each direction of each link; None: no limit.
    """

    def __init__(
        self,
        writer: Writer,
        processes: Sequence[Process],
        network: SimulatedNetwork,
        traffic: TrafficCounter,
        bytes_per_second: float | None,
    ) -> None:
        self.write = writer.write
        self._processes = processes
        self._network = network
        self._traffic = traffic
        self._bytes_per_second = bytes_per_second

    def write_evaluation(self, at: float) -> None:
        """Consensus distance and traffic at the time of an evaluation."""
        self._write_consensus(at, (process for process in self._processes if process.active))
        self._write_traffic(at)

    def write_end(self, at: float, failure: str | None) -> None:
        """The last records of a run. `failure` is why it failed, in one sentence; None if it did not."""
        self._write_consensus(at, (process for process in self._processes if process.alive))
        self._write_traffic(at)
        self._write_link_use(at)
        sent = self._traffic
        self.write(Ended(at=at, bytes_sent=sent.bytes_sent, messages_sent=sent.messages_sent, failure=failure))

    def _write_traffic(self, at: float) -> None:
        traffic = self._traffic.record(at)
        if traffic is not None:
            self.write(traffic)

    def _write_consensus(self, at: float, processes: Iterable[Process]) -> None:
        """The consensus distance of these processes, if at least two of them have replicas."""
        replicas = [replica for process in processes if (replica := _replica(process)) is not None]
        if len(replicas) < 2:
            return
        distance = consensus_distance(replicas)
        if math.isfinite(distance):
            self.write(Consensus(at=at, peers=len(replicas), distance=distance))

    def _write_link_use(self, at: float) -> None:
        """The bytes that each rank has sent under a rate limit, if there is one."""
        if self._bytes_per_second is None:
            return
        for process in self._processes:
            used = {str(peer): nbytes for peer, nbytes in self._network.limited_bytes(process.rank).items()}
            self.write(LinkUse(at=at, rank=process.rank, bytes_per_second=self._bytes_per_second, used=used))


def _replica(process: Process) -> Tensor | None:
    """The replica of a process; if it has finished, the parameters that it finished with."""
    replica = process.node.replica()
    return replica if replica is None or process.finish is None else process.finish.parameters


def consensus_distance(replicas: Sequence[Tensor]) -> float:
    """The mean of ‖x_i − mean of x‖², in one pass and float64; exactly 0 if all are equal.

    Differences from the first replica are summed instead of the replicas, against cancellation.
    """
    first = replicas[0].double()
    total, difference = torch.zeros_like(first), torch.empty_like(first)
    squares = 0.0
    for replica in replicas[1:]:
        difference.copy_(replica).sub_(first)
        total += difference
        squares += float(difference @ difference)
    mean = total / len(replicas)
    distance = squares / len(replicas) - float(mean @ mean)
    return 0.0 if distance < 0 else distance  # negative by rounding; NaN stays NaN
