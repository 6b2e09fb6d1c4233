"""The style of all figures, files and SVG elements of figures with reproducible bytes, legends, and runs by label.

matplotlib is imported when a figure is drawn, and its global settings stay unchanged.
"""

from __future__ import annotations

import functools
import hashlib
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Self

from offbeat.errors import ConfigurationError, MissingDependency
from offbeat.lab.plots.looks import Look, looks
from offbeat.records.schema import RunRecords

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Figure
    from matplotlib.lines import Line2D


Params = ParamSpec("Params")

FORMATS = ("png", "svg", "pdf")

PNG_DPI = 160
WIDTH_INCHES = 9.0

INK = "#1f2329"
"""The colour of text and axes. In a page it is replaced by the text colour of the page, which dark mode changes."""

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
    "lines.markersize": 4.5,
    "errorbar.capsize": 2.5,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "offbeat",
}


def styled(draw: Callable[Params, Figure]) -> Callable[Params, Figure]:
    """Decorate a function that draws: it runs with `SETTINGS`, and names the extra if matplotlib is not installed."""

    @functools.wraps(draw)
    def wrapper(*args: Params.args, **kwargs: Params.kwargs) -> Figure:
        try:
            import matplotlib
        except ImportError:
            raise MissingDependency("the report", "matplotlib", "report") from None
        with matplotlib.rc_context(SETTINGS):
            return draw(*args, **kwargs)

    return wrapper


def new_figure(width: float, height: float) -> Figure:
    """An empty figure with automatic layout; width and height are in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path) -> Path:
    """Write a figure to a file, as .svg, .png or .pdf, and return its path."""
    import matplotlib

    form = path.suffix.lstrip(".").lower()
    without_date = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(SETTINGS):
        if form not in figure.canvas.get_supported_filetypes():
            raise ConfigurationError(f"cannot draw to {path.name}; name a file that ends in .svg, .png or .pdf")
        figure.savefig(path, format=form, dpi=PNG_DPI, facecolor="white", metadata=without_date)
    return path


def save_as(figure: Figure, path: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write a figure in several formats; `path` has no suffix. Returns the paths of the files."""
    return [save(figure, path.with_name(f"{path.name}.{form}")) for form in formats]


def svg_text(figure: Figure) -> str:
    """The figure as one `<svg>` element for a page; equal figures give equal text.

    Ids without a reference are removed and the others are made unique, so that one page can hold several figures.
    """
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context(SETTINGS):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    # A style element would apply to the whole page; an attribute of the root applies to this figure alone.
    text = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL)
    text = text.replace("<svg ", '<svg style="stroke-linejoin: round; stroke-linecap: butt" ', 1)
    ids = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))
    prefix = "f" + hashlib.sha256(text.encode()).hexdigest()[:10]
    return re.sub(r"<[^<>]+>", lambda tag: _clean_tag(tag[0], ids, prefix), text).strip()


def _clean_tag(tag: str, ids: set[str], prefix: str) -> str:
    """One tag for a page: fonts, ink and ids are replaced; text between tags is never changed."""
    tag = tag.replace("'DejaVu Sans'", "sans-serif").replace(INK, "currentColor")
    # Hundredths of a point are finer than any screen, and the page is half as large.
    tag = re.sub(r"(\d\.\d\d)\d+", r"\1", tag).replace(" \n", " ")
    tag = re.sub(r' id="([^"]*)"', lambda match: f' id="{prefix}-{match[1]}"' if match[1] in ids else "", tag)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", tag)


# Legends


COLUMNS_MAX = 6
HANDLE_INCHES = 0.62
CHARACTER_INCHES = 0.085


def add_legend(figure: Figure, looks: Mapping[str, Look], names: Mapping[str, str] | None = None) -> None:
    """Add one legend for the labels on all axes of a figure; `names` replaces labels in it."""
    labels = {label for axes in figure.axes for label in axes.get_legend_handles_labels()[1]}
    shown = {(names or {}).get(label, label): look for label, look in looks.items() if label in labels}
    place_legend(figure, [legend_handle(name, look) for name, look in shown.items()])


def place_legend(figure: Figure, handles: list[Line2D]) -> None:
    """Put a legend above the axes, in as many columns as its longest name allows."""
    if handles:
        longest = max(len(str(handle.get_label())) for handle in handles)
        columns = int(figure.get_figwidth() / (HANDLE_INCHES + CHARACTER_INCHES * longest))
        rows = math.ceil(len(handles) / max(1, min(columns, COLUMNS_MAX)))
        columns = math.ceil(len(handles) / rows)
        figure.legend(handles=handles, loc="outside upper left", ncols=columns, handlelength=2.6)


def legend_handle(name: str, look: Look) -> Line2D:
    """The entry of a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=look.colour, linestyle=look.dashes, marker=look.marker, markeredgewidth=0, label=name)


# Runs by label


@dataclass(frozen=True)
class Groups:
    """Runs by label, in order of first appearance, and the look of each label."""

    runs: dict[str, list[RunRecords]]
    looks: dict[str, Look]

    @classmethod
    def of(cls, runs: Sequence[RunRecords]) -> Self:
        groups: dict[str, list[RunRecords]] = {}
        for run in runs:
            groups.setdefault(run.header.label, []).append(run)
        names = {label: name for label, group in groups.items() if (name := _strategy(group[0]))}
        return cls(groups, looks(groups, names))

    @property
    def all(self) -> list[RunRecords]:
        return [run for group in self.runs.values() for run in group]

    def one_of_each(self) -> dict[str, RunRecords]:
        """One run per label, of the lowest seed that all labels have, or else the first run."""
        seeds = [{run.header.seed for run in group} for group in self.runs.values()]
        seed = min(set.intersection(*seeds), default=None) if seeds else None
        return {
            label: next((run for run in group if run.header.seed == seed), group[0])
            for label, group in self.runs.items()
        }


def _strategy(run: RunRecords) -> str | None:
    """The name of the strategy of a run, if its header has one."""
    strategy = (run.header.experiment or {}).get("strategy")
    name = strategy.get("name") if isinstance(strategy, dict) else None
    return name if isinstance(name, str) else None
