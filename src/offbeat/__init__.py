"""offbeat trains one model on many machines without making the fast ones wait.

import offbeat as ob

run = ob.simulate(ob.Digits(), ob.AsyncTimed(), ob.Cluster(straggle=ob.NIAGARA), workers=10)
print(run.summary.seconds_to_target)
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from offbeat.version import __version__ as __version__

if TYPE_CHECKING:
    from offbeat.public import *  # noqa: F403  (it has __all__)


def __getattr__(name: str) -> Any:
    """A module of this package, or a public name: imported when it is used, since torch alone takes a second or two."""
    if importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    if not name.startswith("__") or name == "__all__":
        public = importlib.import_module("offbeat.public")
        if name == "__all__" or name in public.__all__:
            return globals().setdefault(name, getattr(public, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *importlib.import_module("offbeat.public").__all__})
