"""What notebooks show of a cluster: the settings that differ from a cluster of equal machines, and all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from offbeat.cluster.cluster import Cluster
from offbeat.core.configuration import Option, options
from offbeat.core.notebook_html import notebook_html
from offbeat.lab.notebook.card import card, paragraph, table

HEADS = ("setting", "value", "what it is")
ALWAYS_SHOWN = ("seconds_per_sample", "straggle", "link")


@notebook_html.register
def cluster_card(cluster: Cluster) -> str:
    """The settings of a cluster: first those that are no defaults, the rest on demand."""
    changed = [item for item in options(Cluster) if item.path in ALWAYS_SHOWN or not _is_default(cluster, item)]
    rest = [item for item in options(Cluster) if item not in changed]
    size = "any number of workers" if cluster.size is None else f"{cluster.size} workers"
    others = f"<details><summary>defaults</summary>{table(HEADS, _rows(cluster, rest))}</details>" if rest else ""
    return card(
        f"Cluster of {size}",
        table(HEADS, _rows(cluster, changed)),
        paragraph("Sizes are in bytes and times in seconds.", quiet=True),
        others,
    )


def _is_default(config: Any, item: Option) -> bool:
    return bool(getattr(config, item.path) == item.default)


def _rows(cluster: Cluster, items: Iterable[Option]) -> list[tuple[str, str, str]]:
    """A row for each setting; one that is a tuple of configurations has a row for each of them."""
    rows = []
    for item in items:
        value = getattr(cluster, item.path)
        is_list = isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0])
        texts = [shown(one) for one in value] if is_list else [shown(value)]
        rows += [(item.path, text, item.text) for text in texts[:1]]
        rows += [("", text, "") for text in texts[1:]]
    return rows


def shown(value: Any) -> str:
    """A value as Python writes it; of a configuration, only the fields that are no defaults."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return "none" if value is None or value == () else repr(value)
    fields = [item for item in options(type(value)) if not _is_default(value, item)]
    inside = ", ".join(f"{item.path}={shown(getattr(value, item.path))}" for item in fields)
    names = [name for name, known in getattr(value, "constants", {}).items() if known == value]
    return f"{''.join(f'{name}: ' for name in names[:1])}{type(value).__name__}({inside})"
