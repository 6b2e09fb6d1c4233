"""The result of a network test, as it is printed, drawn and written, and the measurements that it is computed from."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from offbeat.errors import ConfigurationError, RunFailed, shortened
from offbeat.lab.network_test import plan
from offbeat.lab.network_test.plan import NetworkTest, Step, pairs_of
from offbeat.lab.network_test.protocol import ELEMENT_BYTES, Flow

Matrix = list[list[float | None]]
"""A row for each rank that sends, a column for each that receives; None on the diagonal."""


class PairResult(msgspec.Struct, frozen=True):
    """One rank to another, with no other flow on the network."""

    source: int
    destination: int
    bytes_per_second: float
    latency_seconds: float
    """Half of the median round trip."""
    blocks: int
    """Blocks of this pair in all steps."""
    corrupted: int


class ConcurrentResult(msgspec.Struct, frozen=True):
    """Concurrent flows: the bandwidth of all together and of each."""

    flows: int
    bytes: int
    seconds: float
    bytes_per_second: float
    per_flow_bytes_per_second: float
    """The median flow. A lower bound where blocks go both ways over a link, since acknowledgements wait behind them."""


class HubResult(msgspec.Struct, frozen=True):
    """Rank 0 as the hub of a star."""

    into: ConcurrentResult
    out: ConcurrentResult
    both: ConcurrentResult
    message_bytes: int
    updates_per_second: float
    """Messages of that size, each one in and one out, that rank 0 carries both ways at once."""
    alone_bytes_per_second: float
    """One flow into rank 0 alone: the median over the other ranks."""


class NetworkResult(msgspec.Struct, frozen=True):
    """The whole result, and the content of `network.json`."""

    transport: str
    ranks: int
    hosts: list[str]
    elements: int
    pair_elements: int
    seconds: float
    blocks: int
    corrupted: int
    pairs: list[PairResult]
    ring: ConcurrentResult
    all_to_all: ConcurrentResult
    star: HubResult
    flaws: list[str]
    """One sentence for each pair with a corrupted block."""
    format: int = 1

    def bandwidth(self) -> Matrix:
        """Bytes per second of each pair."""
        return self._matrix(lambda pair: pair.bytes_per_second)

    def latency(self) -> Matrix:
        """Seconds of each pair."""
        return self._matrix(lambda pair: pair.latency_seconds)

    def _matrix(self, value: Callable[[PairResult], float]) -> Matrix:
        values = {(pair.source, pair.destination): value(pair) for pair in self.pairs}
        return [[values.get((source, to)) for to in range(self.ranks)] for source in range(self.ranks)]


class Measurements:
    """What rank 0 has measured; `latency` is in seconds, one way."""

    def __init__(self) -> None:
        self.latency: dict[Flow, float] = {}
        self._pair_seconds: defaultdict[Flow, list[float]] = defaultdict(list)
        self._concurrent_seconds: defaultdict[str, list[list[float]]] = defaultdict(list)
        self._blocks: Counter[Flow] = Counter()
        self._flaws: defaultdict[Flow, list[str]] = defaultdict(list)

    def add_seconds(self, step: Step, seconds: Mapping[int, Mapping[int, float]]) -> None:
        """Add the times of the flows of a step, by source and destination, acknowledgements included."""
        times = [self._without_acknowledgement(flow, seconds[flow[0]][flow[1]]) for flow in step.flows]
        if step.kind == plan.PAIR:
            self._pair_seconds[step.flows[0]] += times
        elif step.kind != plan.WARM_UP:
            self._concurrent_seconds[step.kind].append(times)

    def _without_acknowledgement(self, flow: Flow, seconds: float) -> float:
        """The acknowledgement takes half a round trip, but never counts for more than half of the time."""
        return max(seconds - self.latency.get(flow, 0.0), seconds / 2)

    def add_flaws(self, destination: int, flaws: Iterable[tuple[int, str]]) -> None:
        """Add the blocks that a rank has verified: the source and the flaw of each, empty for an intact block."""
        for source, flaw in flaws:
            self._blocks[source, destination] += 1
            if flaw:
                self._flaws[source, destination].append(flaw)

    def result(self, test: NetworkTest, transport: str, hosts: list[str], seconds: float) -> NetworkResult:
        """The result after all steps, which took `seconds`."""
        block_bytes = test.elements * ELEMENT_BYTES
        pairs = [self._pair(flow, test.pair_elements * ELEMENT_BYTES) for flow in pairs_of(len(hosts))]
        both = self._concurrent(plan.BOTH_WAYS, block_bytes)
        star = HubResult(
            into=self._concurrent(plan.INTO_HUB, block_bytes),
            out=self._concurrent(plan.OUT_OF_HUB, block_bytes),
            both=both,
            message_bytes=test.message_bytes,
            updates_per_second=both.bytes_per_second / 2 / test.message_bytes,
            alone_bytes_per_second=statistics.median(pair.bytes_per_second for pair in pairs if pair.destination == 0),
        )
        return NetworkResult(
            transport=transport,
            ranks=len(hosts),
            hosts=hosts,
            elements=test.elements,
            pair_elements=test.pair_elements,
            seconds=seconds,
            blocks=self._blocks.total(),
            corrupted=sum(pair.corrupted for pair in pairs),
            pairs=pairs,
            ring=self._concurrent(plan.RING, block_bytes),
            all_to_all=self._concurrent(plan.ALL_TO_ALL, block_bytes),
            star=star,
            flaws=[self._sentence(flow) for flow in sorted(self._flaws)],
        )

    def _pair(self, flow: Flow, block_bytes: int) -> PairResult:
        return PairResult(
            *flow,
            bytes_per_second=block_bytes / statistics.median(self._pair_seconds[flow]),
            latency_seconds=self.latency[flow],
            blocks=self._blocks[flow],
            corrupted=len(self._flaws.get(flow, [])),
        )

    def _concurrent(self, kind: str, block_bytes: int) -> ConcurrentResult:
        """The median of the repeats: the total by the longest flow, each flow by its own time."""
        repeats = self._concurrent_seconds[kind]
        flows = len(repeats[0])
        seconds = statistics.median(max(times) for times in repeats)
        each = statistics.median(statistics.median(times) for times in repeats)
        return ConcurrentResult(flows, flows * block_bytes, seconds, flows * block_bytes / seconds, block_bytes / each)

    def _sentence(self, flow: Flow) -> str:
        flaws, blocks = self._flaws[flow], self._blocks[flow]
        return f"{len(flaws)} of {blocks} blocks from rank {flow[0]} to rank {flow[1]} came corrupted: {flaws[0]}"


def write_result(result: NetworkResult, path: Path) -> Path:
    """Write a result as JSON. Raises `ConfigurationError` where the path cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    except OSError as error:
        raise ConfigurationError(f"cannot write {path} ({error.strerror}); name another place with --out") from None
    return path


def read_result(path: Path) -> NetworkResult:
    """Read what `write_result` wrote. Raises `RunFailed` where there is no result."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=NetworkResult)
    except (OSError, msgspec.MsgspecError) as error:
        raise RunFailed(f"{path} holds no result of a network test ({shortened(error)})") from None
