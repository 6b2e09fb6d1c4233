"""CINIC-10: a folder for each part, in it one for each class, in it one PNG for each image.

Images are in the order of class and name, whatever order an archive has them in.
"""

from __future__ import annotations

import re
from pathlib import Path

from offbeat.lab.data.archives import members
from offbeat.lab.data.arrays import DataSet, create
from offbeat.lab.data.catalogue import Entry
from offbeat.lab.data.formats import Advance, lacks, nothing_known, picture

IMAGE = re.compile(r"(?:.*/)?(train|test)/([A-Za-z]+)/([^/.][^/]*\.png)")
EXPECTED = "CINIC-10.tar.gz, or its folder with train/CLASS/*.png and test/CLASS/*.png"


def decode(entry: Entry, path: Path, directory: Path, advance: Advance) -> DataSet:
    """Look at all names first, for their order, then decode."""
    found = sorted({_place(match) for member in members(path) if (match := IMAGE.fullmatch(member.name))})
    if not found:
        raise nothing_known(entry, path, EXPECTED)
    classes = sorted({label for _, label, _ in found})
    counts = {part: sum(one == part for one, _, _ in found) for part in ("train", "test")}
    wanted = {"train": entry.train, "test": entry.test}
    wrong = [f"{wanted[part] - counts[part]:,} {part} images" for part in wanted if counts[part] != wanted[part]]
    if wrong or len(classes) != entry.classes:
        raise lacks(entry, path, wrong or [f"{entry.classes} classes (it has {len(classes)})"], EXPECTED)
    rows = {place: index if place[0] == "test" else index - entry.test for index, place in enumerate(found)}
    made = create(entry, directory)
    for member in members(path):
        match = IMAGE.fullmatch(member.name)
        if not match:
            continue
        place = _place(match)
        part = made.train if place[0] == "train" else made.test
        stream = member.open()
        try:
            part.images[rows[place]] = picture(stream, entry.width, entry.height, member.name)
        finally:
            stream.close()
        part.labels[rows[place]] = classes.index(place[1])
        advance(entry.image_bytes)
    return made


def _place(match: re.Match[str]) -> tuple[str, str, str]:
    part, label, name = match.groups()
    return part, label, name
