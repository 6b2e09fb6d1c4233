"""The report: headline, table, figures and page."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from made_records import a_small_run, a_toy, accuracies, losses, run, timed
from rich.console import Console

from offbeat.errors import ConfigurationError, MissingDependency
from offbeat.lab.plots.figures import REPORT_FIGURES, FigureSpec, plot
from offbeat.lab.plots.style import save, svg_text
from offbeat.lab.plots.timeline import timeline
from offbeat.lab.report.page import report_page, write_report
from offbeat.lab.report.table import comparison_table, headline
from offbeat.records.comparison import Comparison
from offbeat.records.schema import Ended, Notice, RunRecords

NAMESPACES = ("http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink")


def headline_of(*runs: RunRecords) -> str:
    return headline(Comparison.of(runs))


def seeds(label: str, *seconds: float | None) -> list[RunRecords]:
    return [timed(label, seed, time) for seed, time in enumerate(seconds)]


@pytest.fixture(scope="module")
def toys() -> list[RunRecords]:
    return [a_toy(label, seed, workers=3, seconds=20.0) for label in ("fmb", "amb", "apam") for seed in (1, 2)]


@pytest.fixture(scope="module")
def page(toys: list[RunRecords]) -> str:
    return report_page(toys)


def test_the_headline_has_the_speedup_and_its_interval() -> None:
    assert headline_of(*seeds("fmb", 10.0, 11.0, 12.0), *seeds("amb", 5.0, 5.4, 6.1)) == (
        "amb reaches 0.9 accuracy 2.00× sooner than fmb (95% interval 1.91 to 2.09, 3 seeds)."
    )


def test_the_headline_reports_a_slower_strategy() -> None:
    assert headline_of(*seeds("fmb", 8.0), *seeds("amb", 10.0)) == (
        "amb reaches 0.9 accuracy later than fmb: it is 0.80× as quick (1 seed, so without an interval)."
    )
    assert headline_of(*seeds("fmb", 8.0), *seeds("amb", 10.0), *seeds("apam", 16.0)).startswith(
        "No strategy reaches 0.9 accuracy sooner than fmb; the nearest, amb, is 0.80× as quick"
    )


def test_the_headline_reports_an_interval_that_includes_one() -> None:
    assert "the interval includes 1, so this may be chance" in headline_of(
        *seeds("fmb", 10.0, 10.0), *seeds("amb", 5.0, 11.0)
    )


def test_the_headline_prefers_a_strategy_that_reaches_the_target_on_more_seeds() -> None:
    sentence = headline_of(*seeds("fmb", 10.0, 10.0), *seeds("lucky", 1.0, None), *seeds("amb", 8.0, 8.0))
    assert sentence.startswith("amb, the quickest of 2,")
    assert "1 more seed missed the target" in headline_of(*seeds("fmb", 10.0, 10.0), *seeds("lucky", 1.0, None))


def test_the_headline_reports_targets_that_are_not_reached() -> None:
    assert headline_of(*seeds("fmb", None), *seeds("amb", None)) == (
        "No strategy reaches 0.9 accuracy in the time it had; fmb comes nearest and ends at 0.5."
    )
    assert headline_of(*seeds("fmb", None, None), *seeds("amb", 4.0, None)) == (
        "amb reaches 0.9 accuracy after 4 s (1 of 2 seeds); fmb, the baseline, does not reach it."
    )
    assert headline_of(*seeds("fmb", 20.0), *seeds("amb", None)) == (
        "fmb reaches 0.9 accuracy after 20.0 s (1 seed); no other strategy does."
    )
    assert headline_of(*seeds("fmb", 20.0)) == "fmb reaches 0.9 accuracy after 20.0 s (1 seed)."


def test_the_headline_without_a_target_has_the_best_final_value() -> None:
    untimed = [run(losses([2.0, value]), label=label, target=None) for label, value in (("fmb", 0.5), ("amb", 0.4))]
    assert headline_of(*untimed) == "amb ends at loss 0.4, the lowest of 2; no target was set, so nothing is timed."
    assert headline_of(run([], target=None)).startswith("No target was set and nothing was evaluated")


def printed(comparison: Comparison, width: int = 100) -> str:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(comparison_table(comparison))
    return capture.get()


def test_the_table_of_seven_strategies_fits_in_a_hundred_columns() -> None:
    labels = ("fmb", "amb", "async-fmb", "async-timed", "apam", "sync-amsgrad", "k-of-n")
    text = printed(Comparison.of([a_toy(label, seed, workers=4, seconds=120.0) for label in labels for seed in (1, 2)]))
    lines = text.rstrip().splitlines()
    assert max(len(line) for line in lines) <= 100
    assert len(lines) == 3 + len(labels), f"a cell was folded:\n{text}"
    assert "…" not in text


def test_the_table_has_no_column_without_values() -> None:
    text = printed(Comparison.of([run(losses([2.0, 1.0]), target=None)]))
    assert "loss" in text
    assert "accuracy" not in text
    assert "target" not in text


def test_the_table_shows_how_many_seeds_reached_the_target() -> None:
    text = printed(Comparison.of([*seeds("fmb", 4.0, None), *seeds("amb", None, None)]), width=140)
    assert "4.00 (1/2)" in text
    assert "not reached" in text
    assert "baseline" in text


class Outline(HTMLParser):
    """Collects ids and checks that what is opened is closed."""

    VOID = ("meta", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_its_ids_are_unique(page: str) -> None:
    outline = Outline()
    outline.feed(page)
    assert outline.open == []
    assert len(outline.ids) == len(set(outline.ids))
    referred = re.findall(r'(?:url\(|href=")#([^)"]+)', page)
    assert referred
    assert set(referred) <= set(outline.ids)


def test_the_page_needs_no_network(page: str) -> None:
    for namespace in NAMESPACES:
        page = page.replace(f'="{namespace}"', "")
    assert "http://" not in page
    assert "https://" not in page
    assert not re.search(r"<(script|link|img|iframe)\b|@import|@font-face", page)


def test_the_page_holds_every_figure_and_every_strategy(page: str) -> None:
    assert page.count("<svg ") == page.count("<figcaption>") == 7
    for label in ("fmb", "amb", "apam"):
        assert f'<th scope="row">{label}</th>' in page
    assert page.count('<svg role="img" aria-labelledby=') == 7


def test_the_same_records_give_the_same_bytes(toys: list[RunRecords], page: str, tmp_path: Path) -> None:
    path = write_report(toys, tmp_path / "deep" / "report.html")
    assert path.read_text(encoding="utf-8") == page


def test_the_page_escapes_labels_and_texts_of_users() -> None:
    evil = '<script>alert("$1 & 2")</script>'
    small = a_small_run(label=evil, workload=evil, experiment={"name": evil})
    noticed = run(
        [
            *small.records[:-1],
            Notice(at=1.0, rank=0, text=evil),
            Ended(at=9.0, bytes_sent=0, messages_sent=0, failure=evil),
        ],
        label=evil,
        workload=evil,
        experiment={"name": evil},
    )
    page = report_page([noticed])
    assert "<script" not in page
    assert page.count("&lt;script&gt;") > 5


def test_the_page_shows_notices_once_and_failures_first() -> None:
    failed = Ended(at=9.0, bytes_sent=0, messages_sent=0, failure="rank 2 reported three gradients that are not finite")
    noticed = Notice(at=1.0, rank=0, text="the cluster has more workers than the data has samples")
    page = report_page([run([*accuracies([0.1, 0.2, 0.3]), noticed, failed], seed=seed) for seed in (1, 2)])
    assert page.index("2 of 2 runs failed") < page.index("Side by side")
    assert "more workers than the data has samples (2 times)" in page


def test_the_page_of_a_run_that_recorded_nothing_still_opens() -> None:
    page = report_page([run([], target=None, experiment=None)])
    assert "<svg" not in page
    assert "cannot be written down" in page


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot write the report"):
        write_report([run([])], tmp_path / "file" / "report.html")


@pytest.mark.parametrize("spec", REPORT_FIGURES, ids=lambda spec: spec.key)
def test_every_figure_can_be_drawn_from_many_few_and_no_records(spec: FigureSpec, toys: list[RunRecords]) -> None:
    for runs in (toys, [a_small_run()], [run([])]):
        figure = spec.draw(runs)
        assert ElementTree.fromstring(svg_text(figure)).tag == "{http://www.w3.org/2000/svg}svg"
        content = [artist for axes in figure.axes for artist in (*axes.lines, *axes.patches, *axes.images)]
        if any(spec.is_recorded(one) for one in runs):
            assert content


def test_drawing_leaves_the_settings_of_matplotlib_unchanged(toys: list[RunRecords], tmp_path: Path) -> None:
    import matplotlib

    # A copy that does not choose a backend, as reading each setting would.
    before = matplotlib.rcParams.copy()
    save(plot(toys, "accuracy over time"), tmp_path / "figures" / "accuracy.svg")
    assert dict.items(matplotlib.rcParams) == dict.items(before)
    assert "matplotlib.pyplot" not in sys.modules


def test_a_figure_is_saved_with_the_same_bytes_or_refused(toys: list[RunRecords], tmp_path: Path) -> None:
    one, other = (save(timeline(toys), tmp_path / name).read_bytes() for name in ("one.svg", "other.svg"))
    assert one == other
    with pytest.raises(ConfigurationError, match=r"\.svg, \.png or \.pdf"):
        save(timeline(toys), tmp_path / "figure.txt")


def test_a_timeline_of_many_ranks_shows_some_and_says_so() -> None:
    assert "16 of 40 ranks shown" in svg_text(timeline([a_toy("fmb", 1, workers=40, seconds=5.0)]))


def test_labels_are_not_interpreted_as_mathematics() -> None:
    assert ">0.12345 $x$<" in svg_text(plot([timed("0.12345 $x$", 1, 2.0)], "accuracy over time"))


def test_without_matplotlib_the_error_has_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependency, match=r"pip install 'offbeat\[report\]'"):
        report_page([a_small_run()])
