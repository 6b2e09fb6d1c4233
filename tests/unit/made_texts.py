"""Small texts in a cache of their own, so that text workloads are tested without a download."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from made_images import write_manifest

from offbeat.lab.data import arrays, cache
from offbeat.lab.data.catalogue import TEXTS

DOCUMENTS = {
    "shakespeare": {f"play_{number}": 4000 + 400 * number for number in range(6)},
    "sotu": {"1790_ada_lovelace_n": 5000, "1791_ada_lovelace_n": 4000, "1801_alan_turing_d": 6000},
    "enwik8": {"enwik8": 20_000},
}
"""Names and lengths of documents, by data set."""


def make_text(
    monkeypatch: pytest.MonkeyPatch, directory: Path, name: str, lengths: Mapping[str, int] | None = None
) -> arrays.TextDataset:
    """Put made-up documents under the name of a data set: byte i of a document is its number plus i, modulo 64."""
    lengths = DOCUMENTS[name] if lengths is None else lengths
    monkeypatch.setenv("OFFBEAT_DATA", str(directory))
    entry = dataclasses.replace(TEXTS[name], documents=len(lengths), bytes=sum(lengths.values()), sha256={})
    monkeypatch.setitem(TEXTS, name, entry)
    place = cache.directory_of(entry)
    place.mkdir(parents=True)
    made = arrays.create_text(entry, place)
    made.offsets[:] = np.concatenate([[0], np.cumsum(list(lengths.values()))])
    made.names[:] = [document.encode() for document in lengths]
    for number, (begin, end) in enumerate(zip(made.offsets[:-1], made.offsets[1:], strict=True)):
        made.text[begin:end] = (number + np.arange(end - begin)) % 64
    write_manifest(place, name, made)
    return made
