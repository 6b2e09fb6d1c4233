"""How numbers are written for people: enough digits to compare, and no more."""

from __future__ import annotations

NONE = "–"
UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def number(value: float | None) -> str:
    """Three significant digits below a thousand, whole numbers with separators above."""
    if value is None:
        return NONE
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def fixed(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.0%}"


def seconds(value: float) -> str:
    """Seconds to a tenth, finer where they are few."""
    return f"{value:.1f} s" if value >= 10 else f"{value:.3g} s"


def size(nbytes: float | None) -> str:
    """Bytes to three digits, in units of a thousand."""
    if nbytes is None:
        return NONE
    value, unit = float(nbytes), 0
    while value >= 999.5 and unit < len(UNITS) - 1:
        value, unit = value / 1000, unit + 1
    digits = 0 if unit == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {UNITS[unit]}"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
