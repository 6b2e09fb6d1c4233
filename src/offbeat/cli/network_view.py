"""How `offbeat network` prints a result: tables, heat maps, and sentences."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offbeat.cli.output import table
from offbeat.lab.network_test.protocol import ELEMENT_BYTES
from offbeat.lab.network_test.result import Matrix, NetworkResult, PairResult
from offbeat.lab.report.formatting import NONE, number, plural

ROWS_MAX = 30
"""With more pairs than this, only the slowest are listed."""
SLOWEST = 10
MAP_RANKS_MAX = 16
CELL_WIDTH = 6
"""Columns of one cell of a heat map: a blank and a number of three digits."""

_BAD, _MIDDLE, _GOOD = (213, 94, 0), (245, 245, 245), (86, 180, 233)
"""Colour-blind readers can distinguish them; the numbers say the same."""


def view(result: NetworkResult, width: int) -> Group:
    """The tables and heat maps for a screen of `width` columns; `sentences` follow them."""
    parts: list[RenderableType] = [Text(_title(result), style="bold"), Text("")]
    if len(result.pairs) <= ROWS_MAX:
        parts += [_pair_table(result.pairs), Text("")]
    if result.ranks <= min(MAP_RANKS_MAX, (width - 3) // CELL_WIDTH):
        parts += [*_heat_maps(result), Text("")]
    if len(result.pairs) > ROWS_MAX:
        slowest = sorted(result.pairs, key=lambda pair: pair.bytes_per_second)[:SLOWEST]
        parts += [Text(_ranges(result)), Text(f"the {SLOWEST} slowest:"), _pair_table(slowest), Text("")]
    return Group(*parts, _concurrent_table(result), Text(""))


def _title(result: NetworkResult) -> str:
    machines = len(set(result.hosts))
    size = number(result.elements * ELEMENT_BYTES / 1e6)
    where = f"{result.ranks} ranks on {plural(machines, 'machine')} over {result.transport}"
    return f"{where}, blocks of {result.elements:,} integers ({size} MB)"


def sentences(result: NetworkResult) -> list[str]:
    """What the star carries, and how many blocks arrived intact."""
    star = result.star
    size = number(star.message_bytes / 1e6)
    share = star.into.per_flow_bytes_per_second / star.alone_bytes_per_second
    flows = plural(star.into.flows, "flow")
    intact = result.blocks - result.corrupted
    return [
        f"At {size} MB per message this star carries {number(star.updates_per_second)} updates/s: one message into "
        "rank 0 and one out of it for each.",
        f"Of {flows} into rank 0 at once each gets {number(star.into.per_flow_bytes_per_second / 1e6)} MB/s, "
        f"{share:.0%} of what one gets alone.",
        f"{intact} of {result.blocks} blocks verified: begin and end markers and a 64-bit checksum.",
    ]


def _pair_table(pairs: Sequence[PairResult]) -> Table:
    heads = ("from → to", "MB/s", "Gbit/s", "latency µs", "blocks", "corrupted")
    rows = [
        (
            f"{pair.source} → {pair.destination}",
            number(pair.bytes_per_second / 1e6),
            number(pair.bytes_per_second * 8 / 1e9),
            number(pair.latency_seconds * 1e6),
            str(pair.blocks),
            Text(str(pair.corrupted), style="bold red" if pair.corrupted else ""),
        )
        for pair in pairs
    ]
    return table(heads, rows, right=heads[1:])


def _concurrent_table(result: NetworkResult) -> Table:
    heads = ("at once", "flows", "seconds", "MB/s", "Gbit/s", "MB/s of a flow")
    measured = {
        "ring": (result.ring, result.ranks > 2),
        "all to all": (result.all_to_all, False),
        "all into rank 0": (result.star.into, True),
        "rank 0 to all": (result.star.out, True),
        "rank 0 both ways": (result.star.both, False),
    }
    rows = [
        (
            name,
            str(flows.flows),
            number(flows.seconds),
            number(flows.bytes_per_second / 1e6),
            number(flows.bytes_per_second * 8 / 1e9),
            number(flows.per_flow_bytes_per_second / 1e6) if one_way else NONE,
        )
        for name, (flows, one_way) in measured.items()
    ]
    return table(heads, rows, right=heads[1:])


def _ranges(result: NetworkResult) -> str:
    rates = [pair.bytes_per_second / 1e6 for pair in result.pairs]
    delays = [pair.latency_seconds * 1e6 for pair in result.pairs]
    return f"{len(rates)} pairs: {_range(rates, 'MB/s')}; latency {_range(delays, 'µs')}"


def _range(values: Sequence[float], unit: str) -> str:
    return f"{number(min(values))} to {number(max(values))} {unit}, median {number(statistics.median(values))}"


# Heat maps


def _heat_maps(result: NetworkResult) -> list[RenderableType]:
    is_fast = max(pair.bytes_per_second for pair in result.pairs) >= 1e9
    is_slow = max(pair.latency_seconds for pair in result.pairs) >= 0.01
    rate, rate_factor = ("Gbit/s", 8e-9) if is_fast else ("MB/s", 1e-6)
    delay, delay_factor = ("ms", 1e3) if is_slow else ("µs", 1e6)
    return [
        Text(f"bandwidth in {rate}, row to column"),
        heat_map(scaled(result.bandwidth(), rate_factor), more_is_better=True),
        Text(""),
        Text(f"latency in {delay}, row to column"),
        heat_map(scaled(result.latency(), delay_factor), more_is_better=False),
    ]


def scaled(matrix: Matrix, factor: float) -> Matrix:
    """The matrix in another unit."""
    return [[None if value is None else value * factor for value in row] for row in matrix]


def heat_map(matrix: Matrix, more_is_better: bool) -> Table:
    """Numbers on colours: blue for a pair that is about as good as the best, orange for one that is far worse."""
    known = [value for row in matrix for value in row if value is not None]
    best = max(known) if more_is_better else min(known)
    grid = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 0), collapse_padding=True)
    grid.add_column("", justify="right", style="dim")
    for rank in range(len(matrix)):
        grid.add_column(str(rank), justify="right", header_style="dim", no_wrap=True)
    for rank, row in enumerate(matrix):
        grid.add_row(f"{rank} ", *(_cell(value, best, more_is_better) for value in row))
    return grid


def _cell(value: float | None, best: float, more_is_better: bool) -> Text:
    if value is None:
        return Text(NONE, style="dim")
    share = value / best if more_is_better else best / value
    return Text(f" {number(value)}", style=f"black on rgb({_colour(share)})")


def _colour(share: float) -> str:
    low, high, weight = (_BAD, _MIDDLE, 2 * share) if share < 0.5 else (_MIDDLE, _GOOD, 2 * share - 1)
    weight = min(1.0, max(0.0, weight))
    return ",".join(str(round(a + (b - a) * weight)) for a, b in zip(low, high, strict=True))
