"""Gossip against theory: conserved mean, rate of consensus, rate of exchanges; and training under faults."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from gossip_scenes import BATCH, Disagreement, average
from torch import nn

import offbeat as ob
from offbeat.core.examples import Order
from offbeat.core.randomness import stream
from offbeat.records.files import MemoryWriter
from offbeat.records.metrics import evaluations
from offbeat.records.schema import Consensus, Dropped, Exchange, Notice, Round, Update, of_kind
from offbeat.simulation.simulator import Simulation
from offbeat.strategies.gossip.exchange_schedule import ExchangeSchedule
from offbeat.strategies.gossip.peer import Peer
from offbeat.topology.graphs import Graph

# Conserved mean


def drift(strategy: ob.Gossip, peers: int, gradients: int, **settings: object) -> tuple[float, int]:
    """Largest change of the conserved sum relative to the norm of the parameters, and number of measurements."""
    sums: list[torch.Tensor] = []
    norms: list[float] = []
    worst, calls = [0.0], [0]

    def measure(time: float, disagreement: Disagreement) -> None:
        calls[0] += 1
        if calls[0] % 4 != 1:
            return
        total = disagreement.conserved()
        if not sums:
            norms.append(float(disagreement.replicas().norm()))
        sums.append(total if not sums else sums[0])
        worst[0] = max(worst[0], float((total - sums[0]).norm()) / norms[0])

    average(strategy, peers, gradients, measure, **settings)  # type: ignore[arg-type]
    return worst[0], len(sums)


def random_strategy(seed: int) -> tuple[ob.Gossip, int, dict[str, object]]:
    """A random strategy, number of peers and settings of `average`: latency, speeds, stragglers."""
    rng = stream(seed, "gossip test")
    peers = int(rng.integers(2, 7))
    graphs: list[Graph] = [ob.graphs.Cycle(), ob.graphs.Star(), ob.graphs.Complete()]
    if peers in (2, 4):
        graphs.append(ob.graphs.ExponentialGraph())
    graph = graphs[int(rng.integers(len(graphs)))]
    accelerated = bool(rng.random() < 0.6) and not isinstance(graph, ob.graphs.Complete)
    partners: list[object] = [ob.parts.Random(), ob.parts.FirstAvailable()]
    if peers % 2 == 0 and not isinstance(graph, ob.graphs.Star):
        partners.append(ob.parts.Matchings())
    strategy = ob.Gossip(
        graph=graph,
        rate=float(10 ** rng.uniform(-0.5, 0.6)),
        partner=partners[int(rng.integers(len(partners)))],  # type: ignore[arg-type]
        clock=[ob.parts.Poisson(), ob.parts.Regular()][int(rng.integers(2))],  # type: ignore[arg-type]
        momentum=ob.parts.Acid() if accelerated else None,
    )
    cluster = ob.Cluster(
        seconds_per_sample=1.0 / BATCH,
        factors=tuple(float(rng.uniform(0.5, 3.0)) for _ in range(peers)),
        straggle=ob.stragglers.Lognormal(0.5) if rng.random() < 0.5 else ob.stragglers.NoStragglers(),
        link=ob.Link(delay_std_seconds=float(rng.choice([0.0, 0.3]))),
    )
    latency = float(rng.choice([0.0, 0.05, 0.5, 2.0]))
    return strategy, peers, {"cluster": cluster, "latency": latency, "seed": seed, "dimension": 16}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [pytest.param(torch.float32, 1e-5, marks=pytest.mark.slow), (torch.float64, 1e-12)]
)
@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 250), marks=pytest.mark.slow)], ids=str)
def test_averaging_conserves_the_mean_whatever_the_interleaving(
    dtype: torch.dtype, tolerance: float, seeds: range
) -> None:
    for seed in seeds:
        strategy, peers, settings = random_strategy(seed if dtype == torch.float32 else 1000 + seed)
        worst, measurements = drift(strategy, peers, 5, dtype=dtype, **settings)
        assert worst <= tolerance, f"seed {seed}: {strategy} drifts by {worst}"
        assert measurements > 3


def test_with_momentum_the_parameters_alone_are_not_conserved() -> None:
    """So the test above can fail, and tests the right sum."""
    sums: list[torch.Tensor] = []
    strategy = ob.GossipAcid(rate=2.0)
    average(strategy, 8, 12, lambda time, observer: sums.append(observer.replicas().sum(0)), latency=0.5, seed=3)
    assert max(float((total - sums[0]).norm()) for total in sums) > 1e-2


# Rate of consensus


def distances(strategy: ob.Gossip, peers: int, gradients: int, seed: int, latency: float = 0.0) -> list[float]:
    """Consensus distance at every gradient time since the peers were set to different parameters."""
    measured: list[float] = []

    def measure(time: float, disagreement: Disagreement) -> None:
        if time >= len(measured):
            measured.extend([disagreement.distance()] * (math.floor(time) + 1 - len(measured)))

    average(strategy, peers, gradients + 3, measure, seed=seed, latency=latency)
    return measured[:gradients]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "peers", "gradients", "seeds", "published"),
    [
        (ob.Gossip(), 8, 24, 10, 0.2688),
        (ob.GossipAcid(), 8, 20, 10, 0.361),
        (ob.Gossip(), 16, 48, 3, 0.0754),
        (ob.GossipAcid(), 16, 36, 4, 0.199),
        pytest.param(ob.Gossip(), 32, 100, 1, 0.0192, marks=pytest.mark.slow),
        pytest.param(ob.GossipAcid(), 32, 60, 2, 0.0743, marks=pytest.mark.slow),
    ],
)
def test_consensus_is_reached_at_the_rate_of_the_second_moments(
    strategy: ob.Gossip, peers: int, gradients: int, seeds: int, published: float
) -> None:
    mean = np.mean([distances(strategy, peers, gradients, seed) for seed in range(seeds)], axis=0)
    later = np.arange(gradients // 4, gradients)
    rate = -np.polyfit(later, np.log(mean[later]), 1)[0]
    assert rate >= 0.9 * published


def stationary_distance(strategy: ob.Gossip, peers: int, gradients: int, latency: float) -> float:
    """Mean consensus distance, once stationary, of peers whose losses have different optima."""
    optima = torch.randn(peers, 12, generator=torch.Generator().manual_seed(0))
    workload = ob.Workload(
        lambda: DistanceToInput(12),
        lambda outputs, targets: outputs,
        (optima, torch.zeros(peers)),
        label="different-optima",
        split=ob.workloads.Sharded(),
    )
    run = ob.simulate(
        workload,
        dataclasses.replace(strategy, batch=1, microbatch=1, optimizer=ob.SGD(lr=0.02)),
        ob.Cluster(seconds_per_sample=1.0, link=ob.Link(latency_seconds=latency)),
        ob.Samples(peers * gradients),
        workers=peers,
        evaluate=ob.EverySeconds(2.0),
    )
    measured = [record.distance for record in of_kind(run.records, Consensus)]
    return float(np.mean(measured[len(measured) // 2 : -1]))


class DistanceToInput(nn.Module):
    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(dimension))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return 0.5 * (self.values - inputs).square().sum(1)


UNGUARDED = ob.Gossip(momentum=ob.parts.Acid(guard=False))
SLOW = pytest.mark.slow
LATENCIES = [
    pytest.param(16, 90, 0.25, marks=SLOW),
    pytest.param(16, 90, 1.0, marks=SLOW),
    (16, 90, 4.0),
    pytest.param(64, 40, 0.25, marks=SLOW),
    pytest.param(64, 60, 4.0, marks=SLOW),
]


@pytest.mark.parametrize(("peers", "gradients", "latency"), LATENCIES)
def test_with_the_guard_momentum_helps_at_any_latency(peers: int, gradients: int, latency: float) -> None:
    plain = stationary_distance(ob.Gossip(), peers, gradients, latency)
    assert stationary_distance(ob.GossipAcid(), peers, gradients, latency) < 0.8 * plain


@pytest.mark.slow
@pytest.mark.parametrize(("peers", "latency"), [(16, 4.0), pytest.param(64, 1.0, marks=SLOW)])
def test_guarded_peers_converge_where_unguarded_ones_diverge(peers: int, latency: float) -> None:
    guarded = distances(ob.GossipAcid(), peers, 60 if peers == 16 else 40, seed=1, latency=latency)
    assert guarded[-1] < 0.7 * guarded[0]
    unguarded = distances(UNGUARDED, peers, 60 if peers == 16 else 40, seed=1, latency=latency)
    assert unguarded[-1] > 10 * unguarded[0]


# Rate of exchanges


@pytest.mark.parametrize(("latency", "tolerance"), [(0.05, 0.02), pytest.param(0.5, 0.05, marks=SLOW)])
@pytest.mark.parametrize("clock", [ob.parts.Poisson(), ob.parts.Regular()])
@pytest.mark.parametrize("rate", [pytest.param(0.5, marks=SLOW), pytest.param(1.0, marks=SLOW), 2.0])
def test_every_due_exchange_is_made(rate: float, clock: object, latency: float, tolerance: float) -> None:
    """The rate itself is tested for the regular clock; a Poisson clock has its rate only in the long run: see below."""
    experiment = ob.Experiment(
        strategy=ob.Gossip(rate=rate, clock=clock, batch=1, microbatch=1, optimizer=ob.SGD(lr=0.01)),  # type: ignore[arg-type]
        workload=ob.workloads.Quadratic(dimension=4).build(),
        cluster=ob.Cluster(seconds_per_sample=1.0, link=ob.Link(latency_seconds=latency)),
        workers=2,
        until=ob.Samples(1000),
        seed=0,
        evaluate=None,
    )
    writer = MemoryWriter()
    simulation = Simulation(experiment, writer)
    simulation.run()
    nodes = [process.node for process in simulation.processes]
    due = sum(node._averaging.exchanges_due for node in nodes if isinstance(node, Peer))
    made = sum(isinstance(record, Exchange) and record.outcome == "averaged" for record in writer.records)
    assert made == pytest.approx(due, rel=tolerance)
    if isinstance(clock, ob.parts.Regular):
        gradients = sum(isinstance(record, Update) for record in writer.records)
        assert 2 * made / gradients == pytest.approx(rate, rel=tolerance)


def test_a_poisson_clock_has_its_rate_in_the_long_run() -> None:
    exchange_schedule = ExchangeSchedule(ob.parts.Poisson(), 0.25, stream(0, "test"))
    for _ in range(25_000):
        exchange_schedule.advance()
    assert exchange_schedule.next_position == pytest.approx(100_000, rel=0.02)


def test_a_rate_that_cannot_be_reached_is_reported() -> None:
    strategy = ob.Gossip(rate=4.0, batch=1, microbatch=1, optimizer=ob.SGD(lr=0.01))
    cluster = ob.Cluster(seconds_per_sample=1.0, link=ob.Link(latency_seconds=2.0))
    run = ob.simulate(ob.workloads.Quadratic(dimension=4), strategy, cluster, ob.Samples(400), workers=4, evaluate=None)
    texts = [notice.text for notice in of_kind(run.records, Notice)]
    assert len(texts) == 4
    assert "cannot keep up with rate 4" in texts[0]
    assert "about 0.5 per gradient" in texts[0]


# Partners


def pairs(run: ob.Run) -> set[tuple[int, int]]:
    averaged = (record for record in of_kind(run.records, Exchange) if record.outcome == "averaged")
    return {(min(record.rank, record.peer), max(record.rank, record.peer)) for record in averaged}


def gossip(partner: object, graph: Graph, workers: int, **settings: object) -> ob.Run:
    strategy = ob.Gossip(
        partner=partner,  # type: ignore[arg-type]
        graph=graph,
        batch=4,
        microbatch=4,
        optimizer=ob.SGD(lr=0.01),
        **settings,  # type: ignore[arg-type]
    )
    cluster = ob.Cluster(
        seconds_per_sample=0.1, straggle=ob.stragglers.Lognormal(0.3), link=ob.Link(latency_seconds=0.01)
    )
    return ob.simulate(
        ob.workloads.Quadratic(dimension=4), strategy, cluster, ob.Samples(workers * 240), workers=workers
    )


CYCLE_OF_6 = {(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (0, 5)}


@pytest.mark.parametrize("partner", [ob.parts.Random(), ob.parts.FirstAvailable(), ob.parts.Matchings()])
def test_peers_average_with_all_their_neighbours_and_with_no_other_rank(partner: object) -> None:
    run = gossip(partner, ob.graphs.Cycle(), 6)
    assert pairs(run) == CYCLE_OF_6
    assert run.summary.exchanges_per_gradient == pytest.approx(1.0, rel=0.2)


def test_on_a_complete_graph_the_first_available_may_be_any_rank() -> None:
    run = gossip(ob.parts.FirstAvailable(), ob.graphs.Complete(), 5)
    assert len(pairs(run)) == 10
    assert run.summary.exchanges_per_gradient == pytest.approx(1.0, rel=0.1)


def test_matchings_are_used_equally_often() -> None:
    run = gossip(ob.parts.Matchings(), ob.graphs.Cycle(), 6, clock=ob.parts.Regular())
    counts: dict[tuple[int, int], int] = {}
    for record in of_kind(run.records, Exchange):
        pair = (min(record.rank, record.peer), max(record.rank, record.peer))
        counts[pair] = counts.get(pair, 0) + 1
    assert max(counts.values()) <= 1.5 * min(counts.values())


# Training


def test_a_single_peer_trains_as_a_plain_loop_does() -> None:
    workload = ob.workloads.Quadratic(dimension=4).build()
    strategy = ob.Gossip(batch=8, microbatch=8, optimizer=ob.SGD(lr=0.05, momentum=0.9))
    run = ob.simulate(workload, strategy, until=ob.Samples(400), workers=1)
    model = workload.initial_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    order = Order(workload.split.indices(workload.train.targets, 0, 1, 0), 0, 0)
    for first in range(0, 400, 8):
        optimizer.zero_grad()
        workload.losses(model, workload.train.take(order.take(first, first + 8))).mean().backward()
        optimizer.step()
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert run.finish is not None
    torch.testing.assert_close(run.finish.parameters, flat)


def test_fast_peers_take_more_samples_and_all_end_with_the_same_model() -> None:
    cluster = ob.Cluster(factors=(1.0, 1.0, 1.0, 4.0), seconds_per_sample=0.01)
    run = ob.simulate(ob.workloads.Digits(), ob.GossipAcid(), cluster, ob.Samples(12_000), workers=4)
    rounds = [sum(record.samples for record in of_kind(run.records, Round) if record.rank == rank) for rank in range(4)]
    assert rounds[3] < 0.4 * rounds[0]
    assert run.summary.accuracy is not None
    assert run.summary.accuracy > 0.85
    assert list(of_kind(run.records, Consensus))[-1].distance == 0.0


def test_steps_of_a_user_optimizer_are_averaged_too() -> None:
    seen: list[float] = []
    experiment = ob.Experiment(
        strategy=ob.Gossip(batch=8, microbatch=8),
        workload=ob.workloads.Quadratic(dimension=4).build(),
        cluster=ob.Cluster(seconds_per_sample=0.1),
        workers=4,
        until=ob.Samples(1600),
        seed=0,
        evaluate=None,
    )
    writer = MemoryWriter()
    outcome = Simulation(experiment, writer, user_optimizer=ob.SGD(lr=0.05)).run()
    seen = [record.loss / record.samples for record in writer.records if isinstance(record, Round) and record.samples]  # type: ignore[operator]
    assert outcome.failure is None
    assert np.mean(seen[-20:]) < 0.2 * np.mean(seen[:4])
    assert any(isinstance(record, Exchange) and record.outcome == "averaged" for record in writer.records)


def test_batch_norm_statistics_are_averaged_with_the_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1), nn.Flatten(0))
    inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)) + torch.arange(64).unsqueeze(1) / 16
    workload = ob.Workload(
        lambda: model,
        lambda outputs, targets: (outputs - targets).square(),
        (inputs, inputs.sum(1)),
        split=ob.workloads.Sharded(),
    )
    experiment = ob.Experiment(
        strategy=ob.Gossip(batch=8, microbatch=8, optimizer=ob.SGD(lr=1e-4)),
        workload=workload,
        cluster=ob.Cluster(seconds_per_sample=0.1),
        workers=4,
        until=ob.Samples(1600),
        seed=0,
        evaluate=None,
    )
    finishes = Simulation(experiment, MemoryWriter()).run().finishes
    first = finishes[0].buffers
    assert all(torch.equal(a, b) for finish in finishes.values() for a, b in zip(first, finish.buffers, strict=True))
    counter = next(buffer for buffer in first if not buffer.is_floating_point())
    assert 45 <= int(counter.max()) <= 60  # of 50 batches each on average, the largest count
    alone = inputs[:16].mean(0)
    mean = next(buffer for buffer in first if buffer.is_floating_point())
    assert torch.isfinite(mean).all()
    assert not torch.allclose(alone, inputs.mean(0))


# Faults


def with_faults(*faults: object, graph: Graph = ob.graphs.Cycle(), workers: int = 6, samples: int = 2400) -> ob.Run:  # noqa: B008
    cluster = ob.Cluster(seconds_per_sample=0.05, faults=faults, crash_seen_seconds=0.1)  # type: ignore[arg-type]
    strategy = ob.Gossip(graph=graph, batch=4, microbatch=4, optimizer=ob.SGD(lr=0.01))
    return ob.simulate(ob.workloads.Quadratic(dimension=4), strategy, cluster, ob.Samples(samples), workers=workers)


def test_peers_continue_without_a_lost_one() -> None:
    run = with_faults(ob.faults.Crash(2, 5.0))
    late = {pair for pair in pairs(run) if 2 in pair}
    assert late == {(1, 2), (2, 3)}
    after = [record for record in of_kind(run.records, Exchange) if record.at > 6 and record.outcome == "averaged"]
    assert after
    assert all(2 not in (record.rank, record.peer) for record in after)
    assert run.summary.failure is None
    assert run.summary.samples >= 2400


def test_peers_continue_without_the_lowest_rank_and_the_next_one_evaluates() -> None:
    run = with_faults(ob.faults.Crash(0, 5.0))
    assert run.summary.failure is None
    assert {evaluation.rank for evaluation in evaluations(run.records)} == {0, 1}


def test_a_graph_in_pieces_is_reported_and_all_pieces_join_the_final_average() -> None:
    run = with_faults(ob.faults.Crash(0, 5.0), graph=ob.graphs.Star(), workers=4)
    texts = {notice.text for notice in of_kind(run.records, Notice)}
    assert any("the graph is in pieces" in text for text in texts)
    assert run.summary.failure is None


def test_a_peer_that_comes_back_copies_a_neighbour_and_continues() -> None:
    run = with_faults(ob.faults.Crash(2, 5.0, 3.0))
    back = [record for record in of_kind(run.records, Round) if record.rank == 2 and record.at > 8]
    assert back
    assert back[0].draws[0] > 0, "it begins at the sample count that the others have, not at 0"
    assert run.summary.failure is None
    assert run.summary.rejoined_peers == 1


def test_a_peer_with_corrupt_gradients_fails_and_the_others_continue() -> None:
    run = with_faults(ob.faults.Corrupt(3, 4.0, 1000.0))
    assert sum(record.rank == 3 for record in of_kind(run.records, Dropped)) >= 5
    assert run.summary.failure is None
    assert max(record.at for record in of_kind(run.records, Round) if record.rank == 3) < 10


def test_a_run_ends_close_to_its_goal_even_if_exchanges_are_rare() -> None:
    strategy = ob.Gossip(rate=0.05, batch=4, microbatch=4, optimizer=ob.SGD(lr=0.01))
    run = ob.simulate(
        ob.workloads.Quadratic(dimension=4), strategy, ob.Cluster(seconds_per_sample=0.1), 2400, workers=10
    )
    assert 2400 <= run.summary.samples <= 2400 * 1.1


@pytest.mark.parametrize("seed", range(12))
def test_peers_that_notice_a_loss_at_different_times_end_with_the_same_result(seed: int) -> None:
    """The next root starts the final average before all peers know that it is the root."""
    at = 11.0 + float(stream(seed, "when").uniform(0.0, 1.5))
    experiment = ob.Experiment(
        strategy=ob.Gossip(batch=4, microbatch=4, optimizer=ob.SGD(lr=0.01)),
        workload=ob.workloads.Quadratic(dimension=4).build(),
        cluster=ob.Cluster(
            seconds_per_sample=0.05,
            faults=(ob.faults.Crash(0, at),),
            crash_seen_seconds=0.1,
            link=ob.Link(latency_seconds=0.05),
        ),
        workers=5,
        until=ob.Samples(1200),
        seed=seed,
        evaluate=None,
    )
    outcome = Simulation(experiment, MemoryWriter(), events_max=100_000, notice_seconds=0.4).run()
    assert outcome.failure is None
    results = [outcome.finishes[rank].parameters for rank in range(1, 5)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_many_peers_continue_without_any_coordinator() -> None:
    run = with_faults(*(ob.faults.Crash(rank, 3.0 + rank / 10) for rank in range(16)), workers=20, samples=3000)
    assert run.summary.failure is None
    assert any("continues alone" in notice.text for notice in of_kind(run.records, Notice))


def test_a_peer_with_infinite_parameters_is_left_out_of_the_result() -> None:
    class SetToInfinity(Disagreement):
        def after(self, simulation: Simulation, rank: int, event: object, actions: list[object]) -> None:  # type: ignore[override]
            node = simulation.processes[rank].node
            if rank == 2 and simulation.now > 12 and isinstance(node, Peer):
                node._replica.parameters.fill_(math.inf)

    experiment = ob.Experiment(
        strategy=ob.Gossip(batch=4, microbatch=4, optimizer=ob.SGD(lr=0.01)),
        workload=ob.workloads.Quadratic(dimension=4).build(),
        cluster=ob.Cluster(seconds_per_sample=0.05),
        workers=4,
        until=ob.Samples(1000),
        seed=0,
        evaluate=None,
    )
    observer = SetToInfinity(0, 1.0, lambda time, observer: None)
    observer._randomized = set(range(4))
    outcome = Simulation(experiment, MemoryWriter(), observer=observer).run()
    assert all(torch.isfinite(finish.parameters).all() for finish in outcome.finishes.values())
