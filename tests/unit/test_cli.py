"""The command line as a user meets it: what comes out, where it goes, and what flags mean."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from made_records import a_small_run

import offbeat
from offbeat import cli
from offbeat.cli import class_lookup, flags, main
from offbeat.cli.flags import all_flags
from offbeat.cli.options import GROUPS, LIVE, STRATEGY
from offbeat.cli.plans import plan_of
from offbeat.core.actions import Budget, Samples, Seconds
from offbeat.core.configuration import options
from offbeat.core.optimizers import SGD, AMSGrad
from offbeat.core.schedules import Linear
from offbeat.core.strategy import Strategy
from offbeat.core.workload import NamedWorkload
from offbeat.engine.experiment import Experiment, share_done
from offbeat.errors import RunFailed
from offbeat.lab import parallel_simulations
from offbeat.lab.experiment_plan import Plan
from offbeat.lab.progress import Progress, RunProgress, show_progress
from offbeat.lab.workloads.synthetic import Quadratic
from offbeat.records.metrics import summarize
from offbeat.records.schema import Update
from offbeat.strategies.hub.hub_strategies import FixedMinibatch

QUICK = ["--workers", "3", "--until", "3000", "--microbatch", "64"]


def sorted_words(*texts: str) -> str:
    return " ".join(sorted(word for text in texts for word in text.split()))


SIMULATE = """
    --acid --augment --baseline --batch --batched --bytes-per-second --checkpoint-interval-seconds --clock --cluster
    --compression --condition --context --cores --crash-seen-seconds --damping --delay --depth --dimension --evaluate
    --every --examples --factors --faults --fragments --grace --graph --group --hang-factor --hang-seconds --heads
    --hidden --hub-seconds --in-flight-max --initial --inner --jobs --json --k --link.bytes-per-second
    --link.delay-std-seconds --link.latency-seconds --lr --messages --microbatch --model --momentum --no-acid
    --no-augment --no-report --noise --nonfinite-max --optimizer --optimizer.alpha --optimizer.betas
    --optimizer.clip-norm --optimizer.decay-1d --optimizer.eps --optimizer.lr --optimizer.momentum --optimizer.nesterov
    --optimizer.no-decay-1d --optimizer.no-nesterov --optimizer.weight-decay --out --outer --overwrite --partner
    --patience-seconds --preempt-above --quiet --quorum --rate --rates --recalibrate --samples-max --seconds
    --seconds-per-call --seconds-per-evaluation --seconds-per-round --seconds-per-sample --seconds-per-update
    --seconds-per-worker-update --seed --seeds --send --silence-seconds --sources --speed-trace --split --staleness-free
    --staleness-max --straggle --target --test-examples --track --until --width --worker-seconds --workers
"""
COMPARE = """
    --baseline --batched --bytes-per-second --cluster --cores --crash-seen-seconds --evaluate --factors --faults --jobs
    --json --link.bytes-per-second --link.delay-std-seconds --link.latency-seconds --no-report --out --overwrite --quiet
    --seconds-per-call --seconds-per-evaluation --seconds-per-round --seconds-per-sample --seconds-per-update
    --seconds-per-worker-update --seed --seeds --silence-seconds --speed-trace --straggle --target --track --until
    --workers
"""
SIMULATED_ONLY = """
    --batched --cores --crash-seen-seconds --seconds-per-call --seconds-per-evaluation --seconds-per-round
    --seconds-per-sample --seconds-per-update --seconds-per-worker-update --speed-trace
"""
ENCRYPTION = "--ca --certificate --key --tls"
PROCESSES = f"""
    {ENCRYPTION} --checkpoint-seconds --checksum --listen --local-workers --no-checksum --no-shared-memory
    --records-max-bytes --restarts --resume --shared-memory --threads --token-file --transport
"""
TRAIN = " ".join(sorted({"--allow", *SIMULATE.split(), *PROCESSES.split()} - {"--jobs", *SIMULATED_ONLY.split()}))
OF_WORKLOADS = """
    --augment --condition --context --depth --dimension --examples --group --heads --hidden --model --no-augment
    --noise --recalibrate --split --test-examples --width
"""
OF_CALIBRATION = "--json --microbatch --out --overwrite --quiet --seconds --straggle --workers"
CALIBRATE = " ".join(
    sorted(
        {*PROCESSES.split(), *OF_WORKLOADS.split(), *OF_CALIBRATION.split()}
        - {"--checkpoint-seconds", "--records-max-bytes", "--resume", "--transport"}
    )
)
MICROBATCH = " ".join(sorted({*OF_WORKLOADS.split(), "--batch", "--json", "--plot", "--seconds", "--sizes"}))
NETWORK = """
    --ca --certificate --corrupt --elements --json --key --listen --local --message-bytes --no-shared-memory --out
    --processes --quiet --repeats --tls --token-file --transport --wait
"""
COMMANDS = {
    "simulate": SIMULATE,
    "train": TRAIN,
    "compare": COMPARE,
    "calibrate": CALIBRATE,
    "launch": sorted_words(
        ENCRYPTION, "--listen --out --overwrite --processes --quiet --restarts --resume --token-file --transport"
    ),
    "work": sorted_words(ENCRYPTION, "--allow --threads --token-file --wait"),
    "network": NETWORK,
    "topology": "--json --peers --plot --rate",
    "microbatch": MICROBATCH,
    "reproduce": "--json --list --no-figures --out --processes --quiet --redraw --save --scale --seeds",
    "report": "--baseline --figures --format --out",
    "sample": "--allow --bytes --prompt --seed --temperature",
    "replay": "--allow --no-faults --seed --trace",
    "strategies": "--json",
    "workloads": "--counts --json",
    "clusters": "--json",
    "data": "--from --json --source --verify",
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def registers() -> Any:
    """Leaves the registers as they were, for tests that load classes from files."""
    before = dict(Strategy.members), dict(NamedWorkload.members)
    yield
    for family, members in zip((Strategy, NamedWorkload), before, strict=True):
        family.members.clear()
        family.members.update(members)


def plan(*argv: str) -> Plan:
    """The plan that `simulate` makes of these words and flags."""
    words, values = [], {flag.attribute: None for flag in all_flags()}
    names = {name: flag for flag in all_flags() for name in (flag.name, flags.ALIASES.get(flag.path))}
    rest = iter(argv)
    for word in rest:
        if word.startswith("--"):
            flag = names[word]
            values[flag.attribute] = True if flag.kind is bool else next(rest)  # type: ignore[assignment]
        else:
            words.append(word)
    return plan_of(words, flags.read_flags(types.SimpleNamespace(**values), all_flags()))


# What can be typed


@pytest.mark.parametrize("command", list(COMMANDS))
def test_the_options_of_a_command_change_only_on_purpose(command: str) -> None:
    arguments = cli.application()[command].assemble_argument_collection(parse_docstring=False)
    names = {name for argument in arguments if not argument.children for name in (*argument.names, *argument.negatives)}
    assert sorted(name for name in names if name.startswith("--")) == COMMANDS[command].split()


@pytest.mark.parametrize("command", ["launch", "topology", "reproduce", "data", "strategies"])
def test_the_help_page_shows_every_option_with_a_text(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    rows = re.findall(r"│ (--[^│]*)│", capsys.readouterr().out)
    shown = {row.split()[0]: row for row in rows}
    assert set(shown) >= set(COMMANDS[command].split())
    assert all(re.search(r"  \w", row.strip()) for row in rows)


def test_the_commands_change_only_on_purpose() -> None:
    assert list(cli.COMMANDS) == list(COMMANDS)


@pytest.mark.parametrize("known", [all_flags, flags.live_flags])
def test_no_two_flags_share_a_name(known: Any) -> None:
    names = [flag.name for flag in known()]
    assert len(names) == len(set(names))


def test_a_field_name_means_the_same_type_in_every_strategy_and_in_every_workload() -> None:
    for members in (class_lookup.strategies(), class_lookup.workloads()):
        kinds: dict[str, Any] = {}
        for cls in members.values():
            for item in options(cls):
                kind = set(flags.members_of(item.kind)) - {type(None)}
                assert kinds.setdefault(item.path, kind) == kind, f"{cls.__name__}.{item.path}"


def test_every_flag_is_explained() -> None:
    assert [flag.name for flag in flags.live_flags() if len(flag.text) < 10] == []


@pytest.mark.parametrize("argv", [[], ["--help"]])
def test_without_a_command_it_lists_the_commands(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == offbeat.__version__


def test_it_is_quiet_when_its_output_is_closed() -> None:
    script = "import sys; from offbeat.cli import main; sys.exit(main(['--help']))"
    read, write = os.pipe()
    os.close(read)
    try:
        ended = subprocess.run([sys.executable, "-c", script], stdout=write, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(write)
    assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.parametrize("command", ["simulate", "train", "launch", "work"])
def test_the_help_fits_a_hundred_columns(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 100


def test_the_help_of_simulate_comes_in_sections(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--help"]) == 0
    shown = capsys.readouterr().out
    places = [shown.index(f"─ {section} ─") for section in GROUPS if section != LIVE]
    assert places == sorted(places)
    assert "seconds between updates; none: as long as 90 samples" in shown
    assert "[async-timed: none]" in shown


def test_the_help_of_compare_shows_no_defaults_since_the_file_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "a named cluster, or a TOML file; the flags below change it " in shown
    assert not [flag.name for flag in flags.file_flags() if flag.default]
    assert "[none]" not in shown


# What words and flags mean


def test_a_flag_goes_to_every_strategy_that_has_the_field() -> None:
    made = plan("quadratic", "fmb", "amb", "async-timed", "--batch", "32", "--hub-seconds", "0.5")
    assert made.strategies[0].batch == made.strategies[1].batch == 32  # type: ignore[attr-defined]
    assert made.strategies[2].hub_seconds == 0.5  # type: ignore[attr-defined]


def test_a_setting_for_one_strategy_beats_a_flag_for_all() -> None:
    made = plan("quadratic", "fmb", "amb", "amb", "amb.batch=8", "amb-2.seconds=5", "--batch", "32", "fmb.lr=0.5")
    assert made.labels == ("fmb", "amb", "amb-2")
    assert [strategy.batch for strategy in made.strategies] == [32, 8, 32]  # type: ignore[attr-defined]
    assert [getattr(strategy, "seconds", None) for strategy in made.strategies] == [None, None, 5.0]
    assert made.strategies[0].optimizer == SGD(lr=0.5)  # type: ignore[attr-defined]


def test_a_learning_rate_alone_changes_the_optimizer_that_suits_workload_and_strategy() -> None:
    made = plan("quadratic", "fmb", "apam", "--lr", "0.01", "--optimizer.momentum", "0.5")
    assert made.strategies[0].optimizer == SGD(lr=0.01, momentum=0.5)  # type: ignore[attr-defined]
    assert made.strategies[1].optimizer == AMSGrad(lr=0.01)  # type: ignore[attr-defined]


def test_an_optimizer_is_a_name_a_shorthand_or_fields() -> None:
    def optimizer(*argv: str) -> Any:
        return plan("quadratic", "fmb", *argv).strategies[0].optimizer  # type: ignore[attr-defined]

    assert optimizer("--optimizer", "sgd:0.3") == SGD(lr=0.3)
    assert optimizer("--optimizer", "sgd:0.3", "--lr", "0.2") == SGD(lr=0.2)
    assert optimizer("--lr", "0.2", "fmb.optimizer=sgd:0.3") == SGD(lr=0.3)
    assert optimizer("--lr", "0.2", "fmb.optimizer.momentum=0.9") == SGD(lr=0.2, momentum=0.9)
    assert optimizer("--lr", "linear:0.1:0:1000") == SGD(lr=Linear(0.1, 0.0, 1000))
    assert optimizer("--optimizer.momentum", "0.9", "--optimizer.nesterov") == SGD(0.1, momentum=0.9, nesterov=True)
    assert optimizer() is None


def test_cluster_flags_change_the_cluster_that_is_named() -> None:
    made = plan(
        *("quadratic", "fmb", "--cluster", "thin", "--link.latency-seconds", "0.2", "--straggle", "niagara"),
        *("--factors", "1,1,4", "--faults", "crash:1:30:5,pause:2:10:5"),
    )
    assert made.cluster.link.latency_seconds == 0.2
    assert made.cluster.link.bytes_per_second == 12.5e6
    assert made.cluster.factors == (1.0, 1.0, 4.0)
    assert [fault.name for fault in made.cluster.faults] == ["crash", "pause"]


@pytest.mark.parametrize(
    ("argv", "seeds"),
    [(["--seeds", "3"], (0, 1, 2)), (["--seeds", "3,4,7"], (3, 4, 7)), (["--seed", "5"], (5,)), ([], (0,))],
)
def test_seeds_are_a_number_or_a_list(argv: list[str], seeds: tuple[int, ...]) -> None:
    assert plan("quadratic", "fmb", *argv).seeds == seeds


def test_a_field_with_a_default_can_be_set_to_none_and_that_survives_a_file() -> None:
    made = plan("quadratic", "async-timed", "--samples-max", "none", "--evaluate", "none")
    assert made.strategies[0].samples_max is None  # type: ignore[attr-defined]
    again = Plan.from_plain(made.to_plain(), "again")
    assert again == made


# Running


def test_simulate_shows_a_table_a_headline_and_where_everything_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "quadratic", "fmb", "amb", "--seeds", "2", *QUICK]) == 0
    said = capsys.readouterr()
    assert "speed-up" in said.out
    assert "No strategy reaches" in said.out
    assert "records: runs/quadratic-001" in said.out
    assert "page:    runs/quadratic-001/report.html" in said.out
    assert len(said.err.splitlines()) == 4
    assert "[4/4] " in said.err
    there = {path.name for path in Path("runs/quadratic-001").iterdir()}
    assert there == {"fmb-seed0", "fmb-seed1", "amb-seed0", "amb-seed1", "experiment.toml", "report.html"}


@pytest.mark.parametrize("until", [Samples(200), Seconds(20.0)])
def test_the_bar_advances_by_the_share_of_a_run_that_is_done(until: Budget) -> None:
    drawn: list[tuple[str, float]] = []

    class Recorder(Progress):
        def step(self, text: str, done: float, total: float | None = 1.0) -> None:
            assert total == 2.0
            drawn.append((text, done))

    runs = RunProgress(Recorder(quiet=True), 2)
    experiment = Experiment(Quadratic(), FixedMinibatch(), until=until, seed=4)
    share = share_done(experiment, Update(10.0, 0, 1, 1, 100, 100, 0.1, ()))
    runs.share(0, share, "fmb, seed 4")
    runs.ended(0, summarize(a_small_run()))
    runs.share(1, share, "fmb, seed 4")
    assert drawn == [("fmb, seed 4 (1 of 2)", 0.5), ("1 of 2 runs", 1.0), ("fmb, seed 4 (2 of 2)", 1.5)]


@pytest.mark.parametrize("quiet", [True, False])
def test_runs_that_overlap_are_summed_and_lines_are_printed_unless_quiet(
    quiet: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with show_progress(quiet) as progress:
        runs = RunProgress(progress, 2)
        runs.share(1, 0.25)
        runs.ended(0, summarize(a_small_run()))
    assert re.fullmatch("" if quiet else r"\[1/2\] fmb, seed \d+: .*\n", capsys.readouterr().err)


def test_json_is_one_object_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "quadratic", "fmb", "amb", "--json", "--quiet", "--no-report", *QUICK]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    result = json.loads(said.out)
    assert [run["strategy"] for run in result["runs"]] == ["fmb", "amb"]
    assert [run["directory"] for run in result["runs"]] == [
        f"runs/quadratic-001/{name}-seed0" for name in ("fmb", "amb")
    ]
    assert result["baseline"] == "fmb"
    assert not Path("runs/quadratic-001/report.html").exists()


def test_each_command_gets_the_next_free_number() -> None:
    Path("runs/quadratic-004").mkdir(parents=True)
    assert main(["simulate", "quadratic", "fmb", "--no-report", *QUICK]) == 0
    assert Path("runs/quadratic-005/fmb-seed0/records.jsonl").exists()


def test_what_was_run_can_be_run_again_from_its_experiment_file() -> None:
    argv = [
        "quadratic",
        "fmb",
        "amb",
        "amb",
        "amb-2.seconds=1",
        "--straggle",
        "niagara",
        "--lr",
        "0.05",
        "--seeds",
        "1,2",
    ]
    assert main(["simulate", *argv, "--out", "first", "--no-report", *QUICK]) == 0
    assert main(["compare", "first/experiment.toml", "--out", "second", "--no-report"]) == 0
    assert (Path("first/experiment.toml").read_text()) == Path("second/experiment.toml").read_text()
    runs = sorted(path.name for path in Path("first").iterdir() if path.is_dir())
    assert len(runs) == 6
    for run, file in itertools.product(runs, ("run.json", "records.jsonl")):
        assert (Path("first") / run / file).read_bytes() == (Path("second") / run / file).read_bytes()


def test_in_compare_flags_replace_settings_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("e.toml").write_text('workload = "quadratic"\nstrategy = ["fmb", "amb"]\nseeds = 3\ncluster = "thin"\n')
    argv = ["--workers", "2", "--seed", "7", "--until", "1000", "--target", "loss:5", "--straggle", "niagara"]
    assert main(["compare", "e.toml", *argv, "--json", "--quiet", "--no-report", "--out", "o"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(run["workers"], run["seed"]) for run in result["runs"]] == [(2, 7), (2, 7)]
    assert result["target"] == {"metric": "loss", "value": 5.0}
    made = Plan.from_file("o/experiment.toml")
    assert made.cluster.link.latency_seconds == 0.05
    assert made.cluster.straggle.name == "mixture"


def test_overwrite_removes_runs_and_leaves_everything_else(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["simulate", "quadratic", "--no-report", "--out", "o", *QUICK]
    assert main([*argv, "fmb", "amb"]) == 0
    Path("o/amb-seed0/notes.txt").write_text("mine")
    Path("o/notes.txt").write_text("mine")
    assert main([*argv, "fmb", "--overwrite"]) == 0
    assert Path("o/fmb-seed0/run.json").exists()
    assert [path.name for path in Path("o/amb-seed0").iterdir()] == ["notes.txt"]
    assert Path("o/notes.txt").exists()


def test_overwrite_leaves_alone_what_only_looks_like_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["simulate", "quadratic", "fmb", "--no-report", *QUICK]
    assert main([*argv, "--out", "o/deeper"]) == 0
    Path("p/other").mkdir(parents=True)
    Path("p/other/run.json").write_text("{}")
    for out in ("o", "p"):
        assert main([*argv, "--out", out, "--overwrite"]) == 2
    assert Path("o/deeper/fmb-seed0/run.json").exists()
    assert Path("p/other/run.json").exists()


def test_a_failed_run_is_shown_and_makes_the_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    faults = "crash:1:1,crash:2:1,crash:3:1"
    assert main(["simulate", "quadratic", "fmb", "--faults", faults, "--quiet", "--out", "o", *QUICK]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("offbeat: fmb, seed 0, failed: every worker was lost")
    assert "records: o" in said.out
    assert Path("o/report.html").exists()


def test_without_matplotlib_everything_but_the_page_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["simulate", "quadratic", "fmb", "--quiet", *QUICK]) == 0
    said = capsys.readouterr()
    assert said.err == (
        "offbeat: no page was drawn: the report needs matplotlib, which is not installed; "
        "type: pip install 'offbeat[report]'\n"
    )
    assert "records:" in said.out
    assert "page:" not in said.out


def test_an_interrupt_is_one_line_that_names_the_finished_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate = parallel_simulations.simulate_experiment

    def interrupted(experiment: Any, *rest: Any, **named: Any) -> Any:
        if experiment.name == "amb":
            raise KeyboardInterrupt
        return simulate(experiment, *rest, **named)

    monkeypatch.setattr(parallel_simulations, "simulate_experiment", interrupted)
    assert main(["simulate", "quadratic", "fmb", "amb", "--jobs", "1", "--quiet", *QUICK]) == 130
    said = capsys.readouterr()
    assert said.err == "offbeat: interrupted; 1 of 2 runs were finished and are in runs/quadratic-001\n"


def test_a_killed_simulation_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(*_: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(parallel_simulations, "simulate_experiment", killed)
    assert main(["simulate", "quadratic", "fmb", "amb", "--jobs", "2", "--quiet", *QUICK]) == 1
    assert re.fullmatch(
        r"offbeat: the process that simulated \w+, seed 0 was killed, for want of memory perhaps; simulate fewer at a "
        r"time: --jobs 1\n",
        capsys.readouterr().err,
    )


def test_a_class_of_your_own_is_run_recorded_and_replayed(registers: None, capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from offbeat.core.configuration import option\n"
        "from offbeat.strategies.hub.hub_strategies import FixedMinibatch\n"
        "from offbeat.lab.workloads.synthetic import Quadratic\n"
        "@dataclass(frozen=True)\n"
        "class Mine(FixedMinibatch):\n"
        "    extra: int = option(1, 'nothing in particular')\n"
        "@dataclass(frozen=True)\n"
        "class Small(Quadratic, name='small'):\n"
        "    dimension: int = option(10, 'how many parameters')\n"
    )
    argv = ["own.py:Small", "fmb", "own.py:Mine", "Mine.extra=5", "small.noise=0.5", "--out", "o", "--no-report"]
    assert main(["simulate", *argv, *QUICK]) == 0
    assert 'name = "own.py:Mine"' in Path("o/experiment.toml").read_text()
    capsys.readouterr()
    assert main(["replay", "o/Mine-seed0"]) == 2
    assert capsys.readouterr().err == (
        "offbeat: o/Mine-seed0 names own.py:Mine, which would run that file as Python; if you trust it, add: --allow "
        "own.py\n"
    )
    assert main(["replay", "o/Mine-seed0", "--allow", "own.py"]) == 0
    assert main(["compare", "o/experiment.toml", "--out", "p", "--no-report"]) == 0
    assert Path("o/Mine-seed0/records.jsonl").read_bytes() == Path("p/Mine-seed0/records.jsonl").read_bytes()


# Reports, lists, replays


@pytest.mark.slow
def test_report_draws_the_page_beside_the_runs_or_at_the_given_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "quadratic", "fmb", "amb", "--no-report", "--quiet", "--out", "o", *QUICK]) == 0
    assert main(["report", "o"]) == 0
    assert main(["report", "o/fmb-seed0", "o/amb-seed0", "--out", "elsewhere/p.html", "--baseline", "amb"]) == 0
    assert "page: elsewhere/p.html" in capsys.readouterr().out
    assert Path("o/report.html").exists()
    assert Path("elsewhere/p.html").exists()


@pytest.mark.parametrize("command", ["strategies", "workloads", "clusters"])
def test_the_lists_name_everything_in_words_and_as_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 0
    shown = capsys.readouterr().out
    assert main([command, "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)[command]
    assert len(entries) >= 6
    assert all(entry["name"] in shown and entry["summary"] for entry in entries)
    name = entries[0]["name"]
    assert main([command, name]) == 0
    assert name in capsys.readouterr().out
    assert main([command, name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == entries[0]


def test_one_strategy_is_shown_with_its_fields_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategies", "async-timed"]) == 0
    shown = capsys.readouterr().out
    assert "Al-Lawati" in shown
    assert "--hub-seconds" in shown
    assert "seconds between updates" in shown


def test_replay_reports_identical_records_or_the_first_difference(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "quadratic", "async-timed", "--no-report", "--quiet", "--out", "o", *QUICK]) == 0
    capsys.readouterr()
    assert main(["replay", "o/async-timed-seed0"]) == 0
    assert capsys.readouterr().out.startswith("identical: ")
    records = Path("o/async-timed-seed0/records.jsonl")
    lines = records.read_bytes().splitlines(keepends=True)
    records.write_bytes(b"".join([*lines[:4], lines[5], *lines[5:]]))
    assert main(["replay", "o/async-timed-seed0"]) == 1
    assert "differs from line 5 on; on another machine" in capsys.readouterr().err
    header = Path("o/async-timed-seed0/run.json")
    header.write_text(header.read_text().replace('"torch": "', '"torch": "0.'))
    assert main(["replay", "o/async-timed-seed0"]) == 1
    assert "it was recorded with torch 0." in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [AssertionError("a sample was applied twice"), RunFailed("a sample was applied twice")]
)
def test_replay_of_a_seed_prints_the_violation(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from offbeat import testing

    asked: list[Any] = []

    def replay(*args: Any) -> None:
        asked.append(args)
        if args[1] == 4:
            raise error

    monkeypatch.setattr(testing, "replay", replay)
    assert main(["replay", "amb", "--seed", "3"]) == 0
    assert main(["replay", "amb", "--seed", "4", "--trace", "--no-faults"]) == 1
    assert asked == [("amb", 3, False, True), ("amb", 4, True, False)]
    assert capsys.readouterr().err == "offbeat: a sample was applied twice\n"


def test_a_workload_has_defaults_for_strategies_which_flags_and_settings_replace() -> None:
    words = ["shakespeare", "fmb", "async-fmb", "async-fmb.batch=32"]
    values: dict[str, dict[str, str]] = {group: {} for group in GROUPS}
    fmb, asynchronous = plan_of(words, values).strategies
    assert (fmb.batch, asynchronous.batch, asynchronous.staleness_free) == (16, 32, 0)
    fmb, asynchronous = plan_of(words, {**values, STRATEGY: {"batch": "8", "staleness_free": "2"}}).strategies
    assert (fmb.batch, asynchronous.batch, asynchronous.staleness_free) == (8, 32, 2)
    table = {"workload": "shakespeare", "strategy": ["fmb", {"name": "async-fmb", "batch": 8}]}
    fmb, asynchronous = Plan.from_plain(table, "plan.toml").strategies
    assert (fmb.batch, asynchronous.batch, asynchronous.staleness_free) == (16, 8, 0)
