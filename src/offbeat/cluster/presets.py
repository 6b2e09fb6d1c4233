"""Named clusters, and clusters from TOML files."""

from __future__ import annotations

from pathlib import Path

from offbeat.cluster.cluster import Cluster, Link
from offbeat.cluster.faults import Crash
from offbeat.cluster.stragglers import CEDAR, NIAGARA, Lognormal, Pareto
from offbeat.core.configuration import build, is_file, read_toml
from offbeat.errors import unknown

_GIGABYTE = Link(latency_seconds=1.5e-4, bytes_per_second=1e9)

_TABLE: dict[str, tuple[str, Cluster]] = {
    "uniform": ("machines of equal speed, without stragglers", Cluster()),
    "niagara": (
        "induced sleeps of a shared machine: 1.0 s on average, 4.0 s the slowest of ten",
        Cluster(straggle=NIAGARA),
    ),
    "cedar": (
        "induced sleeps of a faster machine: 0.07 s on average, 0.22 s the slowest of ten",
        Cluster(straggle=CEDAR),
    ),
    "uneven": ("the first worker is 4 times and the second 2 times slower than the rest", Cluster(factors=(4.0, 2.0))),
    "noisy": ("every round's duration varies by a lognormal factor with σ = 0.5", Cluster(straggle=Lognormal(0.5))),
    "heavy-tail": ("a round now and then takes many times as long: Pareto, shape 1.5", Cluster(straggle=Pareto(1.5))),
    "thin": (
        "links of 100 Mbit/s and 50 ms, as between sites",
        Cluster(link=Link(latency_seconds=0.05, bytes_per_second=12.5e6, delay_std_seconds=0.02)),
    ),
    "pc-star": (
        "eight workers and a hub at one switch, 1 GB/s each",
        Cluster(link=_GIGABYTE, size=8),
    ),
    "pc-star-slow": (
        "the same, but the first worker is 4 times slower than the rest",
        Cluster(link=_GIGABYTE, factors=(4.0,), size=8),
    ),
    "preemptible": (
        "rank 1 is taken away after 60 s and given back 30 s later",
        Cluster(faults=(Crash(1, at_seconds=60.0, back_after_seconds=30.0),)),
    ),
}

PRESETS: dict[str, Cluster] = {name: cluster for name, (_, cluster) in _TABLE.items()}
"""The named clusters."""

SUMMARIES: dict[str, str] = {name: summary for name, (summary, _) in _TABLE.items()}
"""Their descriptions in one line."""


def load_cluster(name_or_path: str) -> Cluster:
    """A cluster by the name of a preset, or from a TOML file.

    Args:
        name_or_path: a name that `offbeat clusters` lists, or the path of a TOML file.
    """
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    path = Path(name_or_path)
    if path.suffix != ".toml" and not is_file(path):
        raise unknown("cluster", name_or_path, PRESETS, "or give the path of a TOML file")
    return build(Cluster, read_toml(path, "cluster"), name_or_path)
