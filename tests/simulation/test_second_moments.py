"""The exact second moments of gossip (bench/second_moments.py) are those of the events that they describe."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from offbeat.topology.graphs import Cycle
from offbeat.topology.topology import Topology
from scripts import load_script

RATE = 0.1
"""Learning rate."""

Array = NDArray[np.float64]


bench = load_script("bench/second_moments.py")
PLAIN, DOUBLE, ACID = bench.Averaging(8), bench.Averaging(8, rate=2.0), bench.Averaging(8, accelerated=True)
NOISE, DISAGREEMENT = bench.Gradients(noise=1.0), bench.Gradients(spread=1.0)
CURVED = bench.Gradients(noise=1.0, spread=1.0, curvature=2.0)


def exact_distance(averaging: Any, gradients: Any) -> float:
    return float(bench.MomentEquations(averaging, gradients, RATE).consensus_distance())


# Against simulated events


class EventSimulation:
    """Many independent cycles of peers, one a row, in which events are drawn and applied one by one."""

    cycles = 4000

    def __init__(self, averaging: Any, gradients: Any, seed: int) -> None:
        self.random, self.gradients, self.peers = np.random.default_rng(seed), gradients, averaging.peers
        self.accelerated = averaging.accelerated
        self.constants = Topology(Cycle(), averaging.peers).constants(averaging.rate)
        self.averagings = averaging.rate * averaging.peers / 2
        self.x, self.x_tilde = np.zeros((2, self.cycles, self.peers))
        # Orthonormal columns, so that the covariance over cycles is exactly that of independent draws.
        columns = np.linalg.qr(self.random.normal(size=(self.cycles, self.peers)))[0]
        self.b = gradients.spread * np.sqrt(self.cycles) * columns

    def mean_distance(self, burn_in: int, events: int) -> float:
        """Mean over `events` of the distance before each: of a Poisson process, that is the mean over time."""
        distances = []
        for number in range(burn_in + events):
            if self.accelerated:
                self._mix()
            if number >= burn_in:
                distances.append(self.x.var(axis=1).mean())
            self._event()
        return float(np.mean(distances))

    def _mix(self) -> None:
        elapsed = self.random.exponential(1.0 / (self.averagings + self.peers), (self.cycles, 1))
        q = np.exp(-2.0 * self.constants.eta * elapsed)
        mean, half = (self.x + self.x_tilde) / 2, (self.x - self.x_tilde) / 2
        self.x, self.x_tilde = mean + q * half, mean - q * half

    def _event(self) -> None:
        """In every cycle a gradient of a random peer, or an averaging of it with the next one."""
        rows, one = np.arange(self.cycles), self.random.integers(self.peers, size=self.cycles)
        other = (one + 1) % self.peers
        averages = self.random.random(self.cycles) < self.averagings / (self.averagings + self.peers)
        x, b, noise = self.x[rows, one], self.b[rows, one], self.gradients.noise * self.random.normal(size=self.cycles)
        step = np.where(averages, 0.0, RATE * (self.gradients.curvature * x - b + noise))
        difference = np.where(averages, x - self.x[rows, other], 0.0)
        for copy, share in ((self.x, self.constants.alpha), (self.x_tilde, self.constants.alpha_tilde)):
            copy[rows, one] -= step + share * difference
            copy[rows, other] += share * difference


@pytest.mark.parametrize(
    ("averaging", "gradients"),
    [(PLAIN, NOISE), (ACID, NOISE), (DOUBLE, DISAGREEMENT), (ACID, DISAGREEMENT), (ACID, CURVED)],
    ids=["plain-noise", "acid-noise", "double-disagreement", "acid-disagreement", "acid-curved"],
)
def test_the_stationary_distance_is_that_of_simulated_events(averaging: Any, gradients: Any) -> None:
    simulated = EventSimulation(averaging, gradients, seed=0).mean_distance(burn_in=700, events=300)
    assert simulated == pytest.approx(exact_distance(averaging, gradients), rel=0.02)


# Against the covariance of all peers, without Fourier modes


def covariance_equations(averaging: Any) -> tuple[Array, Array]:
    """Operator and source of the whole covariance, from what each event does; with noise, without the mean of peers."""
    topology, copies = Topology(Cycle(), averaging.peers), 2 if averaging.accelerated else 1
    constants = topology.constants(averaging.rate)
    identity = np.eye(copies * averaging.peers)
    mixing = constants.eta * np.array([[-1.0, 1.0], [1.0, -1.0]]) if averaging.accelerated else np.zeros((1, 1))
    drift = np.kron(mixing, np.eye(averaging.peers))
    operator = np.kron(drift, identity) + np.kron(identity, drift)
    shares = np.array([[constants.alpha, 0.0], [constants.alpha_tilde, 0.0]])[:copies, :copies]
    for one, other, used in topology.edges:
        difference = np.eye(averaging.peers)[one] - np.eye(averaging.peers)[other]
        event = identity - np.kron(shares, np.outer(difference, difference))
        operator += averaging.rate * used * (np.kron(event, event) - np.kron(identity, identity))
    source = RATE**2 * np.kron(np.ones((copies, copies)), np.eye(averaging.peers)).ravel()
    deviations = np.linalg.svd(np.ones((1, averaging.peers)))[2][1:]
    basis = np.kron(np.eye(copies), deviations)
    both = np.kron(basis, basis)
    return both @ operator @ both.T, both @ source


@pytest.mark.parametrize("averaging", [PLAIN, DOUBLE, ACID], ids=["plain", "double", "acid"])
def test_the_modes_give_what_the_whole_covariance_gives(averaging: Any) -> None:
    operator, source = covariance_equations(averaging)
    assert bench.MomentEquations(averaging).decay() == pytest.approx(-np.linalg.eigvals(operator).real.max(), rel=1e-6)
    side = round(len(source) ** 0.5)
    covariance = np.linalg.solve(operator, -source).reshape(side, side)
    distance = np.trace(covariance[: averaging.peers - 1, : averaging.peers - 1]) / averaging.peers
    assert exact_distance(averaging, NOISE) == pytest.approx(distance, rel=1e-9)


# Known figures


@pytest.mark.parametrize(
    ("peers", "variant", "known"),
    [(8, "plain", 0.2688), (16, "plain", 0.0754), (32, "plain", 0.0192), (8, "acid", 0.361), (16, "acid", 0.199)],
)
def test_a_disagreement_decays_at_the_known_rates(peers: int, variant: str, known: float) -> None:
    assert bench.decays(peers)[variant] == pytest.approx(known, rel=5e-3)


@pytest.mark.parametrize(("peers", "same", "double"), [(16, 0.94, 1.88), (32, 0.89, 1.77), (64, 0.83, 1.67)])
def test_acid_reduces_the_distance_due_to_noise_but_less_than_twice_the_rate_does(
    peers: int, same: float, double: float
) -> None:
    row = bench.row_of("noise", peers)
    assert row["acid_over_same_rate"] == pytest.approx(same, abs=0.005)
    assert row["acid_over_double_rate"] == pytest.approx(double, abs=0.005)


def test_acid_is_worth_more_than_twice_the_rate_where_optima_differ() -> None:
    ratios = [bench.row_of("disagreement", peers)["acid_over_double_rate"] for peers in (16, 32, 64)]
    assert 1.0 > ratios[0] > ratios[1] > ratios[2]


def test_curvature_hides_what_acid_does_to_noise() -> None:
    for peers in (16, 32, 64):
        assert bench.row_of("noise, curvature 1", peers)["acid_over_same_rate"] > 1.1
