"""offbeat trains one model on many machines without making the fast ones wait.

    import offbeat as ob

    cluster = ob.Cluster(straggle=ob.stragglers.NIAGARA)
    run = ob.simulate(ob.workloads.Digits(), ob.AsyncTimed(), cluster, workers=10)
    print(run.summary.seconds_to_target)

`dir(ob)` lists the public names; `help(ob.schedules)`, `help(ob.parts)` and so on explain the namespaces.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from offbeat.version import __version__ as __version__

if TYPE_CHECKING:
    from offbeat.api import *  # noqa: F403  (it has __all__)


def __getattr__(name: str) -> Any:
    """Import a public name on first use, since importing torch takes a second or two."""
    if name == "__all__" or not name.startswith("_"):
        api = importlib.import_module("offbeat.api")
        if name == "__all__" or name in api.__all__:
            return globals().setdefault(name, getattr(api, name))
        homes = [space for space in api.__all__ if name in getattr(getattr(api, space), "__all__", ())]
        if homes:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; type {__name__}.{homes[0]}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(["__version__", *importlib.import_module("offbeat.api").__all__])
