"""A supervisor of processes that end, are killed, raise, block and are interrupted; without torch, they start fast."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from offbeat.cluster.faults import Corrupt, Crash, Fault, Partition, Pause
from offbeat.errors import ConfigurationError
from offbeat.launch import supervisor
from offbeat.launch.children import Child, start_command
from offbeat.launch.failure_reports import FailureKind, FailureReport
from offbeat.launch.process_faults import check_faults
from offbeat.launch.process_settings import peer_name
from offbeat.launch.rank_processes import RankFacts
from offbeat.launch.run_failure import Cause, Exited, Killed, Reported, RunFailure
from offbeat.launch.supervisor import Supervisor, SupervisorOptions, backoff_seconds

KILL_YOURSELF = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
RAISE = "raise ValueError('there is no x')"
FOREVER = "import signal; signal.pause()"
QUIT = "pass"
HUB = "exec(open({!r}).read())"


def reports(kind: FailureKind, sentence: str, code: int = 1) -> str:
    """A program that fails as those of offbeat do; without offbeat, it starts fast."""
    line = msgspec.json.encode(FailureReport(kind, sentence))
    return f"import os\nos.write(int(os.environ['OFFBEAT_REPORT'].split(':')[0]), {line!r})\nos._exit({code})"


def sentence_of(failure: RunFailure | None) -> str | None:
    return None if failure is None else failure.sentence


class Processes:
    """The program of each rank in each incarnation, and what was started, printed and reported.

    Rank 0 reads its program from a pipe: `script`, which is written as soon as `when` holds.
    """

    def __init__(self, directory: Path, *lives: list[str], joined: bool = True) -> None:
        self.pipe = directory / "pipe"
        os.mkfifo(self.pipe)
        self.lives = [[HUB.format(str(self.pipe))], *lives]
        self.joined = joined
        self.sentences: list[str] = []
        self.lines: list[tuple[int, str]] = []
        self.children: dict[tuple[int, int], Child] = {}
        self.failure: RunFailure | None = None

    def run(
        self,
        when: Callable[[], bool],
        script: str = QUIT,
        restarts_max: int = 3,
        faults: tuple[Fault, ...] = (),
        grace_seconds: float = 0.05,
    ) -> str | None:
        """The sentence of the failure, if there is one; `failure` is the whole of it."""
        sent = False

        def tick() -> None:
            nonlocal sent
            sent = sent or (when() and self._send(script))

        self.failure = Supervisor(
            self._start,
            range(len(self.lives)),
            RankFacts(has_joined=lambda rank: self.joined),
            say=self.sentences.append,
            options=SupervisorOptions(restarts_max=restarts_max, faults=faults, grace_seconds=grace_seconds),
        ).run(tick)
        return sentence_of(self.failure)

    def _start(self, rank: int, incarnation: int) -> Child:
        script = self.lives[rank][min(incarnation, len(self.lives[rank]) - 1)]
        argv = [sys.executable, "-I", "-S", "-c", script]
        child = start_command(
            argv, rank=rank, incarnation=incarnation, environment={}, on_line=lambda *line: self.lines.append(line)
        )
        self.children[rank, incarnation] = child
        return child

    def _send(self, script: str) -> bool:
        try:
            pipe = os.open(self.pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:  # rank 0 has not opened it yet
                raise
            return False
        os.write(pipe, script.encode())
        os.close(pipe)
        return True

    def has(self, rank: int, incarnation: int) -> Callable[[], bool]:
        return lambda: (rank, incarnation) in self.children

    def printed(self, text: str) -> Callable[[], bool]:
        return lambda: text in [line for _, line in self.lines]

    def starts_of(self, rank: int) -> int:
        return sum(started == rank for started, _ in self.children)


def at_once() -> bool:
    return True


def never() -> bool:
    return False


# Ends


def test_the_run_is_over_when_rank_0_has_ended_and_the_others_have(tmp_path: Path) -> None:
    processes = Processes(tmp_path, [QUIT], [QUIT])
    assert processes.run(at_once, grace_seconds=60.0) is None  # they end by themselves, however slowly they start
    assert processes.sentences == []
    assert [child.poll() for child in processes.children.values()] == [0, 0, 0]


def test_processes_that_do_not_end_with_rank_0_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.launch.supervisor.TERM_SECONDS", 0.1)
    ignores_sigterm = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); signal.pause()"
    )
    processes = Processes(tmp_path, [FOREVER], [ignores_sigterm])
    supervisor = Supervisor(
        processes._start,
        range(3),
        RankFacts(has_joined=lambda rank: True),
        say=processes.sentences.append,
        options=SupervisorOptions(grace_seconds=0.1),
    )

    def tick() -> None:
        if processes.printed("ready")():
            processes._send(QUIT)

    assert supervisor.run(tick) is None
    assert [child.poll() for child in processes.children.values()] == [0, -signal.SIGTERM, -signal.SIGKILL]


def test_a_worker_that_ends_by_itself_is_not_restarted(tmp_path: Path) -> None:
    processes = Processes(tmp_path, [QUIT], [FOREVER])
    assert processes.run(lambda: processes.children[1, 0].poll() == 0) is None
    assert processes.sentences == []
    assert processes.starts_of(1) == 1


def test_all_ranks_are_killed_when_rank_0_is(tmp_path: Path) -> None:
    processes = Processes(tmp_path, [FOREVER])
    assert processes.run(at_once, KILL_YOURSELF) == "the hub was killed by SIGKILL"
    assert processes.children[1, 0].poll() == -signal.SIGKILL


DISK, DIVISION = "the disk is full", "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("script", "cause", "sentence"),
    [
        (reports(FailureKind.RUN_FAILED, DISK), Reported(FailureReport(FailureKind.RUN_FAILED, DISK)), DISK),
        (
            reports(FailureKind.OTHER, DIVISION),
            Reported(FailureReport(FailureKind.OTHER, DIVISION)),
            f"hub: {DIVISION}",
        ),
        (RAISE, Exited(1), "hub: ValueError: there is no x"),
        ("import sys; sys.exit(3)", Exited(3), "the hub ended with exit code 3 and without a message"),
        ("import sys; print('offbeat: a warning', file=sys.stderr); 1 / 0", Exited(1), f"hub: {DIVISION}"),
        ("raise ValueError('several\\nlines')", Exited(1), "hub: ValueError: several"),
        ("import sys; print('offbeat: ready', file=sys.stderr); sys.exit(4)", Exited(4), "hub: offbeat: ready"),
        (KILL_YOURSELF, Killed(signal.SIGKILL), "the hub was killed by SIGKILL"),
        (
            reports(FailureKind.RUN_FAILED, DISK).replace("os._exit(1)", KILL_YOURSELF),
            Killed(signal.SIGKILL),
            "the hub was killed by SIGKILL",
        ),
    ],
)
def test_a_failure_of_rank_0_fails_the_run_with_its_cause_and_its_error_sentence(
    script: str, cause: Cause, sentence: str, tmp_path: Path
) -> None:
    processes = Processes(tmp_path, [FOREVER])
    assert processes.run(at_once, script) == sentence
    assert processes.failure == RunFailure(0, cause, sentence)


# Restarts


def test_a_worker_that_is_killed_is_restarted(tmp_path: Path) -> None:
    processes = Processes(tmp_path, [KILL_YOURSELF, FOREVER], [FOREVER])
    assert processes.run(processes.has(1, 1)) is None
    assert processes.sentences == ["worker 1 was killed by SIGKILL; it is started again (1 of 3)"]
    assert (processes.starts_of(1), processes.starts_of(2)) == (2, 1)


def test_a_worker_that_fails_after_it_had_joined_is_restarted(tmp_path: Path) -> None:
    processes = Processes(tmp_path, [RAISE, FOREVER])
    assert processes.run(processes.has(1, 1)) is None
    assert processes.sentences == ["worker 1: ValueError: there is no x; it is started again (1 of 3)"]


def test_restarts_are_bounded_and_the_others_go_on(tmp_path: Path) -> None:
    processes = Processes(tmp_path, [KILL_YOURSELF], [FOREVER])
    last = "worker 1 was killed by SIGKILL, and it is not started again"
    assert processes.run(lambda: last in processes.sentences) is None
    assert processes.starts_of(1) == 4
    assert processes.starts_of(2) == 1


def test_restarts_are_forgiven_after_a_good_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FORGIVEN_SECONDS", 0.0)  # every process has run for as long as that
    processes = Processes(tmp_path, [KILL_YOURSELF], [FOREVER])
    assert processes.run(processes.has(1, 3), restarts_max=1) is None
    again = "worker 1 was killed by SIGKILL; it is started again (1 of 1)"
    assert processes.sentences[:3] == [again] * 3


def test_the_run_fails_when_no_worker_is_left(tmp_path: Path) -> None:
    processes = Processes(tmp_path, [KILL_YOURSELF])
    failure = processes.run(never, restarts_max=1)
    assert failure == "no process is left to compute: worker 1 was killed by SIGKILL"
    assert processes.failure is not None
    assert processes.failure.was_killed
    assert processes.starts_of(1) == 2


def test_the_wait_before_a_restart_doubles_up_to_ten_seconds() -> None:
    assert [backoff_seconds(restarts) for restarts in (0, 1, 2, 5)] == [0.2, 0.4, 0.8, 6.4]
    assert [backoff_seconds(restarts) for restarts in (6, 10**6)] == [10.0, 10.0]


def test_a_worker_that_raises_before_it_ever_joined_fails_the_run(tmp_path: Path) -> None:
    processes = Processes(tmp_path, [RAISE], [FOREVER], joined=False)
    assert processes.run(never) == "worker 1: ValueError: there is no x"
    assert all(child.poll() is not None for child in processes.children.values())
    assert processes.starts_of(1) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        reports(FailureKind.CONFIGURATION, "the model is another one", code=2),
        reports(FailureKind.CONFIGURATION, "the model is another one", code=1),  # a script, which raised it
        "import sys; print('the model is another one', file=sys.stderr); sys.exit(2)",
    ],
)
def test_a_configuration_error_of_a_worker_fails_the_run_even_after_it_had_joined(wrong: str, tmp_path: Path) -> None:
    processes = Processes(tmp_path, [wrong])
    assert processes.run(never) == "worker 1: the model is another one"
    assert processes.failure is not None
    assert processes.failure.is_configuration


# Runs without a required rank


class Peers(Processes):
    """All ranks are peers and have a pipe; `send` gives one a program, once it reads."""

    def __init__(self, directory: Path, count: int, joined: bool = True) -> None:
        super().__init__(directory, joined=joined)
        self.pipes = [directory / f"pipe {rank}" for rank in range(count)]
        for pipe in self.pipes:
            os.mkfifo(pipe)
        self.lives = [[HUB.format(str(pipe))] for pipe in self.pipes]
        self.rounds: dict[int, int] = {}
        self.gone: list[int] = []

    def run_steps(
        self, *steps: Callable[[], bool], restarts_max: int = 3, faults: tuple[Fault, ...] = ()
    ) -> str | None:
        """Call one step after the other, each until it returns True; until the run is over."""
        left = list(steps)

        def tick() -> None:
            while left and left[0]():
                left.pop(0)

        failure = Supervisor(
            self._start,
            range(len(self.lives)),
            RankFacts(
                has_joined=lambda rank: self.joined,
                rounds=lambda rank: self.rounds.get(rank, 0),
                is_required=lambda rank: False,
                name=peer_name,
            ),
            say=self.sentences.append,
            on_gone=self.gone.append,
            options=SupervisorOptions(restarts_max=restarts_max, faults=faults, grace_seconds=0.05),
        ).run(tick)
        assert not left
        return sentence_of(failure)

    def send(self, rank: int, script: str) -> Callable[[], bool]:
        def is_sent() -> bool:
            self.pipe = self.pipes[rank]
            return self._send(script)

        return is_sent

    def ended(self, rank: int, incarnation: int = 0) -> Callable[[], bool]:
        return lambda: self.children[rank, incarnation].poll() is not None


def test_a_run_of_peers_is_over_when_all_have_ended(tmp_path: Path) -> None:
    processes = Peers(tmp_path, 3)
    steps = [step for rank in (0, 2, 1) for step in (processes.send(rank, QUIT), processes.ended(rank))]
    assert processes.run_steps(*steps) is None
    assert processes.sentences == []
    assert [child.poll() for child in processes.children.values()] == [0, 0, 0]
    assert processes.gone == [0, 2, 1]


def test_any_peer_is_restarted_even_rank_0(tmp_path: Path) -> None:
    processes = Peers(tmp_path, 3)
    again = [
        processes.send(0, KILL_YOURSELF),
        processes.has(0, 1),
        processes.send(2, KILL_YOURSELF),
        processes.has(2, 1),
    ]
    assert processes.run_steps(*again, *(processes.send(rank, QUIT) for rank in range(3))) is None
    assert processes.sentences == [
        "peer 0 was killed by SIGKILL; it is started again (1 of 3)",
        "peer 2 was killed by SIGKILL; it is started again (1 of 3)",
    ]
    assert [processes.starts_of(rank) for rank in range(3)] == [2, 1, 2]


def test_without_rank_0_the_other_peers_go_on_but_are_not_restarted(tmp_path: Path) -> None:
    processes = Peers(tmp_path, 3)
    losses = [processes.send(0, KILL_YOURSELF), lambda: processes.gone == [0], processes.send(2, KILL_YOURSELF)]
    assert (
        processes.run_steps(*losses, lambda: processes.gone == [0, 2], processes.send(1, QUIT), restarts_max=0) is None
    )
    assert processes.sentences == [
        "peer 0 was killed by SIGKILL, and it is not started again",
        "peer 2 was killed by SIGKILL, and it is not started again: rank 0, where it would find the others, is gone",
    ]
    assert [processes.starts_of(rank) for rank in range(3)] == [1, 1, 1]


def test_a_peer_that_dies_when_others_have_finished_is_not_restarted(tmp_path: Path) -> None:
    processes = Peers(tmp_path, 3)
    first = [processes.send(1, QUIT), lambda: processes.gone == [1], processes.send(2, RAISE), processes.ended(2)]
    assert processes.run_steps(*first, processes.send(0, QUIT)) is None
    assert processes.sentences == ["peer 2: ValueError: there is no x (when the run was ending)"]


def test_a_peer_that_was_restarted_too_late_is_killed(tmp_path: Path) -> None:
    """Peer 1 was restarted and waits to copy the state of another; none is left."""
    processes = Peers(tmp_path, 2)
    steps = [processes.send(1, KILL_YOURSELF), processes.has(1, 1), processes.send(0, QUIT), processes.ended(1, 1)]
    assert processes.run_steps(*steps) is None
    assert processes.sentences[1:] == ["peer 1 had come back when the others were ending, and was ended"]
    assert processes.children[1, 1].poll() == -signal.SIGKILL


def test_a_restarted_peer_that_has_computed_may_finish(tmp_path: Path) -> None:
    processes = Peers(tmp_path, 2)

    def computes() -> bool:
        processes.rounds[1] = 1
        return True

    steps = [
        processes.send(1, KILL_YOURSELF),
        processes.has(1, 1),
        computes,
        processes.send(0, QUIT),
        processes.ended(0),
    ]
    ticks = iter(range(3))  # grace is shorter than the time between two ticks
    assert processes.run_steps(*steps, lambda: next(ticks) == 2, processes.send(1, QUIT)) is None
    assert processes.children[1, 1].poll() == 0


def test_when_all_peers_die_the_run_fails_instead_of_starting_over(tmp_path: Path) -> None:
    """Peer 1 was restarted, but has not copied the state of another when the last one dies."""
    processes = Peers(tmp_path, 2)
    failure = processes.run_steps(
        processes.send(1, KILL_YOURSELF), processes.has(1, 1), processes.send(0, KILL_YOURSELF)
    )
    assert failure == "no process is left that has the state of the training: peer 0 was killed by SIGKILL"
    assert processes.children[1, 1].poll() == -signal.SIGKILL


def test_a_peer_that_fails_before_it_ever_joined_fails_the_run(tmp_path: Path) -> None:
    processes = Peers(tmp_path, 2, joined=False)
    wrong = reports(FailureKind.RUN_FAILED, "the model is another one")
    assert processes.run_steps(processes.send(0, wrong)) == "peer 0: the model is another one"


def test_an_injected_crash_of_rank_0_may_be_followed_by_a_restart_if_it_is_a_peer(tmp_path: Path) -> None:
    processes = Peers(tmp_path, 2)
    steps = [processes.has(0, 1), processes.send(0, QUIT), processes.send(1, QUIT)]
    assert processes.run_steps(*steps, faults=(Crash(0, 0.0, back_after_seconds=0.0),)) is None
    assert processes.sentences == ["peer 0 was killed by an injected fault"]


def test_rank_0_that_turns_out_to_be_a_peer_does_not_end_the_run(tmp_path: Path) -> None:
    """Whether rank 0 of a script is a hub is unknown until it computes."""
    processes = Peers(tmp_path, 2)
    supervisor = Supervisor(
        processes._start,
        range(2),
        RankFacts(has_joined=lambda rank: True, is_required=lambda rank: rank == 0 and not processes.rounds.get(0)),
        say=processes.sentences.append,
        options=SupervisorOptions(restarts_max=0, grace_seconds=0.05),
    )
    steps = [processes.send(0, KILL_YOURSELF), processes.ended(0), processes.send(1, QUIT)]

    def tick() -> None:
        processes.rounds[0] = 1
        while steps and steps[0]():
            steps.pop(0)

    assert supervisor.run(tick) is None
    assert processes.children[1, 0].poll() == 0


# Output


def test_every_line_is_reported_with_the_rank_that_wrote_it(tmp_path: Path) -> None:
    processes = Processes(tmp_path, ["print('out')\n" + RAISE], [FOREVER], joined=False)
    processes.run(never)
    mine = [text for rank, text in processes.lines if rank == 1]
    assert "out" in mine
    assert "Traceback (most recent call last):" in mine
    assert "ValueError: there is no x" in mine
    assert {rank for rank, _ in processes.lines} == {1}


# Faults


def test_an_injected_crash_and_restart_does_not_count_as_a_restart(tmp_path: Path) -> None:
    processes = Processes(tmp_path, [FOREVER], [FOREVER])
    faults = (Crash(1, 0.0, back_after_seconds=0.0), Crash(2, 0.0))
    assert processes.run(processes.has(1, 1), restarts_max=0, faults=faults) is None
    assert processes.sentences == [
        "worker 1 was killed by an injected fault",
        "worker 2 was killed by an injected fault",
    ]
    assert (processes.starts_of(1), processes.starts_of(2)) == (2, 1)


def test_a_permanent_crash_of_all_workers_fails_the_run(tmp_path: Path) -> None:
    processes = Processes(tmp_path, [FOREVER])
    assert processes.run(never, faults=(Crash(1, 0.0),)) == (
        "no process is left to compute: worker 1 was killed by an injected fault"
    )


def test_a_pause_stops_and_continues(tmp_path: Path) -> None:
    processes = Processes(tmp_path, [FOREVER])
    states: set[str] = set()

    def seen() -> bool:
        if processes.has(1, 0)():
            states.add(state_of(processes.children[1, 0].pid))
        return len(processes.sentences) == 2

    assert processes.run(seen, faults=(Pause(1, 0.0, 0.8),)) is None
    assert processes.sentences == ["worker 1 was paused by an injected fault", "worker 1 goes on after the pause"]
    assert "T" in states
    assert processes.starts_of(1) == 1


def state_of(pid: int) -> str:
    """As /proc has it: S sleeps, T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (Partition((1,), 1.0, 2.0), "the fault 'partition' can only be simulated"),
        (Corrupt(1, 1.0, 2.0), "the fault 'corrupt' can only be simulated"),
        (Crash(7, 1.0), "names rank 7, which is not started here"),
        (Crash(0, 1.0, 2.0), "rank 0 does not come back by itself"),
    ],
)
def test_faults_that_cannot_be_injected_into_processes_are_rejected(fault: Fault, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        check_faults([fault], range(3))


# Signals, in a process of its own

SUPERVISED = """
import signal, sys
from offbeat.launch.children import start_command
from offbeat.launch.rank_processes import RankFacts
from offbeat.launch.supervisor import Supervisor, SupervisorOptions

signal.signal(signal.SIGINT, signal.default_int_handler)
only_peers, *scripts = sys.argv[1:]

def show(rank, text):
    sys.stdout.write(f"[{rank}] {text}\\n")  # one call, since two threads print
    sys.stdout.flush()

def start(rank, incarnation):
    argv = [sys.executable, "-I", "-S", "-c", scripts[rank]]
    return start_command(argv, rank=rank, incarnation=incarnation, environment={}, on_line=show)

facts = RankFacts(has_joined=lambda rank: True, is_required=lambda rank: rank == 0 and not only_peers)
supervisor = Supervisor(start, range(len(scripts)), facts, say=print, options=SupervisorOptions(grace_seconds=60))
try:
    print("failure:", supervisor.run(lambda: None))
except KeyboardInterrupt:
    print("interrupted in order")
"""
# Handlers bypass the buffers of `print`, which may be in use when a signal arrives.
ORDERLY = """
import os, signal
def end(*_):
    os.write(1, b"ends\\n")
    os._exit(0)
signal.signal(signal.SIGINT, end)
os.write(1, b"%d\\n" % os.getpid())
while True: signal.pause()
"""
STUBBORN = """
import os, signal
signal.signal(signal.SIGINT, lambda *_: os.write(1, b"interrupted\\n"))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(1, b"%d\\n" % os.getpid())
while True: signal.pause()
"""
Supervised = Callable[..., tuple[subprocess.Popen[str], list[int]]]


@pytest.fixture
def supervised() -> Iterator[Supervised]:
    """Starts a supervisor in a process of its own; returns it and the process numbers of its children, all ready."""
    with contextlib.ExitStack() as stack:

        def start(*scripts: str, only_peers: bool = False) -> tuple[subprocess.Popen[str], list[int]]:
            argv = [sys.executable, "-c", SUPERVISED, "only peers" if only_peers else "", *scripts]
            process = stack.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout is not None
            return process, [int(process.stdout.readline().split()[1]) for _ in scripts]

        yield start


def rest_of(process: subprocess.Popen[str]) -> list[str]:
    output, _ = process.communicate()
    return output.splitlines()


def is_alive(pid: int) -> bool:
    """False for a process that has ended, and for a zombie."""
    try:
        return state_of(pid) != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int]) -> None:
    for pid in pids:
        try:
            watched = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert select.select([watched], [], [], 30)[0], f"{pid} is still there"
        os.close(watched)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_goes_to_rank_0_alone_which_ends_the_run(number: signal.Signals, supervised: Supervised) -> None:
    leaves = ORDERLY.replace(
        "SIGINT", "SIGCONT"
    )  # a real one ends at a message of rank 0; this one at the signal that precedes the end
    process, pids = supervised(ORDERLY, leaves)
    process.send_signal(number)
    assert rest_of(process) == ["[0] ends", "[1] ends", "interrupted in order"]
    assert not any(map(is_alive, pids))


def test_an_interrupt_goes_to_all_peers(supervised: Supervised) -> None:
    process, pids = supervised(ORDERLY, ORDERLY, only_peers=True)
    process.send_signal(signal.SIGINT)
    assert sorted(rest_of(process)) == ["[0] ends", "[1] ends", "interrupted in order"]
    assert not any(map(is_alive, pids))


def test_a_second_interrupt_kills_all_processes_at_once(supervised: Supervised) -> None:
    process, pids = supervised(STUBBORN, STUBBORN)
    assert process.stdout is not None
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "[0] interrupted\n"
    process.send_signal(signal.SIGINT)
    assert rest_of(process) == ["interrupted in order"]
    assert not any(map(is_alive, pids))


def test_no_process_outlives_a_supervisor_that_is_killed(supervised: Supervised) -> None:
    process, pids = supervised(STUBBORN, STUBBORN)
    process.kill()
    process.communicate()
    wait_until_gone(pids)


STARTS_ANOTHER = """
import os, subprocess
other = subprocess.Popen(["sleep", "600"])
os.write(1, b"%d\\n" % other.pid)
other.wait()
"""


def test_what_the_children_have_started_does_not_outlive_a_supervisor_that_is_killed(supervised: Supervised) -> None:
    process, grandchildren = supervised(STARTS_ANOTHER, STARTS_ANOTHER)
    assert all(map(is_alive, grandchildren))
    process.kill()
    process.communicate()
    wait_until_gone(grandchildren)
