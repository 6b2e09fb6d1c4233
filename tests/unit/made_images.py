"""Small data sets in a cache of their own, so that image workloads are tested without a download."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from offbeat.lab.data import arrays, cache
from offbeat.lab.data.catalogue import IMAGES

TRAIN, TEST = 240, 60


def make_data(monkeypatch: pytest.MonkeyPatch, directory: Path, name: str) -> None:
    """Put made-up images under the name of a data set: each class has a brightness of its own, under noise."""
    monkeypatch.setenv("OFFBEAT_DATA", str(directory))
    classes = min(10, IMAGES[name].classes)
    entry = dataclasses.replace(IMAGES[name], train=TRAIN, test=TEST, classes=classes, sha256={})
    monkeypatch.setitem(IMAGES, name, entry)
    place = cache.directory_of(entry)
    place.mkdir(parents=True)
    made = arrays.create_images(entry, place)
    random = np.random.default_rng(0)
    for part in (made.train, made.test):
        part.labels[:] = np.arange(len(part.labels)) % classes
        noise = random.integers(-20, 21, part.images.shape)
        part.images[:] = np.clip(25 + 22 * part.labels[:, None, None, None] + noise, 0, 255)
    write_manifest(place, name, made, entry.means)


def write_manifest(place: Path, name: str, made: arrays.Dataset, means: tuple[float, ...] = ()) -> None:
    files = {file: cache.stamp(place / file) for file in made.arrays()}
    digests = {file: arrays.sha256_of(array) for file, array in made.arrays().items()}
    cache.write_manifest(place, cache.Manifest(cache.FORMAT, name, "made up", means, digests, files).sealed())
