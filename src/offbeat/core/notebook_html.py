"""How objects show themselves in a notebook: each class derives from `ShownAsHtml`, and `lab/notebook` has its HTML.

What is shown needs tables and figures of packages above, which the classes themselves may not import.
"""

from __future__ import annotations

import functools


@functools.singledispatch
def notebook_html(value: object) -> str | None:
    """An object as HTML; None where only its text is shown. `lab/notebook` registers a function for each class."""
    return None


class ShownAsHtml:
    """Base class of what notebooks show as HTML."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        """Called by notebooks."""
        return notebook_html(self)
