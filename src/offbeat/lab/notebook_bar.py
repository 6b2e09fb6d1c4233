"""A bar in the output of a notebook cell, by IPython's updatable displays, which need no widgets."""

from __future__ import annotations

import importlib
import sys
import time
from html import escape
from typing import Any, Self

REDRAW_SECONDS = 0.1
"""The least time between two drawings, each of which is a message to the front end."""


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook. A terminal with IPython is none."""
    ipython = sys.modules.get("IPython")  # a kernel has imported it
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookBar:
    """A bar in the output of the cell that runs; at its end one line of text takes its place, which files keep."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._drawn_at = float("-inf")
        self._text = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._text:
            self._draw(_Drawing(self._text if exception[0] is None else f"stopped: {self._text}", None))

    def update(self, text: str, done: float, total: float | None) -> None:
        """Show a step: its text, and how much of the total is done; without a total the bar has no end."""
        self._text = text
        now = time.monotonic()
        if now - self._drawn_at >= REDRAW_SECONDS:
            self._drawn_at = now
            share = "" if not total else f' value="{min(1.0, done / total):.3f}"'
            self._draw(_Drawing(text, share))

    def part(self, index: int, text: str, share: float | None) -> None:
        """Nothing: one bar shows the sum of all parts."""

    def say(self, sentence: str) -> None:
        """Print a sentence below the bar."""
        print(f"offbeat: {sentence}", file=sys.stderr)

    def _draw(self, drawing: _Drawing) -> None:
        if self._handle is None:
            self._handle = importlib.import_module("IPython.display").display(drawing, display_id=True)
        else:
            self._handle.update(drawing)


class _Drawing:
    """What the cell shows; `share` is the attribute of the bar, None without a bar."""

    def __init__(self, text: str, share: str | None) -> None:
        self._text, self._share = text, share

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str | None:
        if self._share is None:
            return None
        return f'<progress style="vertical-align: middle; width: 16em"{self._share}></progress> {escape(self._text)}'
