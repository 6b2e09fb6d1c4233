"""Numbers, times and sizes as text, with as many digits as a comparison needs."""

from __future__ import annotations

from collections.abc import Sequence

NONE = "–"
UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def number(value: float | None) -> str:
    """Three significant digits below a thousand, whole numbers with separators above; "–" for None."""
    if value is None:
        return NONE
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def fixed(value: float | None, digits: int = 2) -> str:
    """A fixed number of digits after the point; "–" for None."""
    return NONE if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share as whole percent; "–" for None."""
    return NONE if value is None else f"{value:.0%}"


def seconds(value: float) -> str:
    """Seconds to a tenth, or with three significant digits below ten."""
    return f"{value:.1f} s" if value >= 10 else f"{value:.3g} s"


def size(nbytes: float | None) -> str:
    """Bytes with three significant digits, in decimal units; "–" for None."""
    if nbytes is None:
        return NONE
    value, unit = float(nbytes), 0
    while value >= 999.5 and unit < len(UNITS) - 1:
        value, unit = value / 1000, unit + 1
    digits = 0 if unit == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {UNITS[unit]}"


def plural(count: int, noun: str) -> str:
    """A count and its noun: 1 seed, 2 seeds."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the first line is its head."""
    head, *rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *rows])
