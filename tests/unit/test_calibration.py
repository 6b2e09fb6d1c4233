"""From the records of probes to a cluster, and how the simulator and live runs use such a cluster."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_records import a_round, run

import offbeat as ob
from offbeat.cli import main
from offbeat.cli.measurement_commands import as_toml
from offbeat.cluster.cluster import Cluster, Link, WorkerOverride
from offbeat.cluster.presets import load_cluster
from offbeat.cluster.stragglers import CEDAR, Lognormal, RoundDelay, Slowdown, Speed, StragglerModel, Trace
from offbeat.core.randomness import stream
from offbeat.errors import ConfigurationError, RunFailed
from offbeat.lab.calibration import (
    Calibration,
    MeasuredWorker,
    RoundCost,
    RoundShape,
    calibrate,
    cluster_of,
    fit_round_cost,
    links_of,
    measured_workers,
    oversleep_seconds,
    round_periods,
    seconds_per_evaluation,
    seconds_per_step,
    seconds_per_update,
    seconds_per_worker_update,
    with_evaluations,
)
from offbeat.lab.calibration_probes import ProbeKinds, ProbeRunner
from offbeat.lab.simulated_runs import record_bytes
from offbeat.live.injected_delay import InjectedDelay
from offbeat.live.session_options import LiveOptions
from offbeat.records.schema import Round, RunRecords
from offbeat.simulation.round_timing import RoundTiming

COST = RoundCost(per_round=2e-3, per_call=1e-3, per_sample=5e-5)
SHAPES = (RoundShape(16, 1), RoundShape(16, 16), RoundShape(64, 4))
LINK = Link(latency_seconds=5e-4, bytes_per_second=1e9)
CALM = RoundDelay(0.0, 1.0)


def seconds_of(shape: RoundShape) -> float:
    return COST.per_round + shape.calls * COST.per_call + shape.samples * COST.per_sample


def rounds(rank: int, durations: Sequence[float], *, idle: float = 0.0, send: float = 0.0) -> list[Round]:
    """Rounds of one rank, one after the other, each of a version of its own."""
    made, start = [], 0.0
    for version, seconds in enumerate(durations):
        one = a_round(rank, start, seconds, idle=idle)
        made.append(msgspec.structs.replace(one, version=version, send_seconds=send))
        start += seconds + idle
    return made


def probe(seconds: float = 0.02, idle: float = 0.001, slower: float = 1.0, **changed: Any) -> RunRecords:
    """Two workers for more than a second, the second of which is slower."""
    both = [rounds(rank, [factor * seconds] * 80, idle=idle) for rank, factor in ((1, 1.0), (2, slower))]
    return run(itertools.chain(*both), **changed)


def calibrated(slower: float = 1.0) -> list[MeasuredWorker]:
    """The workers measured from rounds that cost exactly `COST`."""
    periods = {shape: [{0: [seconds_of(shape)] * 40, 1: [slower * seconds_of(shape)] * 40}] * 3 for shape in SHAPES}
    return list(measured_workers(periods, SHAPES[1], {0: LINK, 1: LINK}))


# From records to seconds


def test_a_period_is_a_round_without_its_sleep_and_the_wait_until_the_next() -> None:
    slept = [msgspec.structs.replace(one, induced_seconds=0.5) for one in rounds(1, [0.6] * 5, idle=0.2)]
    periods = round_periods(run(slept, workers=1))
    assert periods == {0: [pytest.approx(0.3)] * 3}  # the first is not warm, and the last has no next


def test_the_cost_of_a_round_is_exact_without_noise() -> None:
    found = fit_round_cost({shape: seconds_of(shape) for shape in SHAPES})
    assert found.per_round == pytest.approx(COST.per_round)
    assert found.per_call == pytest.approx(COST.per_call)
    assert found.per_sample == pytest.approx(COST.per_sample)


def test_no_cost_is_below_zero() -> None:
    found = fit_round_cost({SHAPES[0]: 0.001, SHAPES[1]: 0.02, SHAPES[2]: 0.03})
    assert min(found.per_round, found.per_call, found.per_sample) >= 0


def test_a_worker_without_rounds_is_an_error_that_says_what_to_type() -> None:
    nothing = round_periods(run(rounds(1, [0.02] * 80)))
    assert nothing[1] == []
    with pytest.raises(RunFailed, match=r"worker 1 computed too little .* --seconds 120"):
        list(measured_workers({shape: [nothing] * 3 for shape in SHAPES}, SHAPES[1], {0: LINK, 1: LINK}))


def test_a_probe_in_which_a_worker_has_no_round_is_left_out() -> None:
    periods = {shape: [{0: [seconds_of(shape)], 1: [seconds_of(shape)]}] * 2 for shape in SHAPES}
    periods[SHAPES[1]] = [*periods[SHAPES[1]], {0: [seconds_of(SHAPES[1])], 1: []}]
    one, other = measured_workers(periods, SHAPES[1], {0: LINK, 1: LINK})
    assert one.cost == other.cost
    assert one.cost.per_call == pytest.approx(COST.per_call)


def test_links_follow_from_round_trips_and_from_the_time_to_send_large_gradients() -> None:
    small = run([*rounds(1, [0.02] * 80, idle=0.0012), *rounds(2, [0.02] * 80, idle=0.0022)])
    large = run([*rounds(1, [0.02] * 80, send=0.002), *rounds(2, [0.02] * 80, send=0.004)], parameters=1_000_000)
    links = links_of(small, large, step=0.0002)
    assert [link.latency_seconds for link in links.values()] == pytest.approx([0.0005, 0.001])
    assert [link.bytes_per_second for link in links.values()] == pytest.approx([2e9, 1e9])


def test_an_update_takes_the_wait_of_the_last_worker_less_links_and_usual_waits() -> None:
    patient, last = rounds(1, [0.02] * 80, idle=0.03), rounds(2, [0.045] * 80, idle=0.005)
    update = seconds_per_update([run([*patient, *last], parameters=250_000)], [probe(idle=0.001)], LINK)
    assert update == pytest.approx(0.005 - 0.001 - 2 * (0.0005 + 0.001))


def test_a_step_takes_time() -> None:
    assert seconds_per_step(ob.workloads.Quadratic(dimension=5), ob.FixedMinibatch()) > 0


def test_delays_that_were_longer_than_drawn_are_added() -> None:
    drawn = itertools.islice(CEDAR.draws(stream(1, "speed", 1)), 30)
    late = [
        msgspec.structs.replace(one, seconds=0.3, induced_seconds=each.delay_seconds + 0.002)
        for one, each in zip(rounds(1, [0.3] * 30), drawn, strict=True)
    ]
    assert oversleep_seconds([run(late, workers=1)], CEDAR) == pytest.approx(0.002)
    assert oversleep_seconds([], CEDAR) == 0.0


@pytest.mark.parametrize("straggle", [Slowdown(2.5), Lognormal(0.5)], ids=["factor", "lognormal"])
def test_the_slow_down_that_was_drawn_is_not_added_to_the_cost_of_rounds(straggle: StragglerModel) -> None:
    factors = [each.factor for each in itertools.islice(straggle.draws(stream(1, "speed", 1)), 200)]

    def slowed(late: float) -> RunRecords:
        induced = [0.3 * max(0.0, factor - 1.0) + late for factor in factors]
        made = rounds(1, [0.3 + each for each in induced])
        pairs = zip(made, induced, strict=True)
        return run([msgspec.structs.replace(one, induced_seconds=each) for one, each in pairs], workers=1)

    assert oversleep_seconds([slowed(0.0)], straggle) == pytest.approx(0.0, abs=1e-12)
    mean = sum(factors[2:]) / len(factors[2:])  # of the rounds after the warm-up
    assert mean * oversleep_seconds([slowed(0.002)], straggle) == pytest.approx(0.002, rel=0.02)


def test_an_update_by_a_worker_takes_what_its_rounds_take_longer_than_those_beside_a_hub() -> None:
    with_hub = probe(seconds=0.02, idle=0.001)
    peers = [msgspec.structs.replace(one, rank=one.rank - 1) for one in probe(0.024, 0.002).records]  # type: ignore[call-arg]
    assert seconds_per_worker_update([run(peers)], [with_hub]) == pytest.approx(0.005)
    assert seconds_per_worker_update([with_hub], [with_hub]) == 0.0
    assert seconds_per_worker_update([], [with_hub]) is None


@pytest.mark.parametrize("limit_seconds", [0.0, 60.0])
def test_an_evaluation_takes_time_however_much_of_it_is_measured(limit_seconds: float) -> None:
    assert seconds_per_evaluation(ob.workloads.Digits().build(), limit_seconds) > 0


def test_slow_workloads_get_fewer_micro_batches_and_repetitions() -> None:
    kinds = ProbeKinds(delayed=False, gossip=True)

    def choice(seconds_per_call: float, seconds: float = 32.0) -> tuple[int, int]:
        probes = ProbeRunner(2, seconds, kinds, LiveOptions(), None, None)
        return probes.choose_calls(seconds_per_call), probes.repetitions

    assert choice(0.001) == (16, 3)
    assert choice(0.02)[0] < 16
    assert choice(0.06)[1] < 3
    assert choice(10.0) == (2, 1)
    assert choice(0.001, seconds=20.0)[1] < 3


# From seconds to a cluster


def test_workers_on_other_machines_share_no_core_with_evaluations() -> None:
    cluster = with_evaluations(cluster_of(calibrated(), 0.001, LINK, 256), 2.0, cores=1, remote=[1])
    assert (cluster.is_remote(0), cluster.is_remote(1)) == (False, True)
    assert cluster.evaluation_slowdown(workers=2) == (2.0, 2.0)
    near = with_evaluations(cluster_of(calibrated(), 0.001, LINK, 256), 2.0, cores=1, remote=[])
    assert near.evaluation_slowdown(workers=2) == (3.0, 1.5)
    assert near.workers == ()


def test_with_injected_delay_all_costs_are_scaled_to_the_delayed_rounds() -> None:
    periods = {shape: [{0: [seconds_of(shape)] * 40}] * 3 for shape in SHAPES}
    slower = [{0: [1.4 * seconds_of(SHAPES[1]), 1.6 * seconds_of(SHAPES[1])]}] * 3
    (mine,) = measured_workers(periods, SHAPES[1], {0: LINK}, slower)
    assert mine.cost.per_call == pytest.approx(1.5 * COST.per_call)
    assert mine.cost.per_round == pytest.approx(1.5 * COST.per_round)
    assert mine.speed_factors[:2] == pytest.approx((1.4 / 1.5, 1.6 / 1.5))


def test_workers_without_a_significant_difference_share_a_speed() -> None:
    jittery = {
        shape: [{0: [seconds_of(shape) * f], 1: [seconds_of(shape)]} for f in (0.7, 1.4, 1.0)] for shape in SHAPES
    }
    one, other = measured_workers(jittery, SHAPES[1], {0: LINK, 1: LINK})
    assert one.cost == other.cost


def test_a_slower_worker_gets_its_own_speed() -> None:
    cluster = cluster_of(calibrated(slower=3.0), 0.001, LINK, 256)
    assert cluster.measured
    speeds = [cluster.speed(worker) for worker in (0, 1)]
    assert speeds[0].seconds_per_call == pytest.approx(COST.per_call, rel=1e-3)
    assert speeds[1].seconds_per_call == pytest.approx(3 * COST.per_call, rel=1e-3)
    assert speeds[1].seconds_per_round == pytest.approx(3 * COST.per_round, rel=1e-3)


def test_a_link_that_differs_from_the_others_gets_an_override() -> None:
    near, far = Link(1e-4, 1e9), Link(2e-2, 1e9)
    workers = [MeasuredWorker(n, COST, link, (1.0,)) for n, link in enumerate((near, near, far))]
    cluster = cluster_of(workers, 0.0, near, 256)
    assert [override.workers for override in cluster.workers] == [(2,)]
    assert (cluster.link_of(0), cluster.link_of(2)) == (near, far)


def test_the_speed_trace_is_one_on_average_and_bounded_and_in_order() -> None:
    worker = MeasuredWorker(0, COST, LINK, tuple(1.0 + (n % 7) / 10 for n in range(1000)))
    trace = cluster_of([worker], 0.0, LINK, 256).speed_trace
    assert trace is not None
    assert (len(trace.factors), trace.samples) == (200, 256)
    assert sum(trace.factors) / 200 == pytest.approx(1.0, abs=1e-3)
    assert list(trace.factors[:2]) == pytest.approx(
        [f / 1.3 for f in (1.0 + 800 % 7 / 10, 1.0 + 801 % 7 / 10)], rel=0.01
    )


def test_the_file_is_the_cluster_and_says_what_to_type(tmp_path: Path) -> None:
    workers = calibrated(slower=3.0)
    found = Calibration("digits", tuple(workers), 0.001, cluster_of(workers, 0.001, LINK, 256))
    path = tmp_path / "here.toml"
    path.write_text(as_toml(found, "here.toml"), encoding="utf-8")
    assert load_cluster(str(path)) == found.cluster
    assert "offbeat simulate digits fmb async-fmb --cluster here.toml --workers 2" in path.read_text(encoding="utf-8")
    assert max(map(len, path.read_text(encoding="utf-8").splitlines())) <= 120


# In the simulator


def test_a_trace_is_replayed_in_order_from_a_random_start() -> None:
    trace = Trace((1.0, 2.0, 3.0))
    starts = set()
    for seed in range(20):
        factors = [one.factor for one in itertools.islice(trace.draws(stream(seed, "speed", 1)), 6)]
        starts.add(factors[0])
        assert all(after == before % 3 + 1 for before, after in itertools.pairwise(factors))
    assert starts == {1.0, 2.0, 3.0}


def test_a_trace_can_be_written_as_a_word() -> None:
    assert ob.stragglers.StragglerModel.shorthand("trace:1+2.5:64") == Trace((1.0, 2.5), 64)


@pytest.mark.parametrize("factors", [(), (1.0, 0.0), (-1.0,)])
def test_a_trace_without_time_is_refused(factors: tuple[float, ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"Trace\.factors needs"):
        Trace(factors)


def test_a_factor_of_the_speed_trace_lasts_for_its_samples() -> None:
    speed = Speed(seconds_per_sample=0.01, speed_trace=Trace((1.0, 3.0), samples=20))
    assert RoundTiming(speed, CALM, 10).seconds(40) == pytest.approx(0.2 + 0.6)
    assert RoundTiming(speed, CALM, 10, position=20).seconds(10) == pytest.approx(0.3)
    assert RoundTiming(speed, CALM, 10, position=30).seconds(25) == pytest.approx(0.3 + 0.1 + 0.05)


def test_a_time_limit_counts_what_the_speed_trace_allows() -> None:
    pace = RoundTiming(
        Speed(seconds_per_sample=0.01, speed_trace=Trace((1.0, 3.0), samples=20)), RoundDelay(0.1, 1.0), 10
    )
    assert pace.samples(ob.Seconds(0.1 + 0.2)) == 20
    assert pace.samples(ob.Seconds(0.1 + 0.21)) == 30
    assert pace.samples(ob.Seconds(0.05)) == 10
    assert pace.samples_when_cancelled(0.1 + 0.2 + 0.3, planned=100) == 30


def test_on_average_a_time_limit_is_as_fast_as_rounds_of_fixed_size() -> None:
    speed = Speed(seconds_per_sample=0.001, speed_trace=Trace((0.5, 1.5), samples=50))
    position, samples, limit = 0, 0, 0.04
    for _ in range(500):
        done = RoundTiming(speed, CALM, 1, position).samples(ob.Seconds(limit))
        position, samples = position + done, samples + done
    assert samples * 0.001 == pytest.approx(500 * limit, rel=0.03)


def test_the_cost_per_round_is_added_to_each_round() -> None:
    pace = RoundTiming(Speed(seconds_per_sample=0.01, seconds_per_round=0.5), RoundDelay(1.0, 2.0), 10)
    assert pace.seconds(10) == pytest.approx(1.0 + 2.0 * (0.1 + 0.5))
    assert pace.samples(ob.Seconds(1.2)) == 10


def test_a_simulation_on_a_measured_cluster_repeats_itself_and_pairs_induced_sleeps() -> None:
    cluster = Cluster(
        0.001, straggle=CEDAR, speed_trace=Trace((0.8, 1.2, 1.0), 64), seconds_per_round=0.002, measured=True
    )
    calm = Cluster(0.001, straggle=CEDAR)

    def simulated(on: Cluster) -> ob.Run:
        return ob.simulate(
            ob.workloads.Quadratic(dimension=5), ob.FixedMinibatch(batch=64), on, ob.Samples(2000), 3, workers=2
        )

    first, again, other = simulated(cluster), simulated(cluster), simulated(calm)
    assert record_bytes(first.records.records) == record_bytes(again.records.records)
    sleeps = [[r.induced_seconds for r in one.records.records if isinstance(r, Round)] for one in (first, other)]
    assert sorted(sleeps[0]) == pytest.approx(sorted(sleeps[1]))
    assert first.summary.seconds > other.summary.seconds


def test_where_evaluations_take_time_they_are_by_default_as_frequent_as_live(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"

    def evaluates(lines: str, flags: tuple[str, ...] = ()) -> object:
        path.write_text(lines, encoding="utf-8")
        command = [
            "simulate",
            "digits",
            "fmb",
            "--cluster",
            str(path),
            "--workers",
            "2",
            "--until",
            "200",
            "--no-report",
        ]
        assert main([*command, "--quiet", "--overwrite", "--out", str(tmp_path / "runs"), *flags]) == 0
        return tomllib.loads((tmp_path / "runs" / "experiment.toml").read_text(encoding="utf-8"))["evaluate"]

    assert evaluates("measured = true\n") == {"name": "updates", "updates": 1}
    assert evaluates("seconds_per_evaluation = 0.1\n") == {"name": "seconds", "seconds": 0.5}
    assert evaluates("seconds_per_evaluation = 0.1\n", ("--evaluate", "3")) == {"name": "updates", "updates": 3}


# In live runs


def test_measured_speeds_are_not_injected_and_requested_delay_is() -> None:
    override = WorkerOverride((0,), seconds_per_sample=0.5, link=Link(latency_seconds=1.0))
    link = Link(latency_seconds=0.5)
    measured = Cluster(0.1, workers=(override,), link=link, speed_trace=Trace((2.0,)), factors=(3.0,), measured=True)
    induced = InjectedDelay.of(measured, {1: 0}, 1, [0], seed=0)
    assert induced.next_round_delay() == pytest.approx((0.0, 3.0, 0.0))
    assert induced.delay(0, 1000, 0.0) == 0.0
    asleep = InjectedDelay.of(Cluster(straggle=CEDAR, measured=True), {1: 0}, 1, [0], seed=0)
    usual = InjectedDelay.of(Cluster(straggle=CEDAR), {1: 0}, 1, [0], seed=0)
    assert [asleep.next_round_delay() for _ in range(5)] == [usual.next_round_delay() for _ in range(5)]


def test_a_slow_round_prolongs_the_extra_time_of_its_micro_batches_too() -> None:
    cluster = Cluster(0.1, straggle=Slowdown(2.0), workers=(WorkerOverride((0,), seconds_per_call=0.01),))
    delay = InjectedDelay.of(cluster, {1: 0}, 1, [0], seed=0).next_round_delay()
    assert delay == pytest.approx((0.0, 2.0, 0.02))
    assert delay.slowdown_seconds(0.1) == pytest.approx(0.1 + 0.02)
    assert 0.1 + delay.slowdown_seconds(0.1) == pytest.approx(cluster.speed(0).microbatch_seconds(1, 2.0))


# What is refused


def test_too_little_time_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="12 seconds at least, but 3 were given"):
        calibrate(ob.workloads.Quadratic(), seconds=3)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "no workload is named"),
        (["digits", "fmb"], "'fmb' is one word too many"),
        (["nonesuch"], "unknown workload"),
        (["digits", "--seconds", "soon"], "--seconds is a number"),
        (["digits", "--workers", "0"], "--workers must be 1 or more"),
        (["digits", "--microbatch", "0"], "microbatch must be 1 or more"),
        (["digits", "--out", "cluster.json"], "--out is a TOML file"),
        (["digits", "--out", "nowhere/cluster.toml"], "there is no directory nowhere"),
        (["digits", "--out", "taken.toml"], "taken.toml is there already; add --overwrite"),
        (["digits", "--width", "3"], "--width is not a field of digits"),
    ],
)
def test_a_mistake_is_answered_by_one_sentence(
    words: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken.toml").write_text("", encoding="utf-8")
    assert main(["calibrate", *words]) == 2
    said = capsys.readouterr()
    assert complaint in said.err
    assert (said.out, said.err.count("\n")) == ("", 1)


def test_measured_links_cannot_be_changed_in_a_live_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here.toml").write_text("measured = true\n", encoding="utf-8")
    assert main(["train", "digits", "fmb", "--cluster", "here.toml", "--link.latency-seconds", "1"]) == 2
    assert "--link.latency-seconds does not go with a measured cluster" in capsys.readouterr().err
