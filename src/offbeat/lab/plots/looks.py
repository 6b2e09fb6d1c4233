"""How each strategy looks: the same colour, dashes and marker in every figure, whatever else is drawn beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import offbeat.strategies  # noqa: F401  (registers the named strategies)
from offbeat.core.strategy import Strategy

Dashes = Literal["-"] | tuple[float, tuple[float, ...]]

# The first seven are after Okabe and Ito, told apart by colour-blind readers; their yellow vanishes on white.
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
    """The colour of a strategy, and the dashes and the marker that tell it from its neighbours without any colour."""

    colour: str
    dashes: Dashes
    marker: str


SHADES = (0.0, 0.4, -0.3, 0.65, 0.2)
"""How far the colour of a first, second, third … of one strategy goes towards white, or below zero towards black."""


def looks(labels: Iterable[str], strategies: Mapping[str, str] | None = None) -> dict[str, Look]:
    """One look per label. `strategies` says whose runs have a label that is not itself the name of a strategy.

    A label that is a strategy's name looks as that strategy always does, and so does the first label of a strategy
    whose name is not among the labels. Further ones have other shades of its colour, and what belongs to no known
    strategy takes a colour that is left.
    """
    wanted = list(dict.fromkeys(labels))
    known = {label: (strategies or {}).get(label) or strategy_in(label) for label in wanted}
    given: dict[str, Look] = {label: NAMED[label] for label in wanted if label in NAMED}
    for label in wanted:
        name = known[label]
        if label not in given and name in NAMED and NAMED[name] not in given.values():
            given[label] = NAMED[name]
    uses = Counter(look.colour for look in given.values())
    for label in wanted:
        if label not in given:
            named = NAMED.get(known[label])
            base = named.colour if named else min(COLOURS, key=lambda colour: uses[colour])
            given[label] = Look(_shaded(base, uses[base]), *_free_pair(given.values()))
            uses[base] += 1
    return {label: given[label] for label in wanted}


def strategy_in(label: str) -> str:
    """The strategy that a label begins with, as in "amb, fixed limit" or "fmb batch=64"; else the label itself."""
    found = [name for name in NAMED if label.startswith(name) and not label[len(name) :][:1].isalnum()]
    return max(found, key=len, default=label)


def _free_pair(taken: Iterable[Look]) -> tuple[Dashes, str]:
    """Dashes and a marker that nobody has together, and as few as possible one by one."""
    others = list(taken)
    pairs = Counter((look.dashes, look.marker) for look in others)
    dashes, markers = Counter(look.dashes for look in others), Counter(look.marker for look in others)
    return min(PAIRS, key=lambda pair: (pairs[pair], dashes[pair[0]] + markers[pair[1]], dashes[pair[0]]))


def _shaded(colour: str, number: int) -> str:
    shade = SHADES[number % len(SHADES)]
    towards = 255 if shade > 0 else 0
    parts = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return "#" + "".join(f"{round(part + abs(shade) * (towards - part)):02x}" for part in parts)


def named_looks() -> dict[str, Look]:
    """A strategy with a `figure_style` has the look of that number, the others have what is left."""
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
"""The look of each strategy that has a name. No two share a colour, and none shares both dashes and marker."""
