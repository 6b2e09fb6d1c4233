"""Processes that end, die, raise, sleep and are interrupted: stand-ins without torch, so that they start at once."""

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
from typing import Any

import pytest

from offbeat.cluster.faults import Corrupt, Crash, Fault, Partition, Pause
from offbeat.errors import ConfigurationError
from offbeat.launch.children import Child, start_command
from offbeat.launch.process_settings import peers
from offbeat.launch.supervisor import Supervisor, backoff_seconds, check_faults

KILL_YOURSELF = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
RAISE = "raise ValueError('there is no x')"
FOREVER = "import signal; signal.pause()"
QUIT = "pass"
HUB = "exec(open({!r}).read())"


class Company:
    """What each rank does in each of its lives, and what was seen and said of it.

    Rank 0 opens a pipe and does what it finds there: `script`, which is written as soon as `when` holds.
    """

    def __init__(self, place: Path, *lives: list[str], joined: bool = True) -> None:
        self.pipe = place / "pipe"
        os.mkfifo(self.pipe)
        self.lives = [[HUB.format(str(self.pipe))], *lives]
        self.joined = joined
        self.said: list[str] = []
        self.lines: list[tuple[int, str]] = []
        self.children: dict[tuple[int, int], Child] = {}

    def run(
        self, when: Callable[[], bool], script: str = QUIT, restarts_max: int = 3, faults: tuple[Fault, ...] = ()
    ) -> str | None:
        told = False

        def tick() -> None:
            nonlocal told
            told = told or (when() and self._tell(script))

        return Supervisor(
            self._start,
            range(len(self.lives)),
            restarts_max=restarts_max,
            say=self.said.append,
            has_joined=lambda rank: self.joined,
            faults=faults,
            grace_seconds=0.05,
        ).run(tick)

    def _start(self, rank: int, incarnation: int) -> Child:
        script = self.lives[rank][min(incarnation, len(self.lives[rank]) - 1)]
        argv = [sys.executable, "-I", "-S", "-c", script]
        child = start_command(
            argv, rank=rank, incarnation=incarnation, environment={}, on_line=lambda *line: self.lines.append(line)
        )
        self.children[rank, incarnation] = child
        return child

    def _tell(self, script: str) -> bool:
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

    def heard(self, text: str) -> Callable[[], bool]:
        return lambda: text in [line for _, line in self.lines]

    def lives_of(self, rank: int) -> int:
        return sum(who == rank for who, _ in self.children)


def at_once() -> bool:
    return True


def never() -> bool:
    return False


# Ends


def test_the_run_is_over_when_rank_0_has_ended_and_the_others_have(tmp_path: Path) -> None:
    company = Company(tmp_path, [QUIT], [QUIT])
    assert company.run(at_once) is None
    assert company.said == []
    assert [child.poll() for child in company.children.values()] == [0, 0, 0]


def test_whoever_does_not_end_with_rank_0_is_made_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.launch.supervisor.TERM_SECONDS", 0.1)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    company = Company(tmp_path, [FOREVER], [deaf])
    supervisor = Supervisor(
        company._start, range(3), say=company.said.append, has_joined=lambda rank: True, grace_seconds=0.1
    )

    def tick() -> None:
        if company.heard("deaf")():
            company._tell(QUIT)

    assert supervisor.run(tick) is None
    assert [child.poll() for child in company.children.values()] == [0, -signal.SIGTERM, -signal.SIGKILL]


def test_a_worker_that_leaves_by_itself_is_not_started_again(tmp_path: Path) -> None:
    company = Company(tmp_path, [QUIT], [FOREVER])
    assert company.run(lambda: company.children[1, 0].poll() == 0) is None
    assert company.said == []
    assert company.lives_of(1) == 1


def test_rank_0_that_dies_takes_the_others_with_it(tmp_path: Path) -> None:
    company = Company(tmp_path, [FOREVER])
    assert company.run(at_once, KILL_YOURSELF) == "the hub was killed by SIGKILL"
    assert company.children[1, 0].poll() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("import sys; print('offbeat: the disk is full', file=sys.stderr); sys.exit(1)", "the disk is full"),
        (RAISE, "hub: ValueError: there is no x"),
        ("import sys; sys.exit(3)", "the hub ended with exit code 3 and said nothing"),
        ("import sys; print('offbeat: a warning', file=sys.stderr); 1 / 0", "hub: ZeroDivisionError: division by zero"),
        ("raise ValueError('several\\nlines')", "hub: ValueError: several"),
    ],
)
def test_rank_0_that_fails_fails_the_run_in_its_own_words(script: str, sentence: str, tmp_path: Path) -> None:
    assert Company(tmp_path, [FOREVER]).run(at_once, script) == sentence


# Starting again


def test_a_worker_that_is_killed_is_started_again(tmp_path: Path) -> None:
    company = Company(tmp_path, [KILL_YOURSELF, FOREVER], [FOREVER])
    assert company.run(company.has(1, 1)) is None
    assert company.said == ["worker 1 was killed by SIGKILL; it is started again (1 of 3)"]
    assert (company.lives_of(1), company.lives_of(2)) == (2, 1)


def test_a_worker_that_fails_after_it_had_joined_is_started_again(tmp_path: Path) -> None:
    company = Company(tmp_path, [RAISE, FOREVER])
    assert company.run(company.has(1, 1)) is None
    assert company.said == ["worker 1: ValueError: there is no x; it is started again (1 of 3)"]


def test_restarts_are_bounded_and_the_others_go_on(tmp_path: Path) -> None:
    company = Company(tmp_path, [KILL_YOURSELF], [FOREVER])
    last = "worker 1 was killed by SIGKILL, and it is not started again"
    assert company.run(lambda: last in company.said) is None
    assert company.lives_of(1) == 4
    assert company.lives_of(2) == 1


def test_when_nobody_is_left_the_run_fails(tmp_path: Path) -> None:
    company = Company(tmp_path, [KILL_YOURSELF])
    failure = company.run(never, restarts_max=1)
    assert failure == "nobody is left to compute: worker 1 was killed by SIGKILL"
    assert company.lives_of(1) == 2


def test_the_wait_before_a_restart_doubles() -> None:
    assert [backoff_seconds(restarts) for restarts in range(4)] == [0.2, 0.4, 0.8, 1.6]


def test_a_worker_that_raises_before_it_ever_joined_fails_the_run(tmp_path: Path) -> None:
    company = Company(tmp_path, [RAISE], [FOREVER], joined=False)
    assert company.run(never) == "worker 1: ValueError: there is no x"
    assert all(child.poll() is not None for child in company.children.values())
    assert company.lives_of(1) == 1


def test_a_worker_whose_command_was_wrong_fails_the_run_even_after_it_had_joined(tmp_path: Path) -> None:
    wrong = "import sys; print('offbeat: the model is another one', file=sys.stderr); sys.exit(2)"
    assert Company(tmp_path, [wrong]).run(never) == "worker 1: the model is another one"


# Among equals


class Peers(Company):
    """Everybody is a peer and has a pipe; `tell` lets one do something, when it listens."""

    def __init__(self, place: Path, count: int, joined: bool = True) -> None:
        super().__init__(place, joined=joined)
        self.pipes = [place / f"pipe {rank}" for rank in range(count)]
        for pipe in self.pipes:
            os.mkfifo(pipe)
        self.lives = [[HUB.format(str(pipe))] for pipe in self.pipes]
        self.rounds: dict[int, int] = {}
        self.gone: list[int] = []

    def play(self, *steps: Callable[[], bool], **options: Any) -> str | None:
        """One step after the other, each as often as it takes until it is true; until the run is over."""
        left = list(steps)

        def tick() -> None:
            while left and left[0]():
                left.pop(0)

        failure = Supervisor(
            self._start,
            range(len(self.lives)),
            say=self.said.append,
            has_joined=lambda rank: self.joined,
            rounds=lambda rank: self.rounds.get(rank, 0),
            is_required=lambda rank: False,
            name=peers,
            on_gone=self.gone.append,
            grace_seconds=0.05,
            **options,
        ).run(tick)
        assert not left
        return failure

    def tell(self, rank: int, script: str) -> Callable[[], bool]:
        def told() -> bool:
            self.pipe = self.pipes[rank]
            return self._tell(script)

        return told

    def ended(self, rank: int, incarnation: int = 0) -> Callable[[], bool]:
        return lambda: self.children[rank, incarnation].poll() is not None


def test_among_equals_the_run_is_over_when_all_have_ended(tmp_path: Path) -> None:
    company = Peers(tmp_path, 3)
    steps = [step for rank in (0, 2, 1) for step in (company.tell(rank, QUIT), company.ended(rank))]
    assert company.play(*steps) is None
    assert company.said == []
    assert [child.poll() for child in company.children.values()] == [0, 0, 0]
    assert company.gone == [0, 2, 1]


def test_any_of_equals_is_started_again_rank_0_too(tmp_path: Path) -> None:
    company = Peers(tmp_path, 3)
    again = [company.tell(0, KILL_YOURSELF), company.has(0, 1), company.tell(2, KILL_YOURSELF), company.has(2, 1)]
    assert company.play(*again, *(company.tell(rank, QUIT) for rank in range(3))) is None
    assert company.said == [
        "peer 0 was killed by SIGKILL; it is started again (1 of 3)",
        "peer 2 was killed by SIGKILL; it is started again (1 of 3)",
    ]
    assert [company.lives_of(rank) for rank in range(3)] == [2, 1, 2]


def test_without_rank_0_the_others_go_on_but_nobody_comes_back(tmp_path: Path) -> None:
    company = Peers(tmp_path, 3)
    losses = [company.tell(0, KILL_YOURSELF), lambda: company.gone == [0], company.tell(2, KILL_YOURSELF)]
    assert company.play(*losses, lambda: company.gone == [0, 2], company.tell(1, QUIT), restarts_max=0) is None
    assert company.said == [
        "peer 0 was killed by SIGKILL, and it is not started again",
        "peer 2 was killed by SIGKILL, and it is not started again: rank 0, where it would find the others, is gone",
    ]
    assert [company.lives_of(rank) for rank in range(3)] == [1, 1, 1]


def test_who_dies_when_others_have_ended_is_not_started_again(tmp_path: Path) -> None:
    company = Peers(tmp_path, 3)
    first = [company.tell(1, QUIT), lambda: company.gone == [1], company.tell(2, RAISE), company.ended(2)]
    assert company.play(*first, company.tell(0, QUIT)) is None
    assert company.said == ["peer 2: ValueError: there is no x (when the run was ending)"]


def test_who_came_back_too_late_is_ended(tmp_path: Path) -> None:
    """Peer 1 has come back and waits to learn from somebody; nobody is left."""
    company = Peers(tmp_path, 2)
    steps = [company.tell(1, KILL_YOURSELF), company.has(1, 1), company.tell(0, QUIT), company.ended(1, 1)]
    assert company.play(*steps) is None
    assert company.said[1:] == ["peer 1 had come back when the others were ending, and was ended"]
    assert company.children[1, 1].poll() == -signal.SIGKILL


def test_who_came_back_and_has_computed_since_may_come_to_its_end(tmp_path: Path) -> None:
    company = Peers(tmp_path, 2)

    def computes() -> bool:
        company.rounds[1] = 1
        return True

    steps = [company.tell(1, KILL_YOURSELF), company.has(1, 1), computes, company.tell(0, QUIT), company.ended(0)]
    looks = iter(range(3))  # grace is shorter than the time between two looks
    assert company.play(*steps, lambda: next(looks) == 2, company.tell(1, QUIT)) is None
    assert company.children[1, 1].poll() == 0


def test_when_all_of_equals_die_nobody_begins_anew(tmp_path: Path) -> None:
    """Peer 1 has come back, but has not learnt yet how far the others are when the last of them dies."""
    company = Peers(tmp_path, 2)
    failure = company.play(company.tell(1, KILL_YOURSELF), company.has(1, 1), company.tell(0, KILL_YOURSELF))
    assert failure == "nobody is left who knows how far the training was: peer 0 was killed by SIGKILL"
    assert company.children[1, 1].poll() == -signal.SIGKILL


def test_a_peer_that_fails_before_it_ever_joined_fails_the_run_and_is_named(tmp_path: Path) -> None:
    company = Peers(tmp_path, 2, joined=False)
    wrong = "import sys; print('offbeat: the model is another one', file=sys.stderr); sys.exit(1)"
    assert company.play(company.tell(0, wrong)) == "peer 0: the model is another one"


def test_a_crash_of_rank_0_may_be_followed_by_its_return_where_it_is_a_peer(tmp_path: Path) -> None:
    company = Peers(tmp_path, 2)
    steps = [company.has(0, 1), company.tell(0, QUIT), company.tell(1, QUIT)]
    assert company.play(*steps, faults=(Crash(0, 0.0, back_after_seconds=0.0),)) is None
    assert company.said == ["peer 0 was killed, as was asked for"]


def test_who_turns_out_to_be_a_peer_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    """Of a script it is not known what its rank 0 is, until it computes."""
    company = Peers(tmp_path, 2)
    supervisor = Supervisor(
        company._start,
        range(2),
        restarts_max=0,
        say=company.said.append,
        has_joined=lambda rank: True,
        is_required=lambda rank: rank == 0 and not company.rounds.get(0),
        grace_seconds=0.05,
    )
    steps = [company.tell(0, KILL_YOURSELF), company.ended(0), company.tell(1, QUIT)]

    def tick() -> None:
        company.rounds[0] = 1
        while steps and steps[0]():
            steps.pop(0)

    assert supervisor.run(tick) is None
    assert company.children[1, 0].poll() == 0


# What they say


def test_every_line_comes_with_the_rank_that_wrote_it(tmp_path: Path) -> None:
    company = Company(tmp_path, ["print('out')\n" + RAISE], [FOREVER], joined=False)
    company.run(never)
    mine = [text for rank, text in company.lines if rank == 1]
    assert "out" in mine
    assert "Traceback (most recent call last):" in mine
    assert "ValueError: there is no x" in mine
    assert {rank for rank, _ in company.lines} == {1}


# Faults


def test_a_crash_kills_and_brings_back_without_counting_as_a_restart(tmp_path: Path) -> None:
    company = Company(tmp_path, [FOREVER], [FOREVER])
    faults = (Crash(1, 0.0, back_after_seconds=0.0), Crash(2, 0.0))
    assert company.run(company.has(1, 1), restarts_max=0, faults=faults) is None
    assert company.said == ["worker 1 was killed, as was asked for", "worker 2 was killed, as was asked for"]
    assert (company.lives_of(1), company.lives_of(2)) == (2, 1)


def test_a_crash_of_everybody_for_good_fails_the_run(tmp_path: Path) -> None:
    company = Company(tmp_path, [FOREVER])
    assert company.run(never, faults=(Crash(1, 0.0),)) == (
        "nobody is left to compute: worker 1 was killed, as was asked for"
    )


def test_a_pause_stops_and_continues(tmp_path: Path) -> None:
    company = Company(tmp_path, [FOREVER])
    states: set[str] = set()

    def seen() -> bool:
        if company.has(1, 0)():
            states.add(state_of(company.children[1, 0].pid))
        return len(company.said) == 2

    assert company.run(seen, faults=(Pause(1, 0.0, 0.8),)) is None
    assert company.said == ["worker 1 stands still, as was asked for", "worker 1 goes on, as was asked for"]
    assert "T" in states
    assert company.lives_of(1) == 1


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
def test_faults_that_real_processes_cannot_have_are_refused(fault: Fault, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        check_faults([fault], range(3))


# Signals, in a process of its own

SUPERVISED = """
import signal, sys
from offbeat.launch.children import start_command
from offbeat.launch.supervisor import Supervisor

signal.signal(signal.SIGINT, signal.default_int_handler)
equals, *scripts = sys.argv[1:]

def show(rank, text):
    print(f"[{rank}] {text}", flush=True)

def start(rank, incarnation):
    argv = [sys.executable, "-I", "-S", "-c", scripts[rank]]
    return start_command(argv, rank=rank, incarnation=incarnation, environment={}, on_line=show)

supervisor = Supervisor(start, range(len(scripts)), say=print, has_joined=lambda rank: True, grace_seconds=60,
                        is_required=lambda rank: rank == 0 and not equals)
try:
    print("failure:", supervisor.run(lambda: None))
except KeyboardInterrupt:
    print("interrupted in order")
"""
# Handlers write past the buffers of `print`, which may be busy when a signal comes.
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
signal.signal(signal.SIGINT, lambda *_: os.write(1, b"hears\\n"))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(1, b"%d\\n" % os.getpid())
while True: signal.pause()
"""
Supervised = Callable[..., tuple[subprocess.Popen[str], list[int]]]


@pytest.fixture
def supervised() -> Iterator[Supervised]:
    """Starts a supervisor in a process of its own: that, and the numbers of its children, all of them ready."""
    with contextlib.ExitStack() as stack:

        def start(*scripts: str, equals: bool = False) -> tuple[subprocess.Popen[str], list[int]]:
            argv = [sys.executable, "-c", SUPERVISED, "equals" if equals else "", *scripts]
            process = stack.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout is not None
            return process, [int(process.stdout.readline().split()[1]) for _ in scripts]

        yield start


def rest_of(process: subprocess.Popen[str]) -> list[str]:
    said, _ = process.communicate()
    return said.splitlines()


def is_there(pid: int) -> bool:
    """A process that is gone, or that only waits to be counted, is not there."""
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
    leaves = ORDERLY.replace("SIGINT", "SIGCONT")  # in a real run rank 0 tells it; here, that it is woken for the end
    process, pids = supervised(ORDERLY, leaves)
    process.send_signal(number)
    assert rest_of(process) == ["[0] ends", "[1] ends", "interrupted in order"]
    assert not any(map(is_there, pids))


def test_an_interrupt_goes_to_all_of_equals(supervised: Supervised) -> None:
    process, pids = supervised(ORDERLY, ORDERLY, equals=True)
    process.send_signal(signal.SIGINT)
    assert sorted(rest_of(process)) == ["[0] ends", "[1] ends", "interrupted in order"]
    assert not any(map(is_there, pids))


def test_a_second_interrupt_ends_everybody_at_once(supervised: Supervised) -> None:
    process, pids = supervised(STUBBORN, STUBBORN)
    assert process.stdout is not None
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "[0] hears\n"
    process.send_signal(signal.SIGINT)
    assert rest_of(process) == ["interrupted in order"]
    assert not any(map(is_there, pids))


def test_nobody_outlives_a_supervisor_that_is_killed(supervised: Supervised) -> None:
    process, pids = supervised(STUBBORN, STUBBORN)
    process.kill()
    process.communicate()
    wait_until_gone(pids)
