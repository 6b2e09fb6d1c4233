"""The settings of the originals beside ours, from a file in the package that is checked against the study files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from offbeat.core.configuration import read_toml
from offbeat.core.validation import require
from offbeat.errors import ConfigurationError, shortened, unknown
from offbeat.lab.experiment_plan import Plan
from offbeat.lab.reproduction.study import SETTINGS_FILE, case_table, directory, names, table_at

Plain = bool | int | float | str | list[Any] | dict[str, Any]
"""A value of a TOML file."""


class PublishedSetting(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One setting of an original: a `[[setting]]` of the file."""

    study: str
    setting: str
    published: Plain
    source: str
    """The section of a paper, or the file of code or data, that it is from."""
    path: str = ""
    """The keys of our setting in the table of the study at scale full, joined by points; empty: we have none.

    A list takes an index, as in `case.1.strategy.0.batch`. What the file leaves out has its default.
    """
    differs: str = ""
    """Why ours is not the same."""


@dataclass(frozen=True)
class ComparedSetting:
    """A setting of an original, and ours; None if we have no such setting."""

    original: PublishedSetting
    ours: Plain | None


def read_settings(path: Path | None = None) -> list[PublishedSetting]:
    """The settings in the file of the package, or in `path`."""
    rows = read_toml(path or directory() / SETTINGS_FILE, "settings").get("setting", [])
    try:
        return msgspec.convert(rows, list[PublishedSetting])
    except (msgspec.ValidationError, ValueError) as error:  # ValueError: an integer of thousands of digits
        raise ConfigurationError(f"{path or SETTINGS_FILE} cannot be read: {shortened(error)}") from None


def compare_settings(rows: Sequence[PublishedSetting]) -> list[ComparedSetting]:
    """Each setting with ours, at scale full.

    Raises ConfigurationError for an unknown study or path, for a setting that is not the same and gives no reason, and
    for one that is the same and gives one.
    """
    tables = {study: list(_tables(study)) for study in dict.fromkeys(row.study for row in rows)}
    return [_compared(row, tables[row.study]) for row in rows]


def _compared(row: PublishedSetting, tables: Sequence[Mapping[str, Any]]) -> ComparedSetting:
    where = f"the setting {row.setting!r} of {row.study}"
    ours = None
    if row.path:
        values = (_look_up(table, row.path.split(".")) for table in tables)
        ours = next((value for value in values if value is not None), None)
        require(ours is not None, f"{where} has the path {row.path}, which the study does not have at scale full")
    is_same = ours is not None and _is_same(row.published, ours)
    require(
        is_same or bool(row.differs),
        f"{where} is {format_setting(row.published)} in the original and {format_setting(ours)} here; "
        "change it, or say why in differs",
    )
    require(not is_same or not row.differs, f"{where} is the same here; leave differs out")
    return ComparedSetting(row, ours)


def _tables(study: str) -> Iterator[dict[str, Any]]:
    """Where a path is looked up, the first that has it: `base` and cases as they are run, the file, and defaults."""
    if study not in names():
        raise unknown("study", study, names())
    table = table_at(read_toml(directory() / f"{study}.toml", "study"), "full")
    base, each, cases = table["base"], table.get("each", {}), table.get("case", [])
    of_base, *of_cases = [case_table(base, each, changes) for changes in ({}, *cases)]
    yield {"base": of_base, "case": of_cases}
    yield table
    of_base, *of_cases = [Plan.from_plain(one, study).to_plain() for one in (of_base, *of_cases)]
    yield {"base": of_base, "case": of_cases}


def _look_up(table: Any, keys: Sequence[str]) -> Any:
    """The value at these keys; None if there is none."""
    for key in keys:
        if isinstance(table, Mapping) and key in table:
            table = table[key]
        elif isinstance(table, list) and key.isdecimal() and int(key) < len(table):
            table = table[int(key)]
        else:
            return None
    return table


def _is_same(published: Plain, ours: Plain) -> bool:
    """Whether values are equal; a table is also equal to its name, if it has nothing else, and true is not 1."""
    if isinstance(ours, Mapping) and set(ours) == {"name"}:
        ours = ours["name"]
    return isinstance(published, bool) == isinstance(ours, bool) and published == ours


def format_setting(value: Plain | None) -> str:
    """A setting as text, for a table; a table begins with its name."""
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.0f}" if value == round(value) and abs(value) >= 1000 else f"{value:g}"
        case str():
            return value
        case list():
            return ", ".join(map(format_setting, value))
    named = [value["name"]] if "name" in value else []
    return ", ".join([*named, *(f"{key} {format_setting(item)}" for key, item in value.items() if key != "name")])
