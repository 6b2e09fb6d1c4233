"""Consensus distance of gossip on a cycle, exactly: the stationary second moments of the process that gossip follows.

    python bench/second_moments.py [--json] [--peers 8 16 32 64]

Compared are the variants of bench/acid.py: plain averaging at rate 1 and at rate 2, and A²CiD² at rate 1. Nothing is
simulated. Every peer has gradients at the times of a Poisson process of rate 1, and every edge has averagings at the
times of another, of rate λ = rate/2; no latency. With x̃ the second copy of A²CiD², between events and at them:

    mixing       dx = η(x̃ − x)dt         dx̃ = η(x − x̃)dt
    averaging    x_i −= α(x_i − x_j)     x̃_i −= α̃(x_i − x_j)     and with the opposite sign for j
    gradient     x_i −= γg               x̃_i −= γg               g = h·x_i − b_i + noise

h is the curvature, and b_i is drawn once per peer, independently: with curvature, the optimum of a peer is b_i/h. All
peers are alike, so in the Fourier modes of the cycle the covariance is one small matrix S per mode. With ℓ the
eigenvalue of the Laplacian, v = (α, α̃), 1 = (1, 1), u = (1, 0) that selects x, and K = η[[−1, 1], [1, −1]]:

    dS/dt = M S + S Mᵀ + r·ℓ·vvᵀ + γ²·E[g²]·11ᵀ + γ(1cᵀ + c1ᵀ)     M = K − ℓ·vuᵀ − γh·1uᵀ     M c = −γ·Var(b)·1

r = E[(x_i − x_j)²] on an edge and E[g²] are sums over all modes, so the equations of all modes are one linear system.
Its solution gives the consensus distance, its slowest eigenvalue how fast an initial disagreement decays.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from scipy.linalg import block_diag

from offbeat.topology.graphs import Cycle
from offbeat.topology.topology import Topology

Array = NDArray[np.floating[Any]]

PEERS = (8, 16, 32, 64)
LEARNING_RATE = 0.1
"""γ, as in bench/acid.py. Without curvature distances are proportional to its square, and ratios independent of it."""


@dataclass(frozen=True)
class Averaging:
    """Averaging on a cycle."""

    peers: int
    rate: float = 1.0
    """Averagings per peer and gradient."""
    accelerated: bool = False
    """Whether with A²CiD²."""


@dataclass(frozen=True)
class Gradients:
    """What the gradients of the peers are made of."""

    noise: float = 0.0
    """Standard deviation of the noise of a gradient."""
    spread: float = 0.0
    """Standard deviation of b over peers."""
    curvature: float = 0.0
    """h, the same for all peers."""


VARIANTS = {"same rate": (1.0, False), "double rate": (2.0, False), "acid": (1.0, True)}
"""Name → rate, and whether with A²CiD²; the names are those of bench/acid.py."""
SAME, DOUBLE, ACID = VARIANTS
REGIMES = {
    "noise": Gradients(noise=1.0),
    "disagreement": Gradients(spread=1.0),
    "noise, curvature 1": Gradients(noise=0.25, curvature=1.0),
    "disagreement, curvature 1": Gradients(noise=0.25, spread=1.0, curvature=1.0),
}
"""What separates peers: noise alone, b alone, and both cases of the quadratics of bench/acid.py, with batches of 16."""


# The equations


class MomentEquations:
    """The linear equations dS/dt = operator·S + source: all elements of S, mode after mode.

    Without curvature the mean over peers is not stationary; no other mode depends on it, and it is left out.
    """

    def __init__(
        self, averaging: Averaging, gradients: Gradients | None = None, learning_rate: float = LEARNING_RATE
    ) -> None:
        self.peers, self.learning_rate, self.gradients = averaging.peers, learning_rate, gradients or Gradients()
        topology = Topology(Cycle(), averaging.peers)
        laplacian, constants = topology.laplacian(averaging.rate), topology.constants(averaging.rate)
        self.has_mean = self.gradients.curvature > 0.0
        self.eigenvalues = np.fft.fft(laplacian[0]).real[0 if self.has_mean else 1 :]
        self.averagings = 0.5 * float(np.trace(laplacian))
        """Averagings of all pairs per gradient time."""
        copies = 2 if averaging.accelerated else 1
        self.shares = np.array([constants.alpha, constants.alpha_tilde])[:copies]
        self.drifts = np.zeros((len(self.eigenvalues), copies, copies))
        """M of each mode."""
        if averaging.accelerated:
            self.drifts += constants.eta * np.array([[-1.0, 1.0], [1.0, -1.0]])
        self.drifts[:, :, 0] -= np.outer(self.eigenvalues, self.shares) + self.pull

    @property
    def pull(self) -> float:
        """γh: the share of its distance to its optimum that a peer moves with a gradient."""
        return self.learning_rate * self.gradients.curvature

    def operator(self) -> Array:
        identity = np.eye(len(self.shares))
        operator: Array = block_diag(*(np.kron(drift, identity) + np.kron(identity, drift) for drift in self.drifts))
        jumps = np.multiply.outer(self.eigenvalues, np.outer(self.shares, self.shares)).ravel()
        edge_square = self._sum_over_modes(self.eigenvalues / self.averagings)
        mean_square = self._sum_over_modes(np.full(len(self.eigenvalues), 1.0 / self.peers))
        return operator + np.outer(jumps, edge_square) + self.pull**2 * np.outer(np.ones_like(jumps), mean_square)

    def source(self) -> Array:
        """What does not depend on the second moments of x: noise, b, and x times b."""
        variance, rate = self.gradients.spread**2, self.learning_rate
        with_b = np.linalg.solve(self.drifts, np.full((*self.drifts.shape[:2], 1), -rate * variance))[..., 0]
        square = self.gradients.noise**2 + variance - 2.0 * self.gradients.curvature * with_b[:, 0].sum() / self.peers
        source: Array = rate * (with_b[:, :, None] + with_b[:, None, :]) + rate**2 * square
        return source.ravel()

    def consensus_distance(self) -> float:
        """Stationary mean over peers of the expected squared distance of x to its mean, per coordinate."""
        return float(self.variances().sum()) / self.peers

    def variances(self) -> Array:
        """Stationary E[x²] of every mode but the mean; the first is the slowest, the one in the middle the fastest."""
        moments: Array = np.linalg.solve(self.operator(), -self.source())
        return moments.reshape(self.drifts.shape)[int(self.has_mean) :, 0, 0]

    def decay(self) -> float:
        """The rate, per gradient time, at which the influence of the initial second moments decays in the end."""
        return -float(np.linalg.eigvals(self.operator()).real.max())

    def _sum_over_modes(self, weights: Array) -> Array:
        """The vector whose product with all moments is the sum over modes of E[x²], weighted."""
        vector = np.zeros_like(self.drifts)
        vector[:, 0, 0] = weights
        return vector.ravel()


# Figures


def row_of(regime: str, peers: int) -> dict[str, object]:
    """Ratios of one regime at one size: of consensus distances, and of the variances of single modes."""
    equations = {
        name: MomentEquations(Averaging(peers, *variant), REGIMES[regime]) for name, variant in VARIANTS.items()
    }
    distance = {name: each.consensus_distance() for name, each in equations.items()}
    modes = equations[ACID].variances() / equations[SAME].variances()
    return {
        "regime": regime,
        "peers": peers,
        "acid_over_double_rate": round(distance[ACID] / distance[DOUBLE], 4),
        "acid_over_same_rate": round(distance[ACID] / distance[SAME], 4),
        "slowest_mode": round(float(modes[0]), 4),
        "fastest_mode": round(float(modes[len(modes) // 2]), 4),
        "distance": {name: float(f"{value:.5g}") for name, value in distance.items()},
    }


def decays(peers: int) -> dict[str, float]:
    """How fast an initial disagreement decays at rate 1 without gradients, per gradient time."""
    return {
        name: round(MomentEquations(Averaging(peers, accelerated=accelerated)).decay(), 5)
        for name, accelerated in (("plain", False), ("acid", True))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--peers", type=int, nargs="+", default=PEERS, help="sizes of the cycle, three or more")
    arguments = parser.parse_args()
    if min(arguments.peers) < 3:
        parser.error(f"a cycle has three peers or more, but {min(arguments.peers)} were asked for; type --peers 16")
    rows = [row_of(regime, peers) for regime in REGIMES for peers in arguments.peers]
    decay = {peers: decays(peers) for peers in arguments.peers}
    if arguments.json:
        print(json.dumps({"rows": rows, "decay": decay}))
    else:
        show(rows, decay)


def show(rows: Sequence[dict[str, object]], decay: dict[int, dict[str, float]]) -> None:
    console = Console()
    heads = ("", "peers", "acid/\ndouble", "acid/\nsame", "slowest\nmode", "fastest\nmode")
    table = _table("Consensus distance, stationary; acid/same also mode by mode", heads)
    for row in rows:
        names = ("acid_over_double_rate", "acid_over_same_rate", "slowest_mode", "fastest_mode")
        ratios = (f"{row[name]:.3f}" for name in names)
        table.add_row(str(row["regime"]), str(row["peers"]), *ratios)
    console.print(table)
    console.print()
    table = _table("Decay per gradient time", ("peers", "plain", "acid"))
    for peers, rates in decay.items():
        table.add_row(str(peers), *(f"{rate:.4f}" for rate in rates.values()))
    console.print(table)


def _table(title: str, heads: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, title=title, title_justify="left")
    for head in heads:
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    return table


if __name__ == "__main__":
    main()
