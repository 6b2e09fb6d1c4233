"""Verdicts: what an interval over seeds says about a published range, and what a differing claim must explain."""

from __future__ import annotations

import math
from typing import Any

import pytest
from made_records import accuracies, an_update, run

from offbeat.lab.reproduction.findings import Finding, compute_findings
from offbeat.lab.reproduction.quantities import QUANTITIES, values_of
from offbeat.lab.reproduction.study import Claim, RunSelection, Study, StudyRun, study_of
from offbeat.lab.reproduction.verdicts import SEEDS_MAX, Verdict, seeds_needed, verdict_of
from offbeat.records.comparison import Interval, interval
from offbeat.records.metrics import summarize
from offbeat.records.schema import Ended

STUDY: dict[str, Any] = {
    "title": "t",
    "original": "o",
    "scaled": "s",
    "expect": "e",
    "minutes": 1,
    "columns": ["accuracy", "seconds_per_epoch"],
    "base": {"workload": "digits", "workers": 2, "seeds": [1, 2, 3], "strategy": ["fmb"]},
    "case": [{"label": "on"}, {"label": "off", "workload": "digits-cnn"}],
}
CLAIM: dict[str, Any] = {
    "quantity": "accuracy",
    "of": {"strategy": "fmb", "case": "on"},
    "sentence": "It was {ours}.",
    "published": "a number",
}


def claim(low: float | None, high: float | None, better: Any = "higher") -> Claim:
    return Claim(
        quantity="accuracy", of=RunSelection("fmb"), sentence="{ours}", published="", low=low, high=high, better=better
    )


def runs_with(ends: dict[str, list[float]]) -> list[StudyRun]:
    """One run of each case and seed, from 1 on, with this accuracy at its end; 300 samples and 3 seconds each."""
    runs = []
    for case, values in ends.items():
        for seed, value in enumerate(values, start=1):
            records = run(
                [
                    *accuracies([0.1, 0.2, 0.4, value]),
                    *(an_update(float(step), 100 * step, (1, 0, 100, 0)) for step in (1, 2, 3)),
                    Ended(at=3.0, bytes_sent=0, messages_sent=0, failure=None),
                ],
                seed=seed,
            )
            runs.append(StudyRun(case, records, summarize(records)))
    return runs


def finding(on: list[float], off: list[float], **changed: Any) -> Finding:
    study = study_of("made", {**STUDY, "claim": [{**CLAIM, **changed}]}, "default")
    (result,) = compute_findings(study, runs_with({"on": on, "off": off})).sentences
    return result


@pytest.mark.parametrize(
    ("low", "high", "better", "verdict"),
    [
        (1.5, 1.8, "higher", Verdict("agrees")),
        (2.0, None, "higher", Verdict("agrees")),
        (None, 2.0, "lower", Verdict("agrees")),
        (3.0, 4.0, "higher", Verdict("differs", "worse")),
        (3.0, 4.0, "lower", Verdict("differs", "better")),
        (None, 1.0, "higher", Verdict("differs", "better")),
        (0.5, 1.0, "lower", Verdict("differs", "worse")),
        (None, None, "higher", None),
    ],
)
def test_a_narrow_interval_agrees_if_it_meets_the_range_and_differs_otherwise(
    low: float | None, high: float | None, better: str, verdict: Verdict | None
) -> None:
    assert verdict_of(claim(low, high, better), Interval(2.0, 1.6, 2.4, 3)) == verdict


def test_a_half_width_above_a_quarter_of_the_mean_cannot_tell() -> None:
    assert verdict_of(claim(2.0, 2.0), Interval(2.0, 1.5, 2.5, 3)) == Verdict("agrees")
    wide = verdict_of(claim(2.0, 2.0), Interval(2.0, 1.49, 2.51, 3))
    assert wide is not None
    assert (wide.word, wide.seeds_needed) == ("cannot tell", 4)
    assert str(wide) == "cannot tell (about 4 seeds needed)"
    assert wide.clause == "cannot tell: the interval is too wide, and about 4 seeds would be needed"


def test_a_wide_interval_outside_of_the_range_differs() -> None:
    assert verdict_of(claim(9.0, 9.0), Interval(2.0, -1.0, 5.0, 3)) == Verdict("differs", "worse")


def test_one_seed_cannot_tell() -> None:
    alone = verdict_of(claim(0.0, 9.0), interval([2.0]))
    assert alone == Verdict("cannot tell")
    assert alone.clause == "cannot tell: one run or none has no interval"
    with pytest.raises(ValueError, match="run two or more"):
        seeds_needed(Interval(2.0, None, None, 1))


def test_the_seeds_needed_are_the_fewest_whose_half_width_is_a_quarter_of_the_mean() -> None:
    """Of mean 10 and deviation 8: by a table of Student's t at 97.5%, 42 seeds come to 2.49, and 41 to 2.53."""
    ours = interval([2.0, 10.0, 18.0])
    assert ours is not None
    assert 2.0195 * 8 / math.sqrt(42) < 0.25 * ours.mean < 2.0211 * 8 / math.sqrt(41)
    assert seeds_needed(ours) == 42


def test_a_mean_of_nearly_zero_needs_more_seeds_than_are_estimated() -> None:
    verdict = verdict_of(claim(0.0, 1.0), Interval(0.001, -3.0, 3.002, 3))
    assert verdict == Verdict("cannot tell", seeds_needed=SEEDS_MAX)
    assert "1,000 seeds or more" in str(verdict)


def test_a_difference_names_its_cause_and_the_number_without_it() -> None:
    cause = {"text": "small batches", "of": {"strategy": "fmb", "case": "off"}}
    result = finding([0.50, 0.51, 0.52], [0.9, 0.91, 0.92], low=0.9, high=0.9, cause=cause)
    assert result.verdict == Verdict("differs", "worse")
    assert result.sentence == (
        "It was 0.510 (0.485–0.535). Published: a number; ours differs, and is worse. "
        "Cause: small batches; with that switched off 0.910 (0.885–0.935): agrees."
    )
    still = finding([0.50, 0.51, 0.52], [0.6, 0.61, 0.62], low=0.9, high=0.9, cause=cause)
    assert still.sentence.endswith(
        "Not the whole cause: small batches; with that switched off 0.610 (0.585–0.635): differs (worse). "
        "The rest is unknown; nothing was tried."
    )
    wide = finding([0.50, 0.51, 0.52], [0.5, 0.9, 1.3], low=0.9, high=0.9, cause=cause)
    assert "Perhaps the cause: small batches; with that switched off 0.900" in wide.sentence


@pytest.mark.parametrize(
    ("tried", "end"),
    [("", "Cause unknown; nothing was tried."), ("other seeds", "Cause unknown; tried: other seeds.")],
)
def test_a_difference_without_a_cause_says_what_was_tried(tried: str, end: str) -> None:
    assert finding([0.5, 0.51, 0.52], [0.9], low=0.9, tried=tried).sentence.endswith(end)


def test_agreement_needs_no_cause() -> None:
    result = finding([0.5, 0.51, 0.52], [0.9], low=0.5, tried="other seeds")
    assert result.sentence.endswith("Published: a number; ours agrees.")


def test_a_claim_without_a_number_of_ours_cannot_tell() -> None:
    result = finding([0.5], [0.5], quantity="seconds_to_target", low=1.0)
    assert result.verdict == Verdict("cannot tell")
    assert result.sentence.startswith("Not found here: It was –.")


def made_study(**changed: Any) -> Study:
    return study_of("made", {**STUDY, **changed}, "default")


def test_cases_of_different_workloads_have_epochs_of_their_own() -> None:
    runs = runs_with({"on": [0.5], "off": [0.6]})
    study = made_study(case=[{"label": "on"}, {"label": "off", "epoch": 600}])
    assert values_of(study, "seconds_per_epoch", runs) == {("on", "fmb", 1): 14.38, ("off", "fmb", 1): 6.0}
    both = made_study(epoch=300)
    assert set(values_of(both, "seconds_per_epoch", runs).values()) == {3.0}


def test_last_evaluations_and_updates_to_the_target_have_the_values_of_their_definitions() -> None:
    curve = [0.0] * 38 + [0.94, 0.96]  # the last 5% of 40 are two
    records = run([*accuracies(curve), *(an_update(0.5 * step, step, (1, 0, 1, 0)) for step in range(1, 81))])
    made = [StudyRun("", records, summarize(records))]
    assert QUANTITIES["accuracy_last5"].of(made, 1) == [pytest.approx(0.95)]
    assert QUANTITIES["loss_last5"].of(made, 1) == [pytest.approx(0.05)]
    seconds = made[0].summary.seconds_to_target
    assert seconds is not None
    assert QUANTITIES["updates_to_target"].of(made, 1) == [math.floor(seconds / 0.5)]
    peers = run([*accuracies(curve), *(an_update(0.5, 1, (1, 0, 1, 0), rank=rank) for rank in (0, 0, 0, 1))])
    assert QUANTITIES["updates_to_target"].of([StudyRun("", peers, summarize(peers))], 1) == [2.0]
    short = run(accuracies([0.2, 0.7]))
    assert QUANTITIES["accuracy_last5"].of([StudyRun("", short, summarize(short))], 1) == [0.7]
    assert QUANTITIES["updates_to_target"].of([StudyRun("", short, summarize(short))], 1) == [None]


def test_more_seeds_than_a_study_has_are_the_next_that_nothing_was_chosen_on() -> None:
    base = {**STUDY["base"], "seeds": [2, 3]}
    study = made_study(base=base, tuning_seeds=[0, 1, 5])
    assert study.first_seeds(1) == (2,)
    assert study.first_seeds(5) == (2, 3, 4, 6, 7)
