"""Starts the local processes of a run, watches and restarts them, injects faults, and ends them.

A required rank, such as a hub, decides: the run is over when it ends. Among peers, where no rank is required, it is
over when all have ended, and successful if one was. Any other rank that was killed, or that failed after it had
joined, is restarted a few times; one that fails before it ever joined would fail again, and so fails the run.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from offbeat.cluster.faults import Fault
from offbeat.failpoints import failpoint
from offbeat.launch.children import Child
from offbeat.launch.interrupts import InterruptCounter
from offbeat.launch.process_faults import ProcessFaults, check_faults
from offbeat.launch.rank_processes import RankFacts, RankProcess, RankProcesses
from offbeat.launch.run_failure import RunFailure, failure_of, killed

POLL_SECONDS = 0.05
TICK_SECONDS = 0.25
GRACE_SECONDS = 10.0
"""How long processes may take to end after a request; then they are killed."""
FORGIVEN_SECONDS = 600.0
"""After so long without failure, earlier restarts of a rank are not counted any more."""
TERM_SECONDS = 2.0
BACKOFF_SECONDS = 0.2
BACKOFF_SECONDS_MAX = 10.0

Start = Callable[[int, int], Child]
"""Starts the process of a rank, given its rank and its incarnation."""


def backoff_seconds(restarts: int) -> float:
    """How long to wait before a restart, after so many earlier ones."""
    return float(min(BACKOFF_SECONDS * 2 ** min(restarts, 60), BACKOFF_SECONDS_MAX))


@dataclass(frozen=True, kw_only=True)
class SupervisorOptions:
    """How a supervisor reacts."""

    restarts_max: int = 3
    """How often a rank is restarted."""
    faults: tuple[Fault, ...] = ()
    """Crashes and pauses to inject."""
    has_remote_ranks: bool = False
    """Whether there are ranks elsewhere, so that a run with a required rank survives the loss of all others here."""
    grace_seconds: float = GRACE_SECONDS
    """How long processes may take to end."""
    is_saving: Callable[[], bool] = lambda: False
    """Whether a checkpoint is being written, for which an interrupted run is given more time."""


class Supervisor:
    """Starts one process per rank and watches them until the run is over."""

    def __init__(
        self,
        start: Start,
        ranks: Iterable[int],
        facts: RankFacts,
        *,
        say: Callable[[str], None],
        on_gone: Callable[[int], None] = lambda rank: None,
        options: SupervisorOptions = SupervisorOptions(),  # noqa: B008  (frozen)
    ) -> None:
        """Nothing is started before `run`.

        Args:
            start: starts a process, given its rank and its incarnation.
            ranks: those that run here, rank 0 among them.
            facts: what is known of each rank.
            say: takes sentences for the user.
            on_gone: called when a rank has ended and will not be restarted.
            options: restarts, faults and time limits.
        """
        self._start_child, self._facts, self._say, self._on_gone, self._options = start, facts, say, on_gone, options
        self._processes = RankProcesses(ranks, facts)
        check_faults(options.faults, self._processes.ranks, facts.is_required)
        self._faults = ProcessFaults(options.faults, self._processes, say)
        self._interrupts = InterruptCounter()
        self._interrupted_at: float | None = None
        self._ending_since: float | None = None
        self._ticked_at = 0.0
        self._tick: Callable[[], None] = lambda: None

    def run(self, tick: Callable[[], None]) -> RunFailure | None:
        """Until the run is over: why it failed, or None. `tick` is called four times a second.

        After Ctrl-C, or SIGTERM, the run is ended in order; then this raises KeyboardInterrupt.
        """
        self._tick = tick
        failpoint("launch")
        try:
            with self._interrupts.counting():
                for process in self._processes:
                    self._start(process)
                failure = self._watch()
                if failure is None and self._processes.is_over():
                    self._wait_for_end()
        finally:
            self._kill_all()
        tick()
        if self._interrupts.count:
            raise KeyboardInterrupt
        return failure

    # Watching

    def _watch(self) -> RunFailure | None:
        """Why the run failed; None where it is over, or was interrupted."""
        while True:
            self._sleep()
            if self._interrupts.count and self._interrupt():
                return None
            self._faults.inject()
            for process in self._processes.required_first():
                was_gone = process.gone
                failure = self._check(process)
                if failure is not None:
                    return failure
                if process.gone and not was_gone:
                    self._on_gone(process.rank)
                if self._processes.is_over():
                    return None
            self._end_latecomers()

    def _sleep(self) -> None:
        time.sleep(POLL_SECONDS)
        now = time.monotonic()
        if now - self._ticked_at >= TICK_SECONDS:
            self._ticked_at = now
            failpoint("tick")
            self._tick()

    def _check(self, process: RankProcess) -> RunFailure | None:
        """Start a process that is due, or handle one that has ended; returns why that fails the run."""
        if process.child is None:
            is_due = process.restart_at is not None and time.monotonic() >= process.restart_at
            if is_due and not self._interrupts.count:
                self._start(process)
            return None
        code = process.child.poll()
        if code is None:
            return None
        ended, process.child = process.child, None
        self._tick()  # it may have joined, or computed, since the last tick
        process.succeeded = code == 0
        if process.succeeded or self._interrupts.count:
            return None
        return self._after_failure(process, self._failure(ended, code))

    def _after_failure(self, process: RankProcess, failure: RunFailure) -> RunFailure | None:
        if self._processes.is_required(process):
            return failure
        if self._processes.is_ending():  # the other peers have finished, so there is nothing to come back to
            if not process.is_fault:
                self._say(f"{failure.sentence} (when the run was ending)")
            return None
        if process.is_fault:
            return self._after_fault(process)
        if failure.is_configuration or not (failure.was_killed or self._facts.has_joined(process.rank)):
            return failure
        return self._restart(process, failure)

    def _failure(self, ended: Child, code: int) -> RunFailure:
        rank = ended.rank
        return failure_of(ended, code, self._facts.name(rank), is_required=self._facts.is_required(rank))

    # Starting

    def _start(self, process: RankProcess) -> None:
        process.rounds = self._facts.rounds(process.rank)
        process.child, process.restart_at = self._start_child(process.rank, process.incarnation), None
        process.incarnation += 1
        process.started_at = time.monotonic()

    def _restart(self, process: RankProcess, failure: RunFailure) -> RunFailure | None:
        """Plan a restart, or go on without the rank."""
        if self._processes.has_only_peers() and not self._processes.is_any_training():
            return failure.preceded_by("no process is left that has the state of the training")
        why, restarts_max = failure.sentence, self._options.restarts_max
        if time.monotonic() - process.started_at >= FORGIVEN_SECONDS:
            process.restarts = 0
        if process.rank and self._processes[0].gone:
            self._say(f"{why}, and it is not started again: rank 0, where it would find the others, is gone")
        elif failure.lost_peer == 0 and self._processes[0].child is not None:
            # Rank 0 stood still: that is no failure of this rank, which finds it again when it goes on.
            process.restart_at = time.monotonic() + backoff_seconds(0)
            self._say(f"{why}; it is started again")
            return None
        elif process.restarts < restarts_max:
            process.restart_at = time.monotonic() + backoff_seconds(process.restarts)
            process.restarts += 1
            self._say(f"{why}; it is started again ({process.restarts} of {restarts_max})")
            return None
        else:
            self._say(f"{why}, and it is not started again")
        return self._unless_all_gone(failure)

    def _after_fault(self, process: RankProcess) -> RunFailure | None:
        process.is_fault = False
        if process.back_after is None:
            return self._unless_all_gone(killed(process.rank, self._facts.name(process.rank), "an injected fault"))
        process.restart_at = time.monotonic() + process.back_after
        return None

    def _unless_all_gone(self, failure: RunFailure) -> RunFailure | None:
        # Peers elsewhere cannot continue the run of these.
        others = self._options.has_remote_ranks and not self._processes.has_only_peers()
        if others or not self._processes.are_workers_gone():
            return None
        return failure.preceded_by("no process is left to compute")

    # The end

    def _end_latecomers(self) -> None:
        """Kill peers that were restarted when the others were ending: they wait in vain for a peer to copy."""
        if not self._processes.is_ending():
            return
        self._faults.resume_paused()
        if self._processes.is_any_training():
            return
        now, grace = time.monotonic(), self._options.grace_seconds
        self._ending_since = self._ending_since or now
        limit = grace if self._options.has_remote_ranks else min(grace, TERM_SECONDS)
        for process in self._processes:
            process.restart_at = None
            if process.child is not None and now - self._ending_since > limit:
                process.is_fault = True
                process.child.kill(signal.SIGKILL)
                name = self._processes.name(process.rank)
                self._say(f"{name} had come back when the others were ending, and was ended")

    def _interrupt(self) -> bool:
        """Ask once to end the run; True after the grace time, or after a second signal."""
        if self._interrupted_at is None:
            self._interrupted_at = time.monotonic()
            for process in self._processes:
                process.restart_at = None
            children = [process.child for process in self._processes.deciding() if process.child is not None]
            for child in children:
                child.kill(signal.SIGCONT)
            self._faults.resume_paused()
            for child in children:
                child.kill(signal.SIGINT)
        is_late = time.monotonic() - self._interrupted_at > self._options.grace_seconds
        return self._interrupts.count > 1 or (is_late and not self._options.is_saving())

    def _wait_for_end(self) -> None:
        """The run is over: the remaining processes know, and have some time to end as well."""
        before = self._interrupts.count
        children = self._processes.children
        for child in children:
            child.kill(signal.SIGCONT)
        for number, seconds in ((None, self._options.grace_seconds), (signal.SIGTERM, TERM_SECONDS)):
            for child in children:
                if number is not None:
                    child.kill(number)
            deadline = time.monotonic() + seconds
            while any(child.poll() is None for child in children) and time.monotonic() < deadline:
                if self._interrupts.count > max(before, 1):
                    return
                self._sleep()
        for child in children:
            if (code := child.poll()) is not None and code > 0 and not self._interrupts.count:
                self._say(f"{self._failure(child, code).sentence} (after the run had ended)")

    def _kill_all(self) -> None:
        children = self._processes.children
        for child in children:
            child.kill(signal.SIGKILL)
        for child in children:
            child.wait()
