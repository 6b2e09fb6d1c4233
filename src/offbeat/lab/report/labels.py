"""Distinct labels for runs of several experiments: equal labels get the settings in which their runs differ.

Seed, label and target are no difference. As few settings are named as suffice; runs without a recorded configuration
are distinguished by their directories.
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
"""Settings that are in the header of every run."""
SHARED = (*ALWAYS_KNOWN, "workload", "cluster", "until", "bytes_per_second")
"""Settings that the runs of one comparison share: one that differs is in all labels, whatever the strategy."""
SHORTHANDS = ("until", "evaluate")
VALUE_LENGTH_MAX = 24
"""The length in characters up to which a value can be in a label."""
SETTINGS_MAX = 3

Settings = dict[str, str]
Identity = tuple[tuple[tuple[str, str], ...], Path | None]
"""The settings of a run, and its directory if its configuration is not recorded; runs of one group have the same."""


def with_distinct_labels(runs: Sequence[RunRecords]) -> list[RunRecords]:
    """The runs in the same order, with a different label for each configuration."""
    is_recorded = all(run.header.experiment for run in runs)
    shared = [_select(_settings(run), SHARED if is_recorded else ALWAYS_KNOWN) for run in runs]
    labelled = _labelled(runs, _additions(runs, [(tuple(settings.items()), None) for settings in shared]))
    additions = [""] * len(runs)
    for label in dict.fromkeys(run.header.label for run in labelled):
        indices = [index for index, run in enumerate(labelled) if run.header.label == label]
        group = [runs[index] for index in indices]
        for index, addition in zip(indices, _additions(group, [_identity(run) for run in group]), strict=True):
            additions[index] = addition
    return _labelled(labelled, additions)


def without_duplicates(runs: Sequence[RunRecords]) -> list[RunRecords]:
    """Each run once: a seed that was simulated twice is one sample."""
    unique: list[RunRecords] = []
    for run in runs:
        if not any((run.header, run.records) == (other.header, other.records) for other in unique):
            unique.append(run)
    return unique


def _labelled(runs: Sequence[RunRecords], additions: Sequence[str]) -> list[RunRecords]:
    return [
        replace(run, header=msgspec.structs.replace(run.header, label=f"{run.header.label} {addition}".rstrip()))
        for run, addition in zip(runs, additions, strict=True)
    ]


def _additions(runs: Sequence[RunRecords], identities: Sequence[Identity]) -> list[str]:
    """For each run a text that distinguishes it from those with another identity; empty if all have the same."""
    first = dict(zip(reversed(identities), reversed(runs), strict=True))
    unique = list(dict.fromkeys(identities))
    if len(unique) == 1:
        return [""] * len(runs)
    settings = [dict(identity[0]) for identity in unique]
    if not all(run.header.experiment for run in first.values()):
        settings = [_select(one, ALWAYS_KNOWN) for one in settings]
    texts = _differences(settings) or _directory_names([first[identity] for identity in unique])
    text_of = dict(zip(unique, texts, strict=True))
    return [text_of[identity] for identity in identities]


def _identity(run: RunRecords) -> Identity:
    return tuple(_settings(run).items()), None if run.header.experiment else _output_directory(run)


def _settings(run: RunRecords) -> Settings:
    """The configuration of a run, as dotted names and texts: {"strategy.batch": "64", "until": "60000"}."""
    plain = {key: value for key, value in (run.header.experiment or {}).items() if key not in IGNORED}
    for key in SHORTHANDS:
        if isinstance(plain.get(key), Mapping):
            plain[key] = ":".join(str(value) for value in plain[key].values()).removeprefix("samples:")
    return {"engine": run.header.engine, "workers": str(run.header.workers), **_flattened(plain)}


def _flattened(plain: Mapping[str, Any], prefix: str = "") -> Settings:
    texts: Settings = {}
    for key, value in plain.items():
        if isinstance(value, Mapping):
            texts.update(_flattened(value, f"{prefix}{key}."))
        else:
            texts[prefix + key] = str(value)
    return texts


def _select(settings: Settings, names: Sequence[str]) -> Settings:
    return {key: text for key, text in settings.items() if key.partition(".")[0] in names}


def _differences(different: Sequence[Settings]) -> list[str] | None:
    """The smallest set of settings that differs between all of these, as texts; None if it has over `SETTINGS_MAX`."""
    keys = list(dict.fromkeys(key for settings in different for key in settings))
    varying = [key for key in keys if len({settings.get(key) for settings in different}) > 1]
    short = [key for key in varying if all(len(settings.get(key, "")) <= VALUE_LENGTH_MAX for settings in different)]
    # Settings of all runs come first, and those near the top of the configuration.
    short.sort(key=lambda key: (not all(key in settings for settings in different), key.count(".")))
    for size in range(1, SETTINGS_MAX + 1):
        for chosen in itertools.combinations(short, size):
            rows = [tuple(settings.get(key, "none") for key in chosen) for settings in different]
            if len(set(rows)) == len(rows):
                names = _short_names(chosen)
                return [" ".join(map(_setting_text, names, row)) for row in rows]
    return None


def _short_names(keys: Sequence[str]) -> list[str]:
    """The last part of each dotted name, or more parts if two are equal; `optimizer.name` is `optimizer`."""
    names = [key.removesuffix(".name").split(".") for key in keys]
    for parts in range(1, max(map(len, names)) + 1):
        short = [".".join(name[-parts:]) for name in names]
        if len(set(short)) == len(short):
            break
    return short


def _setting_text(name: str, value: str) -> str:
    return value if name == "engine" else f"{name}={value}"


def _output_directory(run: RunRecords) -> Path | None:
    """The `--out` of the command that made the run: the parent of a directory LABEL-seedN, else the directory."""
    if run.directory is None:
        return None
    has_parent = run.directory.name.endswith(f"-seed{run.header.seed}")
    return (run.directory.parent if has_parent else run.directory).absolute()


def _directory_names(runs: Sequence[RunRecords]) -> list[str]:
    """The names of the output directories, or their paths below the common parent; numbers if these are not unique."""
    paths = [_output_directory(run) or Path() for run in runs]
    parent = os.path.commonpath([path.absolute().parent for path in paths])
    for names in ([path.name for path in paths], [os.path.relpath(path, parent) for path in paths]):
        if len(set(names)) == len(names):
            return names
    return [str(number) for number in range(1, len(runs) + 1)]
