"""The colour, dashes and marker of each strategy, which are the same in every figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import offbeat.strategies  # noqa: F401  (registers the named strategies)
from offbeat.core.strategy import Strategy

Dashes = Literal["-"] | tuple[float, tuple[float, ...]]

# The first seven are from the colour-blind safe palette of Okabe and Ito, without yellow, which is faint on white.
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#7f7f7f",
    "#8a5cc2",
    "#9c6b3c",
    "#8f9a27",
    "#2ab7b0",
    "#c2304f",
    "#5a6fd0",
    "#4c7d34",
    "#b0379a",
    "#8195a8",
    "#a1625a",
)
DASHES: tuple[Dashes, ...] = (
    "-",
    (0, (5, 2)),
    (0, (1, 1)),
    (0, (5, 1, 1, 1)),
    (0, (9, 2)),
    (0, (5, 1, 1, 1, 1, 1)),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
PAIRS = tuple((dashes, marker) for marker in MARKERS for dashes in DASHES)


@dataclass(frozen=True)
class Look:
    """The colour of a line, and dashes and a marker, which distinguish it in black and white as well."""

    colour: str
    dashes: Dashes
    marker: str


SHADES = (0.0, 0.4, -0.3, 0.65, 0.2)
"""Shades of the first, second, … label of one strategy: the share of white mixed in, or of black if negative."""


def looks(labels: Iterable[str], strategies: Mapping[str, str] | None = None) -> dict[str, Look]:
    """One look per label. `strategies` maps labels that are not names of strategies to the strategies of their runs.

    A label that is the name of a strategy has the look of that strategy, and so has the first label of a strategy
    whose name is not among the labels. Further labels of it have other shades of its colour. A label of an unknown
    strategy has the colour that is used least.
    """
    unique = list(dict.fromkeys(labels))
    names = {label: (strategies or {}).get(label) or strategy_in(label) for label in unique}
    result = {label: NAMED[label] for label in unique if label in NAMED}
    for label in unique:
        look = NAMED.get(names[label])
        if label not in result and look is not None and look not in result.values():
            result[label] = look
    uses = Counter(look.colour for look in result.values())
    for label in unique:
        if label not in result:
            look = NAMED.get(names[label])
            base = look.colour if look else min(COLOURS, key=lambda colour: uses[colour])
            result[label] = Look(_shaded(base, uses[base]), *_free_pair(result.values()))
            uses[base] += 1
    return {label: result[label] for label in unique}


def strategy_in(label: str) -> str:
    """The strategy whose name a label begins with, as in "amb, fixed limit" or "fmb batch=64"; else the label."""
    names = [name for name in NAMED if label.startswith(name) and not label[len(name) :][:1].isalnum()]
    return max(names, key=len, default=label)


def _free_pair(looks: Iterable[Look]) -> tuple[Dashes, str]:
    """The pair of dashes and marker that these looks use least: first as a pair, then each by itself."""
    others = list(looks)
    pairs = Counter((look.dashes, look.marker) for look in others)
    dashes, markers = Counter(look.dashes for look in others), Counter(look.marker for look in others)
    return min(PAIRS, key=lambda pair: (pairs[pair], dashes[pair[0]] + markers[pair[1]], dashes[pair[0]]))


def _shaded(colour: str, number: int) -> str:
    shade = SHADES[number % len(SHADES)]
    towards = 255 if shade > 0 else 0
    parts = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return "#" + "".join(f"{round(part + abs(shade) * (towards - part)):02x}" for part in parts)


def named_looks() -> dict[str, Look]:
    """The looks of all named strategies: by the number in `figure_style`, or without one what is free."""
    kinds = [kind for kind in Strategy.members.values() if kind.__module__.startswith("offbeat.strategies.")]
    numbers = {kind.name: vars(kind).get("figure_style") for kind in kinds}
    named = {
        name: Look(COLOURS[number], DASHES[number % len(DASHES)], MARKERS[number % len(MARKERS)])
        for name, number in numbers.items()
        if number is not None
    }
    for place, name in enumerate((name for name in numbers if name not in named), start=len(named)):
        colour = _shaded(COLOURS[place % len(COLOURS)], place // len(COLOURS))
        named[name] = Look(colour, *_free_pair(named.values()))
    return named


NAMED = named_looks()
"""The look of each named strategy; no two have the same colour, or the same dashes and marker."""
