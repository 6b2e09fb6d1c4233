"""How figures look and how they are written: one colour per strategy, ink that follows the page, stable bytes.

Nothing of matplotlib is imported before a figure is asked for, and its settings are left as they were.
"""

from __future__ import annotations

import functools
import hashlib
import io
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from offbeat.errors import ConfigurationError, MissingDependency

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Given = ParamSpec("Given")

# After Okabe and Ito, told apart by colour-blind readers; their yellow is left out, it vanishes on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
DASHES: tuple[str | tuple[int, tuple[int, ...]], ...] = ("-", (0, (5, 2)), (0, (1, 1)), (0, (5, 1, 1, 1)))

INK = "#1f2329"
"""Text and axes. In a page it becomes the colour of the page's own text, so that dark mode can be read."""

SETTINGS: dict[Any, Any] = {
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.linewidth": 0.7,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.12,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
    "svg.hashsalt": "offbeat",
}


@dataclass(frozen=True)
class Look:
    """The colour of a strategy, and the dashes that tell it from its neighbours without any colour."""

    colour: str
    dashes: str | tuple[int, tuple[int, ...]]


def looks(labels: Iterable[str]) -> dict[str, Look]:
    """One look per label, in order; the same labels in the same order look the same in every figure.

    There are seven colours and four dashes, which come round together after twenty-eight labels.
    """
    return {
        label: Look(COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)])
        for index, label in enumerate(dict.fromkeys(labels))
    }


def styled(draw: Callable[Given, Figure]) -> Callable[Given, Figure]:
    """Draw under the settings above, and only there."""

    @functools.wraps(draw)
    def drawn(*args: Given.args, **kwargs: Given.kwargs) -> Figure:
        try:
            import matplotlib
        except ImportError:
            raise MissingDependency("the report", "matplotlib", "report") from None
        with matplotlib.rc_context(SETTINGS):
            return draw(*args, **kwargs)

    return drawn


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as the kind of file that its name ends in: .svg, .png, .pdf."""
    import matplotlib

    form = path.suffix.lstrip(".").lower()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(SETTINGS):
        if form not in figure.canvas.get_supported_filetypes():
            raise ConfigurationError(f"cannot draw to {path.name}; name a file that ends in .svg, .png or .pdf")
        figure.savefig(path, format=form, dpi=160, facecolor="white", metadata=undated)
    return path


def svg_text(figure: Figure) -> str:
    """The figure as one `<svg>` element to put into a page, the same text for the same figure.

    Ids that nothing refers to are dropped and the others made the figure's own, so that several figures can
    stand in one page.
    """
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context(SETTINGS):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    whole = buffer.getvalue()
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", whole[whole.index("<svg") :], flags=re.DOTALL)
    # A style element would hold for the whole page; on the root it is inherited by this figure alone.
    text = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL)
    text = text.replace("<svg ", '<svg style="stroke-linejoin: round; stroke-linecap: butt" ', 1)
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))
    prefix = "f" + hashlib.sha256(text.encode()).hexdigest()[:10]
    return re.sub(r"<[^<>]+>", lambda tag: _inlined(tag[0], used, prefix), text).strip()


def _inlined(tag: str, used: set[str], prefix: str) -> str:
    """One tag, fit for a page; the text between tags is nobody's to change."""
    tag = tag.replace("'DejaVu Sans'", "sans-serif").replace(INK, "currentColor")
    # Hundredths of a point are finer than any screen, and the page is half as large.
    tag = re.sub(r"(\d\.\d\d)\d+", r"\1", tag).replace(" \n", " ")
    tag = re.sub(r' id="([^"]*)"', lambda found: f' id="{prefix}-{found[1]}"' if found[1] in used else "", tag)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", tag)
