"""`offbeat sample`: text by the model that a run has trained."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import torch
from cyclopts import Parameter

from offbeat.cli.experiment_commands import read_experiment
from offbeat.cli.options import Files, number
from offbeat.core.flat import FlatModule
from offbeat.core.validation import require
from offbeat.errors import ConfigurationError
from offbeat.lab.run_results import read_result
from offbeat.lab.workloads.text import TextWorkload
from offbeat.lab.workloads.transformer import generate
from offbeat.records.files import find_runs, read_run


def sample(
    run: Annotated[str, Parameter(name="RUN")],
    /,
    *,
    prompt: Annotated[str, Parameter(metavar="TEXT")] = "\n",
    bytes: Annotated[int, number()] = 500,
    temperature: Annotated[float, number()] = 0.8,
    seed: Annotated[int, number()] = 0,
    allow: Files = (),
) -> int:
    """Print text by the model of a run.

    Args:
        run: the directory of a run on a text, or a directory that holds one
        prompt: what the text begins with
        bytes: how many bytes follow
        temperature: 1 draws as the model predicts, less prefers what is likely, 0 takes the likeliest
        seed: another seed draws another text
        allow: a file with a class of the run, which is run as Python; may be repeated
    """
    require(bytes > 0, f"--bytes must be positive, but is {bytes}")
    require(
        math.isfinite(temperature) and temperature >= 0,
        f"--temperature must be 0 or more and finite, but is {temperature}",
    )
    require(prompt != "", "--prompt is empty; give at least one character, such as --prompt 'KING'")
    directory = _one_run(Path(run))
    workload, model = _trained(directory, allow)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed)
    text = generate(model, prompt.encode(), bytes, workload.context, temperature, generator)
    print((prompt.encode() + text).decode(errors="replace"))
    return 0


def _one_run(path: Path) -> Path:
    runs = find_runs([path])
    require(len(runs) == 1, f"{path} holds {len(runs)} runs; name one of them, such as {runs[0]}")
    return runs[0]


def _trained(directory: Path, allowed: tuple[str, ...]) -> tuple[TextWorkload, torch.nn.Module]:
    """The workload of a run and its trained model."""
    header = read_run(directory).header
    workload = read_experiment(header, directory, allowed).workload if header.experiment is not None else None
    if not isinstance(workload, TextWorkload):
        known = ", ".join(name for name, cls in TextWorkload.members.items() if issubclass(cls, TextWorkload))
        raise ConfigurationError(f"{directory} was trained on {header.workload}, which is no text; these are: {known}")
    result = read_result(directory)
    require(
        result is not None,
        f"{directory} has no trained parameters: it has failed, or has not ended, or is older than this command",
    )
    assert result is not None
    flat = FlatModule(workload.transformer().build())
    flat.load(result.parameters, result.buffers)
    return workload, flat.module
