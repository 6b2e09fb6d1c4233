"""Weights & Biases: a run of a project, on its server or offline in `wandb/`."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from offbeat.core.validation import require
from offbeat.errors import MissingDependency
from offbeat.tracking.tracker import SAMPLES, SECONDS, TrackedRun, Tracker, Value

PROJECT = "offbeat"
NO_SERVER = ("offline", "disabled", "dryrun")
"""Values of WANDB_MODE with which nothing is sent."""


@dataclass(eq=False)
class WandB(Tracker):
    """A run of Weights & Biases. Its environment variables apply: WANDB_MODE, WANDB_ENTITY, WANDB_DIR and so on."""

    project: str | None = None
    """the project; none: that of WANDB_PROJECT, or else offbeat"""
    _run: Any = field(default=None, init=False, repr=False)

    @property
    def label(self) -> str:
        return "wandb"

    def check(self) -> None:
        try:
            import wandb  # noqa: F401
        except ImportError:
            raise MissingDependency("tracking with wandb", "wandb", "wandb") from None
        require(
            _has_credentials(os.environ.get("WANDB_MODE")),
            "wandb has no API key for its server; type: wandb login, or set WANDB_MODE=offline",
        )

    def start(self, run: TrackedRun) -> str | None:
        import wandb

        known = run.recall(self.label)
        self._run = wandb.init(
            project=self.project or os.environ.get("WANDB_PROJECT") or PROJECT,
            name=os.environ.get("WANDB_NAME") or run.name,
            group=os.environ.get("WANDB_RUN_GROUP") or f"{run.label}-{run.workload}",
            config=dict(run.config),
            id=known or os.environ.get("WANDB_RUN_ID"),
            resume="allow" if known else None,
            reinit="create_new",
            # The console of the process is not the tracker's.
            settings=wandb.Settings(console="off", silent=True),
        )
        run.remember(self.label, self._run.id)
        # Steps of its own: samples may fall where work is undone, or a late evaluation comes, and steps may not.
        for step in (SAMPLES, SECONDS):
            self._run.define_metric(step, hidden=True)
        self._run.define_metric("*", step_metric=SAMPLES)
        return None if self._run.offline else str(self._run.url)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values))

    def event(self, step: int, text: str) -> None:
        self._run.log({SAMPLES: step, "events": text})

    def close(self, summary: Mapping[str, Value]) -> None:
        self._run.summary.update({f"summary/{name}": value for name, value in summary.items()})
        self._run.finish(exit_code=1 if "failure" in summary else 0)


@functools.cache
def _has_credentials(mode: str | None) -> bool:
    """Whether runs can be sent, or need not be; the mode is that of the environment, and otherwise of the settings."""
    import wandb

    if (mode or wandb.setup().settings.mode) in NO_SERVER:
        return True
    return bool(wandb.login(prompt=False, verify=False))  # a question would wait for an answer
