"""What `offbeat network` shows: progress on standard error, and the result as tables and heat maps."""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from offbeat.lab.network_test.result import Matrix, Network, Pair, Together
from offbeat.lab.report.formatting import NONE, number, plural

Progress = Callable[[float, str], None]

ROWS_MAX = 30
"""Pairs that are listed one by one; of more, only the slowest."""
SLOWEST = 10
MAP_RANKS_MAX = 16
CELL_WIDTH = 6
"""Columns of one cell of a heat map: a blank and a number of three digits."""

_BAD, _MIDDLE, _GOOD = (213, 94, 0), (245, 245, 245), (86, 180, 233)
"""Told apart by colour-blind readers; the numbers say the same."""


# While it goes on


@contextmanager
def progress(quiet: bool) -> Iterator[Progress]:
    """A bar on a terminal, a line for each kind of step elsewhere."""
    if quiet:
        yield lambda share, what: None
    elif not sys.stderr.isatty():
        yield Lines()
    else:
        from rich import progress as bars

        columns = (bars.TextColumn("{task.description:<24}"), bars.BarColumn(), bars.TaskProgressColumn())
        with bars.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
            task = shown.add_task("starting", total=1.0)
            yield lambda share, what: shown.update(task, completed=share, description=what)


class Lines:
    """One line for each kind of step. `read` understands them, where another process has written them."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, share: float, what: str) -> None:
        if what != self._last:
            self._last = what
            print(f"[{share:4.0%}] {what}", file=sys.stderr, flush=True)

    @staticmethod
    def read(line: str) -> tuple[float, str] | None:
        found = re.fullmatch(r"\[ *(\d+)%\] (.*)", line)
        return None if found is None else (int(found[1]) / 100, found[2])


# What came of it


def view(network: Network, width: int) -> Group:
    """The figures, in order, for a screen of so many columns; `sentences` come after them."""
    parts: list[RenderableType] = [Text(_head(network), style="bold"), Text("")]
    if len(network.pairs) <= ROWS_MAX:
        parts += [_pairs(network.pairs), Text("")]
    if network.ranks <= min(MAP_RANKS_MAX, (width - 3) // CELL_WIDTH):
        parts += [*_maps(network), Text("")]
    if len(network.pairs) > ROWS_MAX:
        slowest = sorted(network.pairs, key=lambda pair: pair.bytes_per_second)[:SLOWEST]
        parts += [Text(_spread(network)), Text(f"the {SLOWEST} slowest:"), _pairs(slowest), Text("")]
    return Group(*parts, _together(network), Text(""))


def _head(network: Network) -> str:
    machines = len(set(network.hosts))
    size = number(network.elements * 4 / 1e6)
    where = f"{network.ranks} ranks on {plural(machines, 'machine')} over {network.transport}"
    return f"{where}, blocks of {network.elements:,} integers ({size} MB)"


def sentences(network: Network) -> list[str]:
    """The hub's card in words, and whether everything arrived as it was sent."""
    star = network.star
    size = number(star.message_bytes / 1e6)
    share = star.into.per_flow_bytes_per_second / star.alone_bytes_per_second
    one = plural(star.into.flows, "flow")
    intact = network.blocks - network.corrupted
    return [
        f"At {size} MB per message this star carries {number(star.updates_per_second)} updates/s: one message into "
        "rank 0 and one out of it for each.",
        f"Of {one} into rank 0 at once each gets {number(star.into.per_flow_bytes_per_second / 1e6)} MB/s, "
        f"{share:.0%} of what one gets alone.",
        f"{intact} of {network.blocks} blocks verified: begin and end markers and a 64-bit checksum.",
    ]


def _plain_table(*heads: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _pairs(pairs: Sequence[Pair]) -> Table:
    table = _plain_table("from → to", "MB/s", "Gbit/s", "latency µs", "blocks", "corrupted")
    for pair in pairs:
        table.add_row(
            f"{pair.source} → {pair.destination}",
            number(pair.bytes_per_second / 1e6),
            number(pair.bytes_per_second * 8 / 1e9),
            number(pair.latency_seconds * 1e6),
            str(pair.blocks),
            Text(str(pair.corrupted), style="bold red" if pair.corrupted else ""),
        )
    return table


def _together(network: Network) -> Table:
    table = _plain_table("at once", "flows", "seconds", "MB/s", "Gbit/s", "MB/s of a flow")
    star = network.star
    rows: dict[str, tuple[Together, bool]] = {
        "ring": (network.ring, network.ranks > 2),
        "all to all": (network.all_to_all, False),
        "all into rank 0": (star.into, True),
        "rank 0 to all": (star.out, True),
        "rank 0 both ways": (star.both, False),
    }
    for name, (measured, one_way) in rows.items():
        each = number(measured.per_flow_bytes_per_second / 1e6) if one_way else NONE
        rate = measured.bytes_per_second
        cells = (number(measured.seconds), number(rate / 1e6), number(rate * 8 / 1e9), each)
        table.add_row(name, str(measured.flows), *cells)
    return table


def _spread(network: Network) -> str:
    rates = [pair.bytes_per_second / 1e6 for pair in network.pairs]
    delays = [pair.latency_seconds * 1e6 for pair in network.pairs]
    return (
        f"{len(rates)} pairs: {number(min(rates))} to {number(max(rates))} MB/s, median "
        f"{number(statistics.median(rates))}; latency {number(min(delays))} to {number(max(delays))} µs, median "
        f"{number(statistics.median(delays))}"
    )


# Heat maps


def _maps(network: Network) -> list[RenderableType]:
    fast = max(pair.bytes_per_second for pair in network.pairs) >= 1e9
    slow = max(pair.latency_seconds for pair in network.pairs) >= 0.01
    rate, factor = ("Gbit/s", 8e-9) if fast else ("MB/s", 1e-6)
    unit, scale = ("ms", 1e3) if slow else ("µs", 1e6)
    return [
        Text(f"bandwidth in {rate}, row to column"),
        heat_map(_scaled(network.bandwidth(), factor), more_is_better=True),
        Text(""),
        Text(f"latency in {unit}, row to column"),
        heat_map(_scaled(network.latency(), scale), more_is_better=False),
    ]


def _scaled(matrix: Matrix, factor: float) -> Matrix:
    return [[None if value is None else value * factor for value in row] for row in matrix]


def heat_map(matrix: Matrix, more_is_better: bool) -> Table:
    """Numbers on colours: blue as good as the best pair, orange far worse."""
    known = [value for row in matrix for value in row if value is not None]
    best = max(known) if more_is_better else min(known)
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 0), collapse_padding=True)
    table.add_column("", justify="right", style="dim")
    for rank in range(len(matrix)):
        table.add_column(str(rank), justify="right", header_style="dim", no_wrap=True)
    for rank, row in enumerate(matrix):
        table.add_row(f"{rank} ", *(_cell(value, best, more_is_better) for value in row))
    return table


def _cell(value: float | None, best: float, more_is_better: bool) -> Text:
    if value is None:
        return Text(NONE, style="dim")
    share = value / best if more_is_better else best / value
    red, green, blue = _colour(share)
    return Text(f" {number(value)}", style=f"black on rgb({red},{green},{blue})")


def _colour(share: float) -> tuple[int, int, int]:
    low, high, part = (_BAD, _MIDDLE, 2 * share) if share < 0.5 else (_MIDDLE, _GOOD, 2 * share - 1)
    red, green, blue = (round(a + (b - a) * min(1.0, max(0.0, part))) for a, b in zip(low, high, strict=True))
    return red, green, blue
