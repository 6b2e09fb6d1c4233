"""Labels of runs of several experiments have the settings in which they differ."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from made_records import run

from offbeat.cli import main
from offbeat.lab.report.labels import with_distinct_labels
from offbeat.records.schema import RunRecords

PLAIN: dict[str, Any] = {
    "workload": {"name": "digits", "hidden": 64},
    "strategy": {"name": "fmb", "microbatch": 16, "batch": 64, "optimizer": {"name": "sgd", "lr": 0.1}},
    "cluster": {"seconds_per_sample": 0.02, "straggle": {"name": "none"}},
    "workers": 4,
    "until": {"name": "samples", "count": 60000},
    "evaluate": {"name": "updates", "updates": 1},
    "seed": 0,
    "label": None,
}


def made(label: str = "fmb", seed: int = 0, directory: str | None = None, **changed: Any) -> RunRecords:
    """A run of the experiment above with some settings changed: strategy__batch=256."""
    plain = copy.deepcopy(PLAIN)
    for name, value in changed.items():
        *above, last = name.split("__")
        inner = plain
        for key in above:
            inner = inner[key]
        inner[last] = value
    plain |= {"seed": seed, "label": label}
    return run([], label=label, seed=seed, workers=plain["workers"], experiment=plain, directory=_path(directory))


def unknown(label: str, directory: str, seed: int = 0, **changed: Any) -> RunRecords:
    return run([], label=label, seed=seed, experiment=None, directory=_path(directory), **changed)


def _path(directory: str | None) -> Path | None:
    return Path(directory) if directory else None


def labels(*runs: RunRecords) -> list[str]:
    return [one.header.label for one in with_distinct_labels(runs)]


def test_one_comparison_keeps_its_labels_and_seeds_are_no_difference() -> None:
    amb = made("amb", strategy__name="amb", strategy__batch=256)
    assert labels(made(), made(seed=1), amb, made("amb", 1, strategy__name="amb", strategy__batch=256)) == [
        "fmb",
        "fmb",
        "amb",
        "amb",
    ]


def test_equal_labels_get_the_settings_that_differ() -> None:
    assert labels(made(), made(strategy__batch=256), made(seed=1)) == ["fmb batch=64", "fmb batch=256", "fmb batch=64"]
    lr = made(strategy__optimizer={"name": "sgd", "lr": 0.05})
    assert labels(made(), lr) == ["fmb lr=0.1", "fmb lr=0.05"]
    adam = made(strategy__optimizer={"name": "adam", "lr": 0.1})
    assert labels(made(), adam) == ["fmb optimizer=sgd", "fmb optimizer=adam"]
    assert labels(made(), made(evaluate={"name": "seconds", "seconds": 0.5})) == [
        "fmb evaluate=updates:1",
        "fmb evaluate=seconds:0.5",
    ]


def test_as_few_settings_are_named_as_suffice() -> None:
    square = [made(strategy__batch=batch, strategy__microbatch=micro) for batch in (64, 256) for micro in (8, 16)]
    assert labels(*square) == [f"fmb microbatch={micro} batch={batch}" for batch in (64, 256) for micro in (8, 16)]
    both = [made(strategy__batch=64, strategy__microbatch=8), made(strategy__batch=256, strategy__microbatch=16)]
    assert labels(*both) == ["fmb microbatch=8", "fmb microbatch=16"]


def test_only_labels_that_are_equal_get_settings() -> None:
    assert labels(made(), made(strategy__batch=256), made("amb", strategy__name="amb")) == [
        "fmb batch=64",
        "fmb batch=256",
        "amb",
    ]


@pytest.mark.parametrize(
    ("changed", "one", "other"),
    [
        ({"workers": 8}, "workers=4", "workers=8"),
        ({"until": {"name": "seconds", "seconds": 30.0}}, "until=60000", "until=seconds:30.0"),
        ({"cluster__straggle": {"name": "exponential", "mean": 2.0}}, "straggle=none", "straggle=exponential"),
        ({"cluster__seconds_per_sample": 0.05}, "seconds_per_sample=0.02", "seconds_per_sample=0.05"),
        ({"workload__hidden": 128}, "hidden=64", "hidden=128"),
        ({"bytes_per_second": 1e6}, "bytes_per_second=none", "bytes_per_second=1000000.0"),
    ],
)
def test_a_shared_setting_that_differs_is_in_all_labels(changed: dict[str, Any], one: str, other: str) -> None:
    """Also labels that differ anyway, so that the strategy is not taken for the cause of a difference."""
    assert labels(made(), made(**changed)) == [f"fmb {one}", f"fmb {other}"]
    assert labels(made(), made("amb", strategy__name="amb", **changed)) == [f"fmb {one}", f"amb {other}"]


def test_the_simulated_and_the_live_run_of_one_experiment_are_two() -> None:
    live = run([], label="fmb", seed=0, workers=4, experiment=made().header.experiment, engine="live")
    assert labels(made(), live) == ["fmb simulated", "fmb live"]


def test_lists_and_long_values_are_not_in_labels() -> None:
    mixtures = [[[0.0, 0.1 * number, 0.5], [1.0, 2.0, 0.5]] for number in (1, 2)]
    first, second = (
        made(directory=f"runs/{place}/fmb-seed0", cluster__straggle={"name": "mixture", "components": mixture})
        for place, mixture in zip("ab", mixtures, strict=True)
    )
    assert labels(first, second) == ["fmb a", "fmb b"]


def test_runs_without_a_configuration_are_labelled_by_directory() -> None:
    seeds = [unknown("fmb", f"runs/mine-001/fmb-seed{seed}", seed) for seed in (0, 1)]
    assert labels(*seeds) == ["fmb", "fmb"]
    assert labels(*seeds, unknown("fmb", "runs/script-004")) == ["fmb mine-001", "fmb mine-001", "fmb script-004"]
    assert labels(unknown("fmb", "a/x"), unknown("fmb", "b/x")) == ["fmb a/x", "fmb b/x"]
    assert labels(unknown("fmb", "a/x"), unknown("amb", "b/y")) == ["fmb", "amb"]
    assert labels(unknown("fmb", "a/x", workers=2), unknown("fmb", "b/x", workers=3)) == [
        "fmb workers=2",
        "fmb workers=3",
    ]


def test_a_known_and_an_unknown_run_are_two() -> None:
    assert labels(made(directory="a/fmb-seed0", workers=2), unknown("fmb", "b")) == ["fmb a", "fmb b"]


def test_runs_in_memory_are_numbered() -> None:
    mixtures = [made(cluster__straggle={"name": "mixture", "components": [[0.1 * number] * 9]}) for number in (1, 2)]
    assert labels(*mixtures) == ["fmb 1", "fmb 2"]


def test_the_command_takes_directories_in_the_order_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    quick = ["--until", "2000", "--workers", "2", "--no-report", "--quiet"]
    for batch, out in ((256, "large"), (64, "small")):
        assert main(["simulate", "quadratic", "fmb", "amb", f"fmb.batch={batch}", "--out", out, *quick]) == 0
    capsys.readouterr()
    assert main(["report", "small", "large", "--out", "p.html"]) == 0
    captured = capsys.readouterr()
    assert "1 of 4 runs repeat another record for record" in captured.err
    first_words = [line.split("  ")[0] for line in captured.out.splitlines()]
    assert [word for word in first_words if word.startswith(("fmb", "amb"))][:3] == [
        "fmb batch=64",
        "amb",
        "fmb batch=256",
    ]
    assert "fmb batch=256" in Path("p.html").read_text(encoding="utf-8")
