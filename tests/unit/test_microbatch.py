"""Micro-batch sizes: the measurement, with a fake clock, and what is printed about it."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offbeat as ob
from offbeat.cli import main
from offbeat.cli.measurement_commands import sentences
from offbeat.lab import microbatching
from offbeat.lab.microbatching import MicrobatchCurve, MicrobatchRow, microbatch, time_per_step
from offbeat.lab.plots.sweeps import microbatch_figure

Captured = pytest.CaptureFixture[str]
OVERHEAD = 0.002


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Machine:
    """A fake of clock and model: a call takes `call + size · sample` seconds."""

    def __init__(self, call: float, sample: float, *, batch_norm: bool = False, first_extra: float = 0.0) -> None:
        self.now, self.call, self.sample, self.first_extra = 0.0, call, sample, first_extra
        self.computing = types.SimpleNamespace(
            batch_norm=batch_norm, flat=types.SimpleNamespace(layout=types.SimpleNamespace(numel=1234))
        )
        self.calls: list[tuple[int, int]] = []

    def perf_counter(self) -> float:
        return self.now

    def seconds(self, samples: int, size: int) -> float:
        if samples == size == 1 and self.computing.batch_norm:
            raise ob.ConfigurationError("the model has batch norm, which needs at least 2 samples at a time")
        seconds = OVERHEAD + -(-samples // size) * self.call + samples * self.sample
        if (samples, size) not in self.calls:
            seconds += self.first_extra
        self.calls.append((samples, size))
        self.now += seconds
        return seconds


def measured(machine: Machine, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> MicrobatchCurve:
    monkeypatch.setattr(microbatching, "_GradientTimer", lambda workload, seed: machine)
    monkeypatch.setattr(microbatching.time, "perf_counter", machine.perf_counter)
    return microbatch(ob.workloads.Quadratic(), **settings)


# What is measured


def test_the_time_of_calls_is_separated_from_the_constant_part(monkeypatch: pytest.MonkeyPatch) -> None:
    curve = measured(Machine(call=0.001, sample=0.0001), monkeypatch, batch=64)
    assert [row.size for row in curve.rows] == [1, 2, 4, 8, 16, 32, 64]
    assert curve.seconds_per_round == pytest.approx(OVERHEAD)
    for row in curve.rows:
        assert row.seconds_per_call == pytest.approx(0.001 + row.size * 0.0001)
        assert row.seconds_per_sample == pytest.approx(row.seconds_per_call / row.size)
        assert row.spread == pytest.approx(0.0, abs=1e-9)
        assert row.repeats == microbatching.REPEATS_MAX
    assert curve.seconds_per_step(16) == pytest.approx(OVERHEAD + 4 * 0.001 + 64 * 0.0001)


def test_the_first_call_of_a_size_counts_only_where_it_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    curve = measured(Machine(call=0.02, sample=0.01, first_extra=0.2), monkeypatch, batch=4, sizes=[2, 4])
    assert [row.seconds_per_call for row in curve.rows] == pytest.approx([0.04, 0.06])


def test_repeats_are_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(call=0.02, sample=0.01)
    measured(machine, monkeypatch, batch=4, sizes=[2, 4])
    assert machine.calls == [(2, 2), (0, 1), (2, 2), (4, 4), *[(2, 2), (4, 4), (0, 1)] * microbatching.REPEATS_MAX]


def test_what_takes_long_is_measured_once_and_what_takes_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(call=0.01, sample=0.1)
    curve = measured(machine, monkeypatch, batch=256, seconds=20.0)
    assert [row.repeats > 1 for row in curve.rows] == [True] * 4 + [False] * (len(curve.rows) - 4)
    assert curve.left_out == (128, 256)
    assert [row.spread is None for row in curve.rows[4:]] == [True] * len(curve.rows[4:])
    assert machine.now < 20.0 + 0.9, "one measurement of a size that is repeated"
    assert any("There was no time for 128, 256; add --seconds." in line for line in sentences(curve))


def test_one_sample_is_refused_by_batch_norm_and_no_other_size_is(monkeypatch: pytest.MonkeyPatch) -> None:
    curve = measured(Machine(call=0.001, sample=0.001, batch_norm=True), monkeypatch, batch=8)
    assert ([row.size for row in curve.rows], curve.refused) == ([2, 4, 8], (1,))
    with pytest.raises(ob.ConfigurationError, match="no other size was asked for"):
        measured(Machine(call=0.001, sample=0.001, batch_norm=True), monkeypatch, batch=1)


def test_a_batch_that_is_no_power_of_two_is_measured_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    curve = measured(Machine(call=0.001, sample=0.001), monkeypatch, batch=100)
    assert [row.size for row in curve.rows] == [1, 2, 4, 8, 16, 32, 64, 100]
    assert [row.size for row in measured(Machine(1.0, 1.0), monkeypatch, batch=1, seconds=5.0).rows] == [1]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"batch": 0}, "the batch must be 1 or more, but is 0"),
        ({"sizes": []}, "there is no size to measure"),
        ({"sizes": [0, 4]}, "a micro-batch has 1 sample or more, but 0 was given"),
        ({"batch": 16, "sizes": [4, 32]}, "a micro-batch of 32 is more than the batch of 16; raise the batch"),
        ({"seconds": 0}, "must be more than 0 seconds"),
    ],
)
def test_wrong_arguments_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ob.ConfigurationError, match=sentence):
        microbatch(ob.workloads.Quadratic(), **settings)


def with_batch_norm(seen: list[int]) -> ob.Workload:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(len(targets))
        return (outputs - targets).square().mean(1)

    data = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    return ob.Workload(model=lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), loss=loss, train=(data, data))


def test_the_real_model_is_called_with_micro_batches_of_these_sizes() -> None:
    seen: list[int] = []
    curve = microbatch(with_batch_norm(seen), batch=16, seconds=0.2)
    assert set(seen) - {1} == {2, 4, 8, 16}
    assert (curve.batch_norm, curve.refused, curve.parameters) == (True, (1,), 28)
    assert all(row.seconds_per_call > 0 for row in curve.rows)


def test_micro_batches_are_not_joined_even_where_the_sum_is_the_same() -> None:
    seen: list[int] = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(len(targets))
        return (outputs - targets).square().mean(1)

    data = torch.randn(50, 4)
    workload = ob.Workload(model=lambda: nn.Linear(4, 4), loss=loss, train=(data, data))
    times = time_per_step(workload, 24, [1, 3, 12, 5], repeats=2)
    assert [(each.splits, each.microbatch, len(each.repeats)) for each in times] == [
        (1, 24, 2), (3, 8, 2), (12, 2, 2), (5, 5, 2),
    ]  # fmt: skip
    once = [24, 8, 8, 8, *[2] * 12, 5, 5, 5, 5, 4]
    assert seen == [24, 8, 2, 5, *once, *once]
    assert all(min(each.repeats) <= each.seconds <= max(each.repeats) for each in times)


def test_splits_that_cannot_be_are_refused() -> None:
    with pytest.raises(ob.ConfigurationError, match="can be cut into 1 to 8 parts, but 9 were asked for"):
        time_per_step(ob.workloads.Quadratic(), 8, [1, 9])
    with pytest.raises(ob.ConfigurationError, match="1 repeat or more"):
        time_per_step(ob.workloads.Quadratic(), 8, [1], repeats=0)


def test_the_random_state_and_the_number_of_threads_are_restored() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    microbatch(ob.workloads.Quadratic(), batch=4, seconds=0.05)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


# What is printed


def curve(milliseconds: dict[int, float], *, batch: int = 256, batch_norm: bool = False) -> MicrobatchCurve:
    """A curve with these times per sample."""
    rows = tuple(MicrobatchRow(size, size * each / 1e3, 0.1, 5) for size, each in milliseconds.items())
    return MicrobatchCurve("made up", 1000, batch, 0.0, rows, batch_norm, (), ())


KNEE_AT_8 = {1: 4.0, 2: 2.0, 4: 1.2, 8: 1.04, 64: 1.0, 256: 1.02}


def test_the_knee_is_the_smallest_size_within_five_percent_of_the_best() -> None:
    found = curve(KNEE_AT_8)
    assert (found.knee, found.recommendation, found.best.size) == (8, 8, 64)
    assert curve({**KNEE_AT_8, 8: 1.06}).knee == 64
    with pytest.raises(ob.ConfigurationError, match="the size 3 was not measured"):
        found.row(3)


def test_with_batch_norm_at_least_32_samples_are_recommended() -> None:
    assert curve(KNEE_AT_8, batch_norm=True).recommendation == 64
    assert curve({1: 2.0, 16: 1.0}, batch=16, batch_norm=True).recommendation == 16


def test_the_sentences_name_a_size_its_cost_and_warnings() -> None:
    assert sentences(curve(KNEE_AT_8)) == [
        "Take --microbatch 8: a batch of 256 takes 266 ms in 32 parts, 2% more than in one part.",
        "The knee is at 8, the smallest size whose time per sample is within 5% of the best.",
    ]
    assert "a batch of 4096 takes 4.26 s in 512 parts" in sentences(curve(KNEE_AT_8, batch=4096))[0]
    take, norm = sentences(curve(KNEE_AT_8, batch_norm=True))
    assert take.startswith("Take --microbatch 64: a batch of 256 takes 256 ms in 4 parts, 2% less")
    assert norm.startswith("The knee is at 8, but the model has batch norm, and batch norm suffers")
    assert ".534 in one part, .501 in 16 parts, .302 in 64, .085 in 256" in norm
    small = sentences(curve({1: 2.0, 16: 1.0}, batch=16, batch_norm=True))
    assert small[0] == "Take --microbatch 16: a batch of 16 takes 16 ms in one part."
    assert small[2] == "Time per sample still falls at the largest size, so a larger one may be faster yet."
    assert small[3].startswith("Beware: the model has batch norm")
    assert small[3].endswith("raise --batch or --sizes.")


def test_the_command_prints_a_table_and_draws_the_curve(capsys: Captured) -> None:
    words = ["microbatch", "quadratic", "--batch", "32", "--sizes", "4,8,32", "--seconds", "0.3"]
    assert main([*words, "--plot", "curve.svg"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    lines = said.out.splitlines()
    assert lines[0].startswith("quadratic, 100 parameters, one thread")
    assert [line.split()[0] for line in lines[3:6]] == ["4", "8", "32"]
    assert sum("←" in line for line in lines) == 1
    assert any(line.startswith("Take --microbatch ") for line in lines)
    assert lines[-1] == "written: curve.svg"
    assert "<svg" in Path("curve.svg").read_text(encoding="utf-8")


def test_json_holds_all_of_it_and_nothing_else_is_printed(capsys: Captured) -> None:
    assert main(["microbatch", "quadratic", "quadratic.dimension=7", "--batch", "8", "--seconds", "0.2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["workload"], result["parameters"], result["batch"]) == ("quadratic", 7, 8)
    assert [row["size"] for row in result["rows"]] == [1, 2, 4, 8]
    assert result["knee"] in (1, 2, 4, 8)
    for row in result["rows"]:
        assert row["seconds_per_sample"] == pytest.approx(row["seconds_per_call"] / row["size"])
        assert row["seconds_per_step"] == pytest.approx(result["seconds_per_round"] + 8 * row["seconds_per_sample"])


OWN = """
from dataclasses import dataclass
import offbeat as ob

@dataclass(frozen=True)
class Mine(ob.workloads.NamedWorkload):
    def build(self):
        return ob.workloads.Quadratic(dimension=3).build()
"""


def test_a_workload_of_ones_own_is_measured_as_well(capsys: Captured) -> None:
    Path("mine.py").write_text(OWN, encoding="utf-8")
    try:
        assert main(["microbatch", "mine.py:Mine", "--batch", "4", "--seconds", "0.1", "--json"]) == 0
    finally:
        ob.workloads.NamedWorkload.members.pop("mine.py:Mine", None)
    assert json.loads(capsys.readouterr().out)["parameters"] == 3


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "no workload is named"),
        (["fmb"], "'fmb' is a strategy"),
        (["quadratic", "fmb"], "one word too many"),
        (["quadratic", "--sizes", "many"], "--sizes"),
        (["quadratic", "--batch", "16", "--sizes", "32"], "a micro-batch of 32 is more than the batch of 16"),
        (["quadratic", "--batch", "2", "--seconds", "0.05", "--plot", "curve.doc"], ".svg, .png or .pdf"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(words: list[str], sentence: str, capsys: Captured) -> None:
    assert main(["microbatch", *words]) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.err.count("\n") == 1


def test_the_figure_shows_every_size_and_the_knee() -> None:
    axes = microbatch_figure(curve(KNEE_AT_8)).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == [str(size) for size in KNEE_AT_8]
    assert [text.get_text() for text in axes.texts] == ["knee: 8"]
    assert axes.get_yscale() == "log"
