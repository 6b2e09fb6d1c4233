"""offbeat trains one model on many machines without making the fast ones wait.

import offbeat as ob

run = ob.simulate(ob.workloads.Digits(), ob.AsyncTimed(), ob.Cluster(straggle=ob.stragglers.NIAGARA), workers=10)
print(run.summary.seconds_to_target)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from offbeat.version import __version__ as __version__

if TYPE_CHECKING:
    from offbeat.api import *  # noqa: F403  (it has __all__)


def __getattr__(name: str) -> Any:
    """A public name, imported when it is used first, since torch alone takes a second or two."""
    if name == "__all__" or not name.startswith("_"):
        api = importlib.import_module("offbeat.api")
        if name == "__all__" or name in api.__all__:
            return globals().setdefault(name, getattr(api, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(["__version__", *importlib.import_module("offbeat.api").__all__])
