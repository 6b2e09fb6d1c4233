"""What the study files of the package have in common: published behaviour of the strategies, and seeds kept apart."""

from __future__ import annotations

from typing import Any

import pytest

from offbeat.core.configuration import read_toml
from offbeat.lab.reproduction.study import SCALES, Scale, directory, load_study, names
from offbeat.strategies.hub.hub_strategies import AsynchronousHubStrategy

FIRST_REPORTED_SEED = 10


def tables_of(value: Any) -> list[dict[str, Any]]:
    """All tables in the contents of a file, at any depth."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return [*([value] if isinstance(value, dict) else []), *(table for item in inner for table in tables_of(item))]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", names())
def test_asynchronous_hubs_are_run_without_damping_as_published(name: str, scale: Scale) -> None:
    strategies = [strategy for case in load_study(name, scale).cases for strategy in case.plan.strategies]
    assert all(strategy.damping == 0 for strategy in strategies if isinstance(strategy, AsynchronousHubStrategy))


@pytest.mark.parametrize("name", names())
def test_the_file_says_so_itself_whatever_the_default_of_the_library(name: str) -> None:
    contents = read_toml(directory() / f"{name}.toml", "study")
    asynchronous = [table for table in tables_of(contents) if table.get("name") in ("async-fmb", "async-timed", "apam")]
    assert all(table.get("damping") == 0 for table in asynchronous)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", names())
def test_settings_were_chosen_on_seeds_that_are_not_reported(name: str, scale: Scale) -> None:
    study = load_study(name, scale)
    reported = {seed for case in study.cases for seed in case.plan.seeds}
    assert min(reported) >= FIRST_REPORTED_SEED
    assert not reported & set(study.description.tuning_seeds)
    assert bool(study.description.tuning) == bool(study.description.tuning_seeds)


@pytest.mark.parametrize("name", names())
def test_a_claim_has_a_short_form_and_a_published_number_or_says_that_there_is_none(name: str) -> None:
    for claim in load_study(name).description.claims:
        assert claim.short, claim.sentence
        assert claim.published_short, claim.sentence
        if claim.low is not None or claim.high is not None:
            assert claim.published_short != "no number", claim.sentence


def test_the_file_of_published_settings_is_no_study_and_has_rows_of_every_study() -> None:
    rows = read_toml(directory() / "published_settings.toml", "settings")["setting"]
    assert "published_settings" not in names()
    assert {row["study"] for row in rows} == set(names())
    assert all(row["source"] and (row["path"] or row.get("differs")) for row in rows)
