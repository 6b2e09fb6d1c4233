"""How numbers are written for people: enough digits to compare, and no more."""

from __future__ import annotations

NONE = "–"


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


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
