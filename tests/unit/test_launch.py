"""Child processes: how they are started, read and ended; and `offbeat launch` with scripts that do not use offbeat."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch
from made_records import a_round

import offbeat as ob
from offbeat.cli import ARGUMENTS_BEFORE_SCRIPT, BOOLEAN_FLAGS, _separate_script, application, main
from offbeat.errors import ConfigurationError, ContractViolation, RunFailed
from offbeat.lab.live_runs import _truncate_records, workers_for_processes
from offbeat.launch.children import Child, start_command, start_forked
from offbeat.launch.failure_reports import (
    OUT_OF_MEMORY,
    SENTENCE_CHARACTERS_MAX,
    FailureKind,
    FailureReport,
    find_pipe,
    report_of,
)
from offbeat.launch.run_monitor import RunMonitor
from offbeat.live.clock import Clock
from offbeat.live.rank_allocator import RankAllocator
from offbeat.live.session_options import LiveOptions
from offbeat.records.files import RankWriter, rank_file, read_rank
from offbeat.records.schema import Notice
from offbeat.transports.rendezvous import Assignment, CallRequest

Lines = list[tuple[int, str]]


def start(script: str, lines: Lines, **options: object) -> Child:
    argv = [sys.executable, "-I", "-S", "-c", script]
    settings: dict[str, object] = {"rank": 1, "incarnation": 0, "environment": {}, **options}
    return start_command(argv, on_line=lambda *line: lines.append(line), **settings)  # type: ignore[arg-type]


# Programs


def test_a_child_has_its_environment_one_thread_and_a_session_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("INHERITED", "a")
    lines: Lines = []
    script = "import os; e = os.environ; print(e['MINE'], e['INHERITED'], e['OMP_NUM_THREADS'], os.getsid(0))"
    child = start(script, lines, environment={"MINE": "b"})
    assert child.wait() == 0
    assert lines == [(1, f"b a 1 {child.pid}")]


def test_a_number_of_threads_set_by_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    lines: Lines = []
    start("import os; print(os.environ['OMP_NUM_THREADS'])", lines).wait()
    assert lines == [(1, "3")]


def test_a_listener_is_passed_to_the_child_and_closed_here() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address, lines = listener.getsockname(), Lines()
    script = (
        "import os, socket\n"
        "listener = socket.socket(fileno=int(os.environ['OFFBEAT_LISTENER']))\n"
        "client, _ = listener.accept()\n"
        "client.sendall(b'welcome')\n"
    )
    child = start(script, lines, listener=listener, rank=0)
    assert listener.fileno() == -1
    with socket.create_connection(address) as client:
        assert client.recv(7) == b"welcome"
    assert child.wait() == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_processes_that_a_child_has_started_end_with_it() -> None:
    """Even if the child is killed and cannot end them itself."""
    lines: Lines = []
    script = (
        "import os, signal\n"
        "pid = os.fork() or signal.pause()\n"
        "os.write(1, f'{pid}\\n'.encode())\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert start(script, lines).wait() == -signal.SIGKILL
    (pid,) = [int(text) for _, text in lines]
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([watched], [], [], 30)[0]
    os.close(watched)


def test_a_signal_to_a_child_that_has_ended_is_not_sent() -> None:
    child = start("pass", [])
    assert child.wait() == 0
    child.kill(signal.SIGKILL)
    assert child.poll() == 0


def test_lines_that_are_not_utf_8_are_shown_with_replacement_characters() -> None:
    lines: Lines = []
    start("import os; os.write(2, b'\\xff\\nno end of line')", lines).wait()
    assert lines == [(1, "\ufffd"), (1, "no end of line")]


# Forked copies of this process


def forked(function: object, lines: Lines, **options: object) -> Child:
    settings: dict[str, object] = {"rank": 2, "incarnation": 0, "environment": {"MINE": "b"}, **options}
    return start_forked(function, on_line=lambda *line: lines.append(line), **settings)  # type: ignore[arg-type]


def test_a_function_runs_in_a_forked_copy_and_returns_its_exit_code() -> None:
    lines, here = Lines(), {"secret": 17}

    def function() -> int:
        print("out", here["secret"], os.environ["MINE"], os.getsid(0) == os.getpid())
        return 5

    assert forked(function, lines).wait() == 5
    assert lines == [(2, "out 17 b True")]
    assert "MINE" not in os.environ


@pytest.mark.parametrize(
    ("error", "code", "kind", "reason"),
    [
        (ConfigurationError("the model\nis another one"), 2, FailureKind.CONFIGURATION, "the model is another one"),
        (RunFailed("no worker is left"), 1, FailureKind.RUN_FAILED, "no worker is left"),
        (ContractViolation("two rounds at once"), 1, FailureKind.CONTRACT, "two rounds at once"),
        (ValueError("there is no x\nof this"), 1, FailureKind.OTHER, "ValueError: there is no x"),
        (KeyboardInterrupt(), 130, None, None),
        (SystemExit(4), 4, None, None),
    ],
)
def test_a_function_that_fails_reports_it_as_a_program_does(
    error: BaseException, code: int, kind: FailureKind | None, reason: str | None
) -> None:
    def function() -> int:
        raise error

    lines: Lines = []
    child = forked(function, lines)
    assert (child.wait(), child.failure_reason()) == (code, reason)
    assert (None if child.report is None else child.report.kind) == kind
    assert bool(lines) == (kind is FailureKind.OTHER)  # its traceback


# Reports of failures

HOOKED = """
from offbeat.launch.failure_reports import report_uncaught
from offbeat.launch.rank_info import read_report_pipe
report_uncaught(read_report_pipe())
report_uncaught(read_report_pipe())
"""


def hooked(script: str, lines: Lines) -> Child:
    """A program that uses offbeat, and then runs `script`."""
    argv = [sys.executable, "-c", HOOKED + script]
    return start_command(argv, rank=1, incarnation=0, environment={}, on_line=lambda *line: lines.append(line))


def test_an_exception_that_nothing_catches_is_reported_and_its_traceback_printed() -> None:
    lines: Lines = []
    child = hooked("from offbeat.errors import ConfigurationError\nraise ConfigurationError('no\\nmodel')", lines)
    assert child.wait() == 1
    assert child.report == FailureReport(FailureKind.CONFIGURATION, "no model")
    assert lines[0] == (1, "Traceback (most recent call last):")


def test_a_process_that_the_child_has_started_does_not_report_for_it() -> None:
    forks = "import os\nif os.fork() == 0: raise ValueError('of the copy')\nos.wait(); os._exit(3)"
    runs = (
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import os; print(os.environ[\"OFFBEAT_REPORT\"]);'\n"
        "    'from offbeat.launch.rank_info import read_report_pipe; print(read_report_pipe())'])\n"
        "sys.exit(3)"
    )
    for script in (forks, runs):
        lines: Lines = []
        child = hooked(script, lines)
        assert (child.wait(), child.report) == (3, None)
    assert lines[-1] == (1, "None")


def test_a_pipe_is_recognised_by_its_identity_and_not_by_its_number() -> None:
    reading, writing = os.pipe()
    inode = os.fstat(writing).st_ino
    try:
        assert find_pipe(f"{writing}:{inode}") == writing
        assert find_pipe(f"{writing}:{inode + 1}") is None
        assert [find_pipe(text) for text in ("", "3", "a:b", f"-1:{inode}")] == [None] * 4
    finally:
        os.close(reading)
        os.close(writing)


def test_a_report_of_any_length_reaches_the_launcher() -> None:
    def function() -> int:
        raise RunFailed("ä" * 100_000)

    child = forked(function, [])
    assert child.wait() == 1
    assert child.report == FailureReport(FailureKind.RUN_FAILED, "ä" * SENTENCE_CHARACTERS_MAX)


def test_the_line_that_names_an_exception_has_no_line_breaks_and_is_never_empty() -> None:
    class Silent(Exception):
        pass

    error: BaseException
    for error, line in ((ValueError("a\nb"), "ValueError: a"), (ValueError(), "ValueError"), (OSError(2, "x"), None)):
        assert report_of(error).sentence == (line or "FileNotFoundError: [Errno 2] x")
    assert report_of(Silent()).sentence.endswith("Silent")
    assert report_of(SyntaxError("bad", ("file.py", 1, 1, "x x"))).sentence == "SyntaxError: bad"


# Ranks of runs with a hub, and of peers


def test_rank_0_is_always_started_here() -> None:
    assert LiveOptions(local_workers=0).local_ranks(ob.FixedMinibatch(), 4) == [0]
    assert LiveOptions(local_workers=2).local_ranks(ob.FixedMinibatch(), 4) == [0, 1, 2]
    assert LiveOptions(local_workers=2).local_ranks(ob.Gossip(), 4) == [0, 1]
    assert LiveOptions(local_workers=None).local_ranks(ob.Gossip(), 4) == [0, 1, 2, 3]
    with pytest.raises(ConfigurationError, match="--local-workers must be 1 or more"):
        LiveOptions(local_workers=0).local_ranks(ob.Gossip(), 4)


def test_among_peers_there_are_as_many_workers_as_processes() -> None:
    assert (workers_for_processes(ob.FixedMinibatch(), 4), workers_for_processes(ob.Gossip(), 4)) == (3, 4)
    powers = ob.Gossip(graph=ob.graphs.ExponentialGraph())
    assert [workers_for_processes(powers, processes) for processes in (1, 2, 8)] == [1, 2, 8]
    with pytest.raises(ConfigurationError, match="take 4 or 8 of them"):
        workers_for_processes(powers, 6)


def rank_allocator(is_elastic: bool) -> RankAllocator:
    return RankAllocator(3, (0, 1, 2), frozenset({1}), Clock().now, None, is_elastic, "all ranks are in use")


def test_rank_0_is_never_assigned() -> None:
    request = CallRequest("assignment", None, "member")
    assignment = rank_allocator(is_elastic=False)(request)
    assert isinstance(assignment, Assignment)
    assert assignment.rank == 2


def test_when_all_ranks_are_in_use_only_an_elastic_run_assigns_more() -> None:
    fixed, elastic = rank_allocator(is_elastic=False), rank_allocator(is_elastic=True)
    for each in (fixed, elastic):
        each.linked = lambda: frozenset({1, 2})
    assert fixed(CallRequest("assignment", None, "member")) == "all ranks are in use"
    assignment = elastic(CallRequest("assignment", None, "member"))
    assert isinstance(assignment, Assignment)
    assert assignment.rank == 3


def test_peers_that_resume_from_a_checkpoint_drop_later_records(tmp_path: Path) -> None:
    for rank in range(2):
        with RankWriter(tmp_path, rank) as writer:
            for at in (1.0, 2.0, 3.0):
                writer.write(Notice(at, rank, "done"))
    with rank_file(tmp_path, 1).open("ab") as file:
        file.write(b'{"record":"notice","at":1.5')  # its process was killed
    _truncate_records(tmp_path, 2.5)
    assert [[record.at for record in read_rank(tmp_path, rank)] for rank in range(2)] == [[1.0, 2.0, 3.0], [1.0, 2.0]]


def test_a_monitor_knows_when_the_run_began_and_which_ranks_have_computed(tmp_path: Path) -> None:
    class Observer:
        def records(self, records: object) -> None: ...
        def say(self, sentence: str) -> None: ...
        def line(self, rank: int, text: str) -> None: ...

    monitor = RunMonitor(tmp_path, Observer())
    monitor()
    assert monitor.began is None
    now = time.monotonic()
    with RankWriter(tmp_path, 0) as writer:
        for at in (5.0, 3.0):  # the later one was written later after its time
            writer.write(a_round(0, at - 1.0, 1.0))
            monitor()
    assert monitor.began is not None
    assert now - 5.0 <= monitor.began <= time.monotonic() - 5.0
    assert [monitor.has_joined(rank) for rank in range(2)] == [True, False]
    assert monitor.rounds == {0: 2}


# `offbeat launch` and `offbeat work`


@pytest.mark.parametrize(
    ("argv", "separated"),
    [
        ("launch -n 4 train.py --out here", "launch -n 4 -- train.py --out here"),
        ("launch -n=4 --quiet --out o train.py -n 3", "launch -n=4 --quiet --out o -- train.py -n 3"),
        ("launch -n 4 -- train.py", "launch -n 4 -- train.py"),
        ("launch train.py -n 4", "launch -- train.py -n 4"),
        ("launch -n", "launch -n"),
        ("work h:1 --token-file f", "work h:1 --token-file f"),
        ("work h:1 --token-file f train.py --wait 3", "work h:1 --token-file f -- train.py --wait 3"),
        ("work --wait 3 h:1 train.py", "work --wait 3 h:1 -- train.py"),
        ("simulate digits fmb --workers 3", "simulate digits fmb --workers 3"),
        ("", ""),
    ],
)
def test_arguments_after_the_script_are_passed_to_the_script(argv: str, separated: str) -> None:
    assert _separate_script(argv.split()) == separated.split()


@pytest.mark.parametrize("command", list(ARGUMENTS_BEFORE_SCRIPT))
def test_the_options_without_a_value_are_known_before_anything_is_parsed(command: str) -> None:
    arguments = application()[command].assemble_argument_collection(parse_docstring=False)
    flags = {name for argument in arguments if argument.hint is bool for name in argument.names}
    assert flags == ({"--overwrite", "--quiet"} if command == "launch" else set())
    assert flags <= set(BOOLEAN_FLAGS)


@pytest.fixture
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_elsewhere")
def test_launch_starts_a_script_several_times_and_each_process_knows_its_rank(
    capfd: pytest.CaptureFixture[str],
) -> None:
    Path("script.py").write_text(
        "import os, sys\n"
        "os.write(1, f\"{os.environ['OFFBEAT_RANK']} of {os.environ['OFFBEAT_PROCESSES']} {sys.argv[1:]}\\n\".encode())"
    )
    assert main(["launch", "-n", "3", "--restarts", "0", "script.py", "--out", "x"]) == 0
    output = capfd.readouterr()
    assert sorted(output.out.splitlines()) == [f"{rank} of 3 ['--out', 'x']" for rank in range(3)]
    assert output.err == ""
    assert not list(Path("runs").iterdir())


@pytest.mark.usefixtures("_elsewhere")
def test_a_script_that_raises_fails_the_run_and_its_traceback_is_shown_with_the_rank(
    capfd: pytest.CaptureFixture[str],
) -> None:
    Path("script.py").write_text(
        "import os, signal\n"
        "if os.environ['OFFBEAT_RANK'] == '1':\n"
        "    raise ValueError('there is no x')\n"
        "signal.pause()\n"
    )
    assert main(["launch", "-n", "3", "script.py"]) == 1
    *traceback, sentence = capfd.readouterr().err.splitlines()
    assert sentence == "offbeat: rank 1: ValueError: there is no x"
    assert traceback[0] == "[rank 1] Traceback (most recent call last):"
    assert all(line.startswith("[rank 1] ") for line in traceback)


@pytest.mark.usefixtures("_elsewhere")
def test_a_script_that_reports_its_failure_ends_with_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    report = msgspec.json.encode(FailureReport(FailureKind.RUN_FAILED, "the disk is full"))
    Path("script.py").write_text(
        "import os, signal, sys\n"
        "if os.environ['OFFBEAT_RANK'] == '0':\n"
        f"    os.write(int(os.environ['OFFBEAT_REPORT'].split(':')[0]), {report!r})\n"
        "    sys.exit(1)\n"
        "signal.pause()\n"
    )
    assert main(["launch", "-n", "2", "script.py"]) == 1
    assert capfd.readouterr().err == "offbeat: the disk is full\n"


@pytest.mark.usefixtures("_elsewhere")
def test_what_a_script_prints_is_shown_and_decides_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    Path("script.py").write_text(
        "import os, signal, sys\n"
        "if os.environ['OFFBEAT_RANK'] == '0': sys.exit('offbeat: the disk is full')\n"
        "signal.pause()\n"
    )
    assert main(["launch", "-n", "2", "script.py"]) == 1
    assert capfd.readouterr().err.splitlines() == [
        "[rank 0] offbeat: the disk is full",
        "offbeat: rank 0: offbeat: the disk is full",
    ]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=["Python", "a GPU", "torch"],
)
def test_a_process_that_runs_out_of_memory_says_so_in_a_sentence(error: BaseException) -> None:
    assert report_of(error).sentence == OUT_OF_MEMORY
    assert report_of(RuntimeError("shapes do not match")).sentence == "RuntimeError: shapes do not match"
