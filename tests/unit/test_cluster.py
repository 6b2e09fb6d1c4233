from __future__ import annotations

import numpy as np
import pytest

from offbeat.cluster.cluster import Cluster, Link, WorkerOverride
from offbeat.cluster.faults import Corrupt, Crash, Fault, Partition, Pause
from offbeat.cluster.presets import PRESETS, SUMMARIES, load_cluster
from offbeat.cluster.stragglers import (
    CEDAR,
    NIAGARA,
    Lognormal,
    Mixture,
    NoStragglers,
    Pareto,
    ShiftedExponential,
    Slowdown,
    StragglerModel,
)
from offbeat.core.configuration import from_plain, to_plain
from offbeat.core.randomness import stream
from offbeat.errors import ConfigurationError

DRAWS = 300_000


def sleeps(mixture: Mixture, draws: int = 10_000) -> np.ndarray:
    rng = stream(1, "test")
    return np.array([mixture.draw(rng).delay_seconds for _ in range(draws)])


def slowest_of(count: int, seconds: np.ndarray) -> float:
    return float(seconds[: len(seconds) // count * count].reshape(-1, count).max(axis=1).mean())


def test_niagara_sleeps_as_long_as_published() -> None:
    seconds = sleeps(NIAGARA, DRAWS)
    assert seconds.mean() == pytest.approx(0.996, rel=0.02)
    assert slowest_of(10, seconds) == pytest.approx(4.02, rel=0.02)
    assert slowest_of(3, seconds) == pytest.approx(2.26, rel=0.02)


def test_cedar_sleeps_as_long_as_published() -> None:
    seconds = sleeps(CEDAR, DRAWS)
    assert seconds.mean() == pytest.approx(0.071, rel=0.02)
    assert slowest_of(10, seconds) == pytest.approx(0.224, rel=0.02)


def test_a_mixture_never_sleeps_longer_than_its_cap_nor_less_than_nothing() -> None:
    mixture = Mixture(((0.0, 1.0, 1.0), (-30.0, 1.0, 1.0)))
    seconds = sleeps(mixture)
    assert mixture.cap_seconds == 5.0
    assert seconds.min() >= 0
    assert seconds.max() == 5.0


def test_a_component_without_weight_is_never_chosen() -> None:
    mixture = Mixture(((1.0, 0.0, 0.0), (2.0, 0.0, 0.5), (3.0, 0.0, 0.0)))
    assert set(sleeps(mixture)) == {2.0}


@pytest.mark.parametrize(
    ("straggle", "least", "mean", "median"),
    [
        (NoStragglers(), 1.0, 1.0, 1.0),
        (Slowdown(3.0), 3.0, 3.0, 3.0),
        (ShiftedExponential(0.5), 1.0, 1.5, 1 + 0.5 * np.log(2)),
        (Lognormal(0.5), 0.0, np.exp(0.125), 1.0),
        (Pareto(3.0), 1.0, 1.5, 2 ** (1 / 3)),
    ],
)
def test_factors_follow_their_distribution(straggle: StragglerModel, least: float, mean: float, median: float) -> None:
    rng = stream(2, "test")
    draws = [straggle.draw(rng) for _ in range(50_000)]
    factors = np.array([draw.factor for draw in draws])
    assert {draw.delay_seconds for draw in draws} == {0.0}
    assert factors.min() >= least
    assert factors.mean() == pytest.approx(mean, rel=0.02)
    assert np.median(factors) == pytest.approx(median, rel=0.02)


@pytest.mark.parametrize("straggle", [NIAGARA, Lognormal(0.3), Pareto(2.0), ShiftedExponential()])
def test_the_same_seed_draws_the_same_delays(straggle: StragglerModel) -> None:
    first, second = stream(3, "speed", 1), stream(3, "speed", 1)
    assert [straggle.draw(first) for _ in range(20)] == [straggle.draw(second) for _ in range(20)]


def test_straggler_models_have_a_shorthand() -> None:
    assert StragglerModel.shorthand("niagara") == NIAGARA
    assert StragglerModel.shorthand("cedar") == CEDAR
    assert StragglerModel.shorthand("none") == NoStragglers()
    assert StragglerModel.shorthand("lognormal:0.5") == Lognormal(0.5)
    assert StragglerModel.shorthand("pareto") == Pareto()
    assert from_plain(Cluster, {"straggle": "factor:1e+1"}, "cluster").straggle == Slowdown(10.0)


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("niagra", "unknown straggler model 'niagra'; did you mean 'niagara'?"),
        ("lognormal:wide", "lognormal.sigma is a number, but 'wide' was given"),
        ("pareto:1:2", "straggler model 'pareto:1:2' gives 2 values, but pareto takes shape"),
        ("mixture", "mixture needs components"),
        ("pareto:-1", "Pareto.shape must be greater than 0, but is -1.0"),
    ],
)
def test_a_straggler_that_does_not_exist_is_answered_with_a_sentence(word: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        StragglerModel.shorthand(word)
    assert str(caught.value) == sentence


def test_faults_have_a_shorthand() -> None:
    cluster = from_plain(Cluster, {"faults": "crash:1:30 crash:2:30:5 pause:2:10:5 partition:1+2:30:10"}, "cluster")
    assert cluster.faults == (
        Crash(1, 30.0),
        Crash(2, 30.0, 5.0),
        Pause(2, 10.0, 5.0),
        Partition((1, 2), 30.0, 10.0),
    )
    with pytest.raises(ConfigurationError, match="crash needs at_seconds"):
        Fault.shorthand("crash:1")


def test_a_microbatch_takes_the_call_and_its_samples_times_the_factor() -> None:
    speed = Cluster(seconds_per_sample=0.5, seconds_per_call=1.0).speed(0)
    assert speed.microbatch_seconds(4, 2.0) == 6.0


def test_256_undisturbed_samples_take_the_published_time() -> None:
    assert Cluster().speed(0).microbatch_seconds(256) == pytest.approx(5.65)


def test_a_link_is_busy_for_its_bytes_and_free_at_once_without_a_limit() -> None:
    assert Link(bytes_per_second=100.0).transmit_seconds(250) == 2.5
    assert Link().transmit_seconds(10**12) == 0.0


def test_a_random_delay_has_the_mean_of_a_folded_normal() -> None:
    rng = stream(4, "test")
    delays = np.array([Link(delay_std_seconds=0.1).draw_delay(rng) for _ in range(50_000)])
    assert delays.min() >= 0
    assert delays.mean() == pytest.approx(0.1 * np.sqrt(2 / np.pi), rel=0.02)
    assert Link().draw_delay(rng) == 0.0


EVERYTHING = Cluster(
    seconds_per_sample=0.1,
    seconds_per_call=0.2,
    seconds_per_update=0.3,
    straggle=NIAGARA,
    factors=(2.0, 1.0),
    workers=(
        WorkerOverride((0, 2), 0.4, 0.5, Lognormal(0.7), Link(0.1, 1e6, 0.2)),
        WorkerOverride((2,), straggle=Pareto(2.0)),
    ),
    link=Link(0.01, 1e9, 0.02),
    faults=(Crash(1, 1.0, 2.0), Crash(2, 1.0), Pause(1, 3.0, 4.0), Partition((1, 2), 5.0, 6.0), Corrupt(3, 7.0, 8.0)),
    crash_seen_seconds=1.5,
    silence_seconds=12.0,
)


def test_a_cluster_survives_being_written_and_read() -> None:
    assert from_plain(Cluster, to_plain(EVERYTHING), "cluster") == EVERYTHING


def test_a_cluster_survives_a_toml_file(tmp_path) -> None:
    tomli_w = pytest.importorskip("tomli_w")
    path = tmp_path / "mine.toml"
    path.write_text(tomli_w.dumps(to_plain(EVERYTHING)))
    assert load_cluster(str(path)) == EVERYTHING


def test_a_workers_speed_folds_in_its_factor_and_the_last_override_wins() -> None:
    slow, plain, third = (EVERYTHING.speed(worker) for worker in (0, 1, 2))
    assert (slow.seconds_per_sample, slow.seconds_per_call, slow.seconds_per_update) == (0.8, 1.0, 0.6)
    assert slow.straggle == Lognormal(0.7)
    assert (plain.seconds_per_sample, plain.straggle) == (0.1, NIAGARA)
    assert (third.seconds_per_sample, third.straggle) == (0.4, Pareto(2.0))
    assert EVERYTHING.speed(99) == Cluster(0.1, 0.2, 0.3, NIAGARA).speed(0)


def test_a_worker_may_have_a_link_of_its_own() -> None:
    assert EVERYTHING.link_of(0) == Link(0.1, 1e6, 0.2)
    assert EVERYTHING.link_of(1) == EVERYTHING.link_of(None) == EVERYTHING.link


@pytest.mark.parametrize(
    ("cluster", "sentence"),
    [
        (Cluster(factors=(1.0, 2.0, 3.0)), "gives 3 factors for 2 workers"),
        (Cluster(workers=(WorkerOverride((2,)),)), "describes worker 2, but there are 2 workers, counted from 0"),
        (Cluster(faults=(Pause(3, 1.0, 1.0),)), "'pause' names rank 3, but there are 3 processes, counted from 0"),
        (Cluster(faults=(Partition((0, 7), 1.0, 1.0),)), "'partition' names rank 7"),
    ],
)
def test_a_cluster_that_names_workers_or_ranks_that_do_not_exist_is_refused(cluster: Cluster, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        cluster.check(processes=3, workers=2)


def test_a_cluster_is_accepted_from_the_number_of_ranks_on_that_it_names() -> None:
    EVERYTHING.check(processes=4, workers=3)
    with pytest.raises(ConfigurationError, match="at most one factor per worker"):
        EVERYTHING.check(processes=2, workers=1)
    for preset in PRESETS.values():
        preset.check(processes=3, workers=2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Cluster(factors=(0.0,)),
        lambda: Cluster(seconds_per_sample=-1.0),
        lambda: Cluster(silence_seconds=0.0),
        lambda: Link(bytes_per_second=0.0),
        lambda: Crash(-1, 1.0),
        lambda: Crash(1, -1.0),
        lambda: Partition((), 1.0, 1.0),
        lambda: WorkerOverride(()),
        lambda: Mixture(()),
        lambda: Mixture(((1.0, 1.0, 0.0),)),
        lambda: Mixture(((1.0, -1.0, 1.0),)),
    ],
)
def test_impossible_values_are_refused_where_they_are_written(make) -> None:
    with pytest.raises(ConfigurationError):
        make()


def test_every_preset_has_a_summary() -> None:
    assert set(SUMMARIES) == set(PRESETS)
    assert load_cluster("uniform") == Cluster()
    assert load_cluster("niagara").straggle == NIAGARA
    assert load_cluster("uneven").speed(0).seconds_per_sample > load_cluster("uneven").speed(2).seconds_per_sample


def test_an_unknown_cluster_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="unknown cluster 'niagra'; did you mean 'niagara'"):
        load_cluster("niagra")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("seconds_per_sample = 1\nstraggle niagara\n", r"is not TOML: .*line 2"),
        ("seconds_per_smple = 1\n", "unknown key in .*did you mean 'seconds_per_sample'"),
        ("[link]\nlatency_seconds = 'long'\n", "link.latency_seconds is a number, but 'long' was given"),
    ],
)
def test_a_broken_cluster_file_is_answered_with_a_sentence(tmp_path, text: str, sentence: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        load_cluster(str(path))
    assert "broken.toml" in str(caught.value)


def test_a_cluster_file_that_is_not_there_or_not_text_is_answered_with_a_sentence(tmp_path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere.toml cannot be read: no such file"):
        load_cluster(str(tmp_path / "nowhere.toml"))
    (tmp_path / "picture.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="not UTF-8"):
        load_cluster(str(tmp_path / "picture.toml"))
