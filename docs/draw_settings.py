"""Write the tables of docs/reproducing.md with every setting of the originals beside ours:

    python docs/draw_settings.py

They are from published_settings.toml and the study files, between two comments; the rest of the page is written by
hand. A setting that is not the original's, without a reason, is refused.
"""

from __future__ import annotations

import sys
from pathlib import Path

from offbeat.lab.report.formatting import markdown_table
from offbeat.lab.reproduction.published_settings import (
    ComparedSetting,
    compare_settings,
    format_setting,
    read_settings,
)

PAGE = Path(__file__).parent / "reproducing.md"
FIRST, LAST = "<!-- written by docs/draw_settings.py -->", "<!-- up to here -->"
HEAD = ["setting", "original", "ours at `--scale full`", "why it differs", "source"]


def tables(settings: list[ComparedSetting]) -> str:
    """A table for each study, in the order of the file."""
    parts = []
    for study in dict.fromkeys(setting.original.study for setting in settings):
        rows = [row(setting) for setting in settings if setting.original.study == study]
        parts.append(f"### {study}\n\n{markdown_table([HEAD, *rows])}")
    return "\n\n".join(parts)


def row(setting: ComparedSetting) -> list[str]:
    original = setting.original
    values = format_setting(original.published), format_setting(setting.ours)
    return [original.setting, *values, original.differs, original.source]


def page(text: str, settings: list[ComparedSetting]) -> str:
    """The text of the page with the tables of these settings in the place of those that it has."""
    before, rest = text.split(FIRST)
    _, after = rest.split(LAST)
    return f"{before}{FIRST}\n\n{tables(settings)}\n\n{LAST}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), compare_settings(read_settings())), encoding="utf-8")
    print(f"written: {PAGE}", file=sys.stderr)
