"""Figures: looks of strategies, units of axes, and reproducible files."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest
from made_records import a_gossip, a_round, a_small_run, a_toy, an_exchange, an_update, run, timed

import offbeat.strategies  # noqa: F401  so that all strategies are in the register
from offbeat.cli import main
from offbeat.core.strategy import Strategy
from offbeat.errors import ConfigurationError
from offbeat.lab.plots.distributions import HISTOGRAMS, Binned, distributions
from offbeat.lab.plots.figures import (
    CELLS,
    panel,
    plot,
    report_figures,
    write_figures,
)
from offbeat.lab.plots.looks import NAMED, Look, looks, named_looks
from offbeat.lab.plots.rank_pairs import exchange_maps
from offbeat.lab.plots.style import FORMATS, Groups, save_as, svg_text
from offbeat.lab.plots.sweeps import GREY, Point, sweep
from offbeat.lab.plots.timeline import timeline
from offbeat.records.schema import RunRecords

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

UNITS = {"s", "1/s", "%", "samples", "updates", "versions", "per update", "bytes", "exchanges", "squared norm"}
WITHOUT_UNIT = {
    "held-out accuracy",
    "held-out top-5 accuracy",
    "held-out loss",
    "training loss",
    "learning rate",
    "rank",
    "with rank",
    "exchanges of rank",
}


@pytest.fixture(scope="module")
def mixed() -> list[RunRecords]:
    hubs = [a_toy(label, seed, workers=3, seconds=20.0) for label in ("fmb", "amb", "apam") for seed in (1, 2)]
    return [*hubs, a_gossip(peers=4, seconds=20.0)]


# Looks


def without_colour(style: dict[str, Look]) -> set[tuple[object, str]]:
    return {(look.dashes, look.marker) for look in style.values()}


def test_every_strategy_with_a_name_has_a_look_that_no_other_has_with_or_without_colour() -> None:
    ours = [name for name, kind in Strategy.members.items() if kind.__module__.startswith("offbeat.strategies.")]
    assert set(ours) <= set(NAMED)
    assert len({look.colour for look in NAMED.values()}) == len(NAMED)
    assert len(without_colour(NAMED)) == len(NAMED)


def test_a_new_strategy_needs_no_entry_to_have_a_look_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        name = f"new-{number}"
        kind = type("New", (), {"__module__": "offbeat.strategies.new", "name": name})
        monkeypatch.setitem(Strategy.members, name, kind)
    style = named_looks()
    assert len(style) == len(NAMED) + 30 == len(without_colour(style))
    assert len({look.colour for look in style.values()}) == len(style)
    assert {name: style[name] for name in NAMED} == NAMED


@pytest.mark.parametrize("others", [[], ["amb"], ["x", "y", "fmb batch=64"], ["amb, fixed limit", "apam"]])
def test_a_strategy_has_the_same_look_beside_any_other(others: list[str]) -> None:
    for labels in itertools.permutations([*others, "fmb"]):
        assert looks(labels)["fmb"] == NAMED["fmb"]


def test_labels_of_one_strategy_have_shades_of_its_colour() -> None:
    style = looks(["fmb", "quick", "slow", "amb, fixed limit", "amb-2"], {"quick": "fmb", "slow": "fmb"})
    assert style["amb, fixed limit"] == NAMED["amb"], "the first of a strategy that is not there by name"
    assert len({look.colour for look in style.values()}) == 5
    assert len(without_colour(style)) == 5
    blue = [int(style[label].colour[5:], 16) - int(style[label].colour[1:3], 16) for label in ("fmb", "quick", "slow")]
    red = [int(style[label].colour[1:3], 16) - int(style[label].colour[5:], 16) for label in ("amb-2",)]
    assert min(blue + red) > 50, "light and dark, each is still the strategy's own hue"


def test_labels_of_unknown_strategies_have_different_looks() -> None:
    many = looks(f"mine {index}" for index in range(40))
    assert len(without_colour(many)) == 40
    assert len(set(looks(f"mine {index}" for index in range(120)).values())) == 120
    assert not {look.colour for look in looks(["fmb", "x", "y"]).values() if look != NAMED["fmb"]} & {"#0072b2"}


def test_the_look_of_a_label_follows_from_the_strategy_in_the_header() -> None:
    header = {"experiment": {"strategy": {"name": "amb"}}}
    (line, *_) = plot([timed("a limit of 6.43 s", 1, 4.0, **header)], "accuracy over time").axes[0].lines
    assert (line.get_color(), line.get_marker()) == (NAMED["amb"].colour, NAMED["amb"].marker)


def test_lines_carry_markers_but_few_of_them(mixed: list[RunRecords]) -> None:
    lines = plot(mixed, "samples over time").axes[0].lines
    assert len(lines) == 4
    for line in lines:
        assert line.get_marker() == NAMED[str(line.get_label())].marker
        assert isinstance(line.get_markevery(), tuple)


def test_lines_of_equal_colour_differ_in_grey(tmp_path: Path) -> None:
    """Strategies drawn in the same colour differ in dashes and markers."""
    import numpy
    from matplotlib.image import imread

    drawn = []
    for name in ("fmb", "amb", "apam"):
        figure = plot([timed(name, 1, 4.0)], "accuracy over time")
        for line in figure.axes[0].lines:
            line.set_color("black")
        figure.legends.clear()
        (path,) = save_as(figure, tmp_path / name, ["png"])
        drawn.append(imread(path)[..., :3].mean(axis=2))
    for one, other in itertools.combinations(drawn, 2):
        assert (numpy.abs(one - other) > 0.5).mean() > 0.0005


# Axes


def drawn_figures(runs: list[RunRecords]) -> Iterator[Figure]:
    yield from (spec.draw(runs) for spec in report_figures(runs))
    yield panel(runs, [[name] for name in CELLS])


def all_axes(figure: Figure) -> Iterator[Axes]:
    """The visible axes, and the inset axes in them."""
    for axes in (axes for axes in figure.axes if axes.axison):
        yield axes
        yield from (child for child in axes.child_axes if hasattr(child, "xaxis"))


def has_unit(text: str) -> bool:
    unit = re.search(r"\(([^()]+)\)$", text.replace("\n", " "))
    return text in WITHOUT_UNIT or (unit is not None and unit[1] in UNITS)


def is_explained(axis: Axis, figure: Figure) -> bool:
    """By its own label, by one for the whole figure, or by that of the axes below that it shares its scale with."""
    texts = [axis.get_label_text(), figure.get_supylabel() if axis.axis_name == "y" else ""]
    siblings = getattr(axis.axes, f"get_shared_{axis.axis_name}_axes")().get_siblings(axis.axes)
    texts += [getattr(other, f"{axis.axis_name}axis").get_label_text() for other in siblings]
    return any(has_unit(text) for text in texts if text)


def test_every_axis_of_every_figure_has_a_unit(mixed: list[RunRecords]) -> None:
    checked = 0
    for figure in drawn_figures(mixed):
        for axes in all_axes(figure):
            for axis in (axes.xaxis, axes.yaxis):
                assert is_explained(axis, figure), axis.get_label_text()
                checked += 1
    assert checked > 50


# Cells, panels and distributions


def test_a_panel_has_a_plot_for_each_name_and_one_legend_for_all(mixed: list[RunRecords]) -> None:
    figure = panel(mixed, [["delay density", "compute time", "batch size"], ["accuracy over time", "", "bytes"]])
    assert len(figure.axes) == 5
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["fmb", "amb", "apam", "gossip"]
    ElementTree.fromstring(svg_text(figure))


@pytest.mark.parametrize("name", CELLS)
def test_every_cell_can_be_drawn_from_many_few_and_no_records(name: str, mixed: list[RunRecords]) -> None:
    for runs in (mixed, [a_small_run()], [run([])]):
        figure = panel(runs, [[name]])
        assert ElementTree.fromstring(svg_text(figure)).tag == "{http://www.w3.org/2000/svg}svg"
        (axes,) = figure.axes
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        is_empty = [text.get_text() for text in axes.texts] == ["none recorded"]
        assert is_empty != bool(axes.lines or axes.patches)
        if runs is mixed:
            assert is_empty == (name == "top-5 over time")


def test_an_unknown_cell_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'accuracy over time'"):
        panel([a_small_run()], [["acuracy over time"]])
    with pytest.raises(ConfigurationError, match="a panel needs a cell"):
        panel([a_small_run()], [])


def test_distributions_leave_out_quantities_without_records() -> None:
    rounds = [a_round(1, 0.0, 1.0), a_round(1, 1.0, 2.0)]
    plain = distributions([run([*rounds, an_update(1.0, 10, (1, 0, 10, 0))])])
    labels = [axes.get_xlabel().replace("\n", " ") for axes in plain.axes]
    assert labels == ["compute time (s)", "batch size (samples)", "messages (per update)", "staleness (versions)"]
    waited = distributions([run([*rounds, a_round(1, 4.0, 1.0, idle=1.0, induced=0.5)], label="fmb"), run(rounds)])
    labels = [axes.get_xlabel().replace("\n", " ") for axes in waited.axes]
    assert [label for label in labels if label] == ["compute time (s)", "induced delay (s)", "waiting time (s)"]


def test_bars_are_shares_of_all_values_and_the_share_beyond_is_written() -> None:
    usual = [a_round(1, float(start), 1.0, idle=0.1 * (start % 5)) for start in range(300)]
    figure = distributions([run([*usual, a_round(1, 400.0, 1.0, idle=90.0)])])
    compute, waiting = figure.axes
    assert compute.patches[0].get_data().values.sum() == pytest.approx(100.0)  # type: ignore[attr-defined]
    assert waiting.patches[0].get_data().values.sum() == pytest.approx(100.0 * 300 / 301)  # type: ignore[attr-defined]
    assert "0.3% beyond" in next(text.get_text() for text in waiting.texts)


def test_all_labels_share_the_bins_of_a_quantity() -> None:
    groups = Groups.of([a_toy("fmb", 1, workers=3, seconds=10.0), a_toy("apam", 1, workers=3, seconds=10.0)])
    binned = Binned.of(HISTOGRAMS["staleness"], groups)
    assert set(binned.values) == {"fmb", "apam"}
    assert binned.edges.tolist() == [-0.5, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5]


# A quantity against a setting


def test_what_others_have_published_is_hollow_and_grey_and_says_so() -> None:
    measured = {"fmb": [Point(2, 90.0, 80.0, 100.0), Point(4, 60.0, 50.0, 70.0)], "amb": [Point(2, 70.0)]}
    figure = sweep(
        "workers", "time (s)", measured, log_x=True, log_y=True, reference={"fmb": [(2.0, 85.0), (4.0, 58.0)]}
    )
    (axes,) = figure.axes
    (published,) = [line for line in axes.lines if line.get_color() == GREY]
    assert published.get_markerfacecolor() == "none"
    assert published.get_marker() == NAMED["fmb"].marker
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["fmb", "amb", "fmb, published"]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    (bars,) = axes.collections
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[80.0, 100.0], [50.0, 70.0]]
    ElementTree.fromstring(svg_text(figure))


# Files


@pytest.mark.slow
def test_figures_are_written_by_what_they_show_in_every_format(mixed: list[RunRecords], tmp_path: Path) -> None:
    written = write_figures(mixed, tmp_path / "deep", ["svg"])
    assert {path.name for path in written} >= {"accuracy-over-time.svg", "computing-and-waiting.svg"}
    assert all(path.read_bytes() for path in written)
    paths = save_as(plot(mixed, "samples over time"), tmp_path / "samples 0.5")
    assert [path.name for path in paths] == [f"samples 0.5.{form}" for form in FORMATS]
    assert [path.read_bytes()[:4] for path in paths] == [b"\x89PNG", b"<?xm", b"%PDF"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"cannot write figures to .*--figures"):
        write_figures(mixed, tmp_path / "file", ["svg"])


SAVED_AGAIN = """
import sys
from pathlib import Path
from made_records import a_toy
from offbeat.lab.plots.figures import panel
from offbeat.lab.plots.style import save_as

runs = [a_toy(label, 1, workers=3, seconds=10.0) for label in ("fmb", "amb", "mine")]
save_as(panel(runs, [["accuracy over time", "batch size"]]), Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_another_process_writes_the_same_bytes(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    for name, seed in (("one", "1"), ("other", "2")):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": here, "PATH": ""}
        argv = [sys.executable, "-c", SAVED_AGAIN, str(tmp_path / name)]
        subprocess.run(argv, check=True, timeout=500, env=environment)
    for form in FORMATS:
        assert (tmp_path / f"one.{form}").read_bytes() == (tmp_path / f"other.{form}").read_bytes(), form


@pytest.mark.slow
def test_the_command_writes_figures_to_the_given_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["simulate", "quadratic", "amb", "fmb", "--until", "2000", "--workers", "2", "--no-report", "--quiet"]
    assert main([*argv, "--out", "o"]) == 0
    assert main(["report", "o", "--figures", "f", "--format", "svg", "--format", "pdf"]) == 0
    output = capsys.readouterr().out
    names = {path.name for path in Path("f").iterdir()}
    assert {"loss-over-time.svg", "loss-over-time.pdf"} <= names
    assert f"figures: f ({len(names) // 2}, each as svg, pdf)" in output
    assert output.index("\namb") < output.index("\nfmb"), "as they were given"
    assert main(["report", "o", "--format", "svg"]) == 2
    assert "--figures DIR" in capsys.readouterr().err


def test_the_totals_of_exchanges_have_a_unit() -> None:
    figure = exchange_maps([run([an_exchange(1.0, 0, 1)], workers=2)])
    inset = figure.axes[0].child_axes[0]
    assert inset.get_xlabel() == "with any (exchanges)"


def test_figures_of_one_page_agree_on_looks(mixed: list[RunRecords]) -> None:
    for name in ("accuracy over time", "quality over bytes", "samples over time", "consensus over time"):
        for line in plot(mixed, name).axes[0].lines:
            if str(line.get_label()) in NAMED:
                assert line.get_color() == NAMED[str(line.get_label())].colour
    titles = {axes.get_title(loc="left") for axes in timeline(mixed).axes}
    assert titles == {"fmb", "amb", "apam", "gossip"}
