"""What the documents say is true: their Python, TOML and commands run, their links resolve, their tables are whole."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import io
import itertools
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import offbeat as ob
from offbeat.cli import COMMANDS, class_lookup, flags, main
from offbeat.cli.experiment_commands import simulate
from offbeat.cli.launch_commands import launch, work
from offbeat.cli.options import Output
from offbeat.cli.train_command import train
from offbeat.cluster.cluster import Cluster
from offbeat.cluster.faults import Fault
from offbeat.cluster.presets import PRESETS
from offbeat.cluster.stragglers import StragglerModel
from offbeat.core.configuration import build, options
from offbeat.core.messages import Message
from offbeat.core.strategy import Strategy
from offbeat.core.workload import NamedWorkload
from offbeat.lab.experiment_plan import Plan
from offbeat.lab.reproduction.study import study_of
from offbeat.records.files import read_run
from offbeat.records.metrics import Summary
from offbeat.records.schema import AnyRecord, Round
from offbeat.testing import check_strategy

ROOT = Path(__file__).parents[2]
RING = ROOT / "examples/token_ring.py"
GUIDE = "docs/writing_a_strategy.md"
DOCUMENTS = sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LIVE = "docs/live.md"
FROM_DDP = "docs/from_ddp.md"
STARTED = {"examples/train_digits.py", "examples/from_ddp.py"}
NETWORK = "docs/network.md"
WITH_COMMANDS = [
    pytest.param("docs/calibration.md", marks=pytest.mark.slow),  # tests/live/test_calibration_live.py is quicker
    "docs/cluster.md",
    pytest.param("docs/command_line.md", marks=pytest.mark.slow),  # tests/unit/test_cli.py is quicker
    FROM_DDP,
    pytest.param(LIVE, marks=pytest.mark.slow),  # a dozen live runs; tests/live has each of them
    pytest.param(NETWORK, marks=pytest.mark.slow),  # tests/live/test_network_live.py is quicker
    "docs/bandwidth.md",
    pytest.param("docs/compression.md", marks=pytest.mark.slow),  # tests/unit has each part
    pytest.param("docs/figures.md", marks=pytest.mark.slow),  # tests/unit/test_figures.py is quicker
    pytest.param("docs/gossip.md", marks=pytest.mark.slow),  # tests/unit/test_gossip_records.py is quicker
    pytest.param("docs/microbatch.md", marks=pytest.mark.slow),
    "docs/notebooks.md",
    pytest.param("docs/reproducing.md", marks=pytest.mark.slow),  # tests/unit/test_reproduce.py is quicker
    "docs/serial.md",
    pytest.param("docs/staleness.md", marks=pytest.mark.slow),
    "docs/topology.md",
    "docs/workloads.md",
    "docs/trackers.md",
    "docs/data.md",
    pytest.param(GUIDE, marks=pytest.mark.slow),  # test_the_example_keeps_the_contract is quicker
    "CONTRIBUTING.md",
]


def read(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str, *languages: str) -> list[tuple[str, str]]:
    """The fenced blocks of a document in these languages, in order: language and text."""
    found = re.findall(r"^```(\w+)\n(.*?)^```$", read(document), re.DOTALL | re.MULTILINE)
    return [(language, text) for language, text in found if language in languages]


def own_name(text: str) -> str | None:
    """The file that a block stands for, where its first line says so: `# lab.toml`."""
    named = re.match(r"# (\w+\.(?:py|toml))\n", text)
    return named[1] if named else None


def first_cells(document: str, head: str) -> list[str]:
    """The code words in the first column of the table under this head."""
    _, _, below = read(document).partition(f"| {head} |")
    rows = below.split("\n\n")[0].splitlines()[2:]
    return [word for row in rows for word in re.findall(r"`([^`]+)`", row.split("|")[1])]


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory to work in, as a reader's, with examples and experiments. What the documents register is removed."""
    importlib.import_module("offbeat.cli.record_commands")  # before the page is taken away from under it
    flags.all_flags()  # remembered from its first call on; classes of the examples must not be among them
    registers: list[dict[str, Any]] = [Strategy.members, NamedWorkload.members, StragglerModel.members, Message.kinds]
    before, modules = [set(register) for register in registers], set(sys.modules)
    for folder in ("examples", "experiments"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "examples")
    monkeypatch.syspath_prepend(tmp_path)
    # Figures take most of the time of a short run, and have tests of their own; `offbeat report` still draws them.
    monkeypatch.setattr("offbeat.lab.report.page.write_report", lambda runs, path, baseline: path)
    yield tmp_path
    for register, known in zip(registers, before, strict=True):
        for name in set(register) - known:
            if not register[name].__module__.startswith("offbeat."):  # defined by the document, or by an example
                del register[name]
    for name in set(sys.modules) - modules:
        if name in ("token_ring", "k_async"):
            del sys.modules[name]


# Python


def run_python(text: str) -> str:
    """Execute a block, then the tests that it defines; returns what it printed."""
    printed = io.StringIO()
    namespace: dict[str, Any] = {"__name__": "block"}
    with contextlib.redirect_stdout(printed):
        exec(compile(text, "block", "exec", dont_inherit=True), namespace)
        for name, value in namespace.items():
            if name.startswith("test_"):
                value()
    return printed.getvalue()


def test_the_python_of_the_readme_prints_what_the_readme_says() -> None:
    """The words exactly; the numbers nearly, since other processors and builds of torch round differently."""
    number = r"\d+(?:\.\d+)?"
    shown = blocks("README.md", "python", "text")
    pairs = [(text, after) for (kind, text), (_, after) in itertools.pairwise(shown) if kind == "python"]
    assert len(pairs) == 2
    for text, expected in pairs:
        printed = run_python(text)
        assert re.sub(number, "N", printed) == re.sub(number, "N", expected)
        approximately = [pytest.approx(float(value), rel=0.1, abs=1) for value in re.findall(number, expected)]
        assert [float(value) for value in re.findall(number, printed)] == approximately


def test_the_loop_of_the_readme_trains() -> None:
    printed = run_python(blocks("README.md", "python")[-1][1])
    assert re.match(r"async-fmb on Sequential, 1 worker: 20,\d{3} samples in ", printed), printed


def test_the_readme_shows_ten_lines_of_python() -> None:
    assert len(blocks("README.md", "python")[0][1].splitlines()) <= 11


def test_the_guide_quotes_the_whole_example_in_pieces() -> None:
    quoted = [lines_of(text) for _, text in blocks(GUIDE, "python") if is_quoted(text)]
    assert [line for piece in quoted for line in piece] == lines_of(RING.read_text(encoding="utf-8"))


def is_quoted(text: str) -> bool:
    return "\n".join(lines_of(text)) in "\n".join(lines_of(RING.read_text(encoding="utf-8")))


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def test_the_example_stays_short() -> None:
    assert len(RING.read_text(encoding="utf-8").splitlines()) < 80


def test_the_example_keeps_the_contract(workdir: Path) -> None:
    ring: Any = importlib.import_module("token_ring")
    assert check_strategy(ring.TokenRing(), seeds=range(30), faults=False) == 30


def test_the_example_learns(workdir: Path) -> None:
    ring: Any = importlib.import_module("token_ring")
    run = ob.simulate(ob.workloads.Digits(), ring.TokenRing(), workers=4, until=ob.Samples(6_000))
    assert run.summary.failure is None
    assert run.summary.samples >= 6_000
    assert run.summary.accuracy is not None
    assert run.summary.accuracy > 0.5


# A document, read from top to bottom


@pytest.mark.parametrize("document", WITH_COMMANDS)
def test_what_a_document_shows_can_be_done_in_its_order(
    document: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for language, text in blocks(document, "python", "toml", "sh"):
        name = own_name(text)
        if name:
            (workdir / name).write_text(text, encoding="utf-8")
        if language == "toml":
            take_toml(text)
        elif "--listen" in text:
            run_on_two_machines(text, workdir)
        elif language == "sh":
            for line in text.splitlines():
                run_command(line, capsys)
        elif not name and not is_quoted(text) and "range(30)" not in text:  # the example has a test of its own
            run_python(text)


def take_toml(text: str) -> None:
    table = tomllib.loads(text)
    if "base" in table:
        study_of("block", table, "default")
    elif "workload" in table:
        Plan.from_plain(table, "block")
    else:
        build(Cluster, table, "block")


def run_command(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Type a line; it ends with exit code 0, or with the one that its comment names."""
    command, _, comment = line.partition(" # ")
    program, *words = shlex.split(command)
    if program == "make":
        assert f"\n{words[0]}: " in read("Makefile")
    elif STARTED & set(words):
        assert line in ways_to_start()
    elif comment == "Ctrl-C":
        interrupt(words)
    elif program.endswith("python"):
        assert (ROOT / words[0]).is_file()
    else:
        expected = int(comment.removeprefix("exit code ")) if comment else 0
        capsys.readouterr()
        code = main(words)
        assert (code, program) == (expected, "offbeat"), f"{line}\n{capsys.readouterr().err}"


def ways_to_start() -> list[str]:
    """The commands that tests/live/test_examples.py runs, each in a test of its own."""
    shown = [*blocks(LIVE, "sh"), *blocks(FROM_DDP, "sh")]
    return [line for _, text in shown for line in text.splitlines() if STARTED & set(line.split())]


def process(words: list[str], **options: Any) -> subprocess.Popen[str]:
    """`offbeat` in a process of its own, which listens to Ctrl-C even where we do not."""
    program = (
        "import signal, sys, offbeat.cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.exit(offbeat.cli.main(sys.argv[1:]))\n"
    )
    return subprocess.Popen([sys.executable, "-c", program, *words], text=True, stderr=subprocess.PIPE, **options)


@contextlib.contextmanager
def ended(*processes: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever happens here, nothing stays behind: the processes of a run end with the one that started them."""
    with contextlib.ExitStack() as stack:
        for one in processes:
            stack.enter_context(one)
            stack.callback(one.kill)
        yield


def run_on_two_machines(text: str, workdir: Path) -> None:
    """The last two lines are a hub and a worker that finds it. Here both are on one machine."""
    *before, hub, worker = text.splitlines()
    for line in before:
        subprocess.run(line, shell=True, check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    lines = [line.replace("hub.lab", "127.0.0.1").replace(":7700", f":{port}") for line in (hub, worker)]
    here, there = (process(shlex.split(line)[1:], stdout=subprocess.DEVNULL) for line in lines)
    with ended(here, there):
        said = [one.communicate()[1] for one in (here, there)]
    assert (here.returncode, there.returncode) == (0, 0), said
    run = read_run(workdir / "runs/both/async-fmb-seed0")
    assert any(isinstance(record, Round) and record.rank == 2 for record in run.records)


def interrupt(words: list[str]) -> None:
    """Type Ctrl-C in the middle of it."""
    directory = Path(words[words.index("--out") + 1])
    running = process(words, stdout=subprocess.DEVNULL)
    with ended(running):
        while not any(b'"update"' in path.read_bytes() for path in directory.glob("*/records-0.jsonl")):
            assert running.poll() is None
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        said = running.communicate()[1]
    assert running.returncode == 130, said
    assert f"offbeat train --resume {directory}" in said


def test_the_commands_of_the_readme_can_be_typed(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _, text in blocks("README.md", "sh"):
        for line in text.splitlines():
            run_command(line, capsys)


def test_the_same_written_in_two_ways_is_the_same() -> None:
    tables = [tomllib.loads(text) for _, text in blocks("docs/cluster.md", "toml")]
    word, table = (build(Cluster, t, "block") for t in tables if "pareto" in str(t.get("straggle")))
    assert word == table


# Tables


def test_the_readme_lists_every_strategy_workload_and_cluster() -> None:
    names = {name: cls for name, cls in class_lookup.strategies().items() if cls.__module__.startswith("offbeat.")}
    cells = first_cells("README.md", "command line")
    assert cells == list(names)
    rows = [line for line in read("README.md").splitlines() if line.startswith("| `")]
    assert [re.findall(r"`([^`]+)`", row)[1] for row in rows] == [cls.__name__ for cls in names.values()]
    for name in [*class_lookup.workloads(), *PRESETS]:
        assert f"`{name}`" in read("README.md")


def test_the_cluster_page_lists_every_preset_field_straggle_and_fault() -> None:
    page = "docs/cluster.md"
    assert first_cells(page, "name | what it is") == list(PRESETS)
    assert first_cells(page, "field | default | meaning") == [item.path for item in options(Cluster)]
    assert first_cells(page, "name | shorthand | a round") == list(StragglerModel.members)
    assert first_cells(page, "name | fields, in the order of the shorthand | what happens") == list(Fault.members)
    for link_field in dataclasses.fields(ob.Link):
        assert f"| `{link_field.name}` |" in read(page)
    rows = {row.split("`")[1]: row for row in read(page).splitlines() if row.startswith("| `")}
    for name, fault in Fault.members.items():
        assert re.findall(r"`(\w+)`", rows[name].split("|")[2]) == [item.path for item in options(fault)]


def test_the_command_page_lists_every_command_key_and_record() -> None:
    page = "docs/command_line.md"
    assert list(COMMANDS) == re.findall(r"^offbeat (\w+)", blocks(page, "text")[0][1], re.MULTILINE)
    assert "".join(f"{command.usage}\n" for command in COMMANDS.values()) == blocks(page, "text")[0][1]
    assert sorted(first_cells(page, "key of a run | meaning")) == sorted(Summary.__struct_fields__)
    kinds: dict[str, Any] = {kind.__struct_config__.tag: kind for kind in AnyRecord.__args__}
    assert first_cells(page, "record | when | besides `at`") == list(kinds)
    rows = {row.split("`")[1]: row for row in read(page).splitlines() if row.startswith("| `")}
    for tag, kind in kinds.items():
        listed = re.findall(r"`(\w+)`", rows[tag].split("|")[3])
        assert listed == [item.name for item in msgspec.structs.fields(kind) if item.name != "at"]


def test_every_flag_that_the_command_page_names_exists() -> None:
    known = {flag.name for flag in flags.all_flags()} | set(flags.ALIASES.values())
    known |= {"--" + item.name.replace("_", "-") for item in dataclasses.fields(Output)}
    known |= {flag.name for flag in flags.live_flags()} | {"--help", "--trace"}
    known |= {"--no-" + flag.name[2:] for flag in flags.live_flags() if flag.kind is bool}
    known |= {
        "--" + name.replace("_", "-")
        for command in (simulate, train, launch, work)
        for name in inspect.signature(command).parameters
    }
    page = re.sub(r"^```\w+\n.*?^```$", "", read("docs/command_line.md"), flags=re.DOTALL | re.MULTILINE)
    assert set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", page)) <= known


def test_the_architecture_page_is_one_page_with_every_package_and_the_layers_as_they_are() -> None:
    page = read("ARCHITECTURE.md")
    assert len(page.splitlines()) <= 100
    source = ROOT / "src/offbeat"
    packages = sorted(path.parent.name for path in source.glob("*/__init__.py"))
    assert sorted(first_cells("ARCHITECTURE.md", "package")) == packages
    for name in re.findall(r"`((?!examples)[\w/]+\.py)`", page):
        assert (source / name).is_file(), f"ARCHITECTURE.md names {name}, which is not there"
    contracts = tomllib.loads(read("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    assert "\n".join(layers) in page


# Links and words


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_resolve(document: str) -> None:
    text = re.sub(r"^```\w*\n.*?^```$", "", read(document), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            there = (ROOT / document).parent / path if path else ROOT / document
            assert there.exists(), f"{document} links to {target}, which is not there"
            if anchor:
                assert anchor in anchors(there), f"{document} links to {target}, which has no such heading"


def anchors(document: Path) -> list[str]:
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
