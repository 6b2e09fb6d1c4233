"""What a probe found out, as it is printed, drawn and written."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import msgspec

from offbeat.errors import ConfigurationError, RunFailed
from offbeat.lab.network_test.plan import Flow

Matrix = list[list[float | None]]
"""Row: who sends. Column: who receives. None on the diagonal."""


class Pair(msgspec.Struct, frozen=True):
    """One rank to another, with nobody else on the network."""

    source: int
    destination: int
    bytes_per_second: float
    latency_seconds: float
    """Half of the median round trip."""
    blocks: int
    """All that went this way, in every step."""
    corrupted: int


class Together(msgspec.Struct, frozen=True):
    """Flows at once: what they carried in all, and what each of them got."""

    flows: int
    bytes: int
    seconds: float
    bytes_per_second: float
    per_flow_bytes_per_second: float
    """The median over the flows; where blocks go both ways over one link, the receipts make it a lower bound."""


class Star(msgspec.Struct, frozen=True):
    """Rank 0 as a hub: what its card carries."""

    into: Together
    out: Together
    both: Together
    message_bytes: int
    updates_per_second: float
    """Messages of that size, one in and one out, that it carries both ways at once."""
    alone_bytes_per_second: float
    """Into rank 0 with nobody else: the median over the others."""


class Network(msgspec.Struct, frozen=True):
    """The whole result; `network.json` holds it."""

    transport: str
    ranks: int
    hosts: list[str]
    elements: int
    pair_elements: int
    seconds: float
    blocks: int
    corrupted: int
    pairs: list[Pair]
    ring: Together
    all_to_all: Together
    star: Star
    flaws: list[str]
    """One sentence for each pair with a corrupted block."""
    format: int = 1

    def bandwidth(self) -> Matrix:
        return self._matrix(lambda pair: pair.bytes_per_second)

    def latency(self) -> Matrix:
        return self._matrix(lambda pair: pair.latency_seconds)

    def _matrix(self, value: Callable[[Pair], float]) -> Matrix:
        known = {(pair.source, pair.destination): value(pair) for pair in self.pairs}
        return [[known.get((source, to)) for to in range(self.ranks)] for source in range(self.ranks)]


class Taken:
    """What was measured so far."""

    def __init__(self) -> None:
        self.latency: dict[Flow, float] = {}
        self.alone: dict[Flow, list[float]] = {}
        self.together: dict[str, list[list[float]]] = {}
        self.blocks: dict[Flow, int] = {}
        self.flaws: dict[Flow, list[str]] = {}

    def less_the_receipt(self, flow: Flow, seconds: float) -> float:
        """How long a flow took: its receipt was on its way for half a round trip, but never for most of it."""
        return max(seconds - self.latency.get(flow, 0.0), seconds / 2)

    def pair(self, flow: Flow, nbytes: int) -> Pair:
        return Pair(
            *flow,
            bytes_per_second=nbytes / statistics.median(self.alone[flow]),
            latency_seconds=self.latency[flow],
            blocks=self.blocks.get(flow, 0),
            corrupted=len(self.flaws.get(flow, [])),
        )

    def at_once(self, kind: str, nbytes: int) -> Together:
        """The median of the repeats: all of it by the longest flow, and each flow by its own time."""
        repeats = self.together[kind]
        flows = len(repeats[0])
        seconds = statistics.median(max(times) for times in repeats)
        each = statistics.median(statistics.median(times) for times in repeats)
        return Together(flows, flows * nbytes, seconds, flows * nbytes / seconds, nbytes / each)

    def sentences(self) -> list[str]:
        return [self._sentence(flow, flaws) for flow, flaws in sorted(self.flaws.items())]

    def _sentence(self, flow: Flow, flaws: list[str]) -> str:
        source, destination = flow
        of = self.blocks[flow]
        return f"{len(flaws)} of {of} blocks from rank {source} to rank {destination} came corrupted: {flaws[0]}"


def write_result(network: Network, path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(network), indent=2) + b"\n")
    except OSError as error:
        raise ConfigurationError(f"cannot write {path} ({error.strerror}); name another place with --out") from None
    return path


def read_result(path: Path) -> Network:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Network)
    except (OSError, msgspec.MsgspecError) as error:
        raise RunFailed(f"{path} holds no result of a probe ({error})") from None
