"""Records and summaries as tables of pandas, which is imported here alone, when a table is made.

A table has flat columns: a number, a word or a truth value in each cell. A field that holds more becomes columns, or a
row for each of its items.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from offbeat.errors import MissingDependency

if TYPE_CHECKING:
    from pandas import DataFrame

DTYPES: dict[Any, str] = {int: "int64", float: "float64", bool: "bool"}
NULLABLE_DTYPES: dict[Any, str] = {**DTYPES, int: "Int64", bool: "boolean"}


@dataclass(frozen=True)
class Table:
    """How a kind of record whose fields hold several values becomes a table.

    nested: the fields that are replaced
    columns: the columns that replace them, with their types
    rows: the values of these columns: a row for each item, so that the other fields repeat
    """

    nested: tuple[str, ...]
    columns: Mapping[str, Any]
    rows: Callable[[Any], Iterable[tuple[Any, ...]]]


def _flows(traffic: Any) -> Iterator[tuple[Any, ...]]:
    for direction in ("sent", "received"):
        for kind, flow in getattr(traffic, direction).items():
            yield direction, kind, *msgspec.structs.astuple(flow)


def _contributions(update: Any) -> Iterator[tuple[Any, ...]]:
    for part in update.parts():
        mean = part.staleness_sum / part.contributions
        yield part.rank, part.first, part.stop, part.samples, part.contributions, mean, part.staleness_max


FLOW = {"direction": str, "kind": str, "messages": int, "bytes": int, "bytes_uncompressed": int}
CONTRIBUTION = {
    **dict.fromkeys(("from_rank", "first", "stop", "samples", "contributions"), int),
    "staleness_mean": float,
    "staleness_max": int,
}
OF_UPDATES = ("messages", "samples", "samples_total", "learning_rate", "updates", "since", "contributions", "merged")
TABLES = {
    "round": Table(("draws",), {"first": int, "stop": int}, lambda record: [record.draws]),
    "update": Table(("contributions", "merged"), {}, lambda record: [()]),
    "contribution": Table(OF_UPDATES, CONTRIBUTION, _contributions),
    "traffic": Table(("sent", "received"), FLOW, _flows),
    "link_use": Table(
        ("used",), {"peer": int, "bytes": int}, lambda record: [(int(peer), n) for peer, n in record.used.items()]
    ),
}
"""The tables of kinds of record that are not flat, and of the messages of updates."""


def record_frame(
    cls: type[msgspec.Struct],
    table: Table | None,
    records: Iterable[msgspec.Struct],
    same_for_all: Mapping[str, Any],
) -> DataFrame:
    """The table of records of one class.

    cls: the class
    table: how it becomes a table; None: its fields are the columns
    records: the records
    same_for_all: columns that come first, with the value that all rows have
    """
    table = table or Table((), {}, lambda record: [()])
    fields = {name: kind for name, kind in _fields(cls).items() if name not in table.nested}
    columns = {**{name: type(value) for name, value in same_for_all.items()}, **fields, **table.columns}
    first = tuple(same_for_all.values())
    rows = [
        (*first, *(getattr(record, name) for name in fields), *row) for record in records for row in table.rows(record)
    ]
    return _frame(rows, columns)


def summary_frame(summaries: Sequence[msgspec.Struct]) -> DataFrame:
    """The table of summaries. Counts by reason become columns with dotted names; traffic has a table of its own."""
    kinds = _fields(type(summaries[0]))
    fields = {name: kind for name, kind in kinds.items() if typing.get_origin(kind) is not dict}
    counts = [name for name, kind in kinds.items() if kind == dict[str, int]]
    dotted = [
        {f"{name}.{key}": count for name in counts for key, count in getattr(summary, name).items()}
        for summary in summaries
    ]
    added = sorted({key for row in dotted for key in row})
    rows = [
        (*(getattr(summary, name) for name in fields), *(row.get(key, 0) for key in added))
        for summary, row in zip(summaries, dotted, strict=True)
    ]
    return _frame(rows, {**fields, **dict.fromkeys(added, int)})


def _fields(cls: type[msgspec.Struct]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in msgspec.structs.fields(cls)}


def _frame(rows: Sequence[tuple[Any, ...]], columns: Mapping[str, Any]) -> DataFrame:
    try:
        import pandas
    except ImportError:
        raise MissingDependency("to_pandas", "pandas", "pandas") from None
    frame = pandas.DataFrame.from_records(rows, columns=list(columns))
    return frame.astype({name: dtype for name, kind in columns.items() if (dtype := _dtype(kind))})


def _dtype(kind: Any) -> str | None:
    """The type of a column of numbers or truth values, where an empty one would have none; None: as pandas has words.

    None is NaN among numbers with a fraction, and <NA> elsewhere.
    """
    choices = set(typing.get_args(kind)) if isinstance(kind, types.UnionType) else {kind}
    dtypes = NULLABLE_DTYPES if type(None) in choices else DTYPES
    return next((dtypes[choice] for choice in choices if choice in dtypes), None)
