"""Labels for runs of several experiments: what is called the same and is not is told apart by what differs.

Seeds are no difference, and neither are labels or targets. Of the settings that differ, as few are named as suffice;
runs that do not say what was run are told apart by where they lie.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from offbeat.records.schema import RunRecords

IGNORED = ("seed", "label", "target")
ALWAYS_KNOWN = ("engine", "workers")
"""Settings that the header of every run holds."""
SHARED = (*ALWAYS_KNOWN, "workload", "cluster", "until", "bytes_per_second")
"""What runs of one comparison have in common: where it differs, all of them say so, whatever their strategy."""
SHORTHANDS = ("until", "evaluate")
LONGEST = 24
"""A value that takes more signs than this is no part of a label."""
SETTINGS_MAX = 3

Settings = dict[str, str]
Identity = tuple[tuple[tuple[str, str], ...], Path | None]
"""What was run, and where it lies if nobody knows what was run. Runs with the same are one group."""


def with_distinct_labels(runs: Sequence[RunRecords]) -> list[RunRecords]:
    """The runs in the same order, with labels that no two different configurations share."""
    known = all(run.header.experiment for run in runs)
    common = [_part(_settings(run), SHARED if known else ALWAYS_KNOWN) for run in runs]
    labelled = _labelled(runs, _additions(runs, [(tuple(settings.items()), None) for settings in common]))
    additions = [""] * len(runs)
    for label in dict.fromkeys(run.header.label for run in labelled):
        places = [place for place, run in enumerate(labelled) if run.header.label == label]
        group = [runs[place] for place in places]
        for place, addition in zip(places, _additions(group, [_identity(run) for run in group]), strict=True):
            additions[place] = addition
    return _labelled(labelled, additions)


def without_duplicates(runs: Sequence[RunRecords]) -> list[RunRecords]:
    """Each run once: the same seed simulated twice is no second sample."""
    kept: list[RunRecords] = []
    for run in runs:
        if not any((run.header, run.records) == (other.header, other.records) for other in kept):
            kept.append(run)
    return kept


def _labelled(runs: Sequence[RunRecords], additions: Sequence[str]) -> list[RunRecords]:
    labels = [f"{run.header.label} {addition}".rstrip() for run, addition in zip(runs, additions, strict=True)]
    return [
        replace(run, header=msgspec.structs.replace(run.header, label=label))
        for run, label in zip(runs, labels, strict=True)
    ]


def _additions(runs: Sequence[RunRecords], identities: Sequence[Identity]) -> list[str]:
    """For each run what tells it from those with another identity; nothing where all have the same."""
    first = dict(zip(reversed(identities), reversed(runs), strict=True))
    different = list(dict.fromkeys(identities))
    if len(different) == 1:
        return [""] * len(runs)
    known = all(run.header.experiment for run in first.values())
    settings = [dict(identity[0]) for identity in different]
    texts = _fewest(settings if known else [_part(one, ALWAYS_KNOWN) for one in settings])
    said = dict(zip(different, texts or _places([first[identity] for identity in different]), strict=True))
    return [said[identity] for identity in identities]


def _identity(run: RunRecords) -> Identity:
    return tuple(_settings(run).items()), None if run.header.experiment else _home(run)


def _settings(run: RunRecords) -> Settings:
    """What was run, as dotted names and texts: {"strategy.batch": "64", "until": "60000"}."""
    plain = {key: value for key, value in (run.header.experiment or {}).items() if key not in IGNORED}
    for key in SHORTHANDS:
        if isinstance(plain.get(key), Mapping):
            plain[key] = ":".join(str(value) for value in plain[key].values()).removeprefix("samples:")
    return {"engine": run.header.engine, "workers": str(run.header.workers), **_flattened(plain)}


def _flattened(plain: Mapping[str, Any], above: str = "") -> Settings:
    texts: Settings = {}
    for key, value in plain.items():
        if isinstance(value, Mapping):
            texts.update(_flattened(value, f"{above}{key}."))
        else:
            texts[above + key] = str(value)
    return texts


def _part(settings: Settings, names: Sequence[str]) -> Settings:
    return {key: text for key, text in settings.items() if key.partition(".")[0] in names}


def _fewest(different: Sequence[Settings]) -> list[str] | None:
    """What to say of each: the smallest set of settings that is different in all; None where there is no small one."""
    keys = list(dict.fromkeys(key for settings in different for key in settings))
    varying = [key for key in keys if len({settings.get(key) for settings in different}) > 1]
    sayable = [key for key in varying if all(len(settings.get(key, "")) <= LONGEST for settings in different)]
    # What every run has comes first, and what is near the top.
    sayable.sort(key=lambda key: (not all(key in settings for settings in different), key.count(".")))
    for size in range(1, SETTINGS_MAX + 1):
        for chosen in itertools.combinations(sayable, size):
            rows = [tuple(settings.get(key, "none") for key in chosen) for settings in different]
            if len(set(rows)) == len(rows):
                names = _short(chosen)
                return [" ".join(map(_said, names, row)) for row in rows]
    return None


def _short(keys: Sequence[str]) -> list[str]:
    """Each setting by its last word, or by more of them where one is said twice; a name is that of what it names."""
    names = [key.removesuffix(".name").split(".") for key in keys]
    for words in range(1, max(map(len, names)) + 1):
        short = [".".join(name[-words:]) for name in names]
        if len(set(short)) == len(short):
            break
    return short


def _said(name: str, text: str) -> str:
    return text if name == "engine" else f"{name}={text}"


def _home(run: RunRecords) -> Path | None:
    """Where the command that made the run was told to put its runs."""
    if run.directory is None:
        return None
    together = run.directory.name.endswith(f"-seed{run.header.seed}")
    return (run.directory.parent if together else run.directory).absolute()


def _places(runs: Sequence[RunRecords]) -> list[str]:
    """The directories of runs by name, or by as much of the path as is not common to all; numbers where that fails."""
    homes = [_home(run) or Path() for run in runs]
    above = os.path.commonpath([home.absolute().parent for home in homes])
    for names in ([home.name for home in homes], [os.path.relpath(home, above) for home in homes]):
        if len(set(names)) == len(names):
            return names
    return [str(number) for number in range(1, len(runs) + 1)]
