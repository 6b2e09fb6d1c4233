"""Damaged input for everything that decodes bytes or text from outside: `python tests/fuzz_inputs.py --minutes 5`.

The properties are those of `tests/property/test_malformed_*.py`, which `make test` checks on a fixed set of inputs.
Here all areas are checked in turn, in rounds of a growing seed, until the time is over. A failure prints the smallest
input that was found and the command that repeats it, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS / "property"), str(TESTS / "unit")]
MODULES = ("test_malformed_messages", "test_malformed_files", "test_malformed_data")
INPUTS_PER_ROUND = 100
FUZZED = settings(
    max_examples=INPUTS_PER_ROUND,
    database=None,
    deadline=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


@dataclass
class Tally:
    """What an area has taken so far."""

    inputs: int = 0
    seconds: float = 0.0
    failures: int = 0

    @property
    def rate(self) -> float:
        return self.inputs / self.seconds if self.seconds else 0.0


def check(one: Any, number: int, tally: Tally) -> str | None:
    """Check a property on the inputs of one seed; what went wrong, or None."""

    @functools.wraps(one.check)
    def counted(*arguments: Any, **named: Any) -> None:
        tally.inputs += 1
        one.check(*arguments, **named)

    begun = time.monotonic()
    try:
        seed(number)(FUZZED(given(*one.inputs)(counted)))()
    except Exception as error:  # a property that raises has failed, whatever it raises
        tally.failures += 1
        return "\n  ".join([f"{type(error).__name__}: {str(error)[:2000]}", *getattr(error, "__notes__", [])])
    finally:
        tally.seconds += time.monotonic() - begun
    return None


def fuzz(properties: Sequence[Any], seconds: float, first: int) -> dict[str, Tally]:
    """Check all properties with one seed after the other until the time is over; a round is finished."""
    tallies = {one.area: Tally() for one in properties}
    failed: set[str] = set()
    end, number = time.monotonic() + seconds, first
    while time.monotonic() < end or number == first:
        for one in properties:
            if one.name in failed or (time.monotonic() >= end and number > first):
                continue
            sentence = check(one, number, tallies[one.area])
            if sentence is not None:
                failed.add(one.name)  # it would fail again
                repeat = f"python tests/fuzz_inputs.py --only {one.name} --first-seed {number} --minutes 0"
                print(f"{one.area}, {one.name}: {sentence}\n  to repeat it: {repeat}", flush=True)
        number += 1
    print(f"seeds {first} to {number - 1}", flush=True)
    return tallies


def report(tallies: dict[str, Tally]) -> None:
    total = Tally(
        *(sum(getattr(tally, name) for tally in tallies.values()) for name in ("inputs", "seconds", "failures"))
    )
    for area, tally in [*tallies.items(), ("all", total)]:
        print(
            f"{area:<12} {tally.inputs:>9,} inputs {tally.seconds:>7.0f} s {tally.rate:>8.1f} per second "
            f"{tally.failures:>3} failures",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="how long; one round at least")
    parser.add_argument("--first-seed", type=int, default=0, help="the seed of the first round")
    parser.add_argument("--areas", default="", help="names, with commas between; all of them otherwise")
    parser.add_argument("--only", default="", help="the name of one property")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("error")  # as pytest is configured
    for module in MODULES:
        importlib.import_module(module)
    registered = importlib.import_module("malformed").PROPERTIES
    areas = arguments.areas.split(",") if arguments.areas else list(dict.fromkeys(one.area for one in registered))
    properties = [one for one in registered if one.area in areas and arguments.only in ("", one.name)]
    unknown = [area for area in areas if area not in {one.area for one in registered}]
    if unknown or not properties or arguments.minutes < 0:
        known = ", ".join(dict.fromkeys(one.area for one in registered))
        print(f"fuzz_inputs: nothing to check; known areas: {known}; minutes are 0 or more", file=sys.stderr)
        return 2
    tallies = fuzz(properties, arguments.minutes * 60, arguments.first_seed)
    report(tallies)
    return 1 if any(tally.failures for tally in tallies.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
