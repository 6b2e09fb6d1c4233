"""The package as a whole: exported names, what may be imported where, what importing it does."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

import offbeat as ob
from offbeat.tracking.named_trackers import trackers_of

SOURCE = Path(ob.__file__).parent

NAMES = """
    AMSGrad Adam AdamW AnytimeMinibatch ArtificialDelay AsyncAdaptive AsyncDataParallel AsyncFixed AsyncTimed
    BackupWorkers Cluster Comparison ConfigurationError ContractViolation DecoupledDiLoCo DelayedExchange DiLoCo
    EverySeconds EveryUpdates Experiment FixedMinibatch Gossip GossipAcid Hub Link LiveOptions LocalSGD LocalSteps
    MissingDependency OffbeatError Population RMSprop RestartFromCheckpoint Run RunFailed SGD Samples Seconds Serial
    Strategy SyncAdaptive Target TorchOptimizer Tracker Workload calibrate compare join load_cluster microbatch
    recalibrate simulate train
"""
NAMESPACES = "compression faults graphs models nodes parts schedules stragglers testing trackers workloads"


def test_exported_names_change_only_on_purpose() -> None:
    public = sorted([*NAMES.split(), *NAMESPACES.split()])
    assert sorted(ob.__all__) == public
    assert [name for name in dir(ob) if not name.startswith("_")] == public
    assert all(hasattr(ob, name) for name in public)


@pytest.mark.parametrize("namespace", NAMESPACES.split())
def test_a_namespace_lists_its_names_and_nothing_else(namespace: str) -> None:
    module = getattr(ob, namespace)
    assert all(hasattr(module, name) for name in module.__all__)
    assert [name for name in dir(module) if not name.startswith("_")] == sorted(module.__all__)


@pytest.mark.parametrize(
    "module", ["offbeat", *(f"offbeat.api.{name}" for name in NAMESPACES.split() if name != "testing")]
)
def test_the_example_in_the_docstring_of_a_namespace_runs(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def simulate(workload: Any, strategy: Any, cluster: Any = ob.Cluster(), **settings: Any) -> Any:  # noqa: B008
        """Checks the arguments as `ob.simulate` does, without running anything."""
        trackers_of(settings.pop("track", None))
        ob.Experiment(workload, strategy, cluster=cluster, **settings).resolved()
        return MagicMock()

    monkeypatch.setattr(ob, "simulate", simulate)
    source = Path(importlib.import_module(module).__file__ or "").read_text(encoding="utf-8")
    doc = ast.get_docstring(ast.parse(source), clean=False) or ""
    code = "\n".join(line for line in doc.splitlines() if not line or line.startswith("    "))
    assert "import offbeat as ob" in code
    exec(textwrap.dedent(code), {"__name__": "example"})


def imported_by(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def test_torch_distributed_mpi4py_and_pickle_are_imported_in_one_place_each() -> None:
    allowed = {"launch/listeners.py"}
    for path in SOURCE.rglob("*.py"):
        forbidden = [] if path == SOURCE / "lab/data/pickles.py" else ["pickle"]
        if path != SOURCE / "transports" / "mpi.py":
            forbidden.append("mpi4py")
        if path.relative_to(SOURCE).as_posix() not in allowed:
            forbidden.append("torch.distributed")
        for name in imported_by(path):
            assert not name.startswith(tuple(forbidden)), f"{path.name} imports {name}"


def test_trackers_are_imported_in_one_module_each() -> None:
    for path in SOURCE.rglob("*.py"):
        for name in ("tensorboard", "wandb", "mlflow"):
            if path != SOURCE / "tracking" / f"{name}_tracker.py":
                assert not [each for each in imported_by(path) if each.split(".")[0] == name], path


def test_no_module_has_a_name_that_says_nothing() -> None:
    for path in SOURCE.rglob("*.py"):
        assert path.stem not in {"utils", "helpers", "common", "misc", "base"}


def test_importing_touches_neither_logging_nor_plotting_nor_threads() -> None:
    program = (
        "import logging, sys, torch\n"
        "before = torch.get_num_threads(), logging.getLogger().handlers[:], torch.get_rng_state()\n"
        "import offbeat\noffbeat.simulate\n"
        "assert torch.get_num_threads() == before[0] and logging.getLogger().handlers == before[1]\n"
        "assert torch.equal(torch.get_rng_state(), before[2])\n"
        "assert not {'IPython', 'matplotlib', 'pandas', 'sklearn', 'scipy.stats'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_commands_that_need_no_torch_do_not_wait_for_it() -> None:
    program = "import sys, offbeat.cli\noffbeat.cli.application()\nassert not {'torch', 'numpy'} & set(sys.modules)\n"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Digitz'"):
        _ = ob.Digitz
    with pytest.raises(AttributeError, match=r"no attribute 'Digits'; type offbeat\.workloads\.Digits$"):
        _ = ob.Digits
    assert {"simulate", "__version__"} <= set(dir(ob))


def test_functions_stay_short() -> None:
    """A function of more than 60 lines is usually two."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno <= 60, f"{path.name}: {node.name}"
