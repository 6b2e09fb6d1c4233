"""Draw the picture of the README again: timelines of computing and waiting, from runs of experiments/demo.toml.

python bench/readme_picture.py [PICTURE]
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from offbeat.lab.compared_runs import simulate_all
from offbeat.lab.experiment_plan import Plan
from offbeat.lab.plots.style import save
from offbeat.lab.plots.timeline import timeline

ROOT = Path(__file__).parents[1]
STRATEGIES = ("fmb", "amb", "async-timed")
SECONDS = 40.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", nargs="?", type=Path, default=ROOT / "docs/images/timeline.png", help="where to")
    print(draw(parser.parse_args().picture))


def draw(picture: Path) -> Path:
    """Run the strategies shown, with the first seed, for as long as the experiment says; draw how they begin."""
    plan = Plan.from_file(ROOT / "experiments/demo.toml")
    shown = dataclasses.replace(
        plan,
        strategies=tuple(strategy for strategy in plan.strategies if strategy.name in STRATEGIES),
        labels=(),
        seeds=plan.seeds[:1],
        evaluate=None,
    )
    return save(timeline(simulate_all(shown), SECONDS), picture)


if __name__ == "__main__":
    main()
