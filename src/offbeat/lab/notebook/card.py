"""The frame of everything that notebooks show: a title, and parts below it.

A notebook has a theme of its own, which no media query knows. So text has the colour that the notebook gives it, and
lines are half transparent grey, which is visible on white and on black.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape

STYLE = """
.offbeat { overflow-x: auto; font-size: .92em; line-height: 1.45; }
.offbeat > p { margin: .35em 0; }
.offbeat .quiet { opacity: .7; }
.offbeat table { margin: .5em 0; border-collapse: collapse; font-variant-numeric: tabular-nums; }
.offbeat th, .offbeat td { padding: .25em .7em; text-align: right; vertical-align: top; border: 0; }
.offbeat tr { border-bottom: 1px solid rgba(128, 128, 128, .35); background: none; }
.offbeat thead th { vertical-align: bottom; }
.offbeat th:first-child, .offbeat .text { padding-left: 0; text-align: left; }
.offbeat figure { margin: .9em 0 0; max-width: 54em; }
.offbeat svg { display: block; max-width: 100%; height: auto; }
"""


def card(title: str, *parts: str) -> str:
    """A title, which is text, and parts, which are HTML; empty parts are left out."""
    shown = "\n".join([f"<p><b>{escape(title)}</b></p>", *filter(None, parts)])
    return f'<div class="offbeat"><style>{STYLE}</style>\n{shown}\n</div>'


def paragraph(text: str, *, quiet: bool = False) -> str:
    """A paragraph of text; nothing for no text."""
    return f'<p class="{"quiet" if quiet else "text"}">{escape(text)}</p>' if text else ""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[str] = ()) -> str:
    """A table of texts; columns are aligned to the left, but for those named in `right`."""
    kinds = ["" if head in right else ' class="text"' for head in heads]
    head = "".join(f'<th scope="col"{kind}>{escape(text)}</th>' for text, kind in zip(heads, kinds, strict=True))
    body = "\n".join(
        f"<tr>{''.join(f'<td{kind}>{escape(cell)}</td>' for cell, kind in zip(row, kinds, strict=True))}</tr>"
        for row in rows
    )
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
