"""`train`, `launch` and `work` as commands: what they hand on, and one sentence for each mistake. No run is started."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from made_records import a_small_run, header

from offbeat.cli import flags, main, train_command, worker_process
from offbeat.cli.live_view import RunWatcher
from offbeat.core.strategy import EverySeconds, EveryUpdates, Strategy
from offbeat.core.workload import NamedWorkload
from offbeat.engine.experiment import Experiment
from offbeat.errors import RunFailed
from offbeat.lab.experiment_plan import Plan
from offbeat.launch.rank_info import RankInfo
from offbeat.live.session_options import LiveOptions
from offbeat.records.files import LIVE, RANK_RECORDS, write_header
from offbeat.records.schema import Notice, RunRecords

QUADRATIC = ["train", "quadratic", "fmb"]
SECRET = b"a secret of enough characters"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Runs:
    """Stands in for `train_experiment`: keeps what it was given, and does what a test asks for."""

    def __init__(self) -> None:
        self.experiments: list[Experiment] = []
        self.lives: list[LiveOptions] = []
        self.resumed: list[bool] = []
        self.tracks: list[Any] = []
        self.raises: BaseException | None = None

    def __call__(
        self, experiment: Experiment, out: Path, live: LiveOptions, watcher: Any, resume: bool = False, track: Any = ()
    ) -> Any:
        self.experiments.append(experiment)
        self.tracks.append(track)
        self.lives.append(live)
        self.resumed.append(resume)
        if self.raises is not None:
            write_header(out, header(experiment.name, experiment.seed, engine="live"))
            raise self.raises
        watcher.records([Notice(0.0, 0, "something to read")])
        records = a_small_run(label=experiment.name, seed=experiment.seed, directory=out, workers=experiment.workers)
        return type("Made", (), {"records": records})


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    made = Runs()
    monkeypatch.setattr(train_command, "train_experiment", made)
    return made


# train


def test_each_strategy_and_seed_is_a_live_run_and_they_are_compared(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["fmb", "amb", "--seeds", "2", "--workers", "3", "--no-report", "--until", "10s"]
    assert main(["train", "quadratic", *argv]) == 0
    assert runs.tracks == [()] * 4
    said = capsys.readouterr()
    assert [(run.name, run.seed) for run in runs.experiments] == [("fmb", 0), ("amb", 0), ("fmb", 1), ("amb", 1)]
    assert "speed-up" in said.out
    assert "offbeat: [1/4] fmb, seed 0: something to read" in said.err
    assert "  worker 3: 0 samples" in said.err
    assert "To repeat it: offbeat train THIS-FILE" in Path("runs/quadratic-001/experiment.toml").read_text()


def test_what_is_left_open_suits_real_processes(runs: Runs) -> None:
    assert main([*QUADRATIC, "--no-report"]) == 0
    (experiment,) = runs.experiments
    assert experiment.workers == min(4, os.cpu_count() or 1)
    assert experiment.evaluate == EverySeconds(0.5)
    assert runs.lives == [LiveOptions()]


def test_flags_about_processes_reach_the_run(runs: Runs) -> None:
    argv = ["--restarts", "1", "--checkpoint-seconds", "none", "--checksum", "--silence-seconds", "3", "--faults"]
    listen = ["--listen", "127.0.0.1:0", "--local-workers", "1"]
    assert main([*QUADRATIC, "--no-report", *listen, *argv, "crash:1:2", "--workers", "2"]) == 0
    asked = LiveOptions(
        listen="127.0.0.1:0",
        local_workers=1,
        checkpoint_seconds=None,
        restarts=1,
        checksum=True,
    )
    assert runs.lives == [asked]
    assert runs.experiments[0].cluster.silence_seconds == 3.0


def test_json_is_one_object_and_nothing_else(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUADRATIC, "--json", "--quiet", "--no-report"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert [run["strategy"] for run in json.loads(said.out)["runs"]] == ["fmb"]


def test_an_experiment_file_runs_live_as_it_runs_in_virtual_time(runs: Runs) -> None:
    Path("e.toml").write_text('workload = "quadratic"\nstrategy = ["fmb", "amb"]\nevaluate = "updates:3"\n')
    assert main(["train", "e.toml", "--seed", "7", "--no-report", "--out", "o"]) == 0
    assert [(run.name, run.seed, run.evaluate) for run in runs.experiments] == [
        ("fmb", 7, EveryUpdates(3)),
        ("amb", 7, EveryUpdates(3)),
    ]
    assert runs.experiments[0].workers == flags.live_defaults()["workers"]
    assert Plan.from_file("o/experiment.toml").seeds == (7,)


def test_a_run_that_fails_is_one_of_the_runs_and_makes_the_exit_code_1(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.raises = RunFailed("the hub was killed by SIGKILL")
    assert main(["train", "quadratic", "fmb", "amb", "--no-report", "--quiet"]) == 1
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        "offbeat: fmb, seed 0, failed: the hub was killed by SIGKILL",
        "offbeat: amb, seed 0, failed: the hub was killed by SIGKILL",
    ]
    assert "records: runs/quadratic-001" in said.out


def test_an_interrupt_prints_how_to_resume(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.raises = KeyboardInterrupt()
    kept = "offbeat: interrupted; 0 of 1 runs were finished and are in runs/quadratic-00"
    assert main([*QUADRATIC, "--quiet"]) == 130
    assert capsys.readouterr().err == f"{kept}1\n"
    monkeypatch.setattr(train_command, "has_checkpoint", lambda directory: True)
    assert main([*QUADRATIC, "--quiet"]) == 130
    assert capsys.readouterr().err == (
        f"{kept}2; to continue this run type: offbeat train --resume runs/quadratic-002/fmb-seed0\n"
    )


# train --resume


def a_run(directory: str, engine: str = "live", **changed: Any) -> Path:
    experiment = Experiment(NamedWorkload.members["quadratic"](), Strategy.members["fmb"](), workers=2, label="fmb")
    place = Path(directory)
    write_header(place, header(engine=engine, **{"experiment": experiment.to_plain(), **changed}))
    (place / LIVE).write_text('{"restarts": 1, "checksum": true}')
    (place / "records-0.jsonl").write_text("")
    assert RANK_RECORDS.fullmatch("records-0.jsonl")
    return place


def test_resume_goes_on_with_one_run_as_it_was(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    a_run("o/fmb-seed0")
    assert main(["train", "--resume", "o/fmb-seed0", "--until", "90s", "--restarts", "5", "--no-report"]) == 0
    assert runs.resumed == [True]
    assert runs.lives == [LiveOptions(restarts=5, checksum=True)]
    assert (runs.experiments[0].workers, str(runs.experiments[0].until)) == (
        2,
        "Seconds(seconds=90.0, samples_max=None)",
    )
    assert "records: o/fmb-seed0" in capsys.readouterr().out


# launch and work, and what they refuse


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["train"], "neither a workload nor a strategy is named"),
        (["train", "quadratic"], "no strategy is named"),
        (["train", "none.toml"], "the experiment file none.toml cannot be read"),
        (["train", "e.toml", "fmb"], "e.toml describes the whole experiment, so 'fmb' is one word too many"),
        (["train", "e.toml", "--batch", "3"], "--batch does not go with an experiment file; write it into e.toml"),
        ([*QUADRATIC, "--faults", "partition:1:3:4"], "the fault 'partition' can only be simulated"),
        ([*QUADRATIC, "--faults", "crash:2:3", "--workers", "2", "--local-workers", "1"], "is not started here"),
        ([*QUADRATIC, "--restarts", "-1"], "--restarts must be 0 or more, but is -1"),
        ([*QUADRATIC, "--local-workers", "x"], "--local-workers is a whole number, but 'x' was given"),
        ([*QUADRATIC, "--seconds-per-sample", "1"], "unknown option '--seconds-per-sample'"),
        ([*QUADRATIC, "--transport", "mpx"], "unknown transport 'mpx'; did you mean 'mpi'?"),
        ([*QUADRATIC, "--transport", "mpi", "--listen", "h:1"], "--listen does not go with --transport mpi"),
        ([*QUADRATIC, "--threads", "0"], "--threads must be greater than 0, but is 0"),
        (["train", "--resume", "/nowhere"], "there is no run at /nowhere"),
        (["train", "--resume", "many"], "many holds 2 runs; name one of them: --resume many/a"),
        (["train", "--resume", "many/a", "fmb"], "--resume takes workload and strategy from the run; leave out fmb"),
        (["train", "--resume", "many/a", "--out", "o"], "leave out --out"),
        (["train", "--resume", "many/a", "--workers", "3"], "--workers cannot be changed on --resume; --until can"),
        (["train", "--resume", "simulated"], "simulated was simulated; to repeat it type: offbeat replay"),
        (["train", "--resume", "unnamed"], "trained a workload or strategy without a name; resume it"),
        (["launch"], "no script is named; type, for example: offbeat launch -n 4 train.py"),
        (["launch", "-n", "4"], "no script is named"),
        (["launch", "-n", "4", "none.py"], "there is no script none.py"),
        (["launch", "script.py", "-n", "4"], "-n says how many processes to start"),
        (["launch", "-n", "0", "script.py"], "-n must be 1 or more, but is 0"),
        (["launch", "-n", "x", "script.py"], "-n is a whole number, but 'x' was given"),
        (["launch", "-n", "2", "--restarts", "-1", "script.py"], "--restarts must be 0 or more, but is -1"),
        (["launch", "-n", "2", "--listen", "0.0.0.0:0", "script.py"], "lets other machines in, which needs a token"),
        (["launch", "-n", "2", "--listen", "here", "script.py"], "'here' is not an address; type HOST:PORT"),
        (["launch", "-n", "2", "--token-file", "none", "script.py"], "the token file none cannot be read"),
        (["launch", "-n", "2", "--resume", "none", "script.py"], "there is no run at none to continue"),
        (["launch", "-n", "2", "--resume", "a", "--out", "b", "script.py"], "leave out --out"),
        (["launch", "-n", "2", "--out", "many", "script.py"], "many already holds 2 runs"),
        (["launch", "-n", "2", "--transport", "mpx", "script.py"], "unknown transport 'mpx'; did you mean 'mpi'?"),
        (["launch", "-n", "2", "--transport", "mpi", "--restarts", "1", "script.py"], "--restarts does not go with"),
        (["launch", "-n", "2", "--wrong", "1", "script.py"], "unknown option '--wrong'"),
        (["work"], "offbeat work needs HOST:PORT"),
        (["work", "here"], "'here' is not an address; type HOST:PORT"),
        (["work", "127.0.0.1:1", "none.py"], "there is no script none.py"),
        (["work", "127.0.0.1:1", "--wait", "soon"], "--wait is a number, but 'soon' was given"),
        (["work", "127.0.0.1:1", "--threads", "0"], "--threads must be 1 or more, but is 0"),
        (["work", "127.0.0.1:1", "none.py", "--threads", "2"], "there is no script none.py"),
        (["work", "127.0.0.1:1", "--token-file", "none"], "the token file none cannot be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_answered_by_one_sentence(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("e.toml").write_text('workload = "quadratic"\nstrategy = "fmb"\n')
    Path("script.py").write_text("")
    a_run("many/a")
    a_run("many/b")
    a_run("simulated", engine="simulated")
    a_run("unnamed", experiment=None)
    assert main(argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("offbeat: ")
    assert said.err.count("\n") == 1
    assert sentence in said.err
    assert not Path("runs").exists()


def test_a_port_in_use_is_reported_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    Path("script.py").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["launch", "-n", "2", "--listen", f"127.0.0.1:{port}", "script.py"]) == 2
    assert capsys.readouterr().err == (
        f"offbeat: port {port} of 127.0.0.1 is taken; choose another, or 0 for any that is free\n"
    )


def test_work_where_nothing_answers_gives_up_with_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert main(["work", f"127.0.0.1:{port}", "--wait", "0"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"offbeat: nothing answers at 127.0.0.1:{port}")
    assert said.count("\n") == 1


def test_work_with_a_script_becomes_that_script_under_the_rank_it_was_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from offbeat.cli import launch_commands
    from offbeat.transports.rendezvous import Assignment

    asked: dict[str, Any] = {}
    became: list[Any] = []

    def assignment(address: Any, credentials: Any, **options: Any) -> Assignment:
        asked.update(options, address=str(address), token=credentials.token)
        return Assignment(3, 4, 1.0, None)

    def become(*program: Any) -> None:
        became.extend(program)
        raise SystemExit(0)

    monkeypatch.setattr(launch_commands, "request_assignment", assignment)
    monkeypatch.setattr(os, "execve", become)
    Path("script.py").write_text("")
    Path("token").write_bytes(SECRET)
    Path("token").chmod(0o600)
    with pytest.raises(SystemExit):
        main(["work", "10.0.0.1:7", "--token-file", "token", "--wait", "5", "script.py", "--wait", "x"])
    member = asked.pop("member")
    assert asked == {
        "address": "10.0.0.1:7",
        "token": SECRET,
        "rank": None,
        "wait_seconds": 5.0,
    }
    assert became[:2] == [sys.executable, [sys.executable, "script.py", "--wait", "x"]]
    seen = {name: became[2][name] for name in ("OFFBEAT_RANK", "OFFBEAT_PROCESSES", "OFFBEAT_ADDRESS", "OFFBEAT_TOKEN")}
    assert list(seen.values()) == ["3", "4", "10.0.0.1:7", SECRET.hex()]
    assert became[2]["OFFBEAT_MEMBER"] == member
    assert capsys.readouterr().err == "offbeat: joining the run at 10.0.0.1:7 as rank 3\n"


# One process of a run


def test_a_worker_process_loads_the_classes_of_the_run_and_runs_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []

    def worker_main(directory: Path, place: Any) -> int:
        taken.extend([directory, place.rank])
        return 7

    monkeypatch.setattr("offbeat.lab.worker_main.worker_main", worker_main)
    monkeypatch.setenv("OFFBEAT_RANK", "0")
    monkeypatch.setenv("OFFBEAT_PROCESSES", "2")
    assert worker_process.run_worker(a_run("o")) == 7
    assert taken == [Path("o"), 0]


def test_records_of_a_run_that_failed_before_anybody_wrote_any(runs: Runs) -> None:
    runs.raises = RunFailed("worker 1: ValueError: there is no x")
    experiment = Experiment(NamedWorkload.members["quadratic"](), Strategy.members["fmb"](), workers=2)
    run: RunRecords = train_command.run_recorded(experiment, Path("o"), LiveOptions(), RunWatcher(str), RankInfo())
    assert [getattr(record, "failure", None) for record in run.records] == ["worker 1: ValueError: there is no x"]
